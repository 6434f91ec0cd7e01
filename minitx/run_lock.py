"""A folder of results is written by one process: a second one in it would remove checkpoints under
the first one's hands, mix its steps into the same metrics, or replace a table that still grows."""

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

    The folder itself is locked, so no file has to be there and none is left; what is done to the
    folder must leave it there, as the lock would go with it. Raises ValueError where another
    process holds it.
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
                f"another process is writing to {folder}; wait for its end, stop it, or choose "
                "another --out_dir"
            ) from error
        except OSError as error:  # some network disks
            logger.warning(
                "%s cannot be locked (%s): start no second run in it", folder, error.strerror
            )
        yield
    finally:
        os.close(handle)
