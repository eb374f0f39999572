"""Scratch memory of compiled loops: taken and given back by hand, since what is used of it is its address alone.

numba gives an array back after the last line that names it. To take an array's address and go on with that is to work
in memory that another thread may have by then: the numbers of both are wrong, now and then. So no loop of this package
makes arrays (tests/unit/test_ops_cpu_memory.py looks), and none returns before it has given back what it took.
"""

from __future__ import annotations

from numba import types

from .compiled import compiled

_ALIGNED = 64  # bytes: a cache line, and a multiple of any vector

_take = types.ExternalFunction("aligned_alloc", types.intp(types.intp, types.intp))
_give = types.ExternalFunction("free", types.void(types.intp))


@compiled(inline="always")
def take_floats(count):
    """The address of `count` float32 that hold anything, aligned to 64 bytes."""
    return _take(_ALIGNED, (4 * count + _ALIGNED) // _ALIGNED * _ALIGNED)


@compiled(inline="always")
def take_integers(count):
    """The address of `count` int64 that hold anything, aligned to 64 bytes."""
    return take_floats(2 * count)


@compiled(inline="always")
def give_back(address):
    """The other end of either. Nothing may look at the address afterwards."""
    _give(address)
