"""What test_bench_attention.py runs in processes of their own; it imports nothing that takes
long."""

import os
import signal
import time


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
