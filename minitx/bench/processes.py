"""Processes of their own for what may hang, crash, or leave something behind."""

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from minitx.signals import heeded_signals


def run_process(command: Sequence[str], log: Path, timeout_s: float) -> int | None:
    """Exit code of a command whose output goes to `log`; None if it was stopped after timeout_s.

    It leads a process group, which ends with it: compilers start workers of their own.
    """
    with tempfile.TemporaryDirectory() as cache, log.open("w", encoding="utf-8") as file:
        # Inductor would otherwise find code on disk that another attention backend was built into.
        environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": cache}
        process = subprocess.Popen(
            command, stdout=file, stderr=file, env=environment, start_new_session=True
        )
        try:
            return process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


class WorkerDied(RuntimeError):
    """The message says how, in a line."""


def run_worker(
    target: Callable[..., None], arguments: Sequence[Any], timeout_s: float
) -> Iterator[Any]:
    """Runs target(send, *arguments) in a process of its own and yields what it sends.

    Raises WorkerDied when the process ends otherwise than by returning, or sends nothing for
    timeout_s.
    """
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(sender, target, arguments))
    process.start()
    sender.close()
    error = ""
    try:
        while True:
            if not receiver.poll(timeout_s):
                raise WorkerDied(f"nothing heard for {timeout_s:g} s")
            try:
                kind, message = receiver.recv()
            except EOFError:
                break
            if kind == "error":
                error = message
            else:
                yield message
        process.join()
        if process.exitcode != 0:
            code = process.exitcode or 0
            raise WorkerDied(
                error or f"ended by {f'signal {-code}' if code < 0 else f'exit {code}'}"
            )
    finally:
        process.kill()
        process.join()


def _work(sender: Connection, target: Callable[..., None], arguments: Sequence[Any]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's; it ends this process
    try:
        target(lambda message: sender.send(("message", message)), *arguments)
    except BaseException as error:
        text = " ".join(str(error).split())[:200]
        sender.send(("error", f"{type(error).__name__}: {text}"))
        raise


@contextlib.contextmanager
def exit_on_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP then unwind as an exit does, so that processes started here end too; those
    of a group of their own get no SIGHUP when the terminal is closed."""
    numbers = [n for n in heeded_signals() if n != signal.SIGINT]  # which unwinds by itself
    before = {n: signal.signal(n, lambda number, _: sys.exit(128 + number)) for n in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
