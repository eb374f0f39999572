"""What a check found: fine, worth knowing, or in the way. Plain data; the checks stand beside this file."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any


class Level(StrEnum):
    """`FAILURE`: a deployment will not start or not serve; `WARNING`: it will, worse than it could.

    `SKIPPED`: not looked at.
    """

    OK = "ok"
    SKIPPED = "skip"
    WARNING = "warning"
    FAILURE = "failure"


@dataclass(frozen=True)
class Verdict:
    """One check's answer. `fix` says exactly what to do; empty where all is well."""

    level: Level
    text: str
    fix: str = ""


@dataclass(frozen=True)
class Finding:
    """A verdict with the name of its check."""

    subject: str
    level: Level
    text: str
    fix: str = ""

    @property
    def ok(self) -> bool:
        """Nothing that stops a deployment."""
        return self.level is not Level.FAILURE

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "ok": self.ok}


def fine(text: str) -> Verdict:
    return Verdict(Level.OK, text)


def skipped(text: str) -> Verdict:
    return Verdict(Level.SKIPPED, text)


def warning(text: str, fix: str) -> Verdict:
    return Verdict(Level.WARNING, text, fix)


def failure(text: str, fix: str) -> Verdict:
    return Verdict(Level.FAILURE, text, fix)
