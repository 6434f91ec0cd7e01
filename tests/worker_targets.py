"""What test_bench_processes.py and test_bench_start.py run in processes of their own; it imports
nothing that takes long."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path


def sends_two(send, first, second):
    send(first)
    send(second)


def raises(send):
    send("begun")
    raise KeyError("no such\nkey")


def exits(send):
    send("begun")
    os._exit(7)


def is_killed(send):
    send(os.getpid())
    os.kill(os.getpid(), signal.SIGKILL)


def hangs(send):
    send(os.getpid())
    time.sleep(600)


def starts_what_hangs(send):
    """As start_ms does. Sends the process id once that process runs, and waits for it."""
    from minitx.bench import start
    from minitx.bench.attention_variants import Case

    def hang(*command, **settings):
        code = (
            "import os, time\n"
            "from minitx.bench.start import end_with_stdin\n"
            "end_with_stdin()\n"
            "print(os.getpid(), flush=True)\n"
            "time.sleep(600)"
        )
        process = popen([sys.executable, "-c", code], **settings)
        send(int(process.stdout.readline()))
        return process

    popen, start.subprocess.Popen = subprocess.Popen, hang
    with tempfile.TemporaryDirectory() as folder:
        start.start_ms("sdpa", Case(1, 1, 1, 1, 1, "float32", True, "cpu"), Path(folder), True)
