"""One line for each request: at info for those that were slow or broke off, at debug for the others."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from splitserve.log import MOST_A_SECOND, RequestLog


@pytest.fixture
def logger(caplog: pytest.LogCaptureFixture) -> Iterator[logging.Logger]:
    found = logging.getLogger("a test's requests")
    with caplog.at_level(logging.DEBUG, logger=found.name):
        yield found


def levels(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.levelname for r in caplog.records]


def test_slow_and_broken_requests_are_told_at_info(
    logger: logging.Logger, caplog: pytest.LogCaptureFixture
) -> None:
    requests = RequestLog(logger, slow_s=2.0, clock=lambda: 50.0)
    requests.ended(lambda: "a", seconds=2.0, usual=True)
    requests.ended(lambda: "b", seconds=2.1, usual=True)
    requests.ended(lambda: "c", seconds=0.0, usual=False)
    assert levels(caplog) == ["DEBUG", "INFO", "INFO"]


def test_no_line_is_made_for_nobody(logger: logging.Logger) -> None:
    logger.setLevel(logging.INFO)
    RequestLog(logger, slow_s=2.0).ended(lambda: pytest.fail("made"), seconds=1.0, usual=True)


def test_a_thousand_at_once_are_counted(logger: logging.Logger, caplog: pytest.LogCaptureFixture) -> None:
    now = [50.0]
    requests = RequestLog(logger, slow_s=2.0, clock=lambda: now[0])
    for _ in range(1000):
        requests.ended(lambda: "x", seconds=0.0, usual=False)
    assert levels(caplog).count("INFO") == MOST_A_SECOND
    now[0] += 1.0
    requests.ended(lambda: "x", seconds=0.0, usual=False)
    requests.ended(lambda: "y", seconds=0.0, usual=False)
    assert [r.getMessage() for r in caplog.records[-2:]] == [
        f"x (and {1000 - MOST_A_SECOND} more requests, at level debug)",
        "y",
    ]


def test_a_name_cannot_begin_a_line(logger: logging.Logger, caplog: pytest.LogCaptureFixture) -> None:
    RequestLog(logger, slow_s=2.0).ended(lambda: "a\n12:00:00 forged", seconds=0.0, usual=False)
    assert caplog.records[-1].getMessage() == "a\\n12:00:00 forged"
