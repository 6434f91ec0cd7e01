"""A run's folder is written by one process: a second run in it, or a second --resume, would remove
checkpoints under the first one's hands and mix its steps into the same metrics."""

import contextlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path

logger = logging.getLogger("minitx")


@contextlib.contextmanager
def only_run_in(folder: Path) -> Iterator[None]:
    """Holds a folder against other processes; the system lets go of it when this one ends, killed
    or not.

    The folder itself is locked, so no file has to be there and none is left. Raises ValueError
    where another process holds it.
    """
    if os.name != "posix":  # Windows locks no folders
        yield
        return
    import fcntl

    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(
                f"another process is training in {folder}; wait for its end, stop it, or choose "
                "another --out_dir"
            ) from error
        except OSError as error:  # some network disks
            logger.warning(
                "%s cannot be locked (%s): start no second run in it", folder, error.strerror
            )
        yield
    finally:
        os.close(handle)
