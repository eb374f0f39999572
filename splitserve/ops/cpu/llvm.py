"""Lines of LLVM that the tiles are written in: eight-lane float32 vectors at addresses (bytes, as 64-bit integers)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import cgutils

LANES = 8
I8, I16, I32, I64 = (ir.IntType(n) for n in (8, 16, 32, 64))
F16, F32 = ir.HalfType(), ir.FloatType()
VECTOR = ir.VectorType(F32, LANES)
ZERO = ir.Constant(VECTOR, [0.0] * LANES)
_LINE = 64  # bytes of a cache line

Builder = Any  # ir.IRBuilder; llvmlite has no types


def vector(kind: Any, lanes: int = LANES) -> Any:
    return ir.VectorType(kind, lanes)


def constant(kind: Any, number: int, lanes: int = LANES) -> Any:
    """A vector of one integer."""
    return ir.Constant(vector(kind, lanes), [number] * lanes)


def element(b: Builder, address: Any, index: Any) -> Any:
    """Address of the float32 so many elements further on."""
    return b.add(address, b.mul(index, I64(4)))


def load(b: Builder, address: Any, kind: Any = VECTOR) -> Any:
    return b.load(b.inttoptr(address, kind.as_pointer()), align=1)


def store(b: Builder, value: Any, address: Any) -> None:
    b.store(value, b.inttoptr(address, value.type.as_pointer()), align=1)


def splat(b: Builder, number: Any) -> Any:
    """A float32 in every lane."""
    one = b.insert_element(ir.Constant(VECTOR, ir.Undefined), number, I32(0))
    return b.shuffle_vector(one, one, constant(I32, 0))


def lanes(b: Builder, of: Any, chosen: range) -> Any:
    """Some lanes of a vector, as a shorter one."""
    return b.shuffle_vector(of, of, ir.Constant(vector(I32, len(chosen)), list(chosen)))


def fma(b: Builder, x: Any, y: Any, z: Any) -> Any:
    """x y + z, rounded once."""
    kind = ir.FunctionType(VECTOR, [VECTOR] * 3)
    return b.call(cgutils.get_or_insert_function(b.module, kind, f"llvm.fma.v{LANES}f32"), [x, y, z])


def sum_lanes(b: Builder, of: Any) -> Any:
    """((l0 + l4) + (l2 + l6)) + ((l1 + l5) + (l3 + l7))."""
    width = LANES
    while width > 1:
        half = width // 2
        of, width = b.fadd(lanes(b, of, range(half)), lanes(b, of, range(half, width))), half
    return b.extract_element(of, I32(0))


def turned(b: Builder, rows: list[Any]) -> list[Any]:
    """Eight vectors as a square matrix, transposed: pairs, then fours, then halves change places."""

    def mixed(x: Any, y: Any, low: tuple[int, int, int, int]) -> Any:
        """Four lanes of a vector's lower half or of the other's (from 8 on), and the same four of the upper halves."""
        chosen = [*low, *(i + LANES // 2 for i in low)]
        return b.shuffle_vector(x, y, ir.Constant(vector(I32), chosen))

    pairs = [
        mixed(rows[i], rows[i + 1], low) for low in ((0, 8, 1, 9), (2, 10, 3, 11)) for i in range(0, LANES, 2)
    ]
    fours = [
        [mixed(pairs[i], pairs[i + 1], low) for i in (0, 4) for low in ((0, 1, 8, 9), (2, 3, 10, 11))],
        [mixed(pairs[i], pairs[i + 1], low) for i in (2, 6) for low in ((0, 1, 8, 9), (2, 3, 10, 11))],
    ]
    halves = (range(4), range(4, LANES))
    return [
        b.shuffle_vector(x, y, ir.Constant(vector(I32), [*half, *(i + LANES for i in half)]))
        for half in halves
        for x, y in zip(*fours, strict=True)
    ]


def prefetch(b: Builder, address: Any, num_bytes: int) -> None:
    """Bring bytes into every level of the cache, for reading. Addresses past the end of memory do no harm."""
    kind = ir.FunctionType(ir.VoidType(), [I8.as_pointer(), I32, I32, I32])
    function = cgutils.get_or_insert_function(b.module, kind, "llvm.prefetch.p0")
    for line in range(0, num_bytes, _LINE):
        where = b.inttoptr(b.add(address, I64(line)), I8.as_pointer())
        b.call(function, [where, I32(0), I32(3), I32(1)])


def loop(
    b: Builder,
    *,
    over: tuple[Any, Any, int],
    start: list[Any],
    turn: Callable[[Any, list[Any]], list[Any]],
) -> list[Any]:
    """Carry `start` through turn(i, carried) for each i of a range that is not empty; returns what comes out."""
    first, stop, step = over
    before = b.block
    body, after = b.append_basic_block("turn"), b.append_basic_block("after")
    b.branch(body)
    b.position_at_end(body)
    at = b.phi(I64)
    carried = [b.phi(value.type) for value in start]
    results = turn(at, list(carried))
    following = b.add(at, I64(step))
    end = b.block  # not `body` where a turn has a loop in it
    b.cbranch(b.icmp_signed("<", following, stop), body, after)
    for phi, begun, later in zip([at, *carried], [first, *start], [following, *results], strict=True):
        phi.add_incoming(begun, before)
        phi.add_incoming(later, end)
    b.position_at_end(after)
    return results
