"""The kernels in plain torch against naive definitions, with garbage wherever nobody wrote."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from splitserve.models.config import Rope
from splitserve.models.rope import frequencies
from splitserve.ops import ref as ops

HEAD = 8


def naive(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, at: int, window: int) -> torch.Tensor:
    """One query [heads, d] at position `at` over keys and values [tokens, kv_heads, d], in float64."""
    first = max(at + 1 - window, 0) if window else 0
    group = q.shape[0] // keys.shape[1]
    out = []
    for h in range(q.shape[0]):
        k, v = keys[first : at + 1, h // group].double(), values[first : at + 1, h // group].double()
        out.append((k @ q[h].double() / math.sqrt(q.shape[1])).softmax(0) @ v)
    return torch.stack(out).float()


class Case:
    """Sequences of given lengths whose rows lie on shuffled pages of a strided view; everything else is NaN."""

    def __init__(
        self, lens: list[int], page_tokens: int, *, kv_heads: int = 2, group: int = 3, seed: int = 0
    ) -> None:
        draw = torch.Generator().manual_seed(seed)
        counts = [-(-n // page_tokens) for n in lens]
        pool = torch.full((sum(counts) + 2, kv_heads, 3, page_tokens, 2 * HEAD), float("nan"))
        self.view, self.page_tokens, self.lens = pool[:, :, 1], page_tokens, lens
        units = torch.randperm(sum(counts) + 2, generator=draw).tolist()
        self.pages = torch.zeros(len(lens), max(counts), dtype=torch.int64)
        self.rows, at = [], 0
        for i, (n, c) in enumerate(zip(lens, counts, strict=True)):
            self.pages[i, :c] = torch.tensor(units[at : at + c])
            at += c
            rows = torch.randn(n, kv_heads, 2 * HEAD, generator=draw) * 2
            token = torch.arange(n)
            k, v = rows.chunk(2, dim=-1)
            ops.write_rows(self.view, k, v, self.pages[i, token // page_tokens], token % page_tokens)
            self.rows.append(rows)
        self.q = torch.randn(sum(lens), kv_heads * group, HEAD, generator=draw) * 2

    def expected(self, i: int, q: torch.Tensor, at: int, window: int) -> torch.Tensor:
        keys, values = self.rows[i].chunk(2, dim=-1)
        return naive(q, keys, values, at, window)


lengths = st.lists(st.integers(1, 40), min_size=1, max_size=5)


@settings(deadline=None, max_examples=80)
@given(
    lengths,
    st.sampled_from([1, 4, 16]),
    st.sampled_from([0, 1, 5, 16, 100]),
    st.sampled_from([(1, 1), (2, 3)]),
)
def test_decode_attention(lens: list[int], page_tokens: int, window: int, heads: tuple[int, int]) -> None:
    case = Case(lens, page_tokens, kv_heads=heads[0], group=heads[1])
    q = case.q[: len(lens)]
    plan = ops.plan_decode(case.pages, lens, page_tokens, window)
    got = ops.attend_decode(q, case.view, plan, HEAD**-0.5)
    want = torch.stack([case.expected(i, q[i], n - 1, window) for i, n in enumerate(lens)])
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


@settings(deadline=None, max_examples=80)
@given(st.integers(1, 40), st.data(), st.sampled_from([1, 4, 16]), st.sampled_from([0, 1, 5, 16, 100]))
def test_prefill_attention(length: int, data: st.DataObject, page_tokens: int, window: int) -> None:
    case = Case([length], page_tokens)
    start = data.draw(st.integers(0, length - 1))
    q = case.q[start:length]
    plan = ops.plan_prefill(case.pages[0], length, slice(0, length - start), page_tokens, window)
    got = ops.attend_prefill(q, case.view, plan, HEAD**-0.5)
    want = torch.stack([case.expected(0, q[i], start + i, window) for i in range(length - start)])
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


def test_decoding_does_not_depend_on_the_batch() -> None:
    """Bit for bit: what an engine computes for a request may not change with its neighbours."""
    case = Case([33, 7, 64, 1, 50], 16)
    scale = HEAD**-0.5
    together = ops.attend_decode(case.q[:5], case.view, ops.plan_decode(case.pages, case.lens, 16), scale)
    for i, n in enumerate(case.lens):
        plan = ops.plan_decode(case.pages[i : i + 1], [n], 16)
        assert torch.equal(ops.attend_decode(case.q[i : i + 1], case.view, plan, scale)[0], together[i])


def test_decode_plan_reads_only_visible_pages() -> None:
    pages = torch.tensor([[7, 3, 9, 1], [4, 0, 0, 0]])
    plan = ops.plan_decode(pages, [60, 5], 16, window=20)  # tokens 40..59: pages 2 and 3 of the first
    assert plan.page.tolist() == [9, 1, 4]
    assert plan.seq.tolist() == [0, 0, 1]
    assert (plan.bias[:, 0, 0] == 0).sum(-1).tolist() == [8, 12, 5]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rms_norm(dtype: torch.dtype) -> None:
    x, weight = torch.randn(5, 3, 64).to(dtype) * 30, torch.randn(64).to(dtype)
    wide = x.double()
    want = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    got = ops.rms_norm(x, weight, 1e-5)
    assert got.dtype is dtype
    torch.testing.assert_close(got.double(), want, atol=1e-6, rtol={torch.float32: 1e-6}.get(dtype, 0.02))


def test_rotation_is_a_complex_product_and_keeps_distances() -> None:
    inverse = torch.tensor(frequencies(Rope(theta=100.0), HEAD, 64).inverse)
    x = torch.randn(6, 2, HEAD)
    positions = torch.tensor([0, 1, 5, 9, 100, 3])
    got = ops.rotate(x, ops.rope_table(positions, inverse))
    z = torch.complex(x[..., : HEAD // 2], x[..., HEAD // 2 :])
    turned = z * torch.exp(1j * positions[:, None, None] * inverse)
    torch.testing.assert_close(got, torch.cat((turned.real, turned.imag), -1), atol=1e-5, rtol=0)
    torch.testing.assert_close(got[0], x[0])  # position 0 turns nothing
    q, k = torch.randn(2, 1, 1, HEAD)

    def score(at: int, of: int) -> float:
        a = ops.rotate(q, ops.rope_table(torch.tensor([at]), inverse))
        b = ops.rotate(k, ops.rope_table(torch.tensor([of]), inverse))
        return float((a * b).sum())

    assert score(9, 4) == pytest.approx(score(105, 100), abs=1e-4)


def test_swiglu_and_embedding_shards() -> None:
    x = torch.randn(4, 10)
    torch.testing.assert_close(ops.swiglu(x), F.silu(x[:, :5]) * x[:, 5:])
    table, tokens = torch.randn(11, 6), torch.tensor([0, 10, 4, 5, 4])
    shards = [ops.embed(tokens, table[a:b], a) for a, b in ((0, 4), (4, 8), (8, 11))]
    torch.testing.assert_close(sum(shards), table[tokens])
    assert ops.embed(tokens[:0], table).shape == (0, 6)


@pytest.mark.parametrize("normalize", [True, False])
def test_experts(normalize: bool) -> None:
    x, scores = torch.randn(9, 6), torch.randn(9, 5) * 2
    gate_up, down = torch.randn(5, 8, 6), torch.randn(5, 6, 4)
    weights, experts = ops.choose_experts(scores, 2, normalize=normalize)
    probs = scores.softmax(-1)
    want = torch.zeros(9, 6)
    for t in range(9):
        best = sorted(range(5), key=lambda e: -float(probs[t, e]))[:2]
        assert sorted(experts[t].tolist()) == sorted(best)
        total = sum(probs[t, e] for e in best) if normalize else 1.0
        for e in best:
            want[t] += probs[t, e] / total * (down[e] @ ops.swiglu(gate_up[e] @ x[t]))
    got = ops.mix_experts(x, gate_up, down, weights, experts)
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


def test_plain_and_stretched_frequencies() -> None:
    """Figures by hand; equality with transformers is in tests/models."""
    assert frequencies(Rope(theta=16.0), 8, 0).inverse == pytest.approx((1.0, 0.5, 0.25, 0.125))
    assert frequencies(Rope("linear", 16.0, factor=4.0), 8, 0).inverse[3] == pytest.approx(0.125 / 4)
    assert frequencies(Rope("divided", 16.0, divisors=(1, 1, 2, 8)), 8, 0).inverse[3] == pytest.approx(1 / 64)
    llama3 = Rope("llama3", 16.0, factor=8.0, original_len=16)  # 16 tokens: 2.5, 1.27, 0.64, 0.32 turns
    f = frequencies(llama3, 8, 0).inverse
    kept = (16 / (2 * math.pi) - 1) / 3
    assert f[0] == pytest.approx(kept + (1 - kept) / 8)  # between one turn and four
    assert f[3] == pytest.approx(0.125 / 8)
    long = Rope("longrope", 16.0, 4.0, original_len=32, short_factor=(1,) * 4, long_factor=(2,) * 4)
    assert [frequencies(long, 8, n).inverse[0] for n in (32, 33)] == [1.0, 0.5]
    assert frequencies(long, 8, 32).scale == pytest.approx(math.sqrt(1 + math.log(4) / math.log(32)))
