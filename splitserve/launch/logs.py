"""Log files of children: bounded in size, readable from the end. Children append to them directly.

A child writes to its file without the supervisor between them, so the last words of a crash are kept even when the
supervisor is gone. `bound` cuts a file in place (copy, then truncate), which is safe because all writers append.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

_TIME = re.compile(r"\b\d\d:\d\d:\d\d(\.\d{1,3})?")
_STAMP_WITHIN = 40
"""A line's time is in its first so many characters: ours begin with it, vLLM's and SGLang's with level or date."""


def bound(path: Path, max_bytes: int) -> bool:
    """Cut a log that has grown past `max_bytes`: its later half moves to PATH.1. True if it was cut.

    Lines written between the copy and the cut are lost; that is a few in every `max_bytes`. Where the disk has no room
    for the copy there is none: a log must not keep a full disk full.
    """
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        return False
    if size <= max_bytes:
        return False
    with path.open("rb+") as log:
        log.seek(size - max_bytes // 2)
        log.readline()
        older = path.with_name(path.name + ".1")
        try:
            older.write_bytes(log.read())
        except OSError:
            with contextlib.suppress(OSError):
                older.unlink(missing_ok=True)
        log.truncate(0)
    return True


def tail(path: Path, lines: int, *, block: int = 64 * 1024) -> list[str]:
    """The last `lines` lines, [] where there is no such file. Reads from the end, `block` bytes and more if need be."""
    if lines <= 0:
        return []
    try:
        with path.open("rb") as log:
            size = os.fstat(log.fileno()).st_size
            while True:
                log.seek(max(0, size - block))
                read = log.read()
                if block >= size or read.count(b"\n") > lines:
                    return _lines(read)[-lines:]
                block *= 4
    except FileNotFoundError:
        return []


def whole(path: Path) -> list[str]:
    """Every line that is kept of a log, the older part first; [] where there is no such file."""
    found = b""
    for part in (path.with_name(path.name + ".1"), path):
        with contextlib.suppress(FileNotFoundError):
            found += part.read_bytes()
    return _lines(found)


def _lines(raw: bytes) -> list[str]:
    return raw.decode(errors="replace").splitlines()


def merged(tails: Mapping[str, Sequence[str]], now: str) -> list[tuple[str, str]]:
    """Lines of several logs as (log, line) in the order of their times; those without one stay behind the line before.

    Times are of the day, ours and other engines'; `now` ("HH:MM:SS") tells today's from yesterday's.
    """
    found = []
    for name, lines in tails.items():
        at = (False, "")
        for number, line in enumerate(lines):
            stamp = _TIME.search(line[:_STAMP_WITHIN])
            if stamp is not None:
                at = (stamp[0] <= now + ".999", stamp[0])  # False, yesterday's, comes first
            found.append((at, name, number, line))
    return [(name, line) for _, name, _, line in sorted(found)]


class Follower:
    """Yields what is appended to a log from now on, across cuts. The caller decides when to look again."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._at = path.stat().st_size if path.exists() else 0
        self._rest = b""

    def new_lines(self) -> Iterator[str]:
        try:
            with self._path.open("rb") as log:
                if os.fstat(log.fileno()).st_size < self._at:
                    self._at = 0
                log.seek(self._at)
                chunk = log.read()
        except FileNotFoundError:
            return
        self._at += len(chunk)
        *whole, self._rest = (self._rest + chunk).split(b"\n")
        yield from (line.decode(errors="replace") for line in whole)
