"""Processes of their own for what may hang, crash, or leave something behind."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path


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


@contextlib.contextmanager
def exit_on_sigterm() -> Iterator[None]:
    """SIGTERM then unwinds as an exit does, so that processes started here end too."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
