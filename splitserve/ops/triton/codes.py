"""Codes of eight and four bits as bf16, by bits alone, so that one source serves every architecture.

    e4m3   s eeee mmm   ->   s 0000eeee mmm 0000   the value times 2 ** -120, subnormal codes included
    e2m1   s ee m       ->   s 000000ee m 000000   the value times 2 ** -126
    e2m1   s ee m       ->   s 00ee m 00, an e4m3   the value times 2 ** -6

Products with bf16 powers of two are exact, so that the missing factor and a scale come in with one multiplication. The
compiler would take codes apart one by one; the PTX here takes them two by two.

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
def e4m3_numbers(codes, NATIVE: tl.constexpr):
    """e4m3 of any shape, as they are for products of eight bits (as float32 unless NATIVE)."""
    if NATIVE:
        return codes
    else:
        return codes.to(tl.float32)


@triton.jit
def e2m1_numbers(codes, NATIVE: tl.constexpr):
    """int16 of any shape, four codes each -> four e4m3 (float32 unless NATIVE) of that shape: values times 2 ** -6."""
    if NATIVE:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 a, b, c, d;
            prmt.b32 a, $4, $5, 0x6420;
            prmt.b32 b, $4, $5, 0x7531;
            shl.b32 c, a, 4;
            shl.b32 d, a, 2;
            and.b32 c, c, 0x80808080;
            lop3.b32 $0, d, 0x1c1c1c1c, c, 0xea;
            shr.u32 d, a, 2;
            and.b32 c, a, 0x80808080;
            lop3.b32 $1, d, 0x1c1c1c1c, c, 0xea;
            shl.b32 c, b, 4;
            shl.b32 d, b, 2;
            and.b32 c, c, 0x80808080;
            lop3.b32 $2, d, 0x1c1c1c1c, c, 0xea;
            shr.u32 d, b, 2;
            and.b32 c, b, 0x80808080;
            lop3.b32 $3, d, 0x1c1c1c1c, c, 0xea;
            }""",
            "=r,=r,=r,=r,r,r",
            [codes],
            dtype=(tl.float8e4nv, tl.float8e4nv, tl.float8e4nv, tl.float8e4nv),
            is_pure=True,
            pack=4,
        )
    else:
        scale: tl.constexpr = 2.0**120
        a, b, c, d = e2m1_bits(codes, False)
        return a * scale, b * scale, c * scale, d * scale


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
