"""DeepSeek-V4's loops for a CPU against their definitions: weights to the bit, coefficients closely, in any batch alike."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from splitserve.ops.cpu import v4 as cpu
from splitserve.ops.cpu.v4 import codes, gathered, loops, products
from splitserve.ops.cpu.v4.quant import FEW
from splitserve.ops.ref import v4 as ref


def wide(rows: int, columns: int) -> torch.Tensor:
    """Numbers of every magnitude that the formats have, smallest codes included."""
    draw = torch.Generator().manual_seed(rows * columns)
    return torch.randn(rows, columns, generator=draw) * torch.logspace(-6, 3, columns)


def weights(rows: int, columns: int) -> list[ref.Weight]:
    codes, scales = ref.quantise_tiles(wide(rows, columns))
    base = ref.Tiles(codes, ref.ue8m0_to_float(scales), (128, 128))  # the -Base variant's float32 scales
    return [ref.Tiles(codes, scales, (128, 128)), base, ref.Mxfp4(*ref.quantise_mxfp4(wide(rows, columns)))]


@pytest.mark.parametrize(("rows", "columns"), [(256, 256), (130, 320), (1, 32)])
def test_weights_are_widened_to_the_same_bits(rows: int, columns: int) -> None:
    x = torch.randn(FEW + 1, columns)
    for weight in weights(rows, columns):
        assert torch.equal(cpu.dequantise(weight, torch.float32), ref.dequantise(weight, torch.float32))
        assert torch.equal(cpu.linear(x, weight), ref.linear(x, weight))
        half = x.bfloat16()
        assert torch.equal(cpu.linear(half, weight), ref.linear(half, weight))


@pytest.mark.parametrize("tile", [(128, 128), (64, 12)])
def test_rows_of_any_length(tile: tuple[int, int]) -> None:
    """Tiles that a rank's share cuts may end anywhere."""
    codes = wide(70, 36).clamp(-400, 400).to(torch.float8_e4m3fn)
    weight = ref.Tiles(codes, torch.rand(-(-70 // tile[0]), -(-36 // tile[1])), tile)
    assert torch.equal(cpu.dequantise(weight, torch.float32), ref.dequantise(weight, torch.float32))
    x = torch.randn(2, 36)
    assert torch.equal(cpu.linear(x, weight), ref.linear(x, weight))


@pytest.mark.parametrize(("rows", "columns"), [(256, 256), (130, 320), (1, 32)])
def test_few_rows_meet_the_codes_and_are_alike_in_any_batch(rows: int, columns: int) -> None:
    x = torch.randn(FEW, columns)
    for weight in weights(rows, columns):
        found = cpu.linear(x, weight)
        size = (x.abs() @ ref.dequantise(weight, torch.float32).abs().T).max().item()
        torch.testing.assert_close(found, ref.linear(x, weight), atol=1e-6 * size, rtol=1e-5)
        for some in (slice(0, 1), slice(2, 4), slice(5, 12)):
            assert torch.equal(cpu.linear(x[some], weight), found[some])


def stack(kind: int, shape: tuple[int, int, int]) -> ref.Weight:
    """Weights of experts in one of the three forms."""
    draw = torch.Generator().manual_seed(sum(shape))
    made = [
        ref.Mxfp4(*ref.quantise_mxfp4(torch.randn(shape[1:], generator=draw) / 8)) for _ in range(shape[0])
    ]
    if kind == 0:
        return ref.Mxfp4(torch.stack([m.codes for m in made]), torch.stack([m.scales for m in made]))
    pairs = [ref.quantise_tiles(ref.dequantise(m, torch.float32)) for m in made]
    codes, scales = (torch.stack(parts) for parts in zip(*pairs, strict=True))
    return ref.Tiles(codes, scales if kind == 1 else ref.ue8m0_to_float(scales), (128, 128))


@pytest.mark.parametrize("kind", [0, 1, 2])
@pytest.mark.parametrize("local", [range(6), range(2, 4)])
def test_experts_of_few_tokens(kind: int, local: range) -> None:
    """Some experts have no token, some all of them; alike in any batch."""
    gate_up, down = (stack(kind, (len(local), *shape)) for shape in ((192, 160), (160, 96)))
    x = torch.randn(FEW, 160)
    weights, experts = ref.route(torch.randn(FEW, 6), torch.tensor([9.0, 0, 0, 0, 0, -9]), count=3, scale=1.5)

    def mix(ops: Any, some: slice) -> torch.Tensor:
        return ops.mix_experts(x[some], gate_up, down, weights[some], experts[some], local=local, limit=0.5)

    found = mix(cpu, slice(None))
    torch.testing.assert_close(found, mix(ref, slice(None)), atol=1e-5, rtol=1e-5)
    assert torch.equal(mix(cpu, slice(3, 8)), found[3:8])
    for by in (None, weights[:, :1]):
        pair = (gate_up[0], down[0], 0.5, by)
        torch.testing.assert_close(cpu.expert_ffn(x, *pair), ref.expert_ffn(x, *pair), atol=1e-5, rtol=1e-5)


def test_every_code_and_the_least_scales() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[(codes & 0x7F) != 0x7F].repeat(2, 1)  # the two that are not numbers are refused at loading
    for bits in (0, 1, 127, 200):
        scales = torch.full((1, 2), bits, dtype=torch.uint8)
        weight = ref.Tiles(codes.view(torch.float8_e4m3fn), scales, (128, 128))
        assert torch.equal(cpu.dequantise(weight, torch.float32), ref.dequantise(weight, torch.float32))
        four = ref.Mxfp4(torch.arange(256, dtype=torch.uint8)[None], scales.repeat(1, 8))
        assert torch.equal(cpu.dequantise(four, torch.float32), ref.dequantise(four, torch.float32))


def test_coefficients_are_close_and_alike_in_any_batch() -> None:
    streams, fn = torch.randn(9, 4, 64), torch.randn(24, 256) / 16
    base, scale = torch.randn(24) / 2, torch.rand(3)
    settings = {"iters": 20, "eps": 1e-6, "norm_eps": 1e-6}
    found, expected = (k.hc_pre(streams, fn, base, scale, **settings) for k in (cpu, ref))
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=0)
    for iters in (1, 3):
        some = cpu.hc_pre(streams, fn, base, scale, iters=iters, eps=1e-6, norm_eps=1e-6)
        others = ref.hc_pre(streams, fn, base, scale, iters=iters, eps=1e-6, norm_eps=1e-6)
        torch.testing.assert_close(some[2], others[2], atol=1e-5, rtol=0)


def test_streams_take_what_comes_back() -> None:
    y, streams = torch.randn(5, 64), torch.randn(5, 4, 64)
    post, comb = torch.rand(5, 4), torch.rand(5, 4, 4)
    found = cpu.hc_post(y, streams, post, comb)
    torch.testing.assert_close(found, ref.hc_post(y, streams, post, comb), atol=1e-5, rtol=1e-5)
    assert torch.equal(cpu.hc_post(y[2:3], streams[2:3], post[2:3], comb[2:3]), found[2:3])


def lists(tokens: int, length: int, positions: int) -> torch.Tensor:
    """Some places of each list are empty; the last token's are all."""
    made = torch.rand(tokens, positions).argsort(dim=1)[:, :length]
    made[torch.rand(tokens, length) < 0.3] = -1
    made[-1] = -1
    return made


@pytest.mark.parametrize("with_far", [True, False])
def test_attention_over_lists(with_far: bool) -> None:
    wide = torch.randn(6, 3, 2, 48)  # rows of units lie apart
    ring, pages = wide[:, :, 0], torch.randn(9, 5, 48)
    near = ref.Rows(ring, lists(7, 10, 18))
    far = ref.Rows(pages, lists(7, 20, 45)) if with_far else None
    for rows in (near, far):
        if rows is not None:  # what nobody lists may hold anything
            unseen = torch.ones(rows.view.shape[:2], dtype=torch.bool).flatten()
            unseen[rows.index[rows.index >= 0]] = False
            rows.view[unseen.view(rows.view.shape[:2])] = torch.nan
    q, sink = torch.randn(7, 3, 48), torch.randn(3)
    settings = {"scale": 0.2, "rope_dim": 8}
    found = cpu.attend(q, near, far, sink, **settings)
    torch.testing.assert_close(found, ref.attend(q, near, far, sink, **settings), atol=1e-5, rtol=1e-5)
    some = [r if r is None else ref.Rows(r.view, r.index[2:4]) for r in (near, far)]
    assert torch.equal(cpu.attend(q[2:4], *some, sink, **settings), found[2:4])


def test_ratings_of_index_keys() -> None:
    keys = torch.randn(8, 2, 6, 24)[:, 1]
    pages = torch.randperm(8).view(4, 2)
    seen = torch.tensor([12, 1, 7, 0])
    keys[pages[3]] = torch.nan  # the last token sees nothing
    q, weights = torch.randn(4, 5, 24), torch.randn(4, 5)
    found, expected = (
        ops.index_scores(q, weights, keys, pages, seen, q_lens=(1, 1, 1, 1)) for ops in (cpu, ref)
    )
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    both = cpu.index_scores(q[:3], weights[:3], keys, pages[:2], seen[:3], q_lens=(1, 2))
    assert both.shape == (3, 12)


@pytest.mark.parametrize("tokens", [FEW, FEW + 1])
def test_grouped_products(tokens: int) -> None:
    x = torch.randn(tokens, 2, 160)
    for weight in weights(64, 160):
        numbers = ref.dequantise(weight, torch.float32)
        size = numbers.abs().max().item()
        found, expected = cpu.grouped_linear(x / size, weight), ref.grouped_linear(x / size, numbers)
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_rows_into_slots() -> None:
    view, rows = torch.zeros(4, 2, 3, 8)[:, 0], torch.randn(5, 11)[:, 2:10]
    unit, row = torch.tensor([3, -1, 0, 1, 3]), torch.tensor([2, 0, 1, 1, 0])
    expected = view.clone()
    ref.write_rows(expected, rows, unit, row)
    cpu.write_rows(view, rows, unit, row)
    assert torch.equal(view, expected)
    halves = torch.zeros(4, 3, 8, dtype=torch.bfloat16)
    cpu.write_rows(halves, rows, unit, row)
    assert torch.equal(halves, expected.bfloat16())


def test_nothing_is_compiled_after_prepare() -> None:
    """Signatures are those of real calls: else the first request would wait for a compiler."""
    cpu.prepare()
    loops_of = [
        v for m in (codes, gathered, loops, products) for v in vars(m).values() if hasattr(v, "signatures")
    ]
    before = [(f, len(f.signatures)) for f in loops_of]
    test_few_rows_meet_the_codes_and_are_alike_in_any_batch(1, 32)
    test_experts_of_few_tokens(0, range(2, 4))
    test_coefficients_are_close_and_alike_in_any_batch()
    test_streams_take_what_comes_back()
    test_attention_over_lists(with_far=True)
    test_ratings_of_index_keys()
    test_grouped_products(FEW)
    test_rows_into_slots()
    test_norms_and_rotation()
    assert [(f, len(f.signatures)) for f in loops_of] == before


def test_norms_and_rotation() -> None:
    x, weight = torch.randn(5, 3, 40), torch.randn(40)
    table = ref.rope_table(torch.arange(5) * 700, torch.logspace(0, -4, 8))
    for by in (weight, None):
        torch.testing.assert_close(cpu.rms_norm(x, by, 1e-6), ref.rms_norm(x, by, 1e-6), atol=1e-5, rtol=1e-5)
        parts = x.flatten(1).split((50, 70), dim=-1)[1][:, :40]  # a view with gaps
        torch.testing.assert_close(cpu.rms_norm(parts, by, 1e-6), ref.rms_norm(parts, by, 1e-6))
    for inverse in (False, True):
        found = cpu.rotate_tail(x, table, inverse=inverse)
        torch.testing.assert_close(found, ref.rotate_tail(x, table, inverse=inverse), atol=1e-6, rtol=1e-5)
    assert torch.equal(
        cpu.rotate_tail(x[2:3], (table[0][2:3], table[1][2:3])), cpu.rotate_tail(x, table)[2:3]
    )
