"""The two inner loops of every product, in LLVM's own vectors, since the order of a sum is part of their meaning.

    dot_tile    out[m, r] = x[m] . w[r]           R rows of weights against M rows of inputs
        lane l of a stretch = w[r, l] x[m, l] + w[r, l + 8] x[m, l + 8] + ...      fused multiply-adds, 256 numbers
        lane l              = stretch 0 + stretch 1 + ...                    so that errors do not grow with the length
        result              = ((l0 + l4) + (l2 + l6)) + ((l1 + l5) + (l3 + l7))
    mix_tile    out[m, c] += sum over i of p[m, i] v[i, c]        in the order of i, for 8 C columns

All sums of a tile stay in registers. A compiler's own vectoriser picks another order for other sizes; here it depends
on the row length alone, so that a token's numbers are the same bits in any batch, in any chunk, and from weights in any
format. Addresses are in bytes; strides of float32 rows in elements, of weights in bytes.
"""

# ruff: noqa: ARG001, PLR0917 - numba takes the parameters of an intrinsic from names in a signature

from __future__ import annotations

from typing import Any

from numba import types
from numba.extending import intrinsic

from .formats import FORMATS, SCALES_BYTES, Format
from .llvm import (
    F32,
    I32,
    I64,
    LANES,
    ZERO,
    Builder,
    element,
    fma,
    load,
    loop,
    prefetch,
    splat,
    store,
    sum_lanes,
)

STRETCH = 256
"""Numbers that one chain of multiply-adds covers: the error of SmolLM2's logits falls by a third against whole rows."""


def dot_tile(R: int, M: int, *, ahead: int = 0) -> Any:
    """f(form, x, x_stride, w, w_bytes, k, out, out_stride, scales, scale_bytes) for rows of k numbers, whole steps.

    `form` is an index of formats.FORMATS. `w_bytes` from one row of weights to the next, `scale_bytes` from one row of
    scales to the next where the form has any. With `ahead`, the weights so many tiles further on are brought into the
    cache meanwhile: rows of a tile are read side by side, and hardware does not see in that the one long stream it is.
    """

    def lower(_: Any, b: Builder, _signature: Any, args: Any) -> Any:
        form, *others = args
        for index, form_of in enumerate(FORMATS):
            with b.if_then(b.icmp_signed("==", form, I64(index))):
                _dot(b, form_of, shape=(R, M, ahead), args=others)
        return I32(0)

    @intrinsic
    def tile(_context, form, x, x_stride, w, w_bytes, k, out, out_stride, scales, scale_bytes):
        return types.int32(*[types.intp] * 10), lower

    return tile


def _dot(b: Builder, form: Format, *, shape: tuple[int, int, int], args: list[Any]) -> None:
    R, M, ahead = shape
    x, x_stride, w, w_bytes, k, out, out_stride, scales, scale_bytes = args
    inputs = [element(b, x, b.mul(x_stride, I64(m))) for m in range(M)]
    rows = [b.add(w, b.mul(w_bytes, I64(r))) for r in range(R)]
    scale_rows = [b.add(scales, b.mul(scale_bytes, I64(r))) for r in range(R)]
    further = b.add(w, b.mul(w_bytes, I64(R * ahead)))
    further_scales = b.add(scales, b.mul(scale_bytes, I64(2 * R * ahead)))

    def turn(at: Any, sums: list[Any]) -> list[Any]:
        passed = b.mul(at, I64(form.number_bytes))
        if ahead:
            prefetch(b, b.add(further, b.mul(passed, I64(R))), R * form.step * form.number_bytes)
        group = b.mul(b.sdiv(at, I64(form.step)), I64(SCALES_BYTES))
        if ahead and form.scaled:
            prefetch(b, b.add(further_scales, b.mul(group, I64(R))), R * SCALES_BYTES)
        weights = [
            form.read(b, b.add(row, passed), b.add(its, group))
            for row, its in zip(rows, scale_rows, strict=True)
        ]
        for i, column in enumerate(zip(*weights, strict=True)):
            for m in range(M):
                factor = load(b, element(b, inputs[m], b.add(at, I64(i * LANES))))
                for r in range(R):
                    sums[m * R + r] = fma(b, column[r], factor, sums[m * R + r])
        return sums

    def stretch(at: Any, totals: list[Any]) -> list[Any]:
        end = b.add(at, I64(STRETCH))
        stop = b.select(b.icmp_signed("<", end, k), end, k)
        sums = loop(b, over=(at, stop, form.step), start=[ZERO] * (R * M), turn=turn)
        return [b.fadd(total, more) for total, more in zip(totals, sums, strict=True)]

    sums = loop(b, over=(I64(0), k, STRETCH), start=[ZERO] * (R * M), turn=stretch)
    for m in range(M):
        for r in range(R):
            where = element(b, out, b.add(b.mul(out_stride, I64(m)), I64(r)))
            store(b, sum_lanes(b, sums[m * R + r]), where)


def mix_tile(M: int, C: int) -> Any:
    """f(p, p_stride, v, v_stride, n, out, out_stride) for n > 0 rows of v."""

    def generate(b: Builder, args: Any) -> None:
        p, p_stride, v, v_stride, n, out, out_stride = args
        weights = [element(b, p, b.mul(p_stride, I64(m))) for m in range(M)]
        places = [
            element(b, out, b.add(b.mul(out_stride, I64(m)), I64(LANES * c)))
            for m in range(M)
            for c in range(C)
        ]

        def turn(at: Any, sums: list[Any]) -> list[Any]:
            row = element(b, v, b.mul(v_stride, at))
            values = [load(b, element(b, row, I64(LANES * c))) for c in range(C)]
            for m in range(M):
                weight = splat(b, load(b, element(b, weights[m], at), F32))
                for c in range(C):
                    sums[m * C + c] = fma(b, weight, values[c], sums[m * C + c])
            return sums

        start = [load(b, place) for place in places]
        for place, total in zip(places, loop(b, over=(I64(0), n, 1), start=start, turn=turn), strict=True):
            store(b, total, place)

    def lower(_: Any, b: Builder, _signature: Any, args: Any) -> Any:
        generate(b, args)
        return I32(0)

    @intrinsic
    def tile(_context, p, p_stride, v, v_stride, n, out, out_stride):
        return types.int32(*[types.intp] * 7), lower

    return tile


@intrinsic
def times_power(_context, y, n):
    """y times 2^n for a whole float32 n, if neither is far from 1."""

    def lower(_: Any, b: Builder, _signature: Any, args: Any) -> Any:
        y, n = args
        return b.bitcast(b.add(b.bitcast(y, I32), b.shl(b.fptosi(n, I32), I32(23))), F32)

    return types.float32(types.float32, types.float32), lower


@intrinsic
def floats_at(_context, address):
    """A pointer to float32 from an address."""
    return types.CPointer(types.float32)(types.intp), _as_pointer


@intrinsic
def integers_at(_context, address):
    """A pointer to int64 from an address."""
    return types.CPointer(types.int64)(types.intp), _as_pointer


def _as_pointer(context: Any, b: Builder, signature: Any, args: Any) -> Any:
    return b.inttoptr(args[0], context.get_value_type(signature.return_type))
