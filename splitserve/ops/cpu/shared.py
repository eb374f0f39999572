"""Loops that several threads share: who is woken, how they deal the pieces out, and when a loop is over.

    caller    writes the loop down ── wakes helpers ── takes pieces ... ── waits for pieces that others still have
    helper    sleeps ─────────────────── takes pieces ... ── looks out a little longer ── sleeps

Pieces are dealt out by a counter, so that a helper whose core is taken by another process costs its own piece at most,
and one that wakes too late costs nothing: nobody waits for helpers, only for pieces. A piece is done as the whole loop
would do it, so results are the same bits for any number of threads. All of it is compiled, without Python's lock.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numba import types

from . import paged, pieces, products
from .atomics import add, call, get, put
from .compiled import compiled
from .pieces import ATTEND, PRODUCT, SWIGLU

LEAST = 1 << 17
"""Multiplications below which a loop is faster alone: waking a helper takes some 5 us."""

PIECES = 4  # for each thread: fewer leave more waiting at the end, more cost more counting
MANY_PIECES = 16  # ... where a piece of one unit takes long enough, as in products of many rows
_AT_FIRST = (
    7  # eighths of a thread's share of a product with few rows, in one piece: a long stream from memory
)
MOST_PARTS = 16  # of one attention: each has scores of its own
ROWS = 8  # of an elementwise loop that are one piece at least
_LOOK_OUT = (
    10_000  # times that a helper looks for the next loop, letting others run, before it sleeps: some 5 ms
)
_SLOTS = 8  # loops written down at once: one that runs, and old ones that a late helper may still look at
# Places on the board of 64-bit words: generation << 32 | piece, then the slots.
_NEXT, _STOP, _CALL, _FIRST, _SIZE = 0, 8, 9, 16, 48
_TOTAL, _DONE, _KIND, _STEP, _ARGS = 0, 8, 16, 17, 18
_SEMAPHORE = 64  # bytes; a sem_t is 32

_post = types.ExternalFunction("sem_post", types.int32(types.uintp))
_wait = types.ExternalFunction("sem_wait", types.int32(types.uintp))
_start = types.ExternalFunction("sem_init", types.int32(types.uintp, types.int32, types.uint32))
_count = types.ExternalFunction("sem_getvalue", types.int32(types.uintp, types.uintp))
_yield = types.ExternalFunction("sched_yield", types.int32())


@compiled()
def _set(board, place, number):
    put(board + 8 * place, number)


@compiled()
def _slot(generation):
    return _FIRST + generation % _SLOTS * _SIZE


@compiled()
def _take_pieces(board):
    """Do pieces of the loop at hand until there are none."""
    while True:
        ticket = add(board + 8 * _NEXT, 1)
        generation, piece = ticket >> 32, ticket & 0xFFFFFFFF
        slot = _slot(generation)
        total = get(board, slot + _TOTAL)
        # While a piece is not done its loop is not over; so what was read is this loop's, or the piece is none.
        if get(board, _NEXT) >> 32 != generation or piece >= total:
            return
        call(
            get(board, _CALL),
            get(board, slot + _KIND),
            get(board, slot + _STEP),
            total,
            piece,
            board + 8 * (slot + _ARGS),
        )
        add(board + 8 * (slot + _DONE), 1)


@compiled()
def _help(board, semaphore):
    """A helper's life."""
    while get(board, _STOP) == 0:
        _wait(semaphore)  # a signal may end it early: then there is nothing to take
        _take_pieces(board)
        seen, turns = get(board, _NEXT) >> 32, 0
        while turns < _LOOK_OUT and get(board, _STOP) == 0:
            if get(board, _NEXT) >> 32 != seen:
                _take_pieces(board)
                seen, turns = get(board, _NEXT) >> 32, 0
            _yield()
            turns += 1


@compiled()
def share(crew, kind, total, step, args):
    """Do a loop of `total` pieces together with whoever wakes in time; `crew` is the address of a Crew's words."""
    board = get(crew, 0)
    slot = _slot((get(board, _NEXT) >> 32) + 1)
    for i in range(len(args)):
        _set(board, slot + _ARGS + i, args[i])
    _share(crew, kind, total, step)


@compiled()
def _share(crew, kind, total, step):
    board, semaphores, helpers, waiting = get(crew, 0), get(crew, 1), get(crew, 2), get(crew, 3)
    generation = (get(board, _NEXT) >> 32) + 1
    slot = _slot(generation)
    _set(board, slot + _DONE, 0)
    _set(board, slot + _KIND, kind)
    _set(board, slot + _STEP, step)
    _set(board, slot + _TOTAL, total)
    _set(board, _NEXT, generation << 32)
    for i in range(min(helpers, total - 1)):
        semaphore = semaphores + i * _SEMAPHORE
        _count(semaphore, waiting)
        if get(waiting, 0) & 0xFFFFFFFF == 0:  # else a helper has been woken before and not come yet
            _post(semaphore)
    _take_pieces(board)
    while get(board, slot + _DONE) != total:
        _yield()


@compiled()
def step_of(count, helpers, unit, pieces):
    """Rows of a piece: whole units, `pieces` pieces for each thread."""
    parts = unit * pieces * (helpers + 1)
    return (count + parts - 1) // parts * unit


@compiled()
def product_step(m, n, helpers):
    """How n rows of weights of a product with m rows of inputs are cut into pieces, for pieces.first_row."""
    if m >= products.MANY:
        return step_of(n, helpers, products.COLUMNS, MANY_PIECES)
    threads = helpers + 1
    large = n * _AT_FIRST // 8 // threads // products.PANEL * products.PANEL
    return pieces.step_from(threads, large, step_of(n - threads * large, helpers, products.PANEL, 1))


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
        self._board[_CALL] = pieces.address()
        self._semaphores = np.zeros(helpers * _SEMAPHORE + _SEMAPHORE, dtype=np.uint8)
        self._waiting = np.zeros(1, dtype=np.int64)
        parts = [self._board.ctypes.data, self._semaphores.ctypes.data, helpers, self._waiting.ctypes.data]
        self._words = np.array(parts, dtype=np.int64)
        self.address = int(self._words.ctypes.data)  # for share()
        self.busy = threading.Lock()  # ranks of a test are threads: whoever comes second computes alone
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
        if helpers:
            atexit.register(self.close)  # before the board is gone, which they read

    def close(self) -> None:
        """End the helpers. Idempotent; no loop may be under way."""
        _stop(self._board.ctypes.data, self._semaphores.ctypes.data, self.helpers)
        for thread in self._threads:
            thread.join()


def _live(board: int, semaphore: int, cpus: set[int]) -> None:
    os.sched_setaffinity(0, cpus)  # of this thread alone
    _help(board, semaphore)


_crews: dict[int, Crew] = {}
_alone = threading.local()


def borrow() -> Crew:
    """The crew, or one without helpers while another thread has it; its `busy` is to be released."""
    crew = _crew()
    if crew is not None and crew.busy.acquire(blocking=False):
        return crew
    if not hasattr(_alone, "crew"):
        _alone.crew = Crew(0)
    own: Crew = _alone.crew
    own.busy.acquire()
    return own


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
    crew = borrow()
    step = product_step(m, n, crew.helpers) if m * n * k >= LEAST else n
    _run(crew, PRODUCT, pieces.pieces_of(n, step), step, args)


def swiglu(gate_up: int, m: int, n: int, out: int) -> None:
    """elementwise.swiglu, over its rows."""
    crew = borrow()
    step = step_of(m, crew.helpers, ROWS, PIECES)
    _run(crew, SWIGLU, -(-m // step), step, (gate_up, m, n, out, n))


def attend_parts(counts: Sequence[int], kv_heads: int, group: int) -> int:
    """Pieces of an attention of sequences with so many queries each."""
    items = sum(1 if n == 1 else -(-n // paged.QUERIES) * group for n in counts)
    return min(kv_heads * items, MOST_PARTS)


def attend(*args: Any, queries: int) -> None:
    """paged.attend up to `out`, over its items; `queries` are the tokens of all sequences."""
    shape, scale, out = args[9], np.float32(args[11]), args[12]
    counts = (1,) * queries if queries == shape[0] else (queries,)
    flat = (*args[:4], *args[4], *args[5:9], *shape, args[10], int(scale.view(np.int32)), out)
    _run(borrow(), ATTEND, attend_parts(counts, shape[1], shape[2]), 0, flat)


def _run(crew: Crew, kind: int, total: int, step: int, args: tuple[int, ...]) -> None:
    """A loop with a borrowed crew, which is given back."""
    try:
        share(crew.address, kind, total, step, args)
    finally:
        crew.busy.release()
