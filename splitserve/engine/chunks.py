"""Cuts chunks from requests and shares a step's tokens among prompts. Pure; the scheduler calls it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from splitserve.engine.request import Request
from splitserve.engine.step import PENDING, Chunk
from splitserve.kv.cache import Cache


def share(prompts: Sequence[Request], budget: int, *, makeup: int) -> Iterator[tuple[Request, int]]:
    """How many tokens each prompt, in order, gets of `budget`.

    The first gets at least half of what is left, so that it ends; the others share the rest in the same way,
    so that a short prompt passes a long one. What nobody behind needs goes to the first. All prompts that
    make up for failed handoffs together get at most `makeup` tokens.
    """
    behind = sum(r.num_left for r in prompts)
    for req in prompts:
        behind -= req.num_left
        size = min(req.num_left, max(-(-budget // 2), budget - behind))
        if req.recomputing:
            size = min(size, makeup)
            makeup -= size
        if size <= 0:
            continue
        budget -= size
        yield req, size


def may_share(req: Request, running: Sequence[Request], *, page_tokens: int) -> bool:
    """Whether somebody computes this very prompt right now: waiting for those pages is cheaper than computing them.

    So it is with the choices of one request. A prompt that is to be rated is computed whole by each.
    """
    if req.num_given <= page_tokens or req.sampling.prompt_logprobs is not None:
        return False
    given = req.tokens[: req.num_given]
    return any(
        r.num_given == req.num_given and r.num_done < r.num_given and r.tokens[: r.num_given] == given
        for r in running
    )


def borders(req: Request, stop: int, *, page_tokens: int) -> list[int]:
    """Page borders in the chunk that ends at `stop` at which the state of the request's slot is worth keeping.

    Where its prompt leaves others (the last cached page that it has in common with somebody), and the last border
    of what is known now: the same prompt can be continued before its last token only.

    Of a single token only the border before it: such steps are replayed on GPUs, and nothing can be kept on the way.
    The border behind it is before the next one.
    """
    assert req.holding is not None
    lasts = ((req.num_tokens - 1) // page_tokens * page_tokens, req.num_tokens // page_tokens * page_tokens)
    wanted = {req.holding.num_matched, *lasts}
    last = stop if stop > req.num_planned + 1 else req.num_planned
    return sorted(b for b in wanted if max(req.num_planned, req.num_marked + 1) <= b <= last)


def mark(req: Request, stop: int, cache: Cache) -> tuple[tuple[int, int], ...]:
    """(tokens, slot unit) for each border at which the chunk that ends at `stop` is to keep the slot's state."""
    marks: list[tuple[int, int]] = []
    if req.holding is None or req.holding.slot is None:
        return ()
    for border in borders(req, stop, page_tokens=cache.page_tokens):
        unit = cache.reserve_snapshot()
        if unit is None:  # all are being written
            break
        marks.append((border, unit))
        req.num_marked = border
    return tuple(marks)


def loads(fresh: Sequence[Request]) -> tuple[tuple[int, int], ...]:
    """(snapshot, slot) of newly admitted requests that continue a cached prefix.

    For the very step that follows their admission: a later one may write to the snapshot.
    """
    pairs = [(r.holding.snapshot, r.holding.slot) for r in fresh if r.holding is not None]
    return tuple((a, b) for a, b in pairs if a is not None and b is not None)


def cut(
    req: Request,
    size: int,
    *,
    page_tokens: int,
    drafts: bool = False,
    marks: tuple[tuple[int, int], ...] = (),
) -> Chunk:
    """The next `size` tokens of a request as a chunk; counts them as planned.

    With `drafts` the request's draft goes behind them. It counts for nothing until it has proved right.
    """
    assert req.holding is not None
    start = req.num_planned
    stop = start + size
    sample = stop == req.num_tokens
    known = tuple(req.tokens[start:stop])
    req.num_planned = stop
    guess = (req.draft,) if drafts else ()
    req.draft, req.drafting = PENDING, drafts
    req.num_pending += sample
    req.num_steps += 1
    wants_prompt = req.sampling.prompt_logprobs is not None and start < req.num_prompt
    return Chunk(
        rid=req.rid,
        start=start,
        stop=stop + len(guess),
        tokens=known + (PENDING,) * (size - len(known)) + guess,
        pages=tuple(req.holding.pages[: -(-(stop + len(guess)) // page_tokens)]),
        slot=-1 if req.holding.slot is None else req.holding.slot,
        sample=sample,
        num_draft=len(guess),
        next_token=req.tokens[stop] if stop < len(req.tokens) else PENDING,
        marks=marks,
        sampling=req.sampling if sample or wants_prompt else None,
        history=tuple(req.tokens) if sample and req.needs_history else None,
        num_prompt=req.num_prompt,
        prompt_logprobs=req.sampling.prompt_logprobs if wants_prompt else None,
        prompt_next=tuple(req.tokens[start + 1 : min(stop, req.num_prompt - 1) + 1]) if wants_prompt else (),
    )
