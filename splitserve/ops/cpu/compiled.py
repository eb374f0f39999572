"""How the loops of this package are compiled: by numba, for this machine, machine code kept on disk.

numba notices when the file of a function changes, but not when a file changes whose functions that one calls. So the
code is kept in a directory named after the contents of the whole package. Those of other contents are removed once they
are not among the newest few and nobody has started with them for an hour.

A function's machine code holds that of all that it calls, and each is optimised anew: so one that has a single caller
says inline="always", and loops are called by address where they can be (atomics.py).
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

import numba

from splitserve.ops.code_place import PREFIX, places

ANY_ORDER = {"reassoc", "nsz", "contract"}
"""fastmath of loops whose sums may be reordered. Such a loop is compiled once: the order is the row length's alone."""


_KEPT = 4  # directories of code, the one in use among them
_UNUSED_S = 3600.0  # a process that starts meanwhile has found its own by then, or compiled it


def compiled(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """Decorator: a function of numbers and addresses that is compiled at its first call and then found on disk."""

    def decorate(function: Callable[..., Any]) -> Any:
        with _kept() as cache:
            # numpy's errors: a check of each division for zero would keep loops from becoming vector code.
            return numba.njit(nogil=True, cache=cache, error_model="numpy", **options)(function)

    return decorate


def entry(signature: Any) -> Callable[[Callable[..., Any]], Any]:
    """Decorator: a function whose `address` other machine code calls. It is compiled at once, or found on disk."""

    def decorate(function: Callable[..., Any]) -> Any:
        with _kept() as cache:
            return numba.cfunc(signature, cache=cache, error_model="numpy")(function)

    return decorate


@contextmanager
def _kept() -> Iterator[bool]:
    """Whether what is decorated meanwhile will be kept on disk, where numba looks while it decorates."""
    config: Any = numba.config
    before, directory = config.CACHE_DIR, _directory(config.CACHE_DIR)
    config.CACHE_DIR = directory
    try:
        yield bool(directory)
    finally:
        config.CACHE_DIR = before


@cache
def _directory(chosen: str) -> str:
    """Where NUMBA_CACHE_DIR says, beside this file or in the user's cache; "" where none of them can be written."""
    for place in places(chosen):
        try:
            place.mkdir(parents=True, exist_ok=True)
        except OSError:
            continue
        if os.access(place, os.W_OK):
            prune(place.parent, place.name)
            return str(place)
    return ""


def prune(parent: Path, own: str) -> None:
    """Remove code that nobody uses any more from `parent`, and mark `own` as used.

    Processes may do this at the same time: a directory is renamed before it is emptied, which succeeds for one of them,
    and what cannot be removed stays.
    """
    used = {}
    with suppress(OSError):
        os.utime(parent / own)
        for place in parent.glob(f"{PREFIX}*"):
            with suppress(OSError):  # another process was faster
                used[place] = place.stat().st_mtime
    for place in sorted(used, key=used.__getitem__, reverse=True)[_KEPT:]:
        if time.time() - used[place] > _UNUSED_S and place.name != own:
            with suppress(OSError):
                place.rename(parent / f".{place.name}-{os.getpid()}")
    for place in parent.glob(f".{PREFIX}*"):
        shutil.rmtree(place, ignore_errors=True)
