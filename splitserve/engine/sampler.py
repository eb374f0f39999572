"""Choose tokens: a pure function of (seed, choice, position) and the logits, whatever else is in the batch.

    logits ─▶ penalties, bias, banned end tokens ─▶ / temperature ─▶ top-k ─▶ top-p ─▶ min-p ─▶ + noise ─▶ argmax

Noise is Gumbel noise, so the argmax is a draw from the softmax (Gumbel 1954; Maddison et al., arXiv 1411.0030). It
comes from a counter-based generator: 64 bits mixed from the key and the token id (the finaliser of SplitMix64, Steele
et al. 2014). Nothing is remembered between calls, so a request that is continued elsewhere continues alike. Every rank
of a group samples for itself. Rows that need no filter do not pay for those that do.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import torch

from splitserve.types import SamplingParams, TokenLogprobs

_MASK64 = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / golden ratio: SplitMix64's increment
_MIX_1, _MIX_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_NEVER = -math.inf
_HEAD = 1024  # tokens that are ranked before a whole vocabulary is
_NOISE_AT_ONCE = (
    1 << 16
)  # 64-bit numbers: half a megabyte, so that the passes of the mix stay in the L2 cache

History = Sequence[int] | None
"""All tokens of a request so far, prompt first; needed only where a penalty is set."""


def sample(
    logits: torch.Tensor,
    params: Sequence[SamplingParams],
    positions: Sequence[int],
    *,
    num_prompts: Sequence[int],
    histories: Sequence[History],
    allowed: torch.Tensor | None = None,
) -> tuple[list[int], list[TokenLogprobs | None]]:
    """One token for each row of `logits` [n, vocab] float32, with its logprobs where `params` ask for them.

    `positions` are the absolute positions of the tokens to choose; `num_prompts` the prompt lengths before them.
    Temperature 0 takes the best token, the lowest id on a tie. `logits` is not changed. Of `allowed`, bool [n, vocab],
    every row has a token that nothing else bans; logprobs are those of the model, whatever was allowed.
    """
    open_to = logits if allowed is None else logits.masked_fill(~allowed, _NEVER)
    scores = _scores(open_to, params, positions, num_prompts=num_prompts, histories=histories)
    tokens = scores.argmax(-1).tolist()
    return tokens, _logprobs(logits, tokens, params)


def margins(
    logits: torch.Tensor,
    params: Sequence[SamplingParams],
    positions: Sequence[int],
    *,
    num_prompts: Sequence[int],
    histories: Sequence[History],
) -> list[float]:
    """How far, in logits, the best token is ahead of the second best in each row, noise included.

    When two computations of a row differ by at most half of this, they choose the same token. Filters are taken as
    given: a token at the very edge of top-p may still fall on either side of it.
    """
    scores = _scores(logits, params, positions, num_prompts=num_prompts, histories=histories)
    best = scores.topk(2, dim=-1).values
    gaps = (best[:, 0] - best[:, 1]).tolist()
    return [gap * (p.temperature or 1.0) for gap, p in zip(gaps, params, strict=True)]


def log_softmax_rows(logits: torch.Tensor) -> torch.Tensor:
    """Natural logprobs of every token under the model's own distribution. [n, vocab] -> [n, vocab] float32."""
    return torch.log_softmax(logits.float(), dim=-1)


def uniforms(key: int, tokens: torch.Tensor) -> torch.Tensor:
    """Float64 in (0, 1), one for each token id [n] under a 64-bit key: never 0, never 1."""
    return _uniforms(torch.tensor([[_signed(key)]], device=tokens.device), tokens)[0]


def draw(logits: torch.Tensor, temperatures: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """[n] int64: what `sample` chooses by temperature alone (0: the best), by keys of `signed_key`; reads nothing back.

    `logits` [n, vocab] float32, `temperatures` [n] float32, `keys` [n] int64.
    """
    tokens = torch.arange(logits.shape[1], device=logits.device)
    noise = _uniforms(keys[:, None], tokens).log_().neg_().float().log_().neg_()
    hot = temperatures[:, None] > 0
    return torch.where(hot, logits / temperatures[:, None].clamp(min=1e-9) + noise, logits).argmax(-1)


def signed_key(seed: int, choice: int, position: int) -> int:
    """`random_key` as the 64 bits of a signed number."""
    return _signed(random_key(seed, choice, position))


def random_key(seed: int, choice: int, position: int) -> int:
    """The 64-bit key of one token to choose."""
    key = _mix(seed & _MASK64)
    key = _mix(key ^ (choice & _MASK64))
    return _mix(key ^ (position & _MASK64))


# ------------------------------------------------------------------ scores


def _scores(
    logits: torch.Tensor,
    params: Sequence[SamplingParams],
    positions: Sequence[int],
    *,
    num_prompts: Sequence[int],
    histories: Sequence[History],
) -> torch.Tensor:
    """[n, vocab]: the token to choose has the highest; -inf is what a filter took out."""
    scores = _adjusted(logits, params, positions, num_prompts=num_prompts, histories=histories)
    drawn = [i for i, p in enumerate(params) if p.temperature > 0]
    if not drawn:
        return scores
    rows = _index(drawn, logits.device)
    chosen = [params[i] for i in drawn]
    hot = scores[rows] / _column([p.temperature for p in chosen], logits.device)
    hot = _filtered(hot, chosen) + _noise(chosen, [positions[i] for i in drawn], hot)
    if len(drawn) == len(params):
        return hot
    return scores.index_copy(0, rows, hot)


def _adjusted(
    logits: torch.Tensor,
    params: Sequence[SamplingParams],
    positions: Sequence[int],
    *,
    num_prompts: Sequence[int],
    histories: Sequence[History],
) -> torch.Tensor:
    """Logits after what the client did to them: a copy where any row needs one, else `logits` themselves."""
    scores = logits
    for i, p in enumerate(params):
        penalised = p.repetition_penalty != 1 or p.presence_penalty or p.frequency_penalty
        early = positions[i] - num_prompts[i] < p.min_tokens and p.stop_token_ids
        if not (penalised or early or p.logit_bias):
            continue
        if scores is logits:
            scores = logits.clone()
        if penalised:
            _penalise(scores[i], p, histories[i] or (), num_prompts[i])
        if p.logit_bias:
            ids = _index(list(p.logit_bias), logits.device)
            scores[i, ids] += torch.tensor(list(p.logit_bias.values()), device=logits.device)
        if early:
            scores[i, _index(list(p.stop_token_ids), logits.device)] = _NEVER
    return scores


def _penalise(row: torch.Tensor, p: SamplingParams, tokens: Sequence[int], num_prompt: int) -> None:
    """Repetition shrinks what prompt or output hold; presence and frequency subtract for what the output holds."""
    seen = _index(sorted(set(tokens)), row.device)
    if p.repetition_penalty != 1:
        x = row[seen]
        row[seen] = torch.where(x > 0, x / p.repetition_penalty, x * p.repetition_penalty)
    counts = Counter(tokens[num_prompt:])
    taken = [p.presence_penalty + p.frequency_penalty * n for n in counts.values()]
    row[_index(list(counts), row.device)] -= torch.tensor(taken, device=row.device, dtype=row.dtype)


# ------------------------------------------------------------------ filters


def _filtered(hot: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """`hot` [n, vocab] with -inf for tokens outside top-k, top-p or min-p; only rows that ask are touched.

    A filter keeps the head of a row's ranking, which is nearly always among its best `_HEAD` tokens. Sorting a whole
    vocabulary costs twenty times as much and is done only for rows whose head does not settle it.
    """
    picky = [i for i, p in enumerate(params) if p.top_k > 0 or p.top_p < 1 or p.min_p > 0]
    for size in (min(_HEAD, hot.shape[1]), hot.shape[1]):
        if not picky:
            break
        chosen = hot[_index(picky, hot.device)]
        kept, settled = _keep_head(chosen, [params[i] for i in picky], size)
        done = [i for i, sure in zip(picky, settled, strict=True) if sure]
        hot = hot.index_copy(0, _index(done, hot.device), kept[torch.tensor(settled, device=hot.device)])
        picky = [i for i, sure in zip(picky, settled, strict=True) if not sure]
    return hot


def _keep_head(
    rows: torch.Tensor, params: Sequence[SamplingParams], size: int
) -> tuple[torch.Tensor, list[bool]]:
    """Rows [n, vocab] with only what the filters keep, from the best `size` tokens, and whether that was enough."""
    device, vocab = rows.device, rows.shape[1]
    ids = rows.topk(size, dim=-1, sorted=False).indices.sort(dim=-1).values
    ranked, order = rows.gather(1, ids).sort(dim=-1, descending=True, stable=True)  # ties go to the lower id
    ids = ids.gather(1, order)
    place = torch.arange(size, device=device)
    top_k = _column([p.top_k or vocab for p in params], device)
    weights = (
        (ranked - ranked[:, :1]).exp().masked_fill_(place >= top_k, 0.0)
    )  # probabilities over the best one's
    whole = (rows - ranked[:, :1]).exp().sum(-1, keepdim=True)
    total = torch.where(top_k < vocab, weights.sum(-1, keepdim=True), whole)
    before = weights.cumsum(-1) - weights  # mass of better tokens: a token stays while that is short of top-p
    keep = (place < top_k) & (weights >= _column([p.min_p for p in params], device)) & (ranked > _NEVER)
    keep &= before < total * _column([p.top_p if p.top_p < 1 else math.inf for p in params], device)
    keep[:, 0] = True
    last = ranked.gather(1, keep.sum(-1, keepdim=True) - 1)
    # Not settled: all of the head stays, or its end is a tie that topk may have cut anywhere.
    settled = (last > ranked[:, -1:]) & ((top_k <= size) | (top_k >= vocab)) | (size == vocab)
    kept = torch.full_like(rows, _NEVER).scatter_(1, ids, ranked.masked_fill(~keep, _NEVER))
    return kept, settled[:, 0].tolist()


# ------------------------------------------------------------------ noise


def _noise(params: Sequence[SamplingParams], positions: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    """Gumbel noise [n, vocab] float32 for the rows' keys."""
    keys = [signed_key(p.seed, p.choice, at) for p, at in zip(params, positions, strict=True)]
    streams = torch.tensor(keys, device=like.device)[:, None]
    tokens = torch.arange(like.shape[1], device=like.device)
    at_once = max(1, _NOISE_AT_ONCE // like.shape[1])
    parts = [_uniforms(some, tokens).log_().neg_().float().log_().neg_() for some in streams.split(at_once)]
    return torch.cat(parts)


def _uniforms(keys: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """SplitMix64 at counter `token` of streams `keys` [n, 1]; the top 53 bits, centred, so that 0 and 1 cannot come."""
    z = keys + (tokens + 1) * _signed(_GOLDEN)
    z = (z ^ _shifted(z, 30)) * _signed(_MIX_1)
    z = (z ^ _shifted(z, 27)) * _signed(_MIX_2)
    z = z ^ _shifted(z, 31)
    return _shifted(z, 12).double().add_(0.5).mul_(2.0**-52)


def _shifted(z: torch.Tensor, by: int) -> torch.Tensor:
    """Logical right shift of int64, which torch shifts arithmetically."""
    return (z >> by) & ((1 << (64 - by)) - 1)


def _mix(x: int) -> int:
    """SplitMix64's next output for state `x`, as the tensors above compute it."""
    z = (x + _GOLDEN) & _MASK64
    z = ((z ^ (z >> 30)) * _MIX_1) & _MASK64
    z = ((z ^ (z >> 27)) * _MIX_2) & _MASK64
    return z ^ (z >> 31)


def _signed(x: int) -> int:
    """The same 64 bits as torch's int64."""
    return x - (1 << 64) if x >= 1 << 63 else x


# ------------------------------------------------------------------ logprobs


def _logprobs(
    logits: torch.Tensor, tokens: Sequence[int], params: Sequence[SamplingParams]
) -> list[TokenLogprobs | None]:
    out: list[TokenLogprobs | None] = [None] * len(params)
    asked = [i for i, p in enumerate(params) if p.logprobs is not None]
    if not asked:
        return out
    rated = log_softmax_rows(logits[_index(asked, logits.device)])
    most = max(params[i].logprobs or 0 for i in asked)
    top = rated.topk(min(most, rated.shape[1]), dim=-1)
    best, ids = top.values.tolist(), top.indices.tolist()
    chosen = rated.gather(1, _index([tokens[i] for i in asked], logits.device)[:, None])[:, 0].tolist()
    for row, i in enumerate(asked):
        k = params[i].logprobs or 0
        out[i] = TokenLogprobs(chosen[row], tuple(ids[row][:k]), tuple(best[row][:k]))
    return out


def _index(values: list[int], device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64, device=device)


def _column(values: Sequence[float], device: torch.device) -> torch.Tensor:
    return torch.tensor(values, device=device)[:, None]
