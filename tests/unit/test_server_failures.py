"""The log of requests that failed for the server's own reasons."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from splitserve.errors import (
    ConfigError,
    DeadlineExceeded,
    FetchError,
    Overloaded,
    RequestError,
    SplitserveError,
)
from splitserve.server.failures import FailureLog


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    lines: list[str] = []

    def warning(text: str, *args: Any) -> None:
        lines.append(text % args)

    monkeypatch.setattr(logging.getLogger("splitserve.server.failures"), "warning", warning)
    return lines


def job(half: str = "decode") -> Any:
    room = SimpleNamespace(host="10.0.0.1", port=8998)
    return SimpleNamespace(rids=("cmpl-1",), rooms=(room,), half=half)


def test_a_line_names_the_request_the_code_the_message_and_the_rendezvous(said: list[str]) -> None:
    FailureLog().failed(job(), DeadlineExceeded("state did not arrive"))
    assert len(said) == 1
    for word in ("cmpl-1", "deadline_exceeded", "state did not arrive", "10.0.0.1:8998"):
        assert word in said[0]


def test_lines_are_bounded_for_each_code(said: list[str]) -> None:
    failures = FailureLog()
    for _ in range(120):
        failures.failed(job("prefill"), DeadlineExceeded("late"))
    failures.refused("chat", Overloaded("full"))
    assert [line.rpartition("(")[2] for line in said] == [
        f"failure {n} of this code)" for n in (1, 10, 100, 1)
    ]


def test_what_the_client_did_wrong_is_not_logged(said: list[str]) -> None:
    FailureLog().failed(job(), RequestError("bad"))
    assert said == []


def family(cls: type[SplitserveError]) -> list[type[SplitserveError]]:
    own = [child for child in cls.__subclasses__() if child.__module__ == cls.__module__]
    return [cls, *(c for child in own for c in family(child))]


@pytest.mark.parametrize("cls", family(SplitserveError)[1:])
def test_every_error_over_http_says_what_to_do(cls: type[SplitserveError]) -> None:
    if not issubclass(cls, ConfigError | FetchError):  # those end a command, whose places know better
        assert cls("it went wrong").to_dict()["fix"]
    assert cls("it went wrong", fix="do this").to_dict()["fix"] == "do this"
