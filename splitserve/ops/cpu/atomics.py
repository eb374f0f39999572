"""64-bit words that several threads read and write, and calls of machine code by its address."""

# ruff: noqa: ARG001, PLR0917 - numba takes the parameters of an intrinsic from names in a signature

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from .llvm import I32, I64


@intrinsic
def add(_context, address, number):
    """Atomically: what was at the address, to which a number is added."""

    def lower(_: Any, b: Any, _signature: Any, args: Any) -> Any:
        return b.atomic_rmw("add", b.inttoptr(args[0], I64.as_pointer()), args[1], "seq_cst")

    return types.int64(types.intp, types.intp), lower


@intrinsic
def put(_context, address, number):
    """Atomically: a number to the address; what was there."""

    def lower(_: Any, b: Any, _signature: Any, args: Any) -> Any:
        return b.atomic_rmw("xchg", b.inttoptr(args[0], I64.as_pointer()), args[1], "seq_cst")

    return types.int64(types.intp, types.intp), lower


@intrinsic
def get(_context, address, place):
    """The 64-bit word at a place behind an address, as it is now."""

    def lower(_: Any, b: Any, _signature: Any, args: Any) -> Any:
        at = b.add(args[0], b.mul(args[1], I64(8)))
        return b.load_atomic(b.inttoptr(at, I64.as_pointer()), "seq_cst", 8)

    return types.int64(types.intp, types.intp), lower


@intrinsic
def call(_context, function, kind, step, total, piece, args):
    """pieces.do, by its address: so its code is no part of its callers', which would each take as long to compile."""

    def lower(_: Any, b: Any, _signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [I64] * 5)
        b.call(b.inttoptr(args[0], kind.as_pointer()), args[1:])
        return I32(0)

    return types.int32(*[types.intp] * 6), lower
