"""The inner loops of products of many rows: each vector holds eight results, where dot_tile's hold eight parts of one.

    pack_step      eight rows of weights, one step of their format ─▶ turned into columns, float32
    outer_tile     partial sums of M rows of inputs and 8 C rows of weights over one stretch, lane by lane
    finish_tile    partial sums ─▶ results

Every sum is the one that vector.py defines, in its order: lane l of a stretch adds up the numbers l, l + 8, ..., the
stretches follow one another, and the eight lanes are added as a tree. So results are the same bits as dot_tile's.
What differs is that M + C loads serve M C multiply-adds and that nothing is added across a vector, for which weights
have to be turned first: that pays from some rows of inputs on.

    columns of one stretch    [8 lanes][n / 8 steps][8 C rows of weights]
    partial sums              [8 lanes][M][8 C]
"""

# ruff: noqa: ARG001, PLR0917 - numba takes the parameters of an intrinsic from names in a signature

from __future__ import annotations

from typing import Any

from numba import types
from numba.extending import intrinsic

from .formats import FORMATS
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
    splat,
    store,
    turned,
)

VECTOR_BYTES = 4 * LANES


def outer_tile(M: int, C: int, steps_at_once: int) -> Any:
    """f(x, x_stride, columns, steps, sums): adds one stretch of 8 `steps` numbers to the partial sums.

    `steps` is a multiple of `steps_at_once`, which are one turn of the loop.
    """
    width = C * VECTOR_BYTES

    def generate(b: Builder, args: Any) -> None:
        x, x_stride, columns, steps, sums = args
        rows = [element(b, x, b.mul(x_stride, I64(m))) for m in range(M)]

        def lane(at: Any, _: list[Any]) -> list[Any]:
            begin = b.add(columns, b.mul(at, b.mul(steps, I64(width))))
            inputs = [element(b, row, at) for row in rows]

            def turn(step: Any, partial: list[Any]) -> list[Any]:
                here = b.add(begin, b.mul(step, I64(width)))
                passed = b.mul(step, I64(VECTOR_BYTES))
                for i in range(steps_at_once):
                    weights = [load(b, b.add(here, I64(i * width + c * VECTOR_BYTES))) for c in range(C)]
                    for m in range(M):
                        number = load(b, b.add(inputs[m], b.add(passed, I64(i * VECTOR_BYTES))), F32)
                        factor = splat(b, number)
                        for c in range(C):
                            partial[m * C + c] = fma(b, weights[c], factor, partial[m * C + c])
                return partial

            found = loop(b, over=(I64(0), steps, steps_at_once), start=[ZERO] * (M * C), turn=turn)
            its = b.add(sums, b.mul(at, I64(M * width)))
            for i, more in enumerate(found):
                place = b.add(its, I64(i * VECTOR_BYTES))
                store(b, b.fadd(load(b, place), more), place)
            return []

        loop(b, over=(I64(0), I64(LANES), 1), start=[], turn=lane)

    def lower(_: Any, b: Builder, _signature: Any, args: Any) -> Any:
        generate(b, args)
        return I32(0)

    @intrinsic
    def tile(_context, x, x_stride, columns, steps, sums):
        return types.int32(*[types.intp] * 5), lower

    return tile


def finish_tile(M: int, C: int) -> Any:
    """f(sums, out, out_stride): the lanes' sums added to results; leaves zeros for the next tile."""

    def lower(_: Any, b: Builder, _signature: Any, args: Any) -> Any:
        sums, out, out_stride = args
        for m in range(M):
            for c in range(C):
                places = [b.add(sums, I64(((at * M + m) * C + c) * VECTOR_BYTES)) for at in range(LANES)]
                lanes = [load(b, place) for place in places]
                for place in places:
                    store(b, ZERO, place)
                while len(lanes) > 1:
                    half = len(lanes) // 2
                    lanes = [b.fadd(lanes[i], lanes[i + half]) for i in range(half)]
                store(b, lanes[0], element(b, out, b.add(b.mul(out_stride, I64(m)), I64(c * LANES))))
        return I32(0)

    @intrinsic
    def tile(_context, sums, out, out_stride):
        return types.int32(*[types.intp] * 3), lower

    return tile


def pack_step(form: int) -> Any:
    """f(w, w_bytes, scales, scale_bytes, to, lane_bytes, step_bytes): a step of eight rows, as columns."""
    reader = FORMATS[form]

    def lower(_: Any, b: Builder, _signature: Any, args: Any) -> Any:
        w, w_bytes, scales, scale_bytes, to, lane_bytes, step_bytes = args
        rows = [
            list(reader.read(b, b.add(w, b.mul(w_bytes, I64(r))), b.add(scales, b.mul(scale_bytes, I64(r)))))
            for r in range(LANES)
        ]
        for i in range(reader.step // LANES):
            begin = b.add(to, b.mul(step_bytes, I64(i)))
            for at, column in enumerate(turned(b, [row[i] for row in rows])):
                store(b, column, b.add(begin, b.mul(lane_bytes, I64(at))))
        return I32(0)

    @intrinsic
    def pack(_context, w, w_bytes, scales, scale_bytes, to, lane_bytes, step_bytes):
        return types.int32(*[types.intp] * 7), lower

    return pack
