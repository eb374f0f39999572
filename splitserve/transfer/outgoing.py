"""One room at prefill: what has been computed, where it may go, and which writes are in flight. Pure.

The states are those of handoff.SENDER. A *generation* is one set of destination rows: a re-offer brings a newer one,
and the writes of the older must end before decode may have those rows back.
"""

from __future__ import annotations

from math import inf

from splitserve.errors import DeadlineExceeded, InvariantError, ProtocolError, SplitserveError
from splitserve.transfer.handoff import SENDER, TX_FINAL, Action, Side, Table, Tx


class Outgoing(Side[Tx]):
    """One room at prefill: chunks in order of computation, and which writes are in flight.

    Every method returns what must be done now, in order:
    accept, write(chunk), tell_failed, tell_drained, report_sent, report_failed, disconnect, fence, release.
    """

    def __init__(
        self, *, num_ranks: int = 1, lease_s: float = inf, deadline: float = inf, table: Table[Tx] = SENDER
    ) -> None:
        super().__init__(table, Tx.NEW)
        self.num_chunks = 0
        self.closed = False  # the last chunk has been computed
        self.flying: set[tuple[int, int, int]] = set()  # (generation, chunk, rank) posted and not ended
        self.superseded: set[int] = set()  # older generations that decode has not been told are drained
        self.tainted: set[int] = set()  # generations with a broken write: its bytes may still be under way
        self.deadline = deadline
        self.lease_until = inf
        self._lease_s = lease_s
        self._num_ranks = num_ranks

    def request(self, *, deadline: float) -> list[Action]:
        """The engine has the request: it will compute chunks."""
        self.deadline = deadline
        self.lease_until = inf
        return self._on("request")

    def offer(self, generation: int, *, now: float) -> list[Action]:
        """Decode's rows are known. A newer generation replaces the older; an older one is late."""
        if generation <= self.generation:
            self.num_late += 1
            return []
        if self.generation:
            self.superseded.add(self.generation)
        self.generation = generation
        actions = self._on("offer")
        self.lease_until = now + self._lease_s if self.state is Tx.EXPECTED else inf
        return actions

    def computed(self, *, last: bool, now: float) -> list[Action]:
        """One more chunk lies in our rows, and stays there until "release"."""
        if self.closed:
            raise ProtocolError(f"chunk {self.num_chunks} was computed after the last one")
        self.num_chunks += 1
        self.closed = last
        if self.state is Tx.HOLDING:
            self.lease_until = now + self._lease_s
        return self._on("computed")

    def ended(
        self, generation: int, chunk: int, rank: int, *, error: SplitserveError | None = None
    ) -> list[Action]:
        """A rank is through with one write: all bytes in place, or broken."""
        key = (generation, chunk, rank)
        if key not in self.flying:
            raise ProtocolError(
                f"rank {rank} ended a write that is not in flight: generation {generation}, chunk {chunk}"
            )
        self.flying.remove(key)
        if error is None:
            return self._on("written")
        self.tainted.add(generation)
        self._because(error)
        return self._on("broken")

    def cancel(self, generation: int, error: SplitserveError) -> list[Action]:
        """Decode no longer wants the room."""
        if generation < self.generation:
            self.num_late += 1
            return []
        self.generation = generation
        self._because(error)
        return self._on("cancel")

    def fail(self, error: SplitserveError) -> list[Action]:
        """Give up for a reason of our own."""
        if self.state in TX_FINAL:
            return []
        self._because(error)
        return self._on("fail")

    def dead(self, error: SplitserveError) -> list[Action]:
        """Decode's process is gone. Writes in flight still have to end: they read our rows."""
        if self.state in (Tx.NEW, Tx.HOLDING) or self.state in TX_FINAL:
            return []
        self._because(error)
        return self._on("dead")

    def silent(self) -> list[Action]:
        """Decode answers nothing while our rows wait for its writes to end."""
        return self._on("silent") if self.state is Tx.DRAINING else []

    def tick(self, now: float) -> list[Action]:
        """What passing time has decided: the deadline or the lease is over."""
        if self.state in TX_FINAL or self.state is Tx.DRAINING or now < self.next_deadline():
            return []
        if now >= self.deadline:
            return self.fail(
                DeadlineExceeded(
                    f"state did not leave within deadline_s of [transfer]: the handoff was {self.state}"
                )
            )
        half = "its request" if self.state is Tx.EXPECTED else "decode's offer"
        why = f"waited {self._lease_s:g} s for {half}, which never came"
        return self.fail(DeadlineExceeded(why, field="bootstrap_room"))

    def next_deadline(self) -> float:
        over = self.state in TX_FINAL or self.state is Tx.DRAINING
        return inf if over else min(self.deadline, self.lease_until)

    def check(self) -> None:
        """Raise InvariantError when the state and the writes in flight do not agree."""
        if self.flying and self.state not in (Tx.SENDING, Tx.DRAINING):
            raise InvariantError(f"{len(self.flying)} writes in flight in state {self.state}")
        if not self.flying and (self.state is Tx.DRAINING or (self.state is Tx.SENDING and self.closed)):
            raise InvariantError(f"{self.state} with no write in flight")

    def _on(self, event: str) -> list[Action]:
        actions = self._expand(self._go(event))
        for old in sorted(self.superseded):
            if not any(g == old for g, _, _ in self.flying):
                self.superseded.remove(old)
                actions += self._expand(("tell_drained",), old)
        if self.flying:
            return actions
        if self.state is Tx.SENDING and self.closed:
            actions += self._expand(self._go("all_written"))
        if self.state is Tx.DRAINING:
            actions += self._expand(self._go("idle_broken" if self.generation in self.tainted else "idle"))
        return actions

    def _expand(self, names: tuple[str, ...], generation: int | None = None) -> list[Action]:
        g = self.generation if generation is None else generation
        actions: list[Action] = []
        for name in names:
            if name in ("write", "write_held"):
                chunks = range(self.num_chunks) if name == "write_held" else [self.num_chunks - 1]
                actions += [Action("write", g, chunk) for chunk in chunks]
                self.flying |= {(g, chunk, rank) for chunk in chunks for rank in range(self._num_ranks)}
            elif name != "tell_drained" or (g and g not in self.tainted):
                actions.append(Action(name, g))
        return actions
