"""One room at decode: which generations may still write into its rows, and what has come. Pure.

The states are those of handoff.RECEIVER. Nothing is admitted before every chunk of every link has been noted, the
bytes are those that the state specs say, no older generation can still write, and the digests, where taken, agree.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf

from splitserve.errors import DeadlineExceeded, InvariantError, ProtocolError, SplitserveError, TransferError
from splitserve.transfer.handoff import RECEIVER, RX_FINAL, Action, Rx, Side, Table
from splitserve.transfer.ledger import Ledger, Pair
from splitserve.wire import Note


class Incoming(Side[Rx]):
    """One room at decode: which generations may still write, and the ledger of the current one.

    `deadline_s` is the setting behind `deadline`: errors name it, and a quarantine that lasts as long is overdue.

    Every method returns what must be done now, in order:
    send_offer, tell_cancel, compare(link), admit, report_failed, fence, release.
    """

    def __init__(
        self,
        *,
        deadline: float = inf,
        gap_s: float = inf,
        deadline_s: float = inf,
        again_s: float = inf,
        table: Table[Rx] = RECEIVER,
    ) -> None:
        super().__init__(table, Rx.OPEN)
        self.ledger = Ledger()
        self.undrained: set[int] = set()  # generations that prefill may still write for
        self.deadline = deadline
        self._gap_s, self._deadline_s, self._again_s = gap_s, deadline_s, again_s
        self._gap_at = self._overdue_at = self._again_at = inf

    def offer(self) -> list[Action]:
        """Make the rows known to prefill under a new generation. Earlier ones stay undrained until told."""
        self.generation += 1
        self.undrained.add(self.generation)
        self.ledger = Ledger()
        self._gap_at = inf
        return self._on("offer", 0.0)

    def accepted(self, generation: int, links: Mapping[Pair, int], *, now: float) -> list[Action]:
        """Prefill has the other half; `links` says how many bytes each pair of ranks owes."""
        if generation != self.generation or self.state in RX_FINAL or self.ledger.expected is not None:
            self.num_late += 1
            return []
        self.ledger.expect(links)
        return self._draw(now)

    def noted(self, dst_rank: int, note: Note, *, now: float) -> list[Action]:
        """One write has landed. Notes of older generations, or after the end, are late."""
        if note.generation != self.generation or self.state in RX_FINAL or self.state is Rx.CHECKING:
            self.num_late += 1
            return []
        try:
            self.ledger.add(dst_rank, note)
        except ProtocolError as error:
            return self.fail(error, now=now) if self.state is Rx.OFFERED else []
        return self._draw(now)

    def compared(self, link: Pair, digest: int, *, now: float) -> list[Action]:
        """Our own digest of a link."""
        if self.state is not Rx.CHECKING:
            self.num_late += 1
            return []
        if not self.ledger.compared(link, digest):
            said = self.ledger.digest(link)
            return self.fail(
                TransferError(f"digest of link {link} is {digest:016x} here and {said:016x} at prefill"),
                now=now,
            )
        return self._on("equal", now) if self.ledger.all_compared() else []

    def refused(self, generation: int, error: SplitserveError, *, now: float) -> list[Action]:
        """Prefill gives up. Its writes may still land until it says drained."""
        if generation != self.generation or self.state in RX_FINAL:
            self.num_late += 1
            return []
        return self._happen("refused", error, now)

    def drained(self, generation: int, *, now: float) -> list[Action]:
        """No write of this generation is or will be in flight."""
        if generation not in self.undrained:
            self.num_late += 1
            return []
        self.undrained.remove(generation)
        gone = TransferError("prefill ended the handoff without a reason")
        if not self.undrained:
            return self._happen("drained", gone, now)
        return self.refused(generation, gone, now=now) if generation == self.generation else self._draw(now)

    def dead(self, error: SplitserveError, *, now: float) -> list[Action]:
        """Prefill's process is gone and nothing it sent can still land."""
        self.undrained.clear()
        return self._happen("dead", error, now)

    def cancel(self, error: SplitserveError, *, now: float) -> list[Action]:
        """The engine no longer wants the room."""
        return self._happen("cancel", error, now)

    def fail(self, error: SplitserveError, *, now: float) -> list[Action]:
        """Give up for a reason of our own."""
        return self._happen("fail", error, now)

    def silent(self, error: SplitserveError, *, now: float) -> list[Action]:
        """Prefill has said nothing for a whole silence; called again after each further one."""
        return self._happen("silent", error, now)

    def tick(self, now: float) -> list[Action]:
        """What passing time has decided: deadline, lost note, quarantine without end, a Cancel to repeat."""
        if self.state in (Rx.OPEN, Rx.OFFERED, Rx.CHECKING):
            if now >= self.deadline:
                return self.fail(DeadlineExceeded(self._lateness()), now=now)
            if now >= self._gap_at:
                holes = "; ".join(f"chunks {c} of link {k}" for k, c in self.ledger.gaps().items())
                lost = f"notes were lost: after {self._gap_s:g} s without {holes}"
                return self.fail(TransferError(lost), now=now)
        if self.state in (Rx.QUARANTINE, Rx.FENCING):
            if now >= self._overdue_at:
                self._overdue_at = inf
                return self._on("overdue", now)
            if now >= self._again_at:
                self._again_at = now + self._again_s
                return self._on("again", now)
        return []

    def next_deadline(self) -> float:
        if self.state in (Rx.OPEN, Rx.OFFERED, Rx.CHECKING):
            return min(self.deadline, self._gap_at)
        return min(self._overdue_at, self._again_at) if self.state not in RX_FINAL else inf

    def at_stake(self) -> bool:
        """Whether prefill may write into our rows."""
        return self.state in (Rx.OFFERED, Rx.QUARANTINE, Rx.FENCING)

    def check(self) -> None:
        """Raise InvariantError when the state and the generations that may still write do not agree."""
        if bool(self.undrained) != self.at_stake():
            raise InvariantError(f"{self.state} with undrained generations {sorted(self.undrained)}")

    def _lateness(self) -> str:
        """No counts in it: clients group failures by their text, and the receiver logs what had come."""
        limit = f"[transfer] deadline_s = {self._deadline_s:g} s"
        if self.ledger.expected is None:
            return f"prefill did not have its half of the request within {limit}"
        return f"state did not arrive within {limit}"

    def _happen(self, event: str, error: SplitserveError, now: float) -> list[Action]:
        """An event that ends the handoff unless it has ended."""
        if self.state in RX_FINAL:
            self.num_late += 1
            return []
        self._because(error)
        return self._on(event, now)

    def _on(self, event: str, now: float) -> list[Action]:
        before = self.state
        names = self._go(event)
        if self.state is Rx.QUARANTINE and before is not Rx.QUARANTINE:
            self._overdue_at, self._again_at = now + self._deadline_s, now + self._again_s
        actions: list[Action] = []
        for name in names:
            if name == "compare":
                actions += [Action("compare", self.generation, link=k) for k in self.ledger.digested()]
            else:
                actions.append(Action(name, self.generation))
        if self.state is Rx.CHECKING and before is not Rx.CHECKING and not actions:
            actions += self._on("equal", now)
        return actions + (self._draw(now) if self.state is not before else [])

    def _draw(self, now: float) -> list[Action]:
        """Conclude from the ledger what no message says: something is wrong, a note is missing, or all is here."""
        if not self.at_stake():
            return []
        wrong = self.ledger.wrong()
        if wrong and self.state is Rx.OFFERED:
            return self.fail(TransferError(wrong), now=now)
        if self.ledger.all_noted() and self.undrained == {self.generation}:
            self.undrained.clear()
            return self._on("all_noted", now)
        if self.ledger.gaps():
            self._gap_at = min(self._gap_at, now + self._gap_s)
        return []
