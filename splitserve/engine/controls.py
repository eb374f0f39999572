"""An operator's calls into a running engine, and the figures it reports. Each call answers with plain values.

`check` and `poison` are what `splitserve verify` stands on; `plant` exists only where the engine was started for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, Protocol

from splitserve import wire
from splitserve.engine.lifetimes import Lifetimes
from splitserve.engine.scheduler import Scheduler
from splitserve.engine.transfers import Transfers
from splitserve.errors import ConfigError, NotFound, RequestError, SplitserveError
from splitserve.transfer.faults import Faults


class Poisonable(Protocol):
    def poison(self, page_ids: Sequence[int], slot_ids: Sequence[int] = ()) -> None: ...


class Controls:
    def __init__(
        self,
        scheduler: Scheduler,
        pool: Poisonable,
        *,
        transfers: Transfers | None,
        faults: Faults | None,
        lifetimes: Lifetimes,
    ) -> None:
        self._scheduler = scheduler
        self._pool = pool
        self._transfers = transfers
        self._faults = faults
        self.lifetimes = lifetimes
        self._ops: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
            "flush_cache": self._flush,
            "poison": self._poison,
            "stats": self._stats,
            "marks": self._marks,
            "handoffs": self._handoffs,
            "check": self._check,
            "plant": self._plant,
            "digests": self._digests,
        }

    def answer(self, number: int, op: str, args: dict[str, Any]) -> wire.Reply:
        """Carry out one call. An error of ours is an answer, not a crash."""
        try:
            if op not in self._ops:
                raise NotFound(
                    f"no operator call {op!r}; there are {', '.join(sorted(self._ops))}", field="op"
                )
            return wire.Reply(number, True, self._ops[op](args))
        except SplitserveError as e:
            return wire.Reply(number, False, {**e.to_dict(), "status": e.status})

    def load(self) -> wire.Load:
        """The figures of this moment."""
        cache = self._scheduler.cache
        counters = {k: float(v) for k, v in asdict(self._scheduler.counters).items()}
        counters.update(self.lifetimes.sums())
        if self._transfers:
            for side in (self._transfers.sender, self._transfers.receiver):
                counters.update({k: float(v) for k, v in side.stats().items()})
            counters["slow_lanes"] = float(len(self._transfers.slow_lanes()))
        return wire.Load(
            num_running=len(self._scheduler.running),
            num_waiting=len(self._scheduler.waiting),
            queued_tokens=self._scheduler.queued_tokens(),
            free_pages=cache.num_free + cache.num_evictable,
            total_pages=cache.num_pages,
            quarantined_pages=cache.num_quarantined,
            counters=counters,
            lanes=self._transfers.used_lanes() if self._transfers else (),
            slow_writes=self._transfers.slow_writes() if self._transfers else {},
        )

    def _flush(self, _: dict[str, Any]) -> dict[str, Any]:
        return {"flushed_pages": self._scheduler.cache.flush()}

    def _poison(self, _: dict[str, Any]) -> dict[str, Any]:
        """Fill every free row with NaN, so that a row that was never written cannot pass for one that was."""
        pages, slots = self._scheduler.cache.free_pages(), self._scheduler.cache.free_slots()
        self._pool.poison(pages, slots)
        return {"poisoned_pages": len(pages), "poisoned_slots": len(slots)}

    def _stats(self, _: dict[str, Any]) -> dict[str, Any]:
        load = self.load()
        return {f: getattr(load, f) for f in load.__struct_fields__}

    def _marks(self, _: dict[str, Any]) -> dict[str, Any]:
        return {"requests": self.lifetimes.records()}

    def _handoffs(self, _: dict[str, Any]) -> dict[str, Any]:
        if self._transfers is None:
            return {"sent": [], "received": [], "lanes": {}}
        return {
            "sent": list(self._transfers.sender.records()),
            "received": list(self._transfers.receiver.records()),
            "lanes": self._transfers.lanes(),
            "slow_lanes": self._transfers.slow_lanes(),
        }

    def _check(self, _: dict[str, Any]) -> dict[str, Any]:
        self._scheduler.check()
        if self._transfers:
            self._transfers.check()
        return {"requests": len(self._scheduler.requests)}

    def _digests(self, args: dict[str, Any]) -> dict[str, Any]:
        """Compare the digests of every handoff that comes in from now on, or of the configured share again."""
        if not isinstance(args.get("all"), bool):
            raise RequestError("digests takes all: true or false", field="all")
        if self._transfers:
            self._transfers.receiver.compare_all = args["all"]
        return {"all": args["all"]}

    def _plant(self, args: dict[str, Any]) -> dict[str, Any]:
        if self._faults is None:
            raise ConfigError(
                "this engine was not started for planted faults",
                fix="set allow_faults = true in [engine]; never on an engine that serves people",
            )
        kind, times, ms = args.get("fault"), args.get("times", 1), args.get("ms")
        if isinstance(kind, str) and isinstance(ms, int | float):
            self._faults.slow(kind, ms / 1000)
            return {"planted": kind, "ms": ms}
        if not isinstance(kind, str) or not isinstance(times, int):
            raise RequestError(
                "plant takes a fault's name and a number of times, or a throttle's name and ms", field="fault"
            )
        self._faults.plant(kind, times)
        return {"planted": kind, "times": times}
