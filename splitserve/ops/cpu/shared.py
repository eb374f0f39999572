"""Loops that several threads share: who is woken, how they deal the pieces out, and when a loop is over.

    caller    writes the loop down ── wakes helpers ── takes pieces ... ── waits for pieces that others still have
    helper    sleeps ─────────────────── takes pieces ... ── looks out a little longer ── sleeps

Pieces are dealt out by a counter, so that a helper whose core is taken by another process costs its own piece at most,
and one that wakes too late costs nothing: nobody waits for helpers, only for pieces. A piece is done as the whole loop
would do it, so results are the same bits for any number of threads. All of it is compiled, without Python's lock.
"""

# ruff: noqa: ARG001, PLR0917 - numba takes the parameters of an intrinsic from names in a signature

from __future__ import annotations

import atexit
import os
import threading
from typing import Any

import numpy as np
import torch
from numba import types
from numba.extending import intrinsic

from . import elementwise, paged, products
from .compiled import compiled
from .llvm import I64
from .vector import floats_at

PRODUCT, SWIGLU, ATTEND = 0, 1, 2
"""Kinds of loops."""

LEAST = 1 << 17
"""Multiplications below which a loop is faster alone: waking a helper takes some 5 us."""

PIECES = 4  # for each thread: fewer leave more waiting at the end, more cost more counting
MANY_PIECES = 16  # ... where a piece of one unit takes long enough, as in products of many rows
MOST_PARTS = 16  # of one attention: each has scores of its own
ROWS = 8  # of an elementwise loop that are one piece at least
_LOOK_OUT = (
    10_000  # times that a helper looks for the next loop, letting others run, before it sleeps: some 5 ms
)
_SLOTS = 8  # loops written down at once: one that runs, and old ones that a late helper may still look at
# Places on the board of 64-bit words: generation << 32 | piece, then the slots.
_NEXT, _STOP, _FIRST, _SIZE = 0, 8, 16, 48
_TOTAL, _DONE, _KIND, _STEP, _ARGS = 0, 8, 16, 17, 18
_SEMAPHORE = 64  # bytes; a sem_t is 32

_post = types.ExternalFunction("sem_post", types.int32(types.uintp))
_wait = types.ExternalFunction("sem_wait", types.int32(types.uintp))
_start = types.ExternalFunction("sem_init", types.int32(types.uintp, types.int32, types.uint32))
_count = types.ExternalFunction("sem_getvalue", types.int32(types.uintp, types.uintp))
_yield = types.ExternalFunction("sched_yield", types.int32())


@intrinsic
def _add(_context, address, number):
    """Atomically: what was at the address, to which a number is added."""

    def lower(_: Any, b: Any, _signature: Any, args: Any) -> Any:
        return b.atomic_rmw("add", b.inttoptr(args[0], I64.as_pointer()), args[1], "seq_cst")

    return types.int64(types.intp, types.intp), lower


@intrinsic
def _put(_context, address, number):
    """Atomically: a number to the address; what was there."""

    def lower(_: Any, b: Any, _signature: Any, args: Any) -> Any:
        return b.atomic_rmw("xchg", b.inttoptr(args[0], I64.as_pointer()), args[1], "seq_cst")

    return types.int64(types.intp, types.intp), lower


@intrinsic
def _get(_context, board, place):
    """The word at a place of the board, as it is now."""

    def lower(_: Any, b: Any, _signature: Any, args: Any) -> Any:
        at = b.add(args[0], b.mul(args[1], I64(8)))
        return b.load_atomic(b.inttoptr(at, I64.as_pointer()), "seq_cst", 8)

    return types.int64(types.intp, types.intp), lower


@compiled()
def _set(board, place, number):
    _put(board + 8 * place, number)


@compiled()
def _slot(generation):
    return _FIRST + generation % _SLOTS * _SIZE


@compiled()
def _take_pieces(board):
    """Do pieces of the loop at hand until there are none."""
    while True:
        ticket = _add(board + 8 * _NEXT, 1)
        generation, piece = ticket >> 32, ticket & 0xFFFFFFFF
        slot = _slot(generation)
        total = _get(board, slot + _TOTAL)
        # While a piece is not done its loop is not over; so what was read is this loop's, or the piece is none.
        if _get(board, _NEXT) >> 32 != generation or piece >= total:
            return
        _do(board, slot, piece)
        _add(board + 8 * (slot + _DONE), 1)


@compiled()
def _do(board, slot, piece):
    kind, step, a = _get(board, slot + _KIND), _get(board, slot + _STEP), slot + _ARGS
    if kind == PRODUCT:
        w_bytes, n, scale_bytes = _get(board, a + 5), _get(board, a + 6), _get(board, a + 11)
        first = piece * step
        products.product(
            _get(board, a), _get(board, a + 1), _get(board, a + 2), _get(board, a + 3),
            _get(board, a + 4) + first * w_bytes, w_bytes, min(step, n - first), _get(board, a + 7),
            _get(board, a + 8) + 4 * first, _get(board, a + 9), _get(board, a + 10) + first * scale_bytes, scale_bytes,
        )  # fmt: skip
    elif kind == ATTEND:
        scale = floats_at(board + 8 * (a + 17))[0]
        paged.attend(
            _get(board, a), _get(board, a + 1), _get(board, a + 2), _get(board, a + 3),
            (_get(board, a + 4), _get(board, a + 5), _get(board, a + 6)),
            _get(board, a + 7), _get(board, a + 8), _get(board, a + 9), _get(board, a + 10),
            (_get(board, a + 11), _get(board, a + 12), _get(board, a + 13), _get(board, a + 14), _get(board, a + 15)),
            _get(board, a + 16), scale, _get(board, a + 18), piece, _get(board, slot + _TOTAL),
        )  # fmt: skip
    else:
        gate_up, m, n, out = _get(board, a), _get(board, a + 1), _get(board, a + 2), _get(board, a + 3)
        first = piece * step
        elementwise.swiglu(gate_up + 8 * n * first, min(step, m - first), n, out + 4 * n * first)


@compiled()
def _help(board, semaphore):
    """A helper's life."""
    while _get(board, _STOP) == 0:
        _wait(semaphore)  # a signal may end it early: then there is nothing to take
        _take_pieces(board)
        seen, turns = _get(board, _NEXT) >> 32, 0
        while turns < _LOOK_OUT and _get(board, _STOP) == 0:
            if _get(board, _NEXT) >> 32 != seen:
                _take_pieces(board)
                seen, turns = _get(board, _NEXT) >> 32, 0
            _yield()
            turns += 1


@compiled()
def _share(board, semaphores, helpers, waiting, kind, total, step, args):
    """Do a loop of `total` pieces together with whoever wakes in time."""
    generation = (_get(board, _NEXT) >> 32) + 1
    slot = _slot(generation)
    _set(board, slot + _DONE, 0)
    _set(board, slot + _KIND, kind)
    _set(board, slot + _STEP, step)
    for i in range(len(args)):
        _set(board, slot + _ARGS + i, args[i])
    _set(board, slot + _TOTAL, total)
    _set(board, _NEXT, generation << 32)
    for i in range(min(helpers, total - 1)):
        semaphore = semaphores + i * _SEMAPHORE
        _count(semaphore, waiting)
        if _get(waiting, 0) & 0xFFFFFFFF == 0:  # else a helper has been woken before and not come yet
            _post(semaphore)
    _take_pieces(board)
    while _get(board, slot + _DONE) != total:
        _yield()


@compiled()
def _make_semaphores(semaphores, count):
    for i in range(count):
        _start(semaphores + i * _SEMAPHORE, 0, 0)


@compiled()
def _stop(board, semaphores, helpers):
    _set(board, _STOP, 1)
    for i in range(helpers):
        _post(semaphores + i * _SEMAPHORE)


class Crew:
    """The threads of one process that share loops; `helpers` beside the caller. They end with the process."""

    def __init__(self, helpers: int) -> None:
        self.helpers = helpers
        self._board = np.zeros(_FIRST + _SLOTS * _SIZE, dtype=np.int64)
        self._semaphores = np.zeros(helpers * _SEMAPHORE + _SEMAPHORE, dtype=np.uint8)
        self._waiting = np.zeros(1, dtype=np.int64)
        self._busy = threading.Lock()  # ranks of a test are threads: whoever comes second computes alone
        _make_semaphores(self._semaphores.ctypes.data, helpers)
        # A thread that is woken starts on its waker's core, behind it, and may wait there for milliseconds.
        cpus = sorted(os.sched_getaffinity(0))
        self._threads = [
            threading.Thread(
                target=_live,
                args=(
                    self._board.ctypes.data,
                    self._semaphores.ctypes.data + i * _SEMAPHORE,
                    {cpus[(i + 1) % len(cpus)]},
                ),
                name=f"crew-{i}",
                daemon=True,
            )
            for i in range(helpers)
        ]
        for thread in self._threads:
            thread.start()
        atexit.register(self.close)  # before the board is gone, which they read

    def close(self) -> None:
        """End the helpers. Idempotent; no loop may be under way."""
        _stop(self._board.ctypes.data, self._semaphores.ctypes.data, self.helpers)
        for thread in self._threads:
            thread.join()

    def share(self, kind: int, total: int, step: int, args: tuple[int, ...]) -> bool:
        """Whether the loop was done: not if another thread's is under way."""
        if not self._busy.acquire(blocking=False):
            return False
        try:
            _share(
                self._board.ctypes.data,
                self._semaphores.ctypes.data,
                self.helpers,
                self._waiting.ctypes.data,
                kind,
                total,
                step,
                args,
            )
        finally:
            self._busy.release()
        return True


def _live(board: int, semaphore: int, cpus: set[int]) -> None:
    os.sched_setaffinity(0, cpus)  # of this thread alone
    _help(board, semaphore)


_crews: dict[int, Crew] = {}


def _crew() -> Crew | None:
    """That of torch's number of threads, which the engine has set to its share of the cores."""
    helpers = torch.get_num_threads() - 1
    if helpers < 1:
        return None
    if helpers not in _crews:
        _crews[helpers] = Crew(helpers)
    return _crews[helpers]


def product(*args: int) -> None:
    """products.product, over its rows of weights."""
    m, n, k = args[3], args[6], args[7]
    crew = _crew() if m * n * k >= LEAST else None
    if crew is not None:
        many = m >= products.MANY
        step = _step(n, crew, products.COLUMNS if many else products.PANEL, MANY_PIECES if many else PIECES)
        if crew.share(PRODUCT, -(-n // step), step, args):
            return
    products.product(*args)


def swiglu(gate_up: int, m: int, n: int, out: int) -> None:
    """elementwise.swiglu, over its rows."""
    crew = _crew() if m >= 2 * ROWS else None
    if crew is not None:
        step = _step(m, crew, ROWS)
        if crew.share(SWIGLU, -(-m // step), step, (gate_up, m, n, out)):
            return
    elementwise.swiglu(gate_up, m, n, out)


def attend(*args: Any, queries: int) -> None:
    """paged.attend up to `out`, over its items; `queries` are the tokens of all sequences."""
    shape, scale, out = args[9], np.float32(args[11]), args[12]
    items = queries if queries == shape[0] else -(-queries // paged.QUERIES) * shape[2]
    parts = min(shape[1] * items, MOST_PARTS)
    crew = _crew() if parts > 1 else None
    if crew is not None:
        flat = (*args[:4], *args[4], *args[5:9], *shape, args[10], int(scale.view(np.int32)), out)
        if crew.share(ATTEND, parts, 0, flat):
            return
    paged.attend(*args[:11], scale, out, 0, 1)


def _step(count: int, crew: Crew, unit: int, pieces: int = PIECES) -> int:
    """Rows of a piece: whole units, some pieces for each thread."""
    return -(-count // (unit * pieces * (crew.helpers + 1))) * unit
