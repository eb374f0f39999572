"""Every Triton kernel against its twin in plain torch, run by Triton's interpreter at small and odd shapes.

By default each kernel runs in one case at least; more shapes of the same are slow tests.

The interpreter stores bf16 by cutting off, so results in bf16 may differ by one unit in the last place of each number.
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"  # read when kernels are defined, at their import below

import math
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from triton.runtime.interpreter import InterpretedFunction

from splitserve.engine.sampler import _signed, _uniforms, random_key
from splitserve.layers.v4.compressor import bias_rows
from splitserve.ops import ref
from splitserve.ops import triton as ops
from splitserve.ops.kernels import catalogue
from splitserve.ops.ref import digest as ref_digest
from splitserve.ops.ref import v4 as ref4
from splitserve.ops.ref.v4 import quant as ref_quant
from splitserve.ops.ref.v4 import rows as ref_rows
from splitserve.ops.triton import dense, grouping, multiply, rounding, scaled, v4
from splitserve.ops.triton.parts import Parts
from splitserve.ops.triton.routing import add_up
from splitserve.ops.triton.v4 import (
    choosing,
    hyper_many,
    indexer,
    quant,
    sparse,
    sparse_few,
    sparse_many,
    sparse_scratch,
)
from splitserve.ops.triton.v4 import experts as v4_experts
from splitserve.spec import Growth, Kind, StateSpec, Units, lay_out

BF16 = 0.009  # two results rounded to bf16, by cutting off
EXACT = 2e-6
STARTED: set[str] = set()


def first_of(*cases: object) -> list[object]:
    """Of a parameter: the first by default, the others in `make test-slow`."""
    rest = [c if isinstance(c, tuple) else (c,) for c in cases[1:]]
    return [cases[0], *(pytest.param(*values, marks=pytest.mark.slow) for values in rest)]


@pytest.fixture(autouse=True)
def _record(monkeypatch: pytest.MonkeyPatch) -> None:
    """Notes which kernels ran, for the last test."""
    run = InterpretedFunction.run

    def noting(self: InterpretedFunction, *args: object, **kwargs: object) -> object:
        STARTED.add(self.fn.__name__)
        return run(self, *args, **kwargs)

    monkeypatch.setattr(InterpretedFunction, "run", noting)
    torch.manual_seed(0)


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Relative, of the whole tensor; infinite where a number is missing."""
    if got.shape != want.shape or not torch.isfinite(got.float()).all():
        return math.inf
    return ((got.double() - want.double()).norm() / want.double().norm()).item()


def tiles(*shape: int, powers: bool = True) -> ref4.Tiles:
    """E4M3 weights; a stack where there are three dimensions."""
    stack = [ref4.quantise_tiles(torch.randn(shape[-2:]) * 0.05) for _ in range(math.prod(shape[:-2]))]
    codes = torch.stack([c for c, _ in stack]).view(shape)
    scales = torch.stack([s for _, s in stack])
    scales = scales.view(*shape[:-2], *scales.shape[1:])
    return ref4.Tiles(codes, scales if powers else ref4.ue8m0_to_float(scales) * 1.1, (128, 128))


def mxfp4(*shape: int) -> ref4.Mxfp4:
    return ref4.Mxfp4(*ref4.quantise_mxfp4(torch.randn(shape) * 0.05))


def rounded(x: torch.Tensor) -> torch.Tensor:
    """The definition of linear_rounded's rounding, float32."""
    groups = x.float().unflatten(1, (-1, 128))
    amax = groups.abs().amax(-1).clamp_min(1e-4)
    scale = ref4.ue8m0_to_float(ref_quant.power_of_two_scale(amax, 448.0))[..., None]
    return ((groups / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale).flatten(1)


# ------------------------------------------------------------------ products


@pytest.mark.parametrize(
    "weight",
    [
        pytest.param(tiles(96, 256), id="e4m3"),
        pytest.param(tiles(40, 200), id="e4m3 odd"),
        pytest.param(tiles(40, 200, powers=False), id="e4m3 with any scales"),
        pytest.param(mxfp4(48, 128), id="e2m1"),
    ],
)
@pytest.mark.parametrize("tokens", first_of(5, 1))
def test_linear(weight: ref4.Tiles | ref4.Mxfp4, tokens: int) -> None:
    size = weight.codes.shape[1] * (2 if isinstance(weight, ref4.Mxfp4) else 1)
    x = torch.randn(tokens, size).bfloat16()
    assert error(v4.linear(x, v4.prepare(weight)), ref4.linear(x.float(), weight)) < BF16


def for_rounded(weight: ref4.Tiles | ref4.Mxfp4) -> multiply.Matrix:
    """As it is kept for rows in eight bits, which the interpreter's processor does not ask for."""
    return quant.repack(weight, eight=True) if isinstance(weight, ref4.Mxfp4) else v4.prepare(weight)


def test_every_code_has_its_value() -> None:
    """All 256 e4m3 codes but NaN, subnormal ones among them, and all 16 of e2m1 with scales from 2^-20 to 2."""
    codes = torch.arange(256, dtype=torch.uint8)
    codes[[0x7F, 0xFF]] = 0
    weight = ref4.Tiles(
        codes.view(1, 256).view(torch.float8_e4m3fn), torch.full((1, 2), 127, dtype=torch.uint8), (128, 128)
    )
    eye = torch.eye(256).bfloat16()
    assert torch.equal(v4.linear(eye, v4.prepare(weight)).float(), weight.codes.float().T)
    pairs = (torch.arange(128) * 37 % 256).to(torch.uint8)[None]
    four = ref4.Mxfp4(pairs, torch.tensor([[107, 120, 127, 128, 110, 121, 126, 119]], dtype=torch.uint8))
    want = ref4.dequantise(four, torch.float32)
    assert torch.equal(v4.linear(eye, v4.prepare(four)).float(), want.T)
    near = ref4.Mxfp4(
        pairs, torch.tensor([[117, 120, 127, 128, 90, 101, 99, 93]], dtype=torch.uint8)
    )  # 2^11 apart
    want = ref4.dequantise(near, torch.float32)
    assert torch.equal(v4.linear_rounded(eye, for_rounded(near)).float(), want.T)


def test_groups_far_below_their_neighbours_are_rounded_and_said(caplog: pytest.LogCaptureFixture) -> None:
    """By at most 2^-12 of the largest scale beside them; groups of zeros have no scale to be told."""
    codes = torch.arange(64).repeat(1, 2) * 37 % 256
    codes[0, 48:64] = 0
    four = ref4.Mxfp4(
        codes.to(torch.uint8), torch.tensor([[100, 127, 116, 0, 126, 120, 119, 118]], dtype=torch.uint8)
    )
    got = v4.linear_rounded(torch.eye(256).bfloat16(), for_rounded(four)).float().T
    want = ref4.dequantise(four, torch.float32)
    assert "1 of 8 groups of MXFP4 weights were rounded" in caplog.text
    assert not torch.equal(got, want)
    assert (got - want).abs().max() <= 2.0**-12
    assert torch.equal(got[:, 32:], want[:, 32:])


def test_scales_that_a_product_cannot_take_are_refused() -> None:
    four = ref4.Mxfp4(torch.zeros(1, 64, dtype=torch.uint8), torch.full((1, 4), 129, dtype=torch.uint8))
    with pytest.raises(ValueError, match="up to 2 is served"):
        v4.prepare(four)


def test_rounding_of_rows() -> None:
    """Exactly the definition, zeros and numbers far apart included."""
    x = (torch.randn(9, 256) * torch.logspace(-9, 4, 9)[:, None]).bfloat16()
    x[3] = 0
    got = rounding.quantise_rows(x)
    back = (got.codes.float().unflatten(1, (-1, 128)) * got.scales.T[..., None]).flatten(1)
    assert torch.equal(back, rounded(x))
    assert torch.equal(rounding.round_rows(x).float(), rounded(x))


@pytest.mark.parametrize(
    "weight", [pytest.param(tiles(96, 256), id="e4m3"), pytest.param(mxfp4(48, 256), id="e2m1")]
)
def test_products_of_eight_bits(weight: ref4.Tiles | ref4.Mxfp4) -> None:
    x = torch.randn(3, 256).bfloat16()
    want = ref4.linear(rounded(x), weight)
    assert error(multiply.multiply(rounding.quantise_rows(x), for_rounded(weight)), want) < BF16
    assert error(v4.linear_rounded(x, for_rounded(weight)), want) < BF16
    assert error(v4.linear_rounded(x, v4.prepare(weight)), want) < BF16


def test_weights_for_rounded_rows_are_not_for_others() -> None:
    x, weight = torch.randn(3, 256).bfloat16(), mxfp4(48, 256)
    with pytest.raises(TypeError, match="`prepare` them for these"):
        multiply.multiply(x, for_rounded(weight))
    with pytest.raises(TypeError, match="and rounded rows"):
        multiply.multiply(rounding.quantise_rows(x), v4.prepare(weight))


@pytest.mark.parametrize("eight", [False, True])
def test_products_split_over_their_length(monkeypatch: pytest.MonkeyPatch, *, eight: bool) -> None:
    monkeypatch.setattr(multiply, "_splits", lambda *_: 2)
    x, weight = torch.randn(3, 384).bfloat16(), tiles(64, 384)
    rows = rounding.quantise_rows(x) if eight else x
    want = ref4.linear(rounded(x) if eight else x.float(), weight)
    assert error(multiply.multiply(rows, v4.prepare(weight)), want) < BF16
    limited = ref4.clamped_swiglu(want, 0.5)
    factors = torch.rand(3)
    got = multiply.multiply(rows, v4.prepare(weight), limit=0.5, factors=factors)
    assert error(got, limited * factors[:, None]) < BF16


def test_numbers_of_a_matrix() -> None:
    for weight in (tiles(40, 300), tiles(130, 128)):
        assert torch.equal(multiply.expand(v4.prepare(weight)), ref4.dequantise(weight, torch.bfloat16))


def test_grouped_linear() -> None:
    x, weight = torch.randn(3, 2, 256).bfloat16(), tiles(256, 256)
    want = ref4.grouped_linear(x.float(), ref4.dequantise(weight, torch.float32))
    assert error(v4.grouped_linear(x, v4.prepare(weight)), want) < BF16
    coarse = rounded(x.flatten(1)).view(x.shape)
    want = ref4.grouped_linear(coarse, ref4.dequantise(weight, torch.float32))
    assert error(v4.grouped_linear(x, v4.prepare(weight), exact=False), want) < BF16


def test_float32_products_of_bf16() -> None:
    x, weight = torch.randn(3, 200).bfloat16(), torch.randn(40, 200).bfloat16()
    assert error(v4.linear_f32(x, weight), ref4.linear_f32(x, weight)) < EXACT


# ------------------------------------------------------------------ experts


@pytest.mark.parametrize(("tokens", "held"), [(1, range(16)), (7, range(2, 6)), (40, range(16))])
@pytest.mark.parametrize("few", [0, 1024])
def test_groups_hold_every_pair_once(
    monkeypatch: pytest.MonkeyPatch, tokens: int, held: range, few: int
) -> None:
    """`few` 0 takes the way of many pairs, which are counted in chunks and looked through in spans."""
    for name, size in (("FEW", few), ("CHUNK", 16), ("SPAN", 64)):
        monkeypatch.setattr(grouping, name, size)
    experts = torch.rand(tokens, 16).argsort(-1)[:, :6]
    experts[experts == 3] = 4  # nobody wants 3, and a token may want 4 twice
    groups = grouping.group_pairs(experts, local=held, block=16)
    flat, seen = experts.flatten().tolist(), []
    for owner, rows in zip(groups.expert_of.tolist(), groups.rows_of.view(-1, 16).tolist(), strict=True):
        used = [r for r in rows if r >= 0] if owner >= 0 else []
        assert all(flat[r] - held.start == owner for r in used)
        assert rows[: len(used)] == used or owner < 0
        seen += used
    assert seen == sorted((i for i, e in enumerate(flat) if e in held), key=lambda i: (flat[i], i))


@pytest.mark.parametrize("make", first_of(tiles, mxfp4))
@pytest.mark.parametrize("local", first_of(range(1, 3), range(4)))
def test_mix_experts(make: type, local: range) -> None:
    gate_up, down = make(4, 256, 128), make(4, 128, 128)
    x, weights = torch.randn(3, 128).bfloat16(), torch.rand(3, 2)
    experts = torch.rand(3, 4).argsort(-1)[:, :2]
    a, b = (type(w)(*(getattr(w, f)[local.start : local.stop] for f in ("codes", "scales")), *((w.tile,) if make is tiles else ()))
            for w in (gate_up, down))  # fmt: skip
    want = ref4.mix_experts(x.float(), a, b, weights, experts, local=local, limit=0.5)
    got = v4.mix_experts(x, v4.prepare(a), v4.prepare(b), weights, experts, local=local, limit=0.5)
    assert error(got, want) < 2 * BF16
    got = v4.mix_experts(
        x, for_rounded(a), for_rounded(b), weights, experts, local=local, limit=0.5, exact=False
    )
    assert error(got, want) < 0.1  # two roundings to three bits


@pytest.mark.parametrize("half", [False, True])
def test_experts_of_many_rows(monkeypatch: pytest.MonkeyPatch, *, half: bool) -> None:
    """The same bits as a few rows' kernel gives: an expert without rows, blocks half full, experts elsewhere."""
    gate_up, down = mxfp4(4, 256 if half else 512, 256), mxfp4(4, 256, 128 if half else 256)
    a, b = (ref4.Mxfp4(w.codes[1:], w.scales[1:]) for w in (gate_up, down))  # expert 0 is elsewhere
    tokens = 40
    x, weights = torch.randn(tokens, 256).bfloat16(), torch.rand(tokens, 2)
    experts = torch.stack([torch.arange(tokens) % 2, torch.full((tokens,), 3)], 1)  # nobody wants 2
    experts[7] = 0  # nothing of this token's is here

    def mix(*, rows_of_some: bool) -> torch.Tensor:
        if rows_of_some:
            monkeypatch.setattr(multiply, "many_rows", lambda *_: False)
            monkeypatch.setattr(v4_experts, "many_rows", lambda *_: False)
        return v4.mix_experts(
            x, for_rounded(a), for_rounded(b), weights, experts, local=range(1, 4), limit=0.5, exact=False
        )

    STARTED.discard("weigh_many")
    got = mix(rows_of_some=False)
    assert "weigh_many" in STARTED
    want = mix(rows_of_some=True)
    there = torch.arange(tokens) != 7
    assert torch.equal(got[there], want[there])
    assert not got[7].any()
    assert error(got, ref4.mix_experts(x.float(), a, b, weights, experts, local=range(1, 4), limit=0.5)) < 0.1


def test_every_code_in_lanes_has_its_value() -> None:
    """Groups from 2^11 below the largest of their row to it, empty ones far below; blocks of few rows and of many."""
    codes = (
        ((torch.arange(2 * 128 * 128) * 37 + torch.arange(2 * 128 * 128) // 256) % 256)
        .to(torch.uint8)
        .view(2, 128, 128)
    )
    codes[0, :, 16:32] = 0x80  # two zeros, one of them negative
    scales = torch.randint(117, 129, (2, 128, 8), dtype=torch.uint8)
    scales[:, :, 0], scales[:, :, 7], scales[0, :, 1] = 117, 128, 3
    four = ref4.Mxfp4(codes, scales)
    ready = quant.in_lanes(four)
    assert ready is not None
    rows = rounding.quantise_rows(torch.eye(256).bfloat16(), lanes=True)
    for expert, block in ((0, 16), (1, 64)):
        groups = grouping.group_pairs(torch.full((256, 1), expert), local=range(2), block=block)
        got = multiply.multiply(rows, ready, groups=groups, dtype=torch.float32)
        assert torch.equal(got, ref4.dequantise(four, torch.float32)[expert].T)


def test_what_does_not_lie_in_lanes() -> None:
    """Groups that are too far apart, rows or matrices of other sizes, and single matrices."""
    far, exact = mxfp4(2, 128, 256), mxfp4(2, 128, 256)
    far.scales[1, 5, 3] = int(far.scales[1, 5].max()) - 12
    assert quant.in_lanes(far) is None
    for other in (mxfp4(2, 128, 128), mxfp4(2, 64, 256), mxfp4(128, 256)):
        assert quant.in_lanes(other) is None
    x, groups = (
        torch.randn(3, 256).bfloat16(),
        grouping.group_pairs(torch.zeros(3, 1), local=range(2), block=16),
    )
    with pytest.raises(TypeError, match="in the order of lanes"):
        multiply.multiply(rounding.quantise_rows(x, lanes=True), for_rounded(exact), groups=groups)
    with pytest.raises(TypeError, match="no kernel for weights of type Lanes"):
        multiply.multiply(rounding.quantise_rows(x), quant.in_lanes(exact), groups=groups)


@pytest.mark.parametrize(("tokens", "mixed"), first_of((3, False), (40, False), (40, True)))
def test_experts_in_lanes(tokens: int, *, mixed: bool) -> None:
    """Few tokens, in parts, and many, by place: an expert without rows, blocks half full, experts elsewhere."""
    gate_up, down = mxfp4(4, 512, 512), mxfp4(4, 512, 256)
    if mixed:  # then `down` stays in words
        down.scales[2, 0, 0] = int(down.scales[2, 0].max()) - 12
    a, b = (ref4.Mxfp4(w.codes[1:], w.scales[1:]) for w in (gate_up, down))  # expert 0 is elsewhere
    x, weights = torch.randn(tokens, 512).bfloat16(), torch.rand(tokens, 2)
    experts = torch.stack([torch.arange(tokens) % 2, torch.full((tokens,), 3)], 1)  # nobody wants 2
    experts[1] = 0  # nothing of this token's is here
    how = {"local": range(1, 4), "limit": 0.5, "exact": False}
    want = v4.mix_experts(x, for_rounded(a), for_rounded(b), weights, experts, **how)
    STARTED.discard("weigh_lanes")
    got = v4.mix_experts(x, quant.in_lanes(a), quant.in_lanes(b) or for_rounded(b), weights, experts, **how)
    assert "weigh_lanes" in STARTED
    assert error(got, want) < 2 * BF16
    assert not got[1].any()


def test_rows_of_groups_side_by_side() -> None:
    """Each group's codes and scales are those of its rows by themselves."""
    x = (torch.randn(7, 3, 384) * torch.logspace(-3, 3, 21).view(7, 3, 1)).bfloat16()
    got = rounding.quantise_groups(x)
    for g in range(3):
        want = rounding.quantise_rows(x[:, g])
        assert torch.equal(got.codes[g].view(torch.uint8), want.codes.view(torch.uint8))
        assert torch.equal(got.scales[g], want.scales)


def test_products_by_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where cuBLAS serves, rows come to it as it wants them, whoever multiplies; elsewhere nobody asks it."""

    def product(
        x: torch.Tensor,
        x_scales: torch.Tensor,
        codes: torch.Tensor,
        scales: torch.Tensor,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert x_scales.is_contiguous()
        assert x_scales.shape == (x.shape[1] // 128, len(x))
        rows = x.float() * x_scales.t().repeat_interleave(128, 1)
        wide = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
        found = (rows @ (codes.float() * wide).t()).bfloat16()
        return found if out is None else out.copy_(found)

    x, weight = torch.randn(8, 512).bfloat16(), tiles(256, 512)
    codes, groups = v4.prepare(weight), torch.randn(8, 2, 512).bfloat16()
    assert not multiply.by_library(codes, 8)
    with monkeypatch.context() as there:
        there.setattr(scaled, "works", lambda _: True)
        there.setattr(scaled, "tuned", lambda *_: {"SCALED": True})
        there.setattr(scaled, "product", product)
        assert error(v4.linear_rounded(x, codes), ref4.linear(rounded(x), weight)) < BF16
        got = v4.grouped_linear(groups, codes, exact=False)
        numbers = rounded(groups.flatten(0, 1)).view(groups.shape)
        want = ref4.grouped_linear(numbers, ref4.dequantise(weight, torch.float32))
        assert error(got, want) < BF16
        assert v4.fuses(x, codes, exact=True)
        assert not v4.fuses(x, codes, exact=False)
        assert error(v4.linear_rounded(x[:7], codes), ref4.linear(rounded(x[:7]), weight)) < BF16
        small = v4.prepare(tiles(256, 256))  # a row of two blocks: scales would have to be padded
        assert not multiply.by_library(small, 8)
        assert not multiply.by_library(codes, 7)


def test_rows_by_place_need_their_kernel() -> None:
    groups = grouping.group_pairs(torch.zeros(5, 1, dtype=torch.int32), local=range(1), block=16)
    placed = rounding.round_placed(torch.randn(len(groups.rows_of), 128).bfloat16(), groups, 5)
    with pytest.raises(TypeError, match="no kernel for rows by place"):
        multiply.multiply(placed, for_rounded(mxfp4(1, 128, 128)), groups=groups)


def test_expert_ffn() -> None:
    gate_up, down, x = tiles(256, 128), tiles(128, 128), torch.randn(3, 128).bfloat16()
    want = ref4.expert_ffn(x.float(), gate_up, down, 0.5)
    assert error(v4.expert_ffn(x, v4.prepare(gate_up), v4.prepare(down), 0.5), want) < 2 * BF16
    assert error(v4.clamped_swiglu(x, 0.7), ref4.clamped_swiglu(x, 0.7)) < EXACT


@pytest.mark.slow
def test_mix_experts_of_numbers() -> None:
    x, gate_up, down = torch.randn(7, 64).bfloat16(), torch.randn(20, 96, 64) / 8, torch.randn(20, 64, 48) / 8
    weights, experts = ref.choose_experts(torch.randn(7, 20), 4, normalize=True)
    want = ref.mix_experts(x.float(), gate_up.bfloat16().float(), down.bfloat16().float(), weights, experts)
    assert error(ops.mix_experts(x, gate_up.bfloat16(), down.bfloat16(), weights, experts), want) < 3 * BF16


@pytest.mark.parametrize("tokens", [1, 5])
def test_routing(tokens: int) -> None:
    logits, bias = torch.randn(tokens, 24) * 8, torch.randn(24)
    table, ids = torch.randint(0, 24, (50, 3), dtype=torch.int32), torch.randint(0, 50, (tokens,))
    pairs = [
        (v4.route(logits, bias, count=3, scale=1.5), ref4.route(logits, bias, count=3, scale=1.5)),
        (
            v4.route_by_token(logits, table, ids, scale=1.5),
            ref4.route_by_token(logits, table, ids, scale=1.5),
        ),
        (ops.choose_experts(logits, 4, normalize=True), ref.choose_experts(logits, 4, normalize=True)),
        (ops.choose_experts(logits, 4, normalize=False), ref.choose_experts(logits, 4, normalize=False)),
    ]
    for (weights, experts), (want_weights, want_experts) in pairs:
        order, want_order = experts.argsort(-1), want_experts.argsort(-1)
        assert torch.equal(experts.gather(1, order), want_experts.gather(1, want_order))
        assert error(weights.gather(1, order), want_weights.gather(1, want_order)) < EXACT


# ------------------------------------------------------------------ streams, norms, rotations


@pytest.mark.parametrize("tokens", first_of(3, 1))
def test_hyper_connections(tokens: int) -> None:
    streams, fn = torch.randn(tokens, 4, 96).bfloat16(), torch.randn(24, 384) / 20
    base, scale = torch.randn(24) / 2, torch.rand(3) + 0.5
    how = {"iters": 20, "eps": 1e-6, "norm_eps": 1e-6}
    (x, post, comb), want = (
        v4.hc_pre(streams, fn, base, scale, **how),
        ref4.hc_pre(streams, fn, base, scale, **how),
    )
    assert error(x, want[0]) < BF16
    assert error(post, want[1]) < EXACT
    assert error(comb, want[2]) < EXACT
    y = torch.randn(tokens, 96).bfloat16()
    assert error(v4.hc_post(y, streams, post, comb), ref4.hc_post(y, streams, post, comb)) < BF16
    entered, leave = v4.hc_enter(streams, fn, base, scale, **how)
    assert torch.equal(entered, x)
    assert error(leave(y, None), ref4.hc_post(y, streams, post, comb)) < BF16
    how.pop("iters")
    assert error(v4.hc_head(streams, fn[:4], base[:4], scale[:1], **how),
                 ref4.hc_head(streams, fn[:4], base[:4], scale[:1], **how)) < BF16  # fmt: skip


@pytest.mark.parametrize(("tokens", "size", "splits"), first_of((70, 80, 3), (133, 1056, 4), (65, 32, 1)))
def test_hyper_connections_of_many_tokens(
    monkeypatch: pytest.MonkeyPatch, tokens: int, size: int, splits: int
) -> None:
    """Parts of which the last one is shorter, and blocks whose last one has few tokens; not where columns are left over."""
    config = {"BT": 32, "BK": 64, "MOST": splits, "num_warps": 4, "num_stages": 3}
    monkeypatch.setattr(
        hyper_many, "tuned", lambda k, *_: dict(config) if k == "hc_mix_many" else {"MANY": True}
    )
    streams, fn = torch.randn(tokens, 4, size).bfloat16(), torch.randn(24, 4 * size) / 20
    base, scale, norm = torch.randn(24) / 2, torch.rand(3) + 0.5, torch.rand(size)
    how = {"iters": 20, "eps": 1e-6, "norm_eps": 1e-6}
    got, want = (k.hc_pre(streams, fn, base, scale, **how) for k in (v4, ref4))
    assert "hc_mix_many" in STARTED
    for found, wanted, most in zip(got, want, (BF16, EXACT, EXACT), strict=True):
        assert error(found, wanted) < most
    entered, leave = v4.hc_enter(streams, fn, base, scale, norm=norm, **how)
    assert error(entered, ref4.rms_norm(want[0], norm, 1e-6)) < BF16
    y = torch.randn(tokens, size).bfloat16()
    assert error(leave(y, None), ref4.hc_post(y, streams, *want[1:])) < BF16
    assert not hyper_many.serves(streams[..., :24])
    with pytest.raises(ValueError, match="3 residual streams"):
        v4.hc_pre(streams[:, :3], fn, base, scale, **how)


@dataclass
class Writing:
    """One rank of a group whose kernels write to each other; its mailbox too."""

    rank: int
    size: int
    half: int
    addresses: torch.Tensor
    turns: torch.Tensor

    def mailbox(self, _: torch.Tensor) -> Writing:
        return self

    def all_reduce(self, _: torch.Tensor) -> torch.Tensor:
        raise AssertionError("the kernel was to add up by itself")


@pytest.mark.parametrize(("tokens", "ranks", "size"), first_of((3, 2, 1056), (1, 3, 96)))
def test_a_sum_between_ranks_inside_the_streams_kernel(tokens: int, ranks: int, size: int) -> None:
    streams, fn = torch.randn(tokens, 4, size).bfloat16(), torch.randn(24, 4 * size) / 20
    base, scale = torch.randn(24) / 2, torch.rand(3) + 0.5
    parts = [torch.randn(tokens, size).bfloat16() for _ in range(ranks)]
    half = tokens * size
    boxes = [torch.zeros(2, ranks, half, dtype=torch.int64) for _ in range(ranks)]
    where = torch.tensor([box.data_ptr() for box in boxes])
    groups = [Writing(r, ranks, half, where, torch.zeros(64, dtype=torch.int32)) for r in range(ranks)]
    leave = [v4.hc_enter(streams, fn, base, scale, iters=20, eps=1e-6, norm_eps=1e-6)[1] for _ in groups]
    for turn in (1, 2, 3):
        for r in range(1, ranks):  # nobody runs beside rank 0 here: what it waits for is there already
            pairs = parts[r].view(torch.int32).flatten().long() & 0xFFFFFFFF
            boxes[0][turn % 2, r, : len(pairs)] = pairs | turn << 32
            for other in range(1, ranks):
                boxes[other][turn % 2, r, : len(pairs)] = pairs | turn << 32
        given = [_in_parts(p) if turn == 2 else p.clone() for p in parts]
        found = [leave[r](given[r], groups[r]) for r in range(ranks)]
        want = v4.hc_post(
            sum(p.float() for p in parts).bfloat16(), streams, *_mixture_of(streams, fn, base, scale)
        )
        assert error(found[0], want) < BF16
        assert all(torch.equal(f, found[0]) for f in found), "ranks hold different streams"
        parts = [p.flip(0) * 2 for p in parts]


def _in_parts(x: torch.Tensor) -> Parts:
    """Exactly x."""
    return Parts(torch.stack([x.float() * share for share in (0.5, 0.5)]), x.dtype)


def _mixture_of(streams: torch.Tensor, *how: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return v4.hc_pre(streams, *how, iters=20, eps=1e-6, norm_eps=1e-6)[1:]


def test_norms_and_rotations_of_v4() -> None:
    x, weight = torch.randn(5, 3, 48), torch.rand(48) + 0.5
    table = ref4.rope_table(torch.arange(5) * 9, torch.rand(8))
    assert error(v4.rms_norm(x, weight, 1e-6), ref4.rms_norm(x, weight, 1e-6)) < EXACT
    assert error(v4.rms_norm(x[:, 0], None, 1e-6), ref4.rms_norm(x[:, 0], None, 1e-6)) < EXACT
    for inverse in (False, True):
        assert (
            error(v4.rotate_tail(x, table, inverse=inverse), ref4.rotate_tail(x, table, inverse=inverse))
            < EXACT
        )
    want = ref4.rotate_tail(ref4.rms_norm(x[:, 1:], weight, 1e-6), table)
    assert error(v4.rms_norm_rotate(x[:, 1:], weight, 1e-6, table), want) < EXACT


def test_norms_and_rotations_of_llama() -> None:
    x, weight = torch.randn(5, 3, 64), torch.rand(64) + 0.5
    table = ref.rope_table(torch.arange(5) * 9, torch.rand(32))
    assert error(ops.rms_norm(x, weight, 1e-5), ref.rms_norm(x, weight, 1e-5)) < EXACT
    assert error(ops.rotate(x, table), ref.rotate(x, table)) < EXACT
    assert error(ops.swiglu(x), ref.swiglu(x)) < EXACT
    for got, want in zip(
        ops.add_rms_norm(x[:, 0], x[:, 1], weight, 1e-5),
        ref.add_rms_norm(x[:, 0], x[:, 1], weight, 1e-5),
        strict=True,
    ):
        assert error(got, want) < EXACT
    low = x.bfloat16()
    assert (
        error(ops.rms_norm(low, weight.bfloat16(), 1e-5), ref.rms_norm(low, weight.bfloat16(), 1e-5)) < BF16
    )


# ------------------------------------------------------------------ attention


@pytest.mark.parametrize(("dim", "heads", "kv_heads"), first_of((40, 3, 3), (64, 6, 2)))
@pytest.mark.parametrize("window", first_of(20, 0))
def test_paged_attention(dim: int, heads: int, kv_heads: int, window: int) -> None:
    """Rows that were never written hold NaN."""
    view = torch.full((9, kv_heads, 16, 2 * dim + 8), math.nan)[..., : 2 * dim]
    pages, lens = torch.tensor([[1, 3, 5, 0], [2, 4, 6, 8]]), (37, 50)
    for seq, length in enumerate(lens):
        token = torch.arange(length)
        k, v = torch.randn(length, kv_heads, dim), torch.randn(length, kv_heads, dim)
        other = view.clone()
        ops.write_rows(view, k, v, pages[seq, token // 16], token % 16)
        ref.write_rows(other, k, v, pages[seq, token // 16], token % 16)
        assert torch.equal(view.nan_to_num(7), other.nan_to_num(7))
    q = torch.randn(2, heads, dim)
    want = ref.attend_decode(q, view, ref.plan_decode(pages, lens, 16, window), 0.2)
    assert error(ops.attend_decode(q, view, ops.plan_decode(pages, lens, 16, window), 0.2), want) < EXACT
    q, rows = torch.randn(11, heads, dim), slice(2, 13)
    want = ref.attend_prefill(q, view, ref.plan_prefill(pages[1], 50, rows, 16, window), 0.2)
    assert (
        error(ops.attend_prefill(q, view, ops.plan_prefill(pages[1], 50, rows, 16, window), 0.2), want)
        < EXACT
    )


@pytest.mark.parametrize("packed", first_of(True, False))
@pytest.mark.parametrize(("dim", "rope", "heads"), first_of((64, 16, 2), (512, 64, 3)))
@pytest.mark.parametrize("way", ["splits", "whole", "two passes"])
def test_sparse_attention(
    monkeypatch: pytest.MonkeyPatch, dim: int, rope: int, heads: int, way: str, *, packed: bool
) -> None:
    tuned = sparse.tuned
    choice = {"ONE_PASS": way != "two passes"}
    monkeypatch.setattr(sparse, "tuned", lambda k, *a: choice if k == "attend_one_pass" else tuned(k, *a))
    if way == "whole":
        monkeypatch.setattr(sparse_few, "num_processors", lambda _: 1)
        monkeypatch.setattr(sparse_few, "tuned", lambda *a: tuned(*a) | {"KEEP": True})

    def pool(units: int, rows: int) -> torch.Tensor:
        x = torch.randn(units * rows, dim)
        return (ref_rows.pack_latents(x, rope) if packed else x.bfloat16()).view(units, rows, -1)

    near = ref4.Rows(pool(2, 20), torch.randint(-1, 40, (2, 37)))
    far = ref4.Rows(pool(5, 8), torch.randint(-1, 40, (2, 34)))
    far.view[4, 7] = 255  # NaN where no list points
    far.index[far.index == 39] = -1
    q, sink = torch.randn(2, heads, dim).bfloat16(), torch.randn(heads)
    table = ref4.rope_table(torch.arange(2) * 7, torch.rand(rope // 2))
    for some in (far, None):
        want = ref4.attend(q.float(), near, some, sink, scale=dim**-0.5, rope_dim=rope)
        assert error(v4.attend(q, near, some, sink, scale=dim**-0.5, rope_dim=rope), want) < BF16
        out = torch.full_like(q, torch.nan)
        got = v4.attend(q, near, some, sink, scale=dim**-0.5, rope_dim=rope, turn_back=table, out=out)
        assert got is out
        assert error(out, ref4.rotate_tail(want, table, inverse=True)) < BF16
    with pytest.raises(ValueError, match="contiguous"):
        v4.attend(
            q, near, far, sink, scale=1.0, rope_dim=rope, out=out.transpose(0, 1).contiguous().transpose(0, 1)
        )


@pytest.mark.parametrize("packed", first_of(True, False))
@pytest.mark.parametrize(("dim", "rope", "heads"), first_of((80, 16, 3), (128, 64, 33), (512, 64, 16)))
@pytest.mark.parametrize("wide", [True, False])
def test_sparse_attention_of_many_tokens(
    monkeypatch: pytest.MonkeyPatch, dim: int, rope: int, heads: int, *, wide: bool, packed: bool
) -> None:
    """Two sequences, of which the first has fewer pages; lists with holes, that end early, or name nothing."""
    tokens, per_page = 7, 4
    config = {"WIDE": wide, "BH": 16, "BK": 16, "STAGES": 2}
    monkeypatch.setattr(sparse_many, "tuned", lambda *_: dict(config))
    monkeypatch.setattr(sparse, "tuned", lambda *_: {"SCRATCH": True, "ONE_PASS": True})

    def pool(units: int, rows: int) -> torch.Tensor:
        x = torch.randn(units * rows, dim)
        return (ref_rows.pack_latents(x, rope) if packed else x.bfloat16()).view(units, rows, -1)

    def some(rows: torch.Tensor, count: int) -> torch.Tensor:
        """[tokens, count] of these rows, and holes."""
        index = rows[torch.randint(len(rows), (tokens, count))]
        index[torch.rand(index.shape) < 0.2] = -1
        return index

    near = ref4.Rows(pool(1, 41), some(torch.arange(40), 37))
    pages = torch.tensor([[7, 3, 0], [5, 1, 6]])  # the first sequence has two pages
    named = torch.cat([pages[0, :2], pages[1]])[:, None] * per_page + torch.arange(per_page)
    far = ref4.Rows(pool(9, per_page), some(named.flatten()[:-1], 50), ref4.Reach(pages))
    for view, unit, row in ((near.view, 0, 40), (far.view, 6, 3), (far.view, 2, 1), (far.view, 0, 0)):
        view.view(torch.uint8)[unit, row] = 255  # NaN where no list points
    far.index[1, 9:], far.index[2], near.index[2], near.index[3] = -1, -1, -1, -1
    q, sink = torch.randn(tokens, heads, dim).bfloat16(), torch.randn(heads)
    table = ref4.rope_table(torch.arange(tokens) * 7, torch.rand(rope // 2))
    for rows in (far, None):
        want = ref4.attend(q.float(), near, rows, sink, scale=dim**-0.5, rope_dim=rope)
        STARTED.discard("attend_prepare")
        got = v4.attend(q, near, rows, sink, scale=dim**-0.5, rope_dim=rope)
        assert "attend_prepare" in STARTED
        assert error(got, want) < BF16
        out = torch.full_like(q, torch.nan)
        got = v4.attend(q, near, rows, sink, scale=dim**-0.5, rope_dim=rope, turn_back=table, out=out)
        assert got is out
        assert error(out, ref4.rotate_tail(want, table, inverse=True)) < BF16


def test_which_lists_are_read_through_scratch() -> None:
    """Only where the pages are known, and decoding them costs little beside the tokens' work and fits."""

    def serves(
        tokens: int, *, near_units: int = 1, pages: int | None = 8, dim: int = 512, rope: int = 64
    ) -> bool:
        q, index = (torch.empty(tokens, *n, device="meta") for n in ((64, dim), (128,)))
        near = ref4.Rows(torch.empty(near_units, 640, 584, device="meta"), index)
        reach = None if pages is None else ref4.Reach(torch.empty(1, pages, device="meta"))
        far = ref4.Rows(torch.empty(9999, 64, 584, device="meta"), index, reach)
        return sparse_scratch.serves(q, near, far, rope)

    assert serves(512)
    assert not serves(512, near_units=2)
    assert not serves(512, pages=None)
    assert serves(512, pages=2000)
    assert not serves(512, pages=2050)  # more than 256 rows for a token
    assert serves(8192, pages=4000)
    assert not serves(8192, pages=4096)  # 256 MB
    assert not serves(512, dim=448, rope=128)


@pytest.mark.parametrize("packed", [True, False])
def test_index_scores(*, packed: bool) -> None:
    keys = torch.randn(48, 128)
    view = (ref_rows.pack_keys(keys) if packed else keys.bfloat16()).view(6, 8, -1)
    pages, visible = torch.tensor([[1, 3, 5], [0, 2, 4]]), torch.tensor([20, 21, 13])
    q, weights = torch.randn(3, 4, 128).bfloat16(), torch.randn(3, 4)
    for lens in ((2, 1), (1, 1)):
        n = sum(lens)
        want = ref4.index_scores(q[:n].float(), weights[:n], view, pages, visible[:n], q_lens=lens)
        got = v4.index_scores(q[:n], weights[:n], view, pages, visible[:n], q_lens=lens)
        seen = want > -math.inf
        assert error(got[:, : want.shape[1]][seen], want[seen]) < EXACT
        assert (got[:, : want.shape[1]][~seen] == -math.inf).all()
        assert (got[:, want.shape[1] :] == -math.inf).all()


def parts_of(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Parts:
    return Parts(torch.randn(4, *shape), dtype)


def test_products_in_parts_are_what_they_add_up_to() -> None:
    """For every kernel that reads them; between ranks, see the sum inside the streams' kernel."""
    both, table = parts_of(3, 96), ref4.rope_table(torch.arange(3) * 5, torch.rand(8))
    whole, weight = both.total(), torch.rand(64)
    assert whole.shape == both.shape == (3, 96)
    assert error(v4.rms_norm(both[:, :64], weight, 1e-6), v4.rms_norm(whole[:, :64], weight, 1e-6)) < BF16
    turned = v4.rms_norm_rotate(both[:, 64:].unsqueeze(1), None, 1e-6, table)
    assert error(turned, v4.rms_norm_rotate(whole[:, 64:].unsqueeze(1), None, 1e-6, table)) < BF16
    logits = parts_of(3, 12, dtype=torch.float32)
    bias, tokens, names = torch.randn(12), torch.tensor([1, 0, 3]), torch.randint(12, (4, 2))
    for found, want in zip(
        (*v4.route(logits, bias, count=2, scale=1.5), *v4.route_by_token(logits, names, tokens, scale=1.0)),
        (*v4.route(logits.total(), bias, count=2, scale=1.5),
         *v4.route_by_token(logits.total(), names, tokens, scale=1.0)),
        strict=True,
    ):  # fmt: skip
        torch.testing.assert_close(found, want)
    plus, chosen = parts_of(3, 64), torch.tensor([[0, 1], [1, 2], [0, 2]], dtype=torch.int32)
    given = torch.randn(1, 6, 64)
    got = add_up(given, chosen, local=range(3), dtype=torch.float32, plus=plus)
    assert error(got, given[0].view(3, 2, 64).sum(1) + plus.sums.sum(0)) < EXACT
    streams, fn = torch.randn(3, 4, 128).bfloat16(), torch.randn(24, 512)
    leave = v4.hc_enter(streams, fn, torch.randn(24), torch.rand(3), iters=20, eps=1e-6, norm_eps=1e-6)[1]
    y = parts_of(3, 128)
    assert error(leave(y, None), leave(y.total(), None)) < BF16


def test_linear_of_few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """By our own kernel where the data say so, with or without a bias; more rows by torch's."""
    monkeypatch.setattr(dense, "tuned", lambda *_: {"ROWS": 3})
    weight, bias = torch.randn(70, 256).bfloat16(), torch.randn(70).bfloat16()
    for rows in (1, 3, 4):
        x = torch.randn(rows, 256).bfloat16()
        want = x.float() @ weight.float().T
        STARTED.discard("weigh")
        assert error(ops.linear(x, weight), want) < BF16
        assert error(ops.linear(x, weight, bias), want + bias.float()) < BF16
        assert ("weigh" in STARTED) == (rows < 4)
    assert ops.linear(torch.empty(0, 256).bfloat16(), weight).shape == (0, 70)


@pytest.mark.parametrize("packed", [True, False])
def test_index_scores_of_many_tokens(*, packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two tokens share a tile of keys: also where they are of two sequences, or one is alone at the end."""
    monkeypatch.setattr(indexer, "MANY", 1)
    keys = torch.randn(320, 128)
    view = (ref_rows.pack_keys(keys) if packed else keys.bfloat16()).view(10, 32, -1)
    pages = torch.tensor([[1, 3, 5, 7, 9], [0, 2, 4, 6, 8], [8, 1, 0, 3, 2]])
    lens = (6, 1, 2)
    visible = torch.tensor([126, 127, 127, 128, 129, 129, 21, 0, 1])
    q, weights = torch.randn(9, 4, 128).bfloat16(), torch.randn(9, 4)
    want = ref4.index_scores(q.float(), weights, view, pages, visible, q_lens=lens)
    got = v4.index_scores(q, weights, view, pages, visible, q_lens=lens)
    seen = want > -math.inf
    assert error(got[:, : want.shape[1]][seen], want[seen]) < EXACT
    assert (got[:, : want.shape[1]][~seen] == -math.inf).all()
    assert (got[:, want.shape[1] :] == -math.inf).all()


@pytest.mark.parametrize(("entries", "count"), [(100, 8), (700, 64), (5, 8), (300, 300)])
@pytest.mark.parametrize("many", [1, choosing.MANY])
@pytest.mark.filterwarnings("ignore:invalid value encountered")
def test_choose_entries(monkeypatch: pytest.MonkeyPatch, entries: int, count: int, many: int) -> None:
    """The same scores as topk's, each entry once; with ties and with fewer visible than wanted."""
    monkeypatch.setattr(choosing, "MANY", many)
    scores = torch.randn(3, entries)
    scores[0, entries // 2 :] = -math.inf
    scores[:, :3] = 0.5
    scores[1] = scores[1].round()
    got, want = v4.choose_entries(scores, count), ref4.choose_entries(scores, count)

    def values(chosen: torch.Tensor) -> torch.Tensor:
        return scores.gather(1, chosen.clamp(min=0)).masked_fill(chosen < 0, -math.inf).sort(-1).values

    assert torch.equal(values(got), values(want))
    assert all(len(set(row)) == len(row) for row in ([e for e in r if e >= 0] for r in got.tolist()))


# ------------------------------------------------------------------ rows of the state


@pytest.mark.parametrize(("dim", "rope", "width"), [(512, 64, 584), (64, 16, 88)])
def test_latents_are_packed_bit_for_bit(dim: int, rope: int, width: int) -> None:
    x = (torch.randn(6, dim) * torch.logspace(-7, 2, 6)[:, None]).bfloat16().float()
    unit, row = torch.tensor([0, 2, 1, 0, 2, 1]), torch.tensor([0, 1, 2, 3, 0, 1])
    for dtype in (torch.uint8, torch.bfloat16):
        size = width if dtype == torch.uint8 else dim
        view = torch.zeros(3, 8, size, dtype=dtype)[:, ::2]
        want = view.clone()
        assert torch.equal(v4.encode_latents(x, rope, view), ref4.encode_latents(x, rope, view))
        v4.write_latents(view, x, unit, row, rope_dim=rope)
        ref4.write_rows(want, ref4.encode_latents(x, rope, want), unit, row)
        assert torch.equal(view, want)


def test_index_keys_are_packed_bit_for_bit() -> None:
    x, unit, row = (
        torch.randn(4, 128).bfloat16().float(),
        torch.tensor([0, 2, 1, 0]),
        torch.tensor([0, 1, 2, 3]),
    )
    for dtype, width in ((torch.uint8, 132), (torch.bfloat16, 128)):
        view = torch.zeros(3, 4, width, dtype=dtype)
        want = view.clone()
        assert torch.equal(v4.encode_keys(x, view), ref4.encode_keys(x, view))
        v4.write_keys(view, x, unit, row)
        ref4.write_rows(want, ref4.encode_keys(x, want), unit, row)
        assert torch.equal(view, want)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_rows_are_taken_and_written(dtype: torch.dtype) -> None:
    view, index = torch.randint(0, 255, (5, 7, 20)).to(dtype), torch.randint(-1, 35, (4, 3))
    assert torch.equal(v4.take_rows(view, index), ref4.take_rows(view, index))
    rows, unit, row = (
        torch.randint(0, 255, (3, 20)).to(dtype),
        torch.tensor([0, 2, 4]),
        torch.tensor([1, 6, 0]),
    )
    want = view.clone()
    v4.write_rows(view, rows, unit, row)
    ref4.write_rows(want, rows, unit, row)
    assert torch.equal(view, want)


@pytest.mark.parametrize(
    ("ratio", "width", "q_lens", "kv_lens"),
    [(4, 40, (1, 9, 5), (8, 9, 13)), (4, 260, (1, 2), (4, 20)), (128, 40, (130, 3), (131, 129))],
)
def test_windows_are_pooled(
    ratio: int, width: int, q_lens: tuple[int, ...], kv_lens: tuple[int, ...]
) -> None:
    """First windows, and those of which the slot holds some or all."""
    halves = 4 if ratio == 4 else 2
    slots, pages = torch.arange(len(q_lens)), torch.randperm(20)[: 4 * len(q_lens)].view(len(q_lens), 4)
    plan = ref4.plan_windows(q_lens, kv_lens, ratio=ratio, slots=slots, pages=pages, page_tokens=128)
    fresh, pending = torch.randn(sum(q_lens), halves * width), torch.randn(4, ratio, 2 * width)
    carry = torch.randn(4, 2 * ratio, 2 * width) if ratio == 4 else None
    assert len(plan) > 0
    assert (
        error(v4.pool_windows(fresh, pending, carry, plan), ref4.pool_windows(fresh, pending, carry, plan))
        < EXACT
    )


@pytest.mark.parametrize(("ratio", "width", "keys"), [(4, 64, False), (4, 32, True), (8, 64, False)])
@pytest.mark.parametrize("packed", [True, False])
def test_absorbing_tokens(ratio: int, width: int, *, keys: bool, packed: bool) -> None:
    """Tokens inside windows, tokens that complete one (a request's first, too), and nobody's places."""
    carries = ratio == 4
    positions = torch.tensor([ratio - 1, 3 * ratio - 1, 2 * ratio + 1, 5 * ratio - 1, 0])
    slots = torch.tensor([2, 0, 3, -1, 1])
    pages = torch.arange(15).view(5, 3)
    step = ref4.Singles(positions, slots, pages, 4 * ratio)
    halves = 2 if carries else 1
    gate = ref4.Gate(bias_rows(torch.randn(ratio, halves * width), halves), torch.rand(width) + 0.5, 1e-6)
    rope = width // 4
    size = (width + 4 if keys else width + rope + 8) if packed else width
    table = ref4.rope_table(ref4.entry_positions(positions, ratio), torch.rand(rope // 2))
    rows = torch.randn(5, halves * 2 * width + 3)[:, : halves * 2 * width]

    def store() -> ref4.Store:
        torch.manual_seed(3)
        pending = torch.randn(4, ratio, 2 * width)
        carry = torch.randn(4, 2 * ratio, 2 * width) if carries else None
        entries = torch.zeros(15, 4, size, dtype=torch.uint8 if packed else torch.bfloat16)
        return ref4.Store(pending, carry, entries, keys)

    got, want = store(), store()
    v4.absorb(rows, gate, got, step, table=table, dtype=torch.bfloat16)
    ref4.absorb(rows, gate, want, step, table=table, dtype=torch.bfloat16)
    assert torch.equal(got.pending, want.pending)
    if got.carry is not None:
        assert torch.equal(got.carry, want.carry)
    written = want.entries.float().abs().sum(-1) > 0
    assert written.sum() == 2
    assert torch.equal(got.entries.float().abs().sum(-1) > 0, written)

    def numbers(entries: torch.Tensor) -> torch.Tensor:
        rows = entries[written]
        return ref4.decode_keys(rows) if keys else ref4.decode_latents(rows, rope, width)

    assert error(numbers(got.entries), numbers(want.entries)) < (0.05 if packed else 2 * BF16)


def test_nobodys_rows_are_not_written() -> None:
    unit, row = torch.tensor([1, -1, 0]), torch.tensor([0, 1, 1])
    for dtype, width, put, twin in (
        (torch.uint8, 88, v4.write_latents, ref4.encode_latents),
        (torch.bfloat16, 64, v4.write_latents, ref4.encode_latents),
        (torch.uint8, 68, v4.write_keys, ref4.encode_keys),
        (torch.bfloat16, 64, v4.write_keys, ref4.encode_keys),
    ):
        x, view = torch.randn(3, 64).bfloat16().float(), torch.zeros(2, 2, width, dtype=dtype)
        more = {"rope_dim": 16} if put is v4.write_latents else {}
        put(view, x, unit, row, **more)
        encoded = twin(x, 16, view) if more else twin(x, view)
        want = torch.zeros_like(view)
        want[1, 0], want[0, 1] = encoded[0], encoded[2]
        assert torch.equal(view, want)
    view = torch.zeros(2, 2, 8)
    v4.write_rows(view, torch.ones(3, 8), unit, row)
    assert view.sum(-1).tolist() == [[0, 8], [8, 0]]
    cache, k = torch.zeros(2, 1, 2, 16), torch.ones(3, 1, 8)
    ops.write_rows(cache, k, k, unit, row)
    assert cache.sum(-1)[:, 0].tolist() == [[0, 16], [16, 0]]


def test_chosen_entries_are_located() -> None:
    scores, pages = torch.randn(3, 24), torch.tensor([[4, 1, 3], [0, 2, 5]])
    scores[0, 5:] = -math.inf
    for sequence in (None, torch.tensor([1, 1, 0])):
        some = scores if sequence is not None else scores[:2]
        places = ref4.Places(pages, sequence, 8)
        got, want = (
            v4.choose_located(some, 9, places),
            ref4.locate_entries(v4.choose_entries(some, 9), places),
        )
        assert torch.equal(got, want)


def test_nothing_beyond_what_is_visible_is_chosen_from() -> None:
    seen, places = torch.tensor([3, 0, 900, 1700]), ref4.Places(torch.randperm(40).view(4, 10), None, 200)
    scores = torch.randn(4, 2000).round(decimals=2)  # with equals
    scores[torch.arange(2000) >= seen[:, None]] = -math.inf
    want = ref4.locate_entries(v4.choose_entries(scores, 40), places)
    scores[torch.arange(2000) >= seen[:, None]] = math.nan
    assert torch.equal(v4.choose_located(scores, 40, places, seen), want)


@pytest.mark.filterwarnings("ignore:invalid value encountered")  # thresholds between -inf and a number
@pytest.mark.parametrize(("entries", "count"), first_of((1100, 90), (140, 30), (2052, 33), (4096, 520)))
def test_both_ways_choose_alike(monkeypatch: pytest.MonkeyPatch, entries: int, count: int) -> None:
    """In the same order, of equals the first: ties, zeros of both signs, -inf, NaN, rows of equals, and nothing seen."""
    scores = torch.randn(8, entries)
    scores[1] = scores[1].round()
    scores[2] = 1.0
    scores[3, 1:] = -math.inf
    scores[4, 3:8] = math.nan
    scores[5, 5:], scores[5, 9] = -0.0, 0.0
    scores[6] = (9 * scores[6]).exp()
    scores[7, 1] = math.nan
    seen = torch.tensor([entries, entries - 1, entries, count + 2, entries, entries - 3, count + 70, 0])
    sequence = torch.tensor([0, 0, 0, 1, 1, 1, 2, 2])
    places = ref4.Places(torch.randperm(3 * 129).view(3, 129), sequence, 32)
    each = ref4.Places(torch.randperm(8 * 129).view(8, 129), None, 32)

    def all_ways() -> list[torch.Tensor]:
        located = [v4.choose_located(scores, count, p, s) for p, s in ((places, seen), (each, None))]
        return [v4.choose_entries(scores, count), *located]

    few = all_ways()
    monkeypatch.setattr(choosing, "MANY", 1)
    STARTED.discard("select_many")
    many = all_ways()
    assert "select_many" in STARTED
    assert all(torch.equal(a, b) for a, b in zip(few, many, strict=True))
    first = scores[0].topk(count).indices.sort().values
    assert torch.equal(many[0][0], first)
    assert torch.equal(many[0][2], torch.arange(count))
    assert (many[1][7] == -1).all()


def test_rows_of_any_width_are_chosen_from() -> None:
    """Long rows are gone through in pieces; equals lie on both sides of a border between two."""
    scores = torch.randn(3, 9001)
    scores[1, 3000:6000] = 5.0
    scores[2] = scores[2].round() + 0.0  # no zeros below zero: they are less than zero here
    for entries in (2049, 9001):
        some = scores[:, :entries].contiguous()
        want = some.sort(descending=True, stable=True).indices[:, :1500].sort(-1).values
        assert torch.equal(v4.choose_entries(some, 1500), want)


def test_lengths_on_the_device() -> None:
    view, pages = torch.randn(9, 2, 16, 128), torch.tensor([[1, 3, 5], [2, 4, 6], [7, 8, 0]])
    q, lens = torch.randn(3, 4, 64), torch.tensor([37, 48, 0])
    want = ref.attend_decode(q[:2], view, ref.plan_decode(pages[:2], (37, 48), 16), 0.2)
    got = ops.attend_decode(q, view, ops.plan_decode_any(pages, lens, 48, 16), 0.2)
    assert error(got[:2], want) < EXACT
    assert not got[2].any()
    assert (
        error(ref.attend_decode(q[:2], view, ref.plan_decode_any(pages[:2], lens[:2], 48, 16), 0.2), want)
        == 0
    )


def test_the_expert_that_all_share() -> None:
    pairs = [(tiles(*lead, 256, 128), tiles(*lead, 128, 128)) for lead in ((4,), ())]
    x, weights = torch.randn(3, 128).bfloat16(), torch.rand(3, 2)
    experts = torch.rand(3, 4).argsort(-1)[:, :2]
    routed, shared = ([v4.prepare(w) for w in pair] for pair in pairs)
    how = {"local": range(4), "limit": 0.5}
    want = ref4.mix_experts(x.float(), *pairs[0], weights, experts, **how)
    want += ref4.expert_ffn(x.float(), *pairs[1], 0.5)
    got = v4.mix_onto(
        x, routed, (weights, experts), lambda: v4.expert_ffn(x, *shared, 0.5), **how, whole=True
    )
    assert error(got, want) < 3 * BF16
    one = v4.mix_onto(x[:1], routed, (weights[:1], experts[:1].int()), lambda: v4.expert_ffn(x[:1], *shared, 0.5), **how,
                      whole=True)  # fmt: skip
    assert error(one, want[:1]) < 3 * BF16


@pytest.mark.parametrize("row_bytes", first_of(132, 584, 130, 7))
def test_digests_are_the_same_numbers(row_bytes: int) -> None:
    specs = [StateSpec("c", i, Growth.PAGED, row_bytes, tokens_per_row=4, encoding="x") for i in range(2)]
    specs.append(StateSpec("w", 0, Growth.RING, row_bytes, rows=8, encoding="x"))
    layout = lay_out(specs, page_tokens=16)
    sizes = {Kind.PAGE: (9, layout.page_bytes), Kind.SLOT: (3, layout.slot_bytes)}
    memory = {kind: torch.randint(0, 255, size, dtype=torch.uint8) for kind, size in sizes.items()}
    units = [Units(Kind.PAGE, (3, 1, 7), 0, 0, 41), Units(Kind.SLOT, (2,), 0, 0, 41)]
    fields = [*layout.page_fields, *layout.slot_fields]
    got = ops.field_digests(fields, memory, units, start=5, stop=41, last=True)
    assert torch.equal(got, ref_digest.field_digests(fields, memory, units, start=5, stop=41, last=True))
    memory[Kind.PAGE][1, 3] ^= 1
    assert not torch.equal(got, ops.field_digests(fields, memory, units, start=5, stop=41, last=True))


@pytest.mark.parametrize("size", [4096, 100])
def test_units_are_moved(size: int) -> None:
    slab, ids = torch.randint(0, 255, (6, size), dtype=torch.uint8), torch.tensor([4, 0, 2])
    units = ops.gather_units(slab, ids)
    assert torch.equal(units, slab[ids])
    want = slab.clone()
    want[ids + 1] = units
    ops.scatter_units(slab, ids + 1, units)
    assert torch.equal(slab, want)


def test_draws_are_the_sampler_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("splitserve.ops.triton.sampling.PART", 64)
    logits = torch.randn(4, 150)
    logits[0, [5, 77]] = 9.0  # a tie goes to the lower id
    logits[1, 40:] = -math.inf
    keys = torch.tensor([_signed(random_key(1, 0, i)) for i in range(4)])
    temperatures = torch.tensor([0.0, 0.7, 1.0, 2.0])
    noise = _uniforms(keys[:, None], torch.arange(150)).log_().neg_().float().log_().neg_()
    hot = logits / temperatures.clamp(min=1e-9)[:, None] + noise
    want = torch.where(temperatures[:, None] > 0, hot, logits).argmax(-1)
    assert torch.equal(ops.draw(logits, temperatures, keys), want)


def _is_slow(test: object) -> bool:
    return any(mark.name == "slow" for mark in getattr(test, "pytestmark", ()))


@pytest.fixture(scope="module")
def _whole_file(request: pytest.FixtureRequest) -> Iterator[bool]:
    mine = {item.originalname for item in request.session.items if item.fspath == request.fspath}
    here = {name for name, test in globals().items() if name.startswith("test_") and not _is_slow(test)}
    yield here <= mine


def test_no_kernel_is_left_out(*, _whole_file: bool) -> None:
    if not _whole_file:
        pytest.skip("needs all tests of this file before it")
    kernels = set(catalogue.kernels())
    print(f"{len(kernels)} kernels ran in the interpreter: {', '.join(sorted(kernels))}")
    assert kernels <= STARTED, f"never ran: {sorted(kernels - STARTED)}"
