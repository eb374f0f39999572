"""What the routes of one server share: its engine, its model once loaded, and the requests that run."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from splitserve.errors import Overloaded

from .engine_link import EngineLink
from .health import Health
from .intake import Intake
from .job import Run
from .metrics import Metrics


@dataclass(frozen=True)
class Settings:
    """What a server is told about itself."""

    max_requests: int
    deadline_s: float
    slow_s: float = 30.0  # a request that takes longer gets a line in the log
    allow_faults: bool = False
    about: dict[str, Any] = field(default_factory=dict)  # what /server_info says besides the engine's facts


class Service:
    """`intake` is set once the tokenizer is loaded, `ready` once a token has come, `draining` when the end begins."""

    def __init__(
        self,
        link: EngineLink,
        settings: Settings,
        *,
        health: Health,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.link = link
        self.settings = settings
        self.health = health
        self.clock = clock
        self.metrics = Metrics(lambda: link.load)
        self.intake: Intake | None = None
        self.ready = False
        self.draining = False
        self.runs: set[Run] = set()

    def model(self) -> Intake:
        """The intake, once requests can be served; raises the error that says why they cannot."""
        self.link.check()
        if self.intake is None:
            raise Overloaded("the tokenizer is still loading", retry_after_s=1)
        return self.intake

    def admit(self) -> Intake:
        """Like `model`, for a new generation request: refused while draining and beyond max_requests."""
        if self.draining:
            raise Overloaded("this server is shutting down", retry_after_s=5)
        if len(self.runs) >= self.settings.max_requests:
            raise Overloaded(
                f"{len(self.runs)} requests are open, at most {self.settings.max_requests} are taken",
                fix="retry later, or raise max_requests in [server]",
            )
        return self.model()
