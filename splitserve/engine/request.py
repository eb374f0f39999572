"""One request inside an engine: its tokens, how far it is, and who still holds its rows. No torch, no clock.

    tokens   |-------- prompt --------|-- emitted --|-- pending --|
             0       num_done                  len(tokens)   num_tokens
                        ^ state is in the cache up to here
             num_planned: state that is there or that a launched step will put there
             num_given: tokens it came with. More than num_prompt when another engine emitted some of them:
                        such a request goes on where that one stopped, and its handoff carries all of them

`num_tokens` counts tokens that launched steps will sample although nobody knows them yet, so that step n + 1
can be planned before step n is applied.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from splitserve.engine.step import PENDING
from splitserve.errors import SplitserveError
from splitserve.kv.cache import Holding
from splitserve.types import FinishReason, Rid, SamplingParams, TokenLogprobs
from splitserve.wire import Room


class Phase(Enum):
    WAITING = "waiting"  # has no rows
    ARRIVING = "arriving"  # decode half: rows are reserved and a peer writes them
    RUNNING = "running"  # gets chunks
    LEAVING = "leaving"  # prefill half: computed; rows are read by writes to a peer
    ENDED = "ended"  # the client has its answer; rows may still be pinned


@dataclass
class Request:
    rid: Rid
    tokens: list[int]
    num_prompt: int
    sampling: SamplingParams
    half: str = ""
    room: Room | None = None
    priority: int = 0
    deadline: float = 0.0
    arrived: float = 0.0
    num_given: int = 0  # 0: all of `tokens`

    phase: Phase = Phase.WAITING
    holding: Holding | None = None
    num_done: int = 0
    num_planned: int = 0
    num_pending: int = 0  # tokens that launched steps will sample
    num_cached: int = 0  # prompt tokens found in the prefix cache at the first admission
    num_steps: int = 0  # launched steps that write into its rows and are not applied
    num_marked: int = 0  # the last page border at which the state of its slot was kept
    draft: int = PENDING  # a guess of the token after the last one
    drafting: bool = False  # a launched step tries a guess: how far it comes is known when it is applied
    in_transfer: bool = False  # a handoff may read or write its rows
    met_peer: bool = False  # decode half: its handoff is over, well or badly
    recomputing: bool = False  # makes up for a handoff that failed
    num_preempted: int = 0
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    finish: FinishReason | None = None
    error: SplitserveError | None = None

    def __post_init__(self) -> None:
        self.num_given = self.num_given or len(self.tokens)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens) + self.num_pending

    @property
    def num_left(self) -> int:
        """Tokens whose state no launched step provides yet; 1 for a request that decodes."""
        return self.num_tokens - self.num_planned

    @property
    def num_emitted(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def awaits_peer(self) -> bool:
        """A decode half whose prompt a peer is still to write."""
        return self.half == "decode" and not self.met_peer

    @property
    def max_emitted(self) -> int:
        """Tokens it may have emitted in all when it ends here: a prefill half stops after one of its own."""
        return self.num_given - self.num_prompt + 1 if self.half == "prefill" else self.sampling.max_tokens

    @property
    def needs_history(self) -> bool:
        s = self.sampling
        penalised = s.repetition_penalty != 1.0 or s.presence_penalty != 0.0 or s.frequency_penalty != 0.0
        return penalised or s.grammar is not None

    @property
    def order(self) -> tuple[int, float, Rid]:
        """Who goes first: higher priority, then earlier arrival; rid makes it total."""
        return (-self.priority, self.arrived, self.rid)
