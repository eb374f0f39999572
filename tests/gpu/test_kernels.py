"""Every kernel on the GPU at hand against its twin in float32: fresh inputs, poisoned outputs, repeated runs equal.

Shapes are those of DeepSeek-V4-Flash and Llama-3-8B, and ragged ones. Run with `pytest -m gpu tests/gpu`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

BF16 = 0.004  # a result rounded once to bf16, a weight of a softmax too
EXACT = 1e-5  # sums of thousands of float32 products, in another order


@pytest.fixture(autouse=True)
def _device() -> Iterator[None]:
    torch.set_float32_matmul_precision("highest")
    torch.manual_seed(torch.seed() % 1000)
    with torch.device("cuda"):
        yield


def poison() -> None:
    """Leaves NaN in the memory that the next outputs will be made of."""
    blocks = [
        torch.full((1 << size,), math.nan) for size in (10, 12, 14, 16, 18, 20, 22, 24, 26) for _ in range(3)
    ]
    torch.cuda.synchronize()
    del blocks


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    if got.shape != want.shape or not torch.isfinite(got.float()).all():
        return math.inf
    return ((got.double() - want.double()).norm() / want.double().norm()).item()


def check(
    run: Callable[[], Any],
    want: torch.Tensor,
    tolerance: float,
    pick: Callable[[Any], torch.Tensor] = lambda x: x,
) -> None:
    """Right on poisoned memory, and the same bits on a second run."""
    poison()
    first = pick(run()).clone()
    poison()
    assert torch.equal(first, pick(run()))
    assert error(first, want) < tolerance, error(first, want)


# ------------------------------------------------------------------ products


def e4m3(*shape: int) -> Any:
    from splitserve.ops.ref import v4 as ref4

    stack = [ref4.quantise_tiles(torch.randn(shape[-2:]) * 0.05) for _ in range(math.prod(shape[:-2]))]
    codes = torch.stack([c for c, _ in stack]).view(shape)
    scales = torch.stack([s for _, s in stack])
    return ref4.Tiles(codes, scales.view(*shape[:-2], *scales.shape[1:]), (128, 128))


def mxfp4(*shape: int) -> Any:
    from splitserve.ops.ref import v4 as ref4

    return ref4.Mxfp4(*ref4.quantise_mxfp4(torch.randn(shape) * 0.05))


def rounded(x: torch.Tensor) -> torch.Tensor:
    from splitserve.ops.ref import v4 as ref4
    from splitserve.ops.ref.v4 import quant

    groups = x.float().unflatten(1, (-1, 128))
    scale = ref4.ue8m0_to_float(quant.power_of_two_scale(groups.abs().amax(-1).clamp_min(1e-4), 448.0))[
        ..., None
    ]
    return ((groups / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale).flatten(1)


@pytest.mark.parametrize("tokens", [1, 3, 16, 17, 64, 200, 500])
@pytest.mark.parametrize(("out", "size"), [(1536, 4096), (4096, 2048), (8192, 1024), (200, 384)])
@pytest.mark.parametrize("form", [e4m3, mxfp4])
def test_linear(form: Any, out: int, size: int, tokens: int) -> None:
    from splitserve.ops.ref import v4 as ref4
    from splitserve.ops.triton import v4

    weight, x = form(out, size), torch.randn(tokens, size).bfloat16()
    ready = v4.prepare(weight)
    check(lambda: v4.linear(x, ready), ref4.linear(x.float(), weight), BF16)
    coarse = v4.prepare(weight, exact=False)
    check(lambda: v4.linear_rounded(x, coarse), ref4.linear(rounded(x), weight), BF16)


def test_subnormal_codes_keep_their_value() -> None:
    """Tensor cores multiply bf16 numbers of 2^-120 as they are."""
    from splitserve.ops.ref import v4 as ref4
    from splitserve.ops.triton import v4

    codes = (
        torch.randint(0, 8, (256, 1024), dtype=torch.uint8)
        | torch.randint(0, 2, (256, 1024), dtype=torch.uint8) << 7
    )
    weight = ref4.Tiles(
        codes.view(torch.float8_e4m3fn), torch.full((2, 8), 118, dtype=torch.uint8), (128, 128)
    )
    x = torch.randn(5, 1024).bfloat16()
    check(lambda: v4.linear(x, v4.prepare(weight)), ref4.linear(x.float(), weight), BF16)


def test_rounding_is_the_definition_s() -> None:
    from splitserve.ops.triton.rounding import quantise_rows, round_rows

    x = (torch.randn(37, 4096) * torch.logspace(-8, 3, 37)[:, None]).bfloat16()
    x[3] = 0
    got = quantise_rows(x)
    back = (got.codes.float().unflatten(1, (-1, 128)) * got.scales.T[..., None]).flatten(1)
    assert torch.equal(back, rounded(x))
    assert torch.equal(round_rows(x).float(), rounded(x))


@pytest.mark.parametrize("tokens", [1, 16, 100, 500])
def test_grouped_and_float32_products(tokens: int) -> None:
    from splitserve.ops.ref import v4 as ref4
    from splitserve.ops.triton import v4

    weight, x = e4m3(8192, 4096), torch.randn(tokens, 8, 4096).bfloat16()
    ready = v4.prepare(weight)
    check(
        lambda: v4.grouped_linear(x, ready),
        ref4.grouped_linear(x.float(), ref4.dequantise(weight, torch.float32)),
        BF16,
    )
    matrix, row = torch.randn(2624, 4096).bfloat16(), torch.randn(tokens, 4096).bfloat16()
    check(lambda: v4.linear_f32(row, matrix), row.float() @ matrix.float().T, EXACT)


@pytest.mark.parametrize("tokens", [132, 1024, 4100])
@pytest.mark.parametrize("shape", [(1536, 4096), (32768, 1024), (4096, 8192), (2048, 4096), (4096, 1024)])
def test_rounded_products_of_many_rows(shape: tuple[int, int], tokens: int) -> None:
    """By cuBLAS where it takes scales of blocks, which an H200 must: else prompts are slow without anybody's knowing."""
    from splitserve.ops.ref import v4 as ref4
    from splitserve.ops.triton import multiply, scaled, v4

    weight, x = e4m3(*shape), torch.randn(tokens, shape[1]).bfloat16()
    ready = v4.prepare(weight, exact=False)
    if torch.cuda.get_device_capability() == (9, 0):
        assert scaled.works(ready.codes.device)
        assert multiply.by_library(ready, tokens)
    check(lambda: v4.linear_rounded(x, ready), ref4.linear(rounded(x), weight), BF16)


@pytest.mark.parametrize("tokens", [1, 100, 300, 1024, 2050, 4096])
def test_rounded_products_of_groups(tokens: int) -> None:
    from splitserve.ops.ref import v4 as ref4
    from splitserve.ops.triton import v4

    weight, x = e4m3(8192, 4096), torch.randn(tokens, 8, 4096).bfloat16()
    ready = v4.prepare(weight, exact=False)
    want = ref4.grouped_linear(rounded(x.flatten(0, 1)).view(x.shape), ref4.dequantise(weight, torch.float32))
    check(lambda: v4.grouped_linear(x, ready, exact=False), want, BF16)


@pytest.mark.parametrize("tokens", [1, 2, 16, 64, 300, 1000])
@pytest.mark.parametrize("form", [e4m3, mxfp4])
def test_mix_experts(form: Any, tokens: int) -> None:
    """32 experts of half the real width; all of them here, and some elsewhere."""
    from splitserve.ops.ref import v4 as ref4
    from splitserve.ops.triton import v4

    gate_up, down = form(32, 2048, 4096), form(32, 4096, 1024)
    x, weights = torch.randn(tokens, 4096).bfloat16(), torch.rand(tokens, 6)
    experts = torch.rand(tokens, 32).argsort(-1)[:, :6]
    for local in (range(32), range(8, 24)):
        part = slice(local.start, local.stop)
        a, b = (
            type(w)(w.codes[part], w.scales[part], *((w.tile,) if form is e4m3 else ()))
            for w in (gate_up, down)
        )
        want = ref4.mix_experts(x.float(), a, b, weights, experts, local=local, limit=1.0)
        ready = v4.prepare(a), v4.prepare(b)
        check(
            lambda r=ready, k=local: v4.mix_experts(x, *r, weights, experts, local=k, limit=1.0),
            want,
            2 * BF16,
        )
        ready = v4.prepare(a, exact=False), v4.prepare(b, exact=False)
        check(
            lambda r=ready, k=local: v4.mix_experts(x, *r, weights, experts, local=k, limit=1.0, exact=False),
            want,
            0.1,
        )


@pytest.mark.parametrize("tokens", [1, 2, 20, 100, 1000])
@pytest.mark.parametrize("ffn", [2048, 1024, 512])
@pytest.mark.parametrize("lanes", [False, True])
def test_experts_in_eight_bits(
    monkeypatch: pytest.MonkeyPatch, ffn: int, tokens: int, *, lanes: bool
) -> None:
    """Codes in words and in lanes, rows by place, also as a graph: experts without rows, and pairs that are elsewhere.

    Words give a few rows' bits to many rows, and lanes the same sums in another order.
    """
    from splitserve.ops.kernels.launch import listing
    from splitserve.ops.triton import multiply, v4
    from splitserve.ops.triton.v4 import experts as v4_experts
    from splitserve.ops.triton.v4 import quant

    weights = [mxfp4(16, 2 * ffn, 4096), mxfp4(16, 4096, ffn)]
    words = [quant.repack(w, eight=True) for w in weights]
    ready = [quant.in_lanes(w) for w in weights] if lanes else words
    assert all(type(v4.prepare(w, exact=False)) is multiply.Lanes for w in weights)
    x, factors = torch.randn(tokens, 4096).bfloat16(), torch.rand(tokens, 6)
    experts = torch.rand(tokens, 20).argsort(-1)[:, :6].int()
    experts[experts == 9] = 2
    experts[tokens // 2] = 19  # nothing of this token's is here
    if tokens == 1:
        experts = torch.tensor([[2, 5, 11, 17, 8, 3]], dtype=torch.int32)

    def mix(pair: list[Any] = ready) -> torch.Tensor:
        return v4.mix_experts(x, *pair, factors, experts, local=range(2, 18), limit=1.0, exact=False)

    with monkeypatch.context() as patch, listing() as names:
        for module in (multiply, v4_experts):
            patch.setattr(module, "many_rows", lambda *_: False)
        want = mix(words)
    assert names.count("weigh8") == 2
    with listing() as names:
        check(
            mix, want, 4 * BF16 if lanes else EXACT
        )  # what is rounded between the products may fall otherwise
    few = tokens * 6 <= 8 * 16
    assert names.count("weigh_lanes" if lanes else "weigh8" if few else "weigh_many") == 4
    got = mix()
    assert lanes or torch.equal(got, want)
    want = got.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = mix()
    for _ in range(3):
        got.fill_(math.nan)
        graph.replay()
        assert torch.equal(got, want)


def test_codes_in_lanes_are_exact() -> None:
    """Groups from 2^11 below the largest of their row to it, and empty ones far below it."""
    from splitserve.ops.ref import v4 as ref4
    from splitserve.ops.triton.grouping import group_pairs
    from splitserve.ops.triton.multiply import multiply
    from splitserve.ops.triton.rounding import quantise_rows
    from splitserve.ops.triton.v4 import quant

    codes = torch.randint(0, 256, (2, 512, 512), dtype=torch.uint8)
    codes[0, :, 16:32] = 0x80
    scales = torch.randint(117, 129, (2, 512, 32), dtype=torch.uint8)
    scales[:, :, 0], scales[:, :, 31], scales[0, :, 1] = 117, 128, 3
    four = ref4.Mxfp4(codes, scales)
    ready = quant.in_lanes(four)
    rows = quantise_rows(torch.eye(1024).bfloat16(), lanes=True)
    for expert, block in ((0, 16), (1, 64)):
        groups = group_pairs(torch.full((1024, 1), expert), local=range(2), block=block)
        got = multiply(rows, ready, groups=groups, dtype=torch.float32)
        assert torch.equal(got, ref4.dequantise(four, torch.float32)[expert].T)


@pytest.mark.parametrize("tokens", [1, 64, 333, 2048, 8192])
def test_routing_and_grouping(tokens: int) -> None:
    from splitserve.ops.ref import v4 as ref4
    from splitserve.ops.triton import v4
    from splitserve.ops.triton.grouping import group_pairs

    logits, bias = torch.randn(tokens, 256) * 4, torch.randn(256)
    got, want = v4.route(logits, bias, count=6, scale=1.5), ref4.route(logits, bias, count=6, scale=1.5)
    order, want_order = got[1].argsort(-1), want[1].argsort(-1)
    assert torch.equal(got[1].gather(1, order), want[1].gather(1, want_order))
    assert error(got[0].gather(1, order), want[0].gather(1, want_order)) < EXACT
    table, ids = torch.randint(0, 256, (1000, 6), dtype=torch.int32), torch.randint(0, 1000, (tokens,))
    a, b = (
        v4.route_by_token(logits, table, ids, scale=1.5),
        ref4.route_by_token(logits, table, ids, scale=1.5),
    )
    assert torch.equal(a[1], b[1])
    assert error(a[0], b[0]) < EXACT
    one, none = torch.full_like(got[1], 70), torch.full_like(got[1], 3)
    for experts in (got[1], one, none):
        for local in (range(256), range(64, 128)):
            for block in (16, 64, 128):
                poison()
                groups = group_pairs(experts, local=local, block=block)
                flat = experts.flatten().long()
                here = (flat >= local.start) & (flat < local.stop)
                counts = torch.bincount(flat[here] - local.start, minlength=len(local))
                blocks = (counts + block - 1) // block
                needed = int(blocks.sum())
                owners = torch.arange(len(local)).repeat_interleave(blocks)
                assert torch.equal(groups.expert_of[:needed].long(), owners)
                assert (groups.expert_of[needed:] == -1).all()
                first = (blocks.cumsum(0) - blocks)[owners] * block  # place of the owner's first pair
                inside = (torch.arange(needed) * block)[:, None] + torch.arange(block) < (
                    first + counts[owners]
                )[:, None]
                rows = groups.rows_of[: needed * block].view(needed, block)
                assert torch.equal(rows >= 0, inside)
                want = torch.where(here, flat, 256).sort(stable=True).indices[: int(here.sum())]
                assert torch.equal(rows[inside].long(), want)


@pytest.mark.parametrize("tokens", [1, 40])
def test_overlapped_kernels_read_what_was_written(tokens: int) -> None:
    """A long chain of dependent kernels, replayed as a graph: the same bits as one kernel after another."""
    from splitserve.ops.kernels.launch import one_by_one
    from splitserve.ops.triton import v4

    square = [v4.prepare(e4m3(4096, 4096)) for _ in range(3)]
    gate_up, down = v4.prepare(mxfp4(16, 2048, 4096)), v4.prepare(mxfp4(16, 4096, 1024))
    logits, bias = torch.randn(tokens, 16), torch.randn(16)
    start = torch.randn(tokens, 4096).bfloat16()

    def chain() -> torch.Tensor:
        x = start
        for _ in range(8):
            for matrix in square:
                x = v4.rms_norm(v4.linear_rounded(x, matrix), None, 1e-6)
            weights, experts = v4.route(logits * x[:, :16].float(), bias, count=4, scale=1.0)
            x = v4.mix_experts(x, gate_up, down, weights, experts, local=range(16), limit=5.0).bfloat16()
            x = v4.rms_norm(x, None, 1e-6)
        return x

    with one_by_one():
        want = chain()
    assert torch.isfinite(want).all()
    assert torch.equal(chain(), want)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = chain()
    for _ in range(20):
        got.fill_(math.nan)
        graph.replay()
        assert torch.equal(got, want)


# ------------------------------------------------------------------ streams, norms, rows


@pytest.mark.parametrize("tokens", [1, 7, 64, 1000, 4096, 5000])
def test_hyper_connections(tokens: int) -> None:
    from splitserve.ops.ref import v4 as ref4
    from splitserve.ops.triton import v4

    streams, fn = torch.randn(tokens, 4, 4096).bfloat16(), torch.randn(24, 16384) / 128
    base, scale = torch.randn(24) / 2, torch.rand(3) + 0.5
    how = {"iters": 20, "eps": 1e-6, "norm_eps": 1e-6}
    x, post, comb = ref4.hc_pre(streams, fn, base, scale, **how)
    for i, (want, tolerance) in enumerate(((x, BF16), (post, 2e-5), (comb, 2e-5))):
        check(lambda: v4.hc_pre(streams, fn, base, scale, **how), want, tolerance, lambda r, i=i: r[i])
    y = torch.randn(tokens, 4096).bfloat16()
    check(
        lambda: v4.hc_post(y, streams, post, comb), ref4.hc_post(y.float(), streams.float(), post, comb), BF16
    )
    want = ref4.hc_post(y.float(), streams.float(), post, comb)
    check(lambda: v4.hc_enter(streams, fn, base, scale, **how), x, BF16, lambda r: r[0])
    check(lambda: v4.hc_enter(streams, fn, base, scale, **how)[1](y, None), want, BF16)
    norm = torch.rand(4096)
    want = ref4.rms_norm(x, norm, 1e-6)
    check(lambda: v4.hc_enter(streams, fn, base, scale, norm=norm, **how), want, BF16, lambda r: r[0])
    how.pop("iters")
    want = ref4.hc_head(streams, fn[:4], base[:4], scale[:1], **how)
    check(lambda: v4.hc_head(streams, fn[:4], base[:4], scale[:1], **how), want, BF16)


@pytest.mark.parametrize("tokens", [1, 5, 300])
def test_norms_and_rotations(tokens: int) -> None:
    from splitserve.ops import ref
    from splitserve.ops import triton as ops
    from splitserve.ops.ref import v4 as ref4
    from splitserve.ops.triton import v4

    q, weight = torch.randn(tokens, 64, 512).bfloat16(), torch.rand(512)
    table = ref4.rope_table(torch.arange(tokens) * 9, torch.rand(32))
    check(
        lambda: v4.rms_norm_rotate(q, None, 1e-6, table),
        ref4.rotate_tail(ref4.rms_norm(q.float(), None, 1e-6), table),
        BF16,
    )
    check(lambda: v4.rms_norm(q[:, 0], weight, 1e-6), ref4.rms_norm(q[:, 0].float(), weight, 1e-6), BF16)
    check(
        lambda: v4.rotate_tail(q, table, inverse=True), ref4.rotate_tail(q.float(), table, inverse=True), BF16
    )
    x, y, w = (
        torch.randn(tokens, 4096).bfloat16(),
        torch.randn(tokens, 4096).bfloat16(),
        torch.rand(4096).bfloat16(),
    )
    check(lambda: ops.rms_norm(x, w, 1e-5), ref.rms_norm(x, w, 1e-5), 2 * BF16)
    check(
        lambda: ops.add_rms_norm(x, y, w, 1e-5), ref.add_rms_norm(x, y, w, 1e-5)[1], 2 * BF16, lambda r: r[1]
    )
    heads, turn = (
        torch.randn(tokens, 40, 128).bfloat16(),
        ref.rope_table(torch.arange(tokens) * 9, torch.rand(64)),
    )
    check(lambda: ops.rotate(heads, turn), ref.rotate(heads, turn), 2 * BF16)
    both = torch.randn(tokens, 28672).bfloat16()
    check(lambda: ops.swiglu(both), ref.swiglu(both.float()), 2 * BF16)


def test_rows_are_packed_bit_for_bit() -> None:
    from splitserve.ops.ref import v4 as ref4
    from splitserve.ops.triton import v4

    x = (torch.randn(200, 512) * torch.logspace(-7, 2, 200)[:, None]).bfloat16()
    unit, row = torch.arange(200) % 50, torch.arange(200) // 50
    slab = torch.randint(0, 255, (50, 9000), dtype=torch.uint8)
    view = slab.as_strided((50, 4, 584), (9000, 2000, 1), 72)
    want = slab.clone()
    v4.write_latents(view, x, unit, row, rope_dim=64)
    ref4.write_rows(
        want.as_strided((50, 4, 584), (9000, 2000, 1), 72), ref4.encode_latents(x, 64, view), unit, row
    )
    assert torch.equal(slab, want)
    assert torch.equal(v4.encode_latents(x, 64, view), ref4.encode_latents(x, 64, view))
    keys = x[:, :128].contiguous()
    like = torch.empty(1, 1, 132, dtype=torch.uint8)
    a, b = v4.encode_keys(keys, like), ref4.encode_keys(keys, like)
    assert torch.equal(a[:, 128:], b[:, 128:])
    assert (a[:, :128] == b[:, :128]).float().mean() > 0.999  # a quotient may round the other way at a tie
    index = torch.randint(-1, 200, (7, 30))
    assert torch.equal(v4.take_rows(view, index), ref4.take_rows(view, index))


@pytest.mark.parametrize(("ratio", "width", "q_lens", "kv_lens"), [
    (4, 512, (1, 9, 500), (8, 9, 613)), (4, 128, (4,), (4,)), (4, 512, (8187, 5), (8187, 2050)),
    (4, 128, (2048,), (8192,)), (128, 512, (130, 300, 1), (131, 900, 256))])  # fmt: skip
def test_windows_are_pooled(
    ratio: int, width: int, q_lens: tuple[int, ...], kv_lens: tuple[int, ...]
) -> None:
    from splitserve.ops.ref import v4 as ref4
    from splitserve.ops.triton import v4

    n = len(q_lens)
    pages = torch.randperm(200)[: 64 * n].view(n, 64)
    plan = ref4.plan_windows(
        q_lens, kv_lens, ratio=ratio, slots=torch.arange(n), pages=pages, page_tokens=128
    )
    fresh, pending = (
        torch.randn(sum(q_lens), (4 if ratio == 4 else 2) * width),
        torch.randn(4, ratio, 2 * width),
    )
    carry = torch.randn(4, 2 * ratio, 2 * width) if ratio == 4 else None
    check(
        lambda: v4.pool_windows(fresh, pending, carry, plan),
        ref4.pool_windows(fresh, pending, carry, plan),
        EXACT,
    )


# ------------------------------------------------------------------ attention


@pytest.mark.parametrize("tokens", [1, 5, 16, 33, 300])
@pytest.mark.parametrize("packed", [True, False])
def test_sparse_attention(tokens: int, *, packed: bool) -> None:
    from splitserve.ops.ref import v4 as ref4
    from splitserve.ops.ref.v4 import rows
    from splitserve.ops.triton import v4

    def pool(units: int, count: int) -> torch.Tensor:
        x = torch.randn(units * count, 512)
        return (rows.pack_latents(x, 64) if packed else x.bfloat16()).view(units, count, -1)

    near = ref4.Rows(pool(5, 128), torch.randint(-1, 640, (tokens, 128)))
    q, sink = torch.randn(tokens, 64, 512).bfloat16(), torch.randn(64)
    table = ref4.rope_table(torch.arange(tokens) * 7, torch.rand(32))
    for seen in (512, 77, 0):
        far = ref4.Rows(pool(50, 32), torch.randint(-1, 1600, (tokens, seen))) if seen else None
        want = ref4.attend(q.float(), near, far, sink, scale=512**-0.5, rope_dim=64)
        check(lambda f=far: v4.attend(q, near, f, sink, scale=512**-0.5, rope_dim=64), want, BF16)
        check(lambda f=far: v4.attend(q, near, f, sink, scale=512**-0.5, rope_dim=64, turn_back=table),
              ref4.rotate_tail(want, table, inverse=True), BF16)  # fmt: skip


@pytest.mark.parametrize("heads", [8, 16, 32, 33, 64])
@pytest.mark.parametrize("lens", [(2048,), (700, 1, 333)])
@pytest.mark.parametrize("packed", [True, False])
def test_sparse_attention_of_many_tokens(lens: tuple[int, ...], heads: int, *, packed: bool) -> None:
    """First chunks of sequences whose pages lie anywhere; everything that no list names is NaN."""
    from splitserve.ops.kernels.launch import arch_of, listing
    from splitserve.ops.kernels.tuned import tuned
    from splitserve.ops.ref import v4 as ref4
    from splitserve.ops.ref.v4 import rows
    from splitserve.ops.triton import v4

    tokens, most = sum(lens), math.ceil(max(lens) / 256)

    def view(units: int, count: int, index: torch.Tensor) -> torch.Tensor:
        x = torch.randn(units * count, 512)
        flat = rows.pack_latents(x, 64) if packed else x.bfloat16()
        unread = torch.ones(units * count, dtype=torch.bool).index_fill_(0, index[index >= 0], False)
        flat.view(torch.uint8)[unread] = 255
        return flat.view(units, count, -1)

    q, sink = torch.randn(tokens, heads, 512).bfloat16(), torch.randn(heads)
    table = ref4.rope_table(torch.arange(tokens) * 7, torch.rand(32))
    sequence = torch.repeat_interleave(torch.arange(len(lens)), torch.tensor(lens))
    position = torch.cat([torch.arange(n) for n in lens])
    back = position[:, None] - torch.arange(128)
    index = (torch.arange(tokens)[:, None] - torch.arange(128) + 128 * len(lens)).masked_fill(back < 0, -1)
    near = ref4.Rows(view(1, tokens + 128 * len(lens), index), index)
    pages = torch.randperm(99)[: most * len(lens)].view(len(lens), most)
    for ratio in (4, 128):
        limit = (position + 1) // ratio
        entry = (torch.rand(tokens, 256) * limit[:, None]).long()
        entry[(torch.arange(256) >= limit[:, None]) | (torch.rand(entry.shape) < 0.1)] = -1
        index = ref4.locate_entries(entry, ref4.Places(pages, sequence, 256 // ratio))
        far = ref4.Rows(view(99, 256 // ratio, index), index, ref4.Reach(pages))
        for some in (far, None) if ratio == 4 else (far,):
            want = ref4.attend(q.float(), near, some, sink, scale=512**-0.5, rope_dim=64)
            want = ref4.rotate_tail(want, table, inverse=True)
            with listing() as names:
                check(lambda s=some: v4.attend(q, near, s, sink, scale=512**-0.5, rope_dim=64, turn_back=table),
                      want, BF16)  # fmt: skip
            assert ("attend_prepare" in names) == tuned("attend_scratch", arch_of(q), tokens)["SCRATCH"]


@pytest.mark.parametrize("packed", [True, False])
def test_index(*, packed: bool) -> None:
    from splitserve.ops.ref import v4 as ref4
    from splitserve.ops.ref.v4 import rows
    from splitserve.ops.triton import v4

    keys = torch.randn(600 * 32, 128)
    view = (rows.pack_keys(keys) if packed else keys.bfloat16()).view(600, 32, -1)
    pages, visible = torch.randperm(600)[:580].view(2, 290), torch.randint(1, 9000, (6,))
    q, weights = torch.randn(6, 64, 128).bfloat16(), torch.randn(6, 64)
    for lens in ((2, 4), (1, 1)):
        n = sum(lens)
        want = ref4.index_scores(q[:n].float(), weights[:n], view, pages, visible[:n], q_lens=lens)
        poison()
        got = v4.index_scores(q[:n], weights[:n], view, pages, visible[:n], q_lens=lens)
        seen = want > -math.inf
        assert error(got[:, : want.shape[1]][seen], want[seen]) < EXACT
        assert (got[:, : want.shape[1]][~seen] == -math.inf).all()
        assert (got[:, want.shape[1] :] == -math.inf).all()
        for count in (512, 10_000):
            a, b = v4.choose_entries(got, count), ref4.choose_entries(got, count)
            best = [
                got.gather(1, c.clamp(min=0)).masked_fill(c < 0, -math.inf).sort(-1).values for c in (a, b)
            ]
            assert torch.equal(*best)
            assert all(len(set(r)) == len(r) for r in ([e for e in row if e >= 0] for row in a.tolist()))


@pytest.mark.parametrize(("tokens", "entries"), [
    (8192, 2048), (2048, 4096), (8192, 512), (513, 1000), (300, 4100), (64, 2048), (3, 4096), (2, 33_000), (8, 600)])  # fmt: skip
def test_entries_are_chosen(tokens: int, entries: int) -> None:
    """In their order, of equals the first; early tokens that see fewer than wanted; nothing beyond is looked at."""
    from splitserve.ops.kernels.launch import listing
    from splitserve.ops.ref import v4 as ref4
    from splitserve.ops.triton import v4

    token, entry = torch.arange(tokens), torch.arange(entries)
    visible = ((token + 1) * entries) // tokens
    visible[tokens // 3] = 0
    scores = torch.randn(tokens, entries) * torch.logspace(-3, 3, tokens)[:, None]
    scores[::3] = (scores[::3] * 3).round() + 0.0  # ties; no zeros below zero, which are less than zero here
    scores[1] = 1.0
    for seqs in (1, 2, None):
        pages = torch.stack([torch.randperm(2000)[: math.ceil(entries / 64)] for _ in range(seqs or tokens)])
        places = ref4.Places(pages, None if seqs is None else token * seqs // tokens, 64)
        for count in (512, 40):
            hidden = entry >= visible[:, None]
            order = (
                scores.masked_fill(hidden, -math.inf).sort(descending=True, stable=True).indices[:, :count]
            )
            unseen = torch.arange(order.shape[1]) >= visible[:, None]
            want = order.masked_fill(unseen, entries).sort(-1).values
            want = ref4.locate_entries(want.masked_fill(want == entries, -1), places)
            with listing() as names:
                for _ in range(2):
                    poison()
                    beyond = scores.masked_fill(hidden, math.nan)
                    assert torch.equal(v4.choose_located(beyond, count, places, visible), want)
            many = tokens >= 128 and entries <= 4096
            assert set(names) == {"select_many" if many else "select_best"}
    want = order.masked_fill(unseen, entries).sort(-1).values
    got = v4.choose_entries(scores.masked_fill(hidden, -math.inf), 40)
    assert torch.equal(got, want.masked_fill(want == entries, -1))


@pytest.mark.parametrize(("dim", "heads", "kv_heads"), [(128, 32, 8), (64, 9, 3), (80, 16, 16)])
@pytest.mark.parametrize("window", [0, 100])
def test_paged_attention(dim: int, heads: int, kv_heads: int, window: int) -> None:
    from splitserve.ops import ref
    from splitserve.ops import triton as ops

    lens, page = (1, 37, 600, 1500, 5000), 64
    pages = torch.randperm(600)[: len(lens) * 80].view(len(lens), 80)
    view = torch.full((600, kv_heads, page, 2 * dim), math.nan).bfloat16()
    for seq, length in enumerate(lens):
        at = torch.arange(length)
        k, v = torch.randn(length, kv_heads, dim).bfloat16(), torch.randn(length, kv_heads, dim).bfloat16()
        ops.write_rows(view, k, v, pages[seq, at // page], at % page)
        assert torch.equal(view[pages[seq, at // page], :, at % page], torch.cat((k, v), -1))
    q = torch.randn(len(lens), heads, dim).bfloat16()
    want = ref.attend_decode(q.float(), view, ref.plan_decode(pages, lens, page, window), dim**-0.5)
    check(
        lambda: ops.attend_decode(q, view, ops.plan_decode(pages, lens, page, window), dim**-0.5), want, BF16
    )
    alone = ops.attend_decode(q[:1], view, ops.plan_decode(pages[:1], lens[:1], page, window), dim**-0.5)
    assert torch.equal(
        alone, ops.attend_decode(q, view, ops.plan_decode(pages, lens, page, window), dim**-0.5)[:1]
    )
    for seq, tokens in ((1, 37), (2, 333), (4, 1000)):
        q, rows = torch.randn(tokens, heads, dim).bfloat16(), slice(0, tokens)
        want = ref.attend_prefill(
            q.float(), view, ref.plan_prefill(pages[seq], lens[seq], rows, page, window), dim**-0.5
        )
        plan = ops.plan_prefill(pages[seq], lens[seq], rows, page, window)
        check(lambda q=q, p=plan: ops.attend_prefill(q, view, p, dim**-0.5), want, BF16)


def test_experts_of_numbers() -> None:
    from splitserve.ops import ref
    from splitserve.ops import triton as ops

    for tokens in (1, 20, 300):
        x, gate_up = torch.randn(tokens, 2048).bfloat16(), (torch.randn(32, 1536, 2048) / 45).bfloat16()
        down = (torch.randn(32, 2048, 768) / 27).bfloat16()
        weights, experts = ref.choose_experts(torch.randn(tokens, 32), 8, normalize=True)
        want = ref.mix_experts(x.float(), gate_up.float(), down.float(), weights, experts)
        check(lambda: ops.mix_experts(x, gate_up, down, weights, experts), want, 3 * BF16)


def test_draws_moves_and_digests() -> None:
    from splitserve.engine.sampler import _signed, _uniforms, random_key
    from splitserve.ops import triton as ops
    from splitserve.ops.ref import digest
    from splitserve.spec import Growth, Kind, StateSpec, Units, lay_out

    logits = torch.randn(4, 129280)
    keys = torch.tensor([_signed(random_key(1, 0, i)) for i in range(4)])
    temperatures = torch.tensor([0.0, 0.7, 1.0, 2.0])
    noise = _uniforms(keys[:, None], torch.arange(129280)).log_().neg_().float().log_().neg_()
    hot = torch.where(
        temperatures[:, None] > 0, logits / temperatures.clamp(min=1e-9)[:, None] + noise, logits
    )
    assert torch.equal(ops.draw(logits, temperatures, keys), hot.argmax(-1))
    slab, ids = torch.randint(0, 255, (20, 1 << 20), dtype=torch.uint8), torch.tensor([4, 0, 17])
    assert torch.equal(ops.gather_units(slab, ids), slab[ids])
    layout = lay_out(
        [StateSpec("c", i, Growth.PAGED, 584, tokens_per_row=4) for i in range(3)], page_tokens=128
    )
    memory = {Kind.PAGE: torch.randint(0, 255, (20, layout.page_bytes), dtype=torch.uint8)}
    units = [Units(Kind.PAGE, (3, 1, 7), 0, 0, 300)]
    how = {"start": 5, "stop": 300, "last": True}
    fields = layout.page_fields
    assert torch.equal(
        ops.field_digests(fields, memory, units, **how),
        digest.field_digests(fields, {k: m.cpu() for k, m in memory.items()}, units, **how),
    )
