"""The two inner loops of every product, in LLVM's own vectors, since the order of a sum is part of their meaning.

    dot_tile(R, M)    out[m, r] = x[m] . w[r]           R rows of weights against M rows of inputs
        lane l = w[r, l] x[m, l] + w[r, l + 8] x[m, l + 8] + ...       one fused multiply-add after the other
        result = ((l0 + l4) + (l2 + l6)) + ((l1 + l5) + (l3 + l7))
    mix_tile(M, C)    out[m, c] += sum over i of p[m, i] v[i, c]       in the order of i, for 8 C columns

All sums of a tile stay in registers. A compiler's own vectoriser picks another order for other sizes; here it depends
on the row length alone, so that a token's numbers are the same bits in any batch and in any chunk. Addresses are in
bytes, strides in elements; numbers are float32.
"""

# ruff: noqa: ARG001, PLR0917 - numba takes the parameters of what it compiles from names in a signature

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

LANES = 8
"""Row lengths are multiples of it."""

_F32, _I32, _I64 = ir.FloatType(), ir.IntType(32), ir.IntType(64)
_VECTOR = ir.VectorType(_F32, LANES)
_LINE = 64  # bytes


def dot_tile(R: int, M: int, ahead: int = 0) -> Any:
    """f(x, x_stride, w, w_stride, k, out, out_stride) for rows of length k.

    With `ahead`, the weights so many tiles further on are brought into the cache meanwhile: rows of a tile are read
    side by side, and hardware does not see in that the one long stream that it is.
    """

    def generate(_: Any, b: ir.IRBuilder, _signature: Any, args: Any) -> Any:
        x, x_stride, w, w_stride, k, out, out_stride = args
        inputs = [_element(b, x, b.mul(x_stride, _I64(m))) for m in range(M)]
        weights = [_element(b, w, b.mul(w_stride, _I64(r))) for r in range(R)]
        further = _element(b, w, b.mul(w_stride, _I64(R * ahead)))

        def turn(at: Any, sums: list[Any]) -> list[Any]:
            if ahead:
                _prefetch(b, _element(b, further, b.mul(at, _I64(R))), R * LANES * 4)
            rows = [_load(b, _element(b, row, at)) for row in weights]
            for m in range(M):
                factor = _load(b, _element(b, inputs[m], at))
                for r in range(R):
                    sums[m * R + r] = _fma(b, rows[r], factor, sums[m * R + r])
            return sums

        zero = ir.Constant(_VECTOR, [0.0] * LANES)
        sums = _loop(b, k, step=LANES, start=[zero] * (R * M), turn=turn)
        for m in range(M):
            for r in range(R):
                where = _element(b, out, b.add(b.mul(out_stride, _I64(m)), _I64(r)))
                b.store(_sum_lanes(b, sums[m * R + r]), b.inttoptr(where, _F32.as_pointer()))
        return _I32(0)

    return _intrinsic(generate)


def mix_tile(M: int, C: int) -> Any:
    """f(p, p_stride, v, v_stride, n, out, out_stride) for n > 0 rows of v."""

    def generate(_: Any, b: ir.IRBuilder, _signature: Any, args: Any) -> Any:
        p, p_stride, v, v_stride, n, out, out_stride = args
        weights = [_element(b, p, b.mul(p_stride, _I64(m))) for m in range(M)]
        places = [
            _element(b, out, b.add(b.mul(out_stride, _I64(m)), _I64(LANES * c)))
            for m in range(M)
            for c in range(C)
        ]

        def turn(at: Any, sums: list[Any]) -> list[Any]:
            row = _element(b, v, b.mul(v_stride, at))
            values = [_load(b, _element(b, row, _I64(LANES * c))) for c in range(C)]
            for m in range(M):
                weight = _broadcast(b, _element(b, weights[m], at))
                for c in range(C):
                    sums[m * C + c] = _fma(b, weight, values[c], sums[m * C + c])
            return sums

        sums = _loop(b, n, step=1, start=[_load(b, place) for place in places], turn=turn)
        for place, total in zip(places, sums, strict=True):
            b.store(total, b.inttoptr(place, _VECTOR.as_pointer()), align=4)
        return _I32(0)

    return _intrinsic(generate)


@intrinsic
def float_from_bits(_context, bits):
    """The float32 with the bits of an int32."""

    def generate(_: Any, b: ir.IRBuilder, _signature: Any, args: Any) -> Any:
        return b.bitcast(args[0], _F32)

    return types.float32(types.int32), generate


@intrinsic
def floats_at(_context, address):
    """A pointer to float32 from an address."""

    def generate(context: Any, b: ir.IRBuilder, signature: Any, args: Any) -> Any:
        return b.inttoptr(args[0], context.get_value_type(signature.return_type))

    return types.CPointer(types.float32)(types.intp), generate


@intrinsic
def integers_at(_context, address):
    """A pointer to int64 from an address."""

    def generate(context: Any, b: ir.IRBuilder, signature: Any, args: Any) -> Any:
        return b.inttoptr(args[0], context.get_value_type(signature.return_type))

    return types.CPointer(types.int64)(types.intp), generate


# ------------------------------------------------------------------ LLVM, a line at a time


def _intrinsic(generate: Callable[..., Any]) -> Any:
    @intrinsic
    def tile(_context, a, a_stride, b, b_stride, length, out, out_stride):
        return types.int32(*[types.intp] * 7), generate

    return tile


def _loop(
    b: ir.IRBuilder, stop: Any, *, step: int, start: list[Any], turn: Callable[[Any, list[Any]], list[Any]]
) -> list[Any]:
    """Carry `start` through turn(i, carried) for i in range(0, stop, step), at least once; returns what comes out."""
    before = b.block
    body, after = b.append_basic_block("turn"), b.append_basic_block("after")
    b.branch(body)
    b.position_at_end(body)
    at = b.phi(_I64)
    carried = [b.phi(value.type) for value in start]
    results = turn(at, list(carried))
    following = b.add(at, _I64(step))
    b.cbranch(b.icmp_signed("<", following, stop), body, after)
    for phi, first, later in zip([at, *carried], [_I64(0), *start], [following, *results], strict=True):
        phi.add_incoming(first, before)
        phi.add_incoming(later, body)
    b.position_at_end(after)
    return results


def _element(b: ir.IRBuilder, address: Any, index: Any) -> Any:
    """Address of a float32 so many elements further on."""
    return b.add(address, b.mul(index, _I64(4)))


def _load(b: ir.IRBuilder, address: Any) -> Any:
    return b.load(b.inttoptr(address, _VECTOR.as_pointer()), align=4)


def _broadcast(b: ir.IRBuilder, address: Any) -> Any:
    one = b.insert_element(
        ir.Constant(_VECTOR, ir.Undefined), b.load(b.inttoptr(address, _F32.as_pointer())), _I32(0)
    )
    return b.shuffle_vector(one, one, ir.Constant(ir.VectorType(_I32, LANES), [0] * LANES))


def _fma(b: ir.IRBuilder, x: Any, y: Any, z: Any) -> Any:
    kind = ir.FunctionType(_VECTOR, [_VECTOR] * 3)
    return b.call(cgutils.get_or_insert_function(b.module, kind, f"llvm.fma.v{LANES}f32"), [x, y, z])


def _sum_lanes(b: ir.IRBuilder, vector: Any) -> Any:
    width = LANES
    while width > 1:
        half = width // 2
        low, high = (
            b.shuffle_vector(vector, vector, ir.Constant(ir.VectorType(_I32, half), list(lanes)))
            for lanes in (range(half), range(half, width))
        )
        vector, width = b.fadd(low, high), half
    return b.extract_element(vector, _I32(0))


def _prefetch(b: ir.IRBuilder, address: Any, num_bytes: int) -> None:
    """Bring bytes into every cache level, for reading."""
    kind = ir.FunctionType(ir.VoidType(), [ir.IntType(8).as_pointer(), _I32, _I32, _I32])
    prefetch = cgutils.get_or_insert_function(b.module, kind, "llvm.prefetch.p0")
    for line in range(0, num_bytes, _LINE):
        where = b.inttoptr(b.add(address, _I64(line)), ir.IntType(8).as_pointer())
        b.call(prefetch, [where, _I32(0), _I32(3), _I32(1)])
