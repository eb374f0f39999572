"""The sampler: a draw from the right distribution, and nothing but (seed, choice, position, logits) decides it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from splitserve.engine.sampler import _filtered, log_softmax_rows, margins, random_key, sample, uniforms
from splitserve.types import SamplingParams

VOCAB = 97


def logits_of(seed: int, rows: int = 1, vocab: int = VOCAB) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


def choose(
    logits: torch.Tensor, *params: SamplingParams, at: int = 10, prompt: int = 5, history: Any = None
) -> Any:
    n = len(params)
    return sample(logits, params, [at] * n, num_prompts=[prompt] * n, histories=[history] * n)


def one(logits: torch.Tensor, at: int = 10, history: Any = None, prompt: int = 5, **kwargs: Any) -> int:
    return choose(logits, SamplingParams(**kwargs), at=at, prompt=prompt, history=history)[0][0]


def draws(logits: torch.Tensor, count: int, **kwargs: Any) -> list[int]:
    """`count` draws from one row: the same seed at `count` positions."""
    params = [SamplingParams(**kwargs)] * count
    rows = logits.expand(count, -1)
    return sample(rows, params, range(count), num_prompts=[0] * count, histories=[None] * count)[0]


# ------------------------------------------------------------------ distribution


def chi_square(counts: torch.Tensor, expected: torch.Tensor) -> float:
    """Standardised: about N(0, 1) for the right distribution with many cells."""
    seen = expected > 5
    rest = (counts[~seen].sum() - expected[~seen].sum()) ** 2 / expected[~seen].sum().clamp(min=1e-9)
    stat = ((counts[seen] - expected[seen]) ** 2 / expected[seen]).sum() + (rest if (~seen).any() else 0)
    dof = int(seen.sum()) - 1 + int((~seen).any())
    return float((stat - dof) / math.sqrt(2 * dof))


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_softmax(temperature: float) -> None:
    logits, count = logits_of(1), 20_000
    found = torch.bincount(
        torch.tensor(draws(logits, count, temperature=temperature, seed=3)), minlength=VOCAB
    )
    right = (logits[0] / temperature).softmax(-1).double() * count
    wrong = (logits[0] / (temperature * 1.1)).softmax(-1).double() * count
    assert abs(chi_square(found.double(), right)) < 4.5
    assert chi_square(found.double(), wrong) > 4.5, "the test must be able to tell ten percent of temperature"


def test_seeds_at_one_position_follow_the_softmax_too() -> None:
    logits, count = logits_of(2, vocab=11), 20_000
    params = [SamplingParams(seed=s) for s in range(count)]
    tokens, _ = sample(
        logits.expand(count, -1), params, [7] * count, num_prompts=[0] * count, histories=[None] * count
    )
    found = torch.bincount(torch.tensor(tokens), minlength=11).double()
    assert abs(chi_square(found, logits[0].softmax(-1).double() * count)) < 4.5


def test_choices_and_positions_are_independent() -> None:
    """Pairs of draws under neighbouring keys fill the product distribution."""
    logits, count = logits_of(3, vocab=5), 10_000
    for other in ({"choice": 1}, {"seed": 1}):
        a = torch.tensor(draws(logits, count))
        b = torch.tensor(draws(logits, count, **other))
        joint = torch.bincount(a * 5 + b, minlength=25).double()
        p = logits[0].softmax(-1).double()
        assert abs(chi_square(joint, torch.outer(p, p).flatten() * count)) < 4.5
    steps = torch.tensor(draws(logits, count + 1))
    joint = torch.bincount(steps[:-1] * 5 + steps[1:], minlength=25).double()
    assert (
        abs(chi_square(joint, torch.outer(p, p).flatten() * count)) < 5.5
    )  # overlapping pairs vary a little more


def test_uniforms_fill_the_open_interval_evenly() -> None:
    u = uniforms(random_key(5, 0, 9), torch.arange(200_000))
    assert u.dtype == torch.float64
    assert 0 < float(u.min()) < 1e-4
    assert 1 - 1e-4 < float(u.max()) < 1
    cells = torch.histc(u, 100, 0, 1)
    assert abs(chi_square(cells, torch.full((100,), 2000.0))) < 4.5
    edges = uniforms(0, torch.tensor([0]))
    assert math.isfinite(float(-(-edges.log()).log()))


def test_the_generator_is_pinned() -> None:
    """A change here would make requests that move between versions diverge."""
    mask = (1 << 64) - 1

    def mix(x: int) -> int:
        z = (x + 0x9E3779B97F4A7C15) & mask
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        return z ^ (z >> 31)

    assert random_key(1, 2, 3) == mix(mix(mix(1) ^ 2) ^ 3)
    key = random_key(-1, 0, 1 << 40)
    for token in (0, 1, 48_000):
        bits = mix((key + token * 0x9E3779B97F4A7C15) & mask)
        assert float(uniforms(key, torch.tensor([token]))[0]) == ((bits >> 12) + 0.5) * 2.0**-52


# ------------------------------------------------------------------ purity

varied = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 1.7]),
    top_k=st.sampled_from([0, 1, 5, 96, 500]),
    top_p=st.sampled_from([1.0, 0.9, 0.2, 1e-9]),
    min_p=st.sampled_from([0.0, 0.05, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    presence_penalty=st.sampled_from([0.0, 0.7]),
    frequency_penalty=st.sampled_from([0.0, -0.4]),
    logit_bias=st.sampled_from([{}, {3: 5.0, 90: -100.0}]),
    seed=st.integers(-(2**63), 2**63 - 1),
    choice=st.integers(0, 3),
    min_tokens=st.sampled_from([0, 50]),
    stop_token_ids=st.sampled_from([(), (2, 7)]),
    logprobs=st.sampled_from([None, 0, 3]),
)


@settings(deadline=None, max_examples=60)
@given(st.lists(varied, min_size=1, max_size=6), st.integers(0, 99), st.randoms())
def test_a_row_is_chosen_alike_in_any_batch(params: list[SamplingParams], seed: int, shuffle: Any) -> None:
    n = len(params)
    logits = logits_of(seed, n)
    rows = [(p, 20 + i, 3 + i, list(range(i, 20 + 2 * i))) for i, p in enumerate(params)]

    def run(order: list[int]) -> list[Any]:
        some = [rows[i] for i in order]
        tokens, rated = sample(
            logits[order].clone(),
            [r[0] for r in some],
            [r[1] for r in some],
            num_prompts=[r[2] for r in some],
            histories=[r[3] for r in some],
        )
        return [(i, t, lp) for i, t, lp in zip(order, tokens, rated, strict=True)]

    before = logits.clone()
    together = run(list(range(n)))
    assert torch.equal(logits, before), "the model's logits are not to be changed"
    order = list(range(n))
    shuffle.shuffle(order)
    assert sorted(run(order), key=lambda r: r[0]) == together
    assert [run([i])[0] for i in range(n)] == together


def test_every_part_of_the_key_matters() -> None:
    logits = torch.zeros(1, 5000)
    base = one(logits, seed=1)
    assert one(logits, seed=1) == base
    assert len({base, one(logits, seed=2), one(logits, seed=1, choice=1), one(logits, seed=1, at=11)}) == 4


# ------------------------------------------------------------------ what shapes a draw


def test_greedy_takes_the_best_and_the_lowest_id_of_a_tie() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, [40, 17, 80]] = 2.0
    assert one(logits, temperature=0.0, seed=9) == 17


def seen(logits: torch.Tensor, **kwargs: Any) -> set[int]:
    return set(draws(logits, 3000, **kwargs))


LADDER = torch.tensor([0.4, 0.3, 0.15, 0.1, 0.05]).log()[None]


@pytest.mark.parametrize(
    ("kwargs", "stay"),
    [
        ({"top_k": 2}, {0, 1}),
        ({"top_k": 9}, {0, 1, 2, 3, 4}),
        ({"top_p": 0.69}, {0, 1}),  # the token that crosses the line stays
        ({"top_p": 0.71}, {0, 1, 2}),
        ({"top_p": 1e-9}, {0}),
        ({"min_p": 0.3}, {0, 1, 2}),
        ({"min_p": 1.0}, {0}),
        ({"top_k": 3, "top_p": 0.8}, {0, 1}),  # of the 0.85 that top-k left, 0.7 is 82 percent
        ({"temperature": 100.0, "top_p": 0.99, "min_p": 0.0}, {0, 1, 2, 3, 4}),  # filters see the temperature
        ({"logit_bias": {4: 50.0}}, {4}),
    ],
    ids=str,
)
def test_filters_keep_exactly(kwargs: dict[str, Any], stay: set[int]) -> None:
    assert seen(LADDER, **kwargs) == stay


def test_top_p_that_is_met_exactly_keeps_no_more() -> None:
    """Two of four equal tokens are exactly half of the mass."""
    assert seen(torch.zeros(1, 4), top_p=0.5) == {0, 1}


def test_top_k_of_a_tie_keeps_k_of_the_lowest_ids() -> None:
    assert seen(torch.zeros(1, 10), top_k=3) == {0, 1, 2}


@settings(deadline=None, max_examples=60)
@given(
    st.integers(0, 99),
    st.sampled_from([0.5, 3.0, 30.0]),
    st.booleans(),
    st.sampled_from([0, 1, 40, 1024, 1025, 2999]),
    st.sampled_from([1.0, 0.95, 0.5, 0.01]),
    st.sampled_from([0.0, 0.001, 0.5]),
)
def test_filters_equal_their_definition(
    seed: int, scale: float, ties: bool, top_k: int, top_p: float, min_p: float
) -> None:
    """Against plain Python over the whole ranking, for flat rows and steep ones, with ties and without."""
    row = torch.randn(3000, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * scale
    row = (row.round() if ties else row).float()
    order = sorted(range(3000), key=lambda i: (-float(row[i]), i))[: top_k or 3000]
    probs = row.double()[order].softmax(-1).tolist()
    stay, mass = set(), 0.0
    for i, p in zip(order, probs, strict=True):
        if stay and ((top_p < 1 and mass >= top_p) or p < min_p * probs[0]):
            break
        stay.add(i)
        mass += p
    kept = _filtered(row[None].clone(), [SamplingParams(top_k=top_k, top_p=top_p, min_p=min_p)])[0]
    found = set(kept.isfinite().nonzero()[:, 0].tolist())
    assert abs(len(found) - len(stay)) <= (1 if top_p < 1 or min_p else 0)  # float32 sums at the very edge
    assert found <= stay or stay <= found
    assert torch.equal(kept[sorted(found)], row[sorted(found)])


def test_filtered_draws_keep_their_proportions() -> None:
    found = torch.bincount(torch.tensor(draws(LADDER, 20_000, top_k=3, seed=4)), minlength=5).double()
    assert abs(chi_square(found[:3], torch.tensor([0.4, 0.3, 0.15]).double() / 0.85 * 20_000)) < 4.5


def test_penalties_count_what_they_should() -> None:
    """Repetition looks at prompt and output; presence and frequency at the output only."""
    logits = torch.tensor([[1.0, 0.9, 0.8, -1.0]])
    history = [0, 1, 1, 2]  # prompt 0; output 1, 1, 2

    def scores(**kwargs: Any) -> list[int]:
        order, left = [], logits.clone()
        for _ in range(4):
            best = one(left, temperature=0.0, history=history, prompt=1, at=4, **kwargs)
            order.append(best)
            left[0, best] = -1e9
        return order

    assert scores() == [0, 1, 2, 3]
    assert scores(repetition_penalty=2.0) == [0, 1, 2, 3]  # 0.5, 0.45, 0.4
    assert scores(presence_penalty=0.15) == [0, 1, 2, 3]  # 1, 0.75, 0.65
    assert scores(frequency_penalty=0.15) == [0, 2, 1, 3]  # 1, 0.6, 0.65
    assert scores(frequency_penalty=-0.1) == [1, 0, 2, 3]  # 1, 1.1, 0.9
    assert (
        one(
            torch.tensor([[1.0, 0.9, 0.4, -1.0]]),
            temperature=0.0,
            history=[0, 3],
            prompt=2,
            repetition_penalty=2.0,
        )
        == 1
    )
    # a penalty makes an unlikely token less likely, so negative logits are multiplied: token 1 falls to -2
    assert (
        one(torch.tensor([[-1.5, -1.0]]), temperature=0.0, history=[1], prompt=1, repetition_penalty=2.0) == 0
    )


def test_min_tokens_bans_end_tokens_until_then() -> None:
    logits = torch.tensor([[0.0, 1.0, 9.0]])
    kwargs: dict[str, Any] = {"temperature": 0.0, "min_tokens": 3, "stop_token_ids": (2,), "prompt": 5}
    assert [one(logits, at=at, **kwargs) for at in (5, 6, 7, 8)] == [1, 1, 1, 2]


# ------------------------------------------------------------------ logprobs and margins


def test_logprobs_are_the_models_own() -> None:
    logits = logits_of(5, 2)
    kwargs: dict[str, Any] = {"temperature": 3.0, "top_k": 1, "logit_bias": {60: 100.0}}
    tokens, (rated, silent) = choose(logits, SamplingParams(logprobs=3, **kwargs), SamplingParams(**kwargs))
    own = logits.log_softmax(-1)
    best = own[0].topk(3)
    assert silent is None
    assert tokens[0] == 60
    assert rated.logprob == pytest.approx(float(own[0, 60]))
    assert rated.top_ids == tuple(best.indices.tolist())
    assert rated.top_logprobs == pytest.approx(best.values.tolist())
    torch.testing.assert_close(log_softmax_rows(logits), own)


def test_margin_is_what_a_change_of_logits_must_exceed() -> None:
    logits = logits_of(6, 40)
    params = [SamplingParams(temperature=t, seed=s) for s in range(10) for t in (0.0, 0.5, 1.0, 2.0)]
    kwargs: dict[str, Any] = {"num_prompts": [0] * 40, "histories": [None] * 40}
    tokens = sample(logits, params, [3] * 40, **kwargs)[0]
    gaps = margins(logits, params, [3] * 40, **kwargs)
    assert min(gaps) > 0
    rows = torch.arange(40)
    for share, same in ((0.99, True), (1.01, False)):
        moved = logits.clone()
        moved[rows, tokens] -= torch.tensor(gaps) * share
        again = sample(moved, params, [3] * 40, **kwargs)[0]
        assert [a == b for a, b in zip(again, tokens, strict=True)] == [same] * 40
