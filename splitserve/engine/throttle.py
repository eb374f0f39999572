"""A runner that takes longer on purpose: what a slower device would do to the others. Only where faults are allowed.

Without a planted throttle a step costs one look at a number. While it waits, handoffs move as in a real step.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from splitserve.engine.step import Step, StepResult
from splitserve.transfer.faults import Faults

TURN_S = 0.0005
"""Between two looks at the handoffs while a throttled step waits; layers of a real step are about as long."""


class Pending(Protocol):
    def result(self) -> StepResult: ...


class Launches(Protocol):
    def launch(self, step: Step) -> Pending: ...


class Throttled:
    """A Runner whose steps last at least as long as planted: `slow_decode` seconds a step, `slow_prefill` a token."""

    def __init__(
        self,
        runner: Launches,
        faults: Faults,
        *,
        progress: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._runner = runner
        self._faults = faults
        self._progress = progress
        self._clock = clock
        self._sleep = sleep

    def launch(self, step: Step) -> Pending:
        """Run the step, and be through with it no sooner than the throttles say."""
        end = self._clock() + self.least_s(step)
        pending = self._runner.launch(step)
        while (left := end - self._clock()) > 0:
            self._progress()
            self._sleep(min(left, TURN_S))
        return pending

    def least_s(self, step: Step) -> float:
        """The least seconds that this step may take."""
        decodes = [c for c in step.chunks if c.decodes]
        num_prompt = step.num_tokens - sum(c.num_tokens for c in decodes)
        slow = self._faults.slowness("slow_decode") if decodes else 0.0
        return slow + num_prompt * self._faults.slowness("slow_prefill")
