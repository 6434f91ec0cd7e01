"""How a run is asked to stop: Ctrl-C (SIGINT), SIGTERM, and SIGHUP, which comes when its terminal
is closed or its connection ends."""

import os
import signal
import sys
import threading
from types import FrameType

SIGHUP = getattr(signal, "SIGHUP", None)  # Windows has none
SIGNALS = tuple(n for n in (signal.SIGINT, signal.SIGTERM, SIGHUP) if n is not None)


def heeded_signals() -> list[signal.Signals]:
    """Those of SIGNALS that stop this process: not SIGHUP where it is ignored, as under nohup."""
    return [n for n in SIGNALS if n != SIGHUP or signal.getsignal(n) is not signal.SIG_IGN]


class Stopped(KeyboardInterrupt):
    """A signal came while there was nothing to save.

    A KeyboardInterrupt, so that nothing on its way up takes it for an error of its own.
    """


class StopRequest:
    """While entered, SIGNALS do not end the process where it stands.

    The first one raises Stopped until `defer` is called, and sets `requested` after it, which the
    training loop looks at between steps: a step, an evaluation or a save is finished first. A
    second one ends the process at once, whatever it is doing, but a hangup, which is not asked for:
    where a terminal is closed, the shell hands its own on, and the system sends another as it ends.
    """

    def __init__(self) -> None:
        self.requested = False
        self._deferred = False
        self._previous: dict[signal.Signals, object] = {}

    def defer(self) -> None:
        """From now on there is something to save."""
        self._deferred = True

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():  # the only one that may
            for number in heeded_signals():
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *exc_info: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _handle(self, number: int, frame: FrameType | None) -> None:
        for each in self._previous:  # the system's own action needs no Python to run
            signal.signal(each, signal.SIG_IGN if each == SIGHUP else signal.SIG_DFL)
        self.requested = True
        if not self._deferred:
            raise Stopped
        if sys.stderr.isatty():  # written past the buffers: the signal may have come amid a print
            os.write(2, b"\nstopping after this step; once more stops at once\n")
