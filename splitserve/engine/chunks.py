"""Cuts chunks from requests and shares a step's tokens among prompts. Pure; the scheduler calls it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from splitserve.engine.request import Request
from splitserve.engine.step import PENDING, Chunk


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


def cut(req: Request, size: int, *, page_tokens: int) -> Chunk:
    """The next `size` tokens of a request as a chunk; counts them as planned."""
    assert req.holding is not None
    start = req.num_planned
    stop = start + size
    sample = stop == req.num_tokens
    known = tuple(req.tokens[start:stop])
    req.num_planned = stop
    req.num_pending += sample
    req.num_steps += 1
    wants_prompt = req.sampling.prompt_logprobs is not None and start < req.num_prompt
    return Chunk(
        rid=req.rid,
        start=start,
        stop=stop,
        tokens=known + (PENDING,) * (size - len(known)),
        pages=tuple(req.holding.pages[: -(-stop // page_tokens)]),
        slot=-1 if req.holding.slot is None else req.holding.slot,
        sample=sample,
        sampling=req.sampling if sample or wants_prompt else None,
        history=tuple(req.tokens) if sample and req.needs_history else None,
        num_prompt=req.num_prompt,
        prompt_logprobs=req.sampling.prompt_logprobs if wants_prompt else None,
        prompt_next=tuple(req.tokens[start + 1 : min(stop, req.num_prompt - 1) + 1]) if wants_prompt else (),
    )
