"""What counts as proof. Pure: from what two engines answered and what the handoff recorded to findings.

A case passes only when all of this holds; each line is a finding of its own when it does not:

    answer      both sides gave tokens; a first divergence is forgiven only at a near tie (see `bound`)
    logprobs    |difference| of every token up to there is within `bound`
    recomputed  0: a fallback that hides a broken handoff must not pass
    bytes       what crossed is what the StateSpecs say for these tokens
    digest      taken on both sides, of all of it, and equal
    poisoned    the receiver's free rows were NaN before, so that no unwritten row can pass for a written one
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Answer:
    """One side's answer, token by token. `margins` are top-2 gaps of the logprobs, where the client asked for them."""

    tokens: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    margins: tuple[float, ...] = ()
    text: str = ""
    error: str = ""


@dataclass(frozen=True)
class Crossing:
    """What the two engines recorded of the handoff (transfer records), and the receiver's counters around it."""

    num_bytes: int = 0
    expected_bytes: int = 0
    num_pages: int = 0
    num_descriptors: int = 0
    lane: str = ""
    seconds: float = 0.0
    sent_digest: str = ""
    received_digest: str = ""
    digest_checked: bool = False
    recomputations: int = 0
    poisoned_pages: int = 0
    failure: str = ""  # why the handoff failed; then nothing above means anything

    @property
    def gb_s(self) -> float:
        return self.num_bytes / self.seconds / 1e9 if self.seconds else 0.0


@dataclass(frozen=True)
class Case:
    name: str
    num_prompt: int
    greedy: bool
    split: Answer
    unified: Answer
    crossing: Crossing | None
    findings: tuple[str, ...] = field(default=())


def judge(case: Case, *, bound: float, num_cached: int = 0) -> list[str]:
    """Why this case is no proof; empty when it is one. `bound` is in nats, 0 for bit equality.

    `num_cached`: prompt tokens that decode had already, so that an empty crossing is right.
    """
    return [*_judge_answers(case, bound), *_judge_crossing(case.crossing, everything_cached=num_cached > 0)]


def _judge_answers(case: Case, bound: float) -> list[str]:
    split, unified = case.split, case.unified
    for side, answer in (("split", split), ("unified", unified)):
        if answer.error:
            return [f"{side}: {answer.error}"]
        if not answer.tokens:
            return [f"{side}: no token came"]
    same = first_divergence(split.tokens, unified.tokens)
    findings = []
    if same is not None:
        margin = unified.margins[same] if same < len(unified.margins) else float("inf")
        at = f"token {same}: split {_token(split.tokens, same)}, unified {_token(unified.tokens, same)}"
        if not case.greedy or margin >= 2 * bound or bound == 0:
            findings.append(f"{at}, top-2 margin {margin:.4g} nat")
    upto = len(unified.tokens) if same is None else same
    gap = largest_gap(split.logprobs[:upto], unified.logprobs[:upto])
    if gap > bound:
        findings.append(f"logprobs differ by {gap:.3g} nat, allowed {bound:.3g}")
    return findings


def _judge_crossing(crossing: Crossing | None, *, everything_cached: bool) -> list[str]:
    if crossing is None:
        return ["no handoff was recorded: the state did not cross"]
    findings = [f"the handoff failed: {crossing.failure}"] if crossing.failure else []
    if crossing.recomputations:
        findings.append(f"{crossing.recomputations} recomputation(s): the answer came without the handoff")
    if crossing.failure:
        return findings
    if crossing.num_bytes != crossing.expected_bytes:
        findings.append(
            f"{crossing.num_bytes:,} bytes crossed, the StateSpecs say {crossing.expected_bytes:,}"
        )
    if not crossing.num_bytes and not everything_cached:
        findings.append("no byte crossed")
    if not crossing.digest_checked:
        findings.append("digests were not compared")
    elif crossing.sent_digest != crossing.received_digest:
        findings.append(f"digests differ: {crossing.sent_digest} sent, {crossing.received_digest} received")
    if not crossing.poisoned_pages:
        findings.append("the receiver's rows were not poisoned first")
    return findings


def first_divergence(a: tuple[int, ...], b: tuple[int, ...]) -> int | None:
    """Index of the first token that differs (a missing one differs too), or None."""
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return None if len(a) == len(b) else min(len(a), len(b))


def largest_gap(a: tuple[float, ...], b: tuple[float, ...]) -> float:
    return max((abs(x - y) for x, y in zip(a, b, strict=False)), default=0.0)


def _token(tokens: tuple[int, ...], index: int) -> str:
    return str(tokens[index]) if index < len(tokens) else "nothing"
