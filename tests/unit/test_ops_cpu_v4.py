"""DeepSeek-V4's loops for a CPU against their definitions: weights to the bit, coefficients closely, in any batch alike."""

from __future__ import annotations

import pytest
import torch

from splitserve.ops.cpu import v4 as cpu
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
    x = torch.randn(3, columns)
    for weight in weights(rows, columns):
        assert torch.equal(cpu.dequantise(weight, torch.float32), ref.dequantise(weight, torch.float32))
        assert torch.equal(cpu.linear(x, weight), ref.linear(x, weight))
        half = x.bfloat16()
        assert torch.equal(cpu.linear(half, weight), ref.linear(half, weight))


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
