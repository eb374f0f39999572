"""Files by which our processes know of each other: whether somebody holds a lock, and state that is its owner's alone.

A flock ends with its process, so that a free one means its owner is gone.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path


def is_held(path: Path) -> bool:
    """True while a process holds an exclusive flock on `path`; False where there is no such file."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    else:
        return False
    finally:
        os.close(fd)


def write_private(path: Path, text: str) -> None:
    """Write a file that only its owner may read, whatever the umask. OSError where that fails."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with open(fd, "w", encoding="utf-8") as file:
        os.fchmod(fd, 0o600)  # one that was there before
        file.write(text)
