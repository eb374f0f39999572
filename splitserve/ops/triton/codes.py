"""Codes of eight and four bits as bf16, by bits alone, so that one source serves every architecture.

    e4m3   s eeee mmm   ->   s 0000eeee mmm 0000   the value times 2 ** -120, subnormal codes included
    e2m1   s ee m       ->   s 000000ee m 000000   the value times 2 ** -126
    e2m1   s ee m       ->   an e4m3 that has its group's scale in it, as far as that differs from its block's

Products with bf16 powers of two are exact, so that the missing factor and a scale come in with one multiplication. The
compiler would take codes apart one by one; the PTX here takes them two by two, or four by four.

NATIVE, in every kernel: products in bf16, codes by PTX. Off under the interpreter, which has neither PTX nor bf16
arithmetic: there the same numbers are float32.
"""

from __future__ import annotations

import triton
import triton.language as tl

E4M3_BIAS = tl.constexpr(120)
E2M1_BIAS = tl.constexpr(126)


@triton.jit
def e4m3_bits(codes, NATIVE: tl.constexpr):
    """uint8 of any shape -> bf16 (float32 unless NATIVE): values times 2 ** -120."""
    if NATIVE:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 a, b, c, d;
            prmt.b32 a, $2, 0, 0x1404;
            prmt.b32 b, $2, 0, 0x3424;
            shr.u32 c, a, 4;
            shr.u32 d, b, 4;
            and.b32 c, c, 0x07f007f0;
            and.b32 d, d, 0x07f007f0;
            lop3.b32 $0, a, 0x80008000, c, 0xea;
            lop3.b32 $1, b, 0x80008000, d, 0xea;
            }""",
            "=r,=r,r",
            [codes],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=4,
        )
    else:
        wide = codes.to(tl.int32)
        return (((wide & 0x80) << 24) | ((wide & 0x7F) << 20)).to(tl.float32, bitcast=True)


@triton.jit
def power_of_two(exponent, NATIVE: tl.constexpr):
    """int32 of any shape, biased by 127 -> bf16 (float32 unless NATIVE). Exponents 1..254."""
    value = (exponent << 23).to(tl.float32, bitcast=True)
    if NATIVE:
        return value.to(tl.bfloat16)
    else:
        return value


@triton.jit
def e2m1_bits(codes, NATIVE: tl.constexpr):
    """uint16 of any shape, four codes each -> four bf16 (float32 unless NATIVE) of that shape: values times 2 ** -126.

    The first comes from the lowest four bits.
    """
    if NATIVE:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 a, b;
            shl.b32 a, $4, 12;
            shl.b32 b, $4, 6;
            and.b32 a, a, 0x80008000;
            lop3.b32 $0, b, 0x01c001c0, a, 0xea;
            shl.b32 a, $4, 8;
            shl.b32 b, $4, 2;
            and.b32 a, a, 0x80008000;
            lop3.b32 $1, b, 0x01c001c0, a, 0xea;
            shl.b32 a, $4, 4;
            shr.u32 b, $4, 2;
            and.b32 a, a, 0x80008000;
            lop3.b32 $2, b, 0x01c001c0, a, 0xea;
            shr.u32 b, $4, 6;
            and.b32 a, $4, 0x80008000;
            lop3.b32 $3, b, 0x01c001c0, a, 0xea;
            }""",
            "=r,=r,=r,=r,r",
            [codes],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    else:
        wide = codes.to(tl.int32)
        return (
            (((wide & 0x0008) << 28) | ((wide & 0x0007) << 22)).to(tl.float32, bitcast=True),
            (((wide & 0x0080) << 24) | ((wide & 0x0070) << 18)).to(tl.float32, bitcast=True),
            (((wide & 0x0800) << 20) | ((wide & 0x0700) << 14)).to(tl.float32, bitcast=True),
            (((wide & 0x8000) << 16) | ((wide & 0x7000) << 10)).to(tl.float32, bitcast=True),
        )


@triton.jit
def e2m1_bytes(words, scale, NATIVE: tl.constexpr):
    """128 numbers of each row, as four tensors [n, 32] of e4m3 codes (of float32 unless NATIVE), 32 neighbours each.

    `words` [n, 32] int16 and `scale` [n] int32 are those of v4/quant.py. What comes out lacks common_scale(scale).
    A code's three bits choose one of eight bytes, in which its group's scale is already: two registers hold them.
    Four words of a row must lie in one thread, one after another. That is so where products of eight bits take them
    from registers; v4/quant.py tries it on every device before it relies on it.
    """
    low0, high0 = _bytes_of(scale & 15)
    low1, high1 = _bytes_of((scale >> 4) & 15)
    low2, high2 = _bytes_of((scale >> 8) & 15)
    low3, high3 = _bytes_of((scale >> 12) & 15)
    if NATIVE:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 m, n, t;
            and.b32 m, $4, 0x77777777;
            prmt.b32 t, $6, $10, m;
            lop3.b32 $0, $4, 0x80808080, t, 0xea;
            shr.u32 n, m, 16;
            prmt.b32 t, $14, $18, n;
            shl.b32 n, $4, 4;
            lop3.b32 $1, n, 0x80808080, t, 0xea;
            and.b32 m, $5, 0x77777777;
            prmt.b32 t, $22, $26, m;
            lop3.b32 $2, $5, 0x80808080, t, 0xea;
            shr.u32 n, m, 16;
            prmt.b32 t, $30, $34, n;
            shl.b32 n, $5, 4;
            lop3.b32 $3, n, 0x80808080, t, 0xea;
            }""",
            "=r,=r,=r,=r,r,r" + ",r" * 32,
            [
                words,
                low0[:, None], high0[:, None], low1[:, None], high1[:, None],
                low2[:, None], high2[:, None], low3[:, None], high3[:, None],
            ],
            dtype=(tl.uint8, tl.uint8, tl.uint8, tl.uint8),
            is_pure=True,
            pack=4,
        )  # fmt: skip
    else:
        w0, w1, w2, w3 = _pick(words, 0), _pick(words, 1), _pick(words, 2), _pick(words, 3)
        return (
            _spread(w0, w0 | (w1 << 16), 7, (scale & 15)[:, None]),
            _spread(w1, w0 | (w1 << 16), 3, ((scale >> 4) & 15)[:, None]),
            _spread(w2, w2 | (w3 << 16), 7, ((scale >> 8) & 15)[:, None]),
            _spread(w3, w2 | (w3 << 16), 3, ((scale >> 12) & 15)[:, None]),
        )


@triton.jit
def e2m1_lanes(words, over, NATIVE: tl.constexpr):
    """As e2m1_bytes, of words [n, 32] of which word 8 t + 4 h + c belongs to group t: four tensors [n, 32], c = 0..3.

    Number 32 t + 16 h + 4 c + b of a block is at 8 t + 4 h + b of tensor c. `over` [n, 4] uint8: exponents 0..11 of the
    groups. Four words of a row that lie in one thread have one scale here, not four.
    """
    exponent = over.to(tl.int32)
    n: tl.constexpr = words.shape[0]
    if NATIVE:
        low, high = _bytes_of(exponent)
        low = tl.reshape(tl.broadcast_to(low[:, :, None], (n, 4, 8)), (n, 32))
        high = tl.reshape(tl.broadcast_to(high[:, :, None], (n, 4, 8)), (n, 32))
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 m, n, t;
            and.b32 m, $4, 0x77777777;
            prmt.b32 t, $6, $10, m;
            lop3.b32 $0, $4, 0x80808080, t, 0xea;
            shr.u32 n, m, 16;
            prmt.b32 t, $6, $10, n;
            shl.b32 n, $4, 4;
            lop3.b32 $1, n, 0x80808080, t, 0xea;
            and.b32 m, $5, 0x77777777;
            prmt.b32 t, $6, $10, m;
            lop3.b32 $2, $5, 0x80808080, t, 0xea;
            shr.u32 n, m, 16;
            prmt.b32 t, $6, $10, n;
            shl.b32 n, $5, 4;
            lop3.b32 $3, n, 0x80808080, t, 0xea;
            }""",
            "=r,=r,=r,=r,r,r" + ",r" * 8,
            [words, low, high],
            dtype=(tl.uint8, tl.uint8, tl.uint8, tl.uint8),
            is_pure=True,
            pack=4,
        )
    else:
        w0, w1, w2, w3 = _pick(words, 0), _pick(words, 1), _pick(words, 2), _pick(words, 3)
        wide = tl.reshape(tl.broadcast_to(exponent[:, :, None], (n, 4, 2)), (n, 8))
        return (
            _spread(w0, w0 | (w1 << 16), 7, wide),
            _spread(w1, w0 | (w1 << 16), 3, wide),
            _spread(w2, w2 | (w3 << 16), 7, wide),
            _spread(w3, w2 | (w3 << 16), 3, wide),
        )


@triton.jit
def in_lanes(codes):
    """[..., 128] bytes of rows in the order in which e2m1_lanes has those of weights: 32 c + 16 h + 4 t + b."""
    apart = tl.reshape(codes, (codes.numel // 128, 4, 2, 4, 4))  # t, h, c, b
    return tl.reshape(tl.permute(apart, (0, 3, 2, 1, 4)), codes.shape)


@triton.jit
def _bytes_of(exponent):
    """e4m3 of 0, 0.5, 1, 1.5 and of 2, 3, 4, 6, each times 2 ** (exponent - 5) with exponents 0..11; lowest byte first."""
    return 0x14100800 + exponent * 0x08080800, 0x24201C18 + exponent * 0x08080808


@triton.jit
def _pick(words, which: tl.constexpr):
    """[n, 32] -> [n, 8]: word `which` of each four, as int32."""
    four = tl.reshape(words.to(tl.int32) & 0xFFFF, (words.shape[0], 8, 4))
    return tl.sum(tl.where(tl.arange(0, 4)[None, None, :] == which, four, 0), 2)


@triton.jit
def _spread(sizes, signs, FIRST: tl.constexpr, exponent):
    """float32 [n, 32]: four numbers of each word [n, 8]; their signs are bits FIRST, FIRST + 8, ... of `signs`.

    `exponent` is [n, 1] or [n, 8].
    """
    i = tl.arange(0, 4)[None, None, :]
    bits = ((sizes[:, :, None] >> (4 * i)) & 7) << 22
    sign = ((signs[:, :, None] >> (8 * i + FIRST)) & 1) << 31
    numbers = (bits | sign).to(tl.float32, bitcast=True) * (2.0**126)
    scale = ((exponent + (127 - 5)) << 23).to(tl.float32, bitcast=True)
    return tl.reshape(numbers * scale[:, :, None], (sizes.shape[0], 32))


@triton.jit
def common_scale(scale):
    """float32 powers of two that all 128 numbers have in common."""
    return ((scale << 7) & 0x7F800000).to(tl.float32, bitcast=True)


@triton.jit
def e4m3_numbers(codes, NATIVE: tl.constexpr):
    """uint8 or e4m3 of any shape as e4m3, for products of eight bits (as float32 unless NATIVE)."""
    if NATIVE:
        return codes.to(tl.float8e4nv, bitcast=True)
    else:
        return codes.to(tl.float32)


@triton.jit
def e4m3_scale(amax):
    """Largest magnitudes, float32 -> the power of two that brings them to at most 448; at least 2 ** -22."""
    bits = (tl.maximum(amax, 1e-4) / 448.0).to(tl.int32, bitcast=True)
    up = tl.where((bits & 0x7FFFFF) != 0, 0x800000, 0)
    return ((bits + up) & 0x7F800000).to(tl.float32, bitcast=True)


@triton.jit
def to_e4m3(x, FP8: tl.constexpr):
    """float32 of any shape -> uint8: the nearest e4m3, ties to even; beyond 448 the largest. FP8: by instruction."""
    x = tl.minimum(tl.maximum(x, -448.0), 448.0)
    if FP8:
        return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        bits = x.to(tl.int32, bitcast=True)
        sign = (bits >> 24) & 0x80
        size = tl.abs(x)
        step = tl.maximum((bits & 0x7F800000) - (3 << 23), (127 - 9) << 23).to(tl.float32, bitcast=True)
        whole = size / step  # an exact quotient, since the step is a power of two
        units = (whole + 8388608.0) - 8388608.0  # the nearest whole number, ties to even
        rounded = (units * step).to(tl.int32, bitcast=True)
        normal = (rounded >> 20) - ((127 - 7) << 3)
        code = tl.where(units * step >= 0.015625, normal, units.to(tl.int32))
        return (sign | code).to(tl.uint8)
