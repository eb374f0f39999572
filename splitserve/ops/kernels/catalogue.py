"""Every kernel, started as the models start it: on meta tensors of the real shapes, so that nothing runs.

    DeepSeek-V4-Flash   hidden 4096, 64 heads of 448 + 64, 256 experts of 2048, latents of 584 bytes
    Llama-3-8B          hidden 4096, 32 heads of 128 over 8, ffn 14336

Under `launch.compiling` a case compiles what it starts. Sizes are chosen so that every tuned configuration is used:
where a table has entries for few and for many tokens, a case runs with both.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from types import ModuleType

import torch

from splitserve.ops import triton as ops
from splitserve.ops.kernels.archs import FIRST_FP8
from splitserve.ops.kernels.counts import cdiv
from splitserve.ops.kernels.tuned import sizes, tuned
from splitserve.ops.ref.v4 import Gate, Places, Reach, Rows, Singles, Store
from splitserve.ops.triton import (
    attention,
    dense,
    digest,
    grouping,
    matrix,
    matrix8,
    matrix_lanes,
    matrix_many,
    moves,
    norms,
    routing,
    sampling,
    v4,
)
from splitserve.ops.triton.multiply import Codes, Strided, Words, expand, many_rows, multiply
from splitserve.ops.triton.parts import FEW, MOST, Parts
from splitserve.ops.triton.rounding import quantise_groups, quantise_rows, round_rows
from splitserve.ops.triton.routing import add_up
from splitserve.spec import Growth, Kind, StateSpec, Units, lay_out

from .catalogue_experts import experts_eight
from .meta import BF16, DIM, F32, HEADS, HIDDEN, I32, I64, LATENT, ROPE, U8, meta, tiles, words

HOLDERS: tuple[ModuleType, ...] = (
    attention, dense, digest, grouping, matrix, matrix8, matrix_lanes, matrix_many, moves, norms, routing,
    sampling, v4.choosing, v4.compress, v4.experts, v4.hyper, v4.hyper_many, v4.indexer, v4.rating, v4.rows, v4.singles,
    v4.sinkhorn, v4.sparse, v4.sparse_few, v4.sparse_many, v4.sparse_scratch,
)  # fmt: skip
"""The modules that define kernels."""


@dataclass(frozen=True)
class Case:
    name: str
    start: Callable[[int], object]  # with the architecture


def kernels() -> dict[str, bool]:
    """Names of all kernels, and whether they multiply matrices: what a build must have started."""
    found = {}
    for module in HOLDERS:
        for name, value in vars(module).items():
            function = getattr(value, "fn", None)  # of triton.jit, compiled or interpreted
            if callable(function) and function.__module__ == module.__name__:
                source = inspect.getsource(function)
                if "# grid:" in source:
                    found[name] = "tl.dot(" in source
    return found


def cases() -> Iterator[Case]:
    yield from _matrix_cases()
    yield from _v4_cases()
    yield from _llama_cases()
    yield from _other_cases()


def _each(kernel: str, start: Callable[[int], object]) -> Callable[[int], None]:
    """`start` with one size for each tuned entry of `kernel`."""

    def run(arch: int) -> None:
        for size in sizes(kernel, arch):
            start(size)

    return run


def _each_group(start: Callable[[int], object], *, rounded: str = "") -> Callable[[int], None]:
    """`start` with each size of a block that pairs are grouped into; `rounded`: where that table wants eight bits."""

    def run(arch: int) -> None:
        loads = _eight(rounded, "group_pairs", arch) if rounded else sizes("group_pairs", arch)
        for block in sorted({tuned("group_pairs", arch, load)["BM"] for load in loads}):
            start(block)

    return run


def _each_rounded(kernel: str, rounded: str, start: Callable[[int], object]) -> Callable[[int], None]:
    """`start` with each entry of `kernel` that is used where the table `rounded` wants eight bits."""

    def run(arch: int) -> None:
        for size in {str(tuned(kernel, arch, n)): n for n in _eight(rounded, kernel, arch)}.values():
            start(size)

    return run


def _eight(rounded: str, kernel: str, arch: int) -> list[int]:
    """Sizes on both sides of every border of the two tables, as far as rows are multiplied in eight bits."""
    every = sorted({*sizes(rounded, arch), *sizes(kernel, arch)})
    return [n for n in every if arch >= FIRST_FP8 and tuned(rounded, arch, n)["EIGHT"]]


def _matrix_cases() -> Iterator[Case]:
    for kind, make in (("e4m3", tiles), ("e2m1", words)):
        yield Case(f"linear_{kind}", _each(f"weigh_{kind}", partial(_linear, make)))
        eight = partial(_each_rounded, f"weigh8_{kind}", f"rounded_{kind}")
        rounded = partial(words, eight=True) if make is words else make
        yield Case(f"linear_rounded_{kind}", eight(partial(_linear_rounded, rounded)))
        yield Case(f"experts_{kind}", _each_group(partial(_experts, make, False)))
        start = partial(_experts, rounded, True)
        yield Case(f"experts_rounded_{kind}", _each_group(start, rounded=f"rounded_{kind}"))
    yield Case(
        "linear_bf16", _each("weigh_bf16", lambda n: multiply(meta(n, HIDDEN), meta(2624, HIDDEN), dtype=F32))
    )
    yield Case("experts_eight", experts_eight)
    yield Case("strided_e4m3", _each("weigh_e4m3", partial(_strided, False)))
    yield Case("strided_rounded", _each_rounded("weigh8_e4m3", "rounded_e4m3", partial(_strided, True)))
    yield Case("expand", lambda _: expand(tiles(1536, HIDDEN)))
    yield Case("round_rows", lambda _: round_rows(meta(8, HIDDEN)))
    yield Case("round_for_library", _round_for_library)


def _round_for_library(_: int) -> None:
    """As scaled.py reads them: many rows, of widths that a program takes in one and in several pieces."""
    for size in (1024, 2048, HIDDEN, 2 * HIDDEN):
        quantise_rows(meta(512, size))
    for groups in (2, 4, 8):
        quantise_groups(meta(1024, groups, HIDDEN))


Maker = Callable[..., Codes | Words]


def _linear(make: Maker, rows: int) -> None:
    weight = make(1536, HIDDEN)
    multiply(meta(rows, HIDDEN), weight)
    multiply(meta(rows, HIDDEN), weight, limit=10.0)


def _linear_rounded(make: Maker, rows: int) -> None:
    small, large = make(1536, HIDDEN), make(32768, 1024)
    x = quantise_rows(meta(rows, HIDDEN))
    multiply(x, small)
    multiply(quantise_rows(meta(rows, 1024)), large)
    multiply(x, small, limit=10.0)


def _experts(make: Maker, rounded: bool, block: int) -> None:
    gate_up, down, tokens = make(256, 4096, HIDDEN), make(256, HIDDEN, 2048), block * 16
    groups = grouping.group_pairs(meta(tokens, 6, dtype=I32), local=range(256), block=block)
    if rounded and many_rows(gate_up, groups):  # see experts_eight: here, what does not come in its tiles
        gate_up, down = make(256, 4032, HIDDEN), make(256, 4032, 2048)
    x, inner = meta(tokens, HIDDEN), meta(tokens * 6, 2048)
    rows = (quantise_rows(x), quantise_rows(inner)) if rounded else (x, inner)
    multiply(rows[0], gate_up, groups=groups, share=6, factors=meta(tokens * 6, dtype=F32), limit=10.0)
    multiply(rows[1], down, groups=groups)


def _strided(rounded: bool, tokens: int) -> None:
    x = meta(tokens * 8, HIDDEN)
    multiply(quantise_rows(x) if rounded else x, tiles(8, 1024, HIDDEN), groups=Strided(8))


def _v4_cases() -> Iterator[Case]:
    yield Case("route", _route)
    yield Case("route_by_token", lambda _: v4.route_by_token(
        meta(8, 256, dtype=F32), meta(129280, 6, dtype=torch.int32), meta(8, dtype=I64), scale=1.5))  # fmt: skip
    yield Case("group_pairs", _groups)
    yield Case("mix_experts", lambda _: v4.mix_experts(
        meta(2, HIDDEN), words(256, 4096, HIDDEN), words(256, HIDDEN, 2048), meta(2, 6, dtype=F32),
        meta(2, 6, dtype=I32), local=range(256), limit=10.0))  # fmt: skip
    yield Case("clamped_swiglu", lambda _: v4.clamped_swiglu(meta(2, 4096), 10.0))
    yield Case("hyper", _each("hc_mix", _hyper))
    yield Case("hyper_many", _hyper_many)
    for tokens in (4, 64, 512):  # split far, in one or two parts, and whole
        yield Case(f"attend_{tokens}", partial(_attend, tokens, (LATENT, U8)))
        yield Case(f"attend_plain_{tokens}", partial(_attend, tokens, (DIM, torch.bfloat16)))
    yield Case("attend_many", partial(_attend_many, (LATENT, U8)))
    yield Case("attend_plain_many", partial(_attend_many, (DIM, BF16)))
    yield Case("index", _each("rate_entries", _index))
    yield Case("choose_entries", _choose)
    yield Case("norms", _norms)
    yield Case("rows", _rows)
    yield Case("pool", _pool)
    yield Case("absorb", _absorb)


class _Ranks:
    """A group whose kernels write to each other's memory, and its mailbox."""

    def __init__(self, size: int) -> None:
        self.rank, self.size, self.half = 0, size, 1 << 18
        self.addresses, self.turns = meta(size, dtype=I64), meta(4096, dtype=I32)

    def mailbox(self, _: torch.Tensor) -> _Ranks:
        return self

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x


def _in_parts(splits: int, *shape: int, dtype: torch.dtype = BF16) -> Parts:
    return Parts(meta(splits, *shape, dtype=F32), dtype)


def _hyper(tokens: int) -> None:
    streams, fn, base = meta(tokens, 4, HIDDEN), meta(24, 4 * HIDDEN, dtype=F32), meta(24, dtype=F32)
    scale, eps = meta(3, dtype=F32), 1e-6
    x, post, comb = v4.hc_pre(streams, fn, base, scale, iters=20, eps=eps, norm_eps=eps)
    v4.hc_post(x, streams, post, comb)
    norm = meta(HIDDEN, dtype=F32)
    x, leave = v4.hc_enter(streams, fn, base, scale, iters=20, eps=eps, norm_eps=eps, norm=norm)
    given: list[torch.Tensor | Parts] = [x]
    if tokens <= FEW:
        given += [_in_parts(splits, tokens, HIDDEN) for splits in (2, MOST)]
    for y in given:
        leave(y, None)
        for ranks in (2, 4, 8):
            leave(y, _Ranks(ranks))
    head = meta(4, 4 * HIDDEN, dtype=F32), meta(4, dtype=F32), meta(1, dtype=F32)
    v4.hc_head(streams, *head, eps=eps, norm_eps=eps)


def _hyper_many(_: int) -> None:
    """Whether or not the architecture's table would choose that; in as many parts as any number of tokens takes."""
    fn, base, scale = meta(24, 4 * HIDDEN, dtype=F32), meta(24, dtype=F32), meta(3, dtype=F32)
    for tokens in (4096, 5000, 8192, 16384):
        v4.hyper_many.pre_many(meta(tokens, 4, HIDDEN), fn, base, scale, iters=20, eps=1e-6, norm_eps=1e-6,
                               norm=meta(HIDDEN, dtype=F32))  # fmt: skip


def _attend(tokens: int, row: tuple[int, torch.dtype], _: int) -> None:
    """With far rows and without."""
    view = meta(64, 128, row[0], dtype=row[1])
    q, sink, half = meta(tokens, HEADS, DIM), meta(HEADS, dtype=F32), meta(tokens, ROPE // 2, dtype=F32)
    near = Rows(view, meta(tokens, 128, dtype=I64))
    for far in (Rows(view, meta(tokens, 512, dtype=I64)), None):
        v4.attend(q, near, far, sink, scale=DIM**-0.5, rope_dim=ROPE, turn_back=(half, half))


def _attend_many(row: tuple[int, torch.dtype], arch: int) -> None:
    """Through scratch, whether or not the architecture's table would choose that; any number of heads."""
    tokens, wide = 512, row[0]
    near = Rows(meta(1, 640, wide, dtype=row[1]), meta(tokens, 128, dtype=I64))
    far = Rows(meta(64, 64, wide, dtype=row[1]), meta(tokens, 512, dtype=I64), Reach(meta(1, 8, dtype=I64)))
    half = meta(tokens, ROPE // 2, dtype=F32)
    for heads in sizes("attend_many", arch):
        q, sink = meta(tokens, heads, DIM), meta(heads, dtype=F32)
        for some in (far, None):
            v4.sparse_many.attend_many(
                q, near, some, sink, q, scale=DIM**-0.5, rope_dim=ROPE, turn_back=(half, half)
            )


def _index(tokens: int) -> None:
    for view in (meta(64, 64, 132, dtype=U8), meta(64, 64, 128)):
        for lens in ([1] * tokens, [2, *[1] * (tokens - 2)] if tokens > 1 else [1], [129]):
            tokens = sum(lens)
            v4.index_scores(meta(tokens, 64, 128), meta(tokens, 64, dtype=F32), view, meta(len(lens), 32, dtype=I64),
                            meta(tokens, dtype=I64), q_lens=lens)  # fmt: skip


def _choose(_: int) -> None:
    """Rows of any width are one form where tokens are few, and two where they are many."""
    for tokens, widths in ((2, (2048,)), (v4.choosing.MANY, (2048, v4.choosing.LONGEST))):
        pages, seen = meta(tokens, 128, dtype=I64), meta(tokens, dtype=I64)
        for entries in widths:
            scores = meta(tokens, entries, dtype=F32)
            v4.choose_entries(scores, 512)
            for sequence in (None, meta(tokens, dtype=I64)):
                v4.choose_located(scores, 512, Places(pages, sequence, 64), seen)


def _absorb(_: int) -> None:
    half, ids = meta(8, ROPE // 2, dtype=F32), meta(8, dtype=I64)
    step = Singles(ids, ids, meta(8, 32, dtype=I64), 256)
    for ratio, width, keys in ((4, 512, False), (4, 128, True), (128, 512, False)):
        row = (4 if ratio == 4 else 2) * width
        gate = Gate(meta(ratio, row, dtype=F32), meta(width, dtype=F32), 1e-6)
        pending = meta(64, ratio, 2 * width, dtype=F32)
        carry = meta(64, 8, 2 * width, dtype=F32) if ratio == 4 else None
        for packed in (True, False):
            size = (132 if keys else LATENT) if packed else width
            entries = meta(64, 256 // ratio, size, dtype=U8 if packed else BF16)
            store = Store(pending, carry, entries, keys)
            v4.absorb(meta(8, row, dtype=F32), gate, store, step, table=(half, half), dtype=BF16)


def _route(_: int) -> None:
    for logits in (meta(8, 256, dtype=F32), _in_parts(8, 8, 256, dtype=F32)):
        v4.route(logits, meta(256, dtype=F32), count=6, scale=1.5)
    add_up(
        meta(1, 48, HIDDEN), meta(8, 6, dtype=I32), local=range(256), dtype=BF16, plus=_in_parts(8, 8, HIDDEN)
    )


def _groups(arch: int) -> None:
    """Few pairs have a form for each power of two, many one for each size of a block."""
    for tokens in (2, 4, 8, 16, 32, 64, 128, 512):
        usual = tuned("group_pairs", arch, cdiv(tokens * 6, 256))["BM"]
        for block in sorted({usual, 64}):
            grouping.group_pairs(meta(tokens, 6, dtype=I32), local=range(256), block=block)
    for ranks in (2, 4, 8):
        grouping.group_pairs(meta(512, 6, dtype=I32), local=range(256 // ranks), block=64)


def _norms(_: int) -> None:
    for size in (HIDDEN, 2048):
        round_rows(meta(999, size))
    for splits in (2, 16):
        both, turns = _in_parts(splits, 8, 1024 + DIM), meta(8, ROPE // 2, dtype=F32)
        v4.rms_norm(both[:, :1024], meta(1024, dtype=F32), 1e-6)
        v4.rms_norm_rotate(both[:, 1024:].unsqueeze(1), meta(DIM, dtype=F32), 1e-6, (turns, turns))
    half = meta(8, ROPE // 2, dtype=F32)
    q, kv = meta(8, HEADS, DIM), meta(8, 1, DIM)
    v4.rms_norm(meta(8, HIDDEN), meta(HIDDEN, dtype=F32), 1e-6)
    v4.rms_norm(meta(8, 1024), meta(1024, dtype=F32), 1e-6)
    v4.rms_norm_rotate(q, None, 1e-6, (half, half))
    v4.rms_norm_rotate(kv, meta(DIM, dtype=F32), 1e-6, (half, half))
    v4.rotate_tail(meta(8, 64, 128), (half, half))
    v4.rotate_tail(q, (half, half), inverse=True)


def _rows(_: int) -> None:
    unit = meta(8, dtype=I64)
    for dtype, width, key in ((U8, LATENT, 132), (BF16, DIM, 128)):
        view, keys = meta(64, 128, width, dtype=dtype), meta(64, 64, key, dtype=dtype)
        v4.encode_latents(meta(8, DIM), ROPE, view)
        v4.write_latents(view, meta(8, DIM), unit, unit, rope_dim=ROPE)
        v4.encode_keys(meta(8, 128), keys)
        v4.write_keys(keys, meta(8, 128), unit, unit)
        v4.write_rows(view, meta(8, width, dtype=dtype), unit, unit)
        v4.take_rows(view, unit)


def _pool(_: int) -> None:
    for ratio, width in ((4, 512), (4, 128), (128, 512)):
        plan = v4.Windows(
            ratio, meta(8, dtype=I64), meta(8, ratio, dtype=I64), meta(8, ratio, dtype=I64), meta(8, ratio, dtype=I64),
            meta(8, dtype=torch.bool), meta(8, dtype=I64), meta(8, dtype=I64), meta(8, dtype=I64),
        )  # fmt: skip
        carry = meta(64, 8, 2 * width, dtype=F32) if ratio == 4 else None
        fresh = meta(32, (4 if ratio == 4 else 2) * width, dtype=F32)
        v4.pool_windows(fresh, meta(64, ratio, 2 * width, dtype=F32), carry, plan)


def _llama_cases() -> Iterator[Case]:
    yield Case("llama_dense", _llama_dense)
    yield Case("decode", _each("decode_span", _decode))
    yield Case("prefill", _each("prefill", _prefill))
    yield Case("write_rows", lambda _: ops.write_rows(
        meta(64, 8, 256, 256), meta(8, 8, 128), meta(8, 8, 128), meta(8, dtype=I64), meta(8, dtype=I64)))  # fmt: skip
    yield Case("choose_experts", lambda _: ops.choose_experts(meta(8, 128), 8, normalize=True))
    yield Case("mix_experts_bf16", _each_group(_bf16_experts))


def _llama_dense(_: int) -> None:
    x, half = meta(8, HIDDEN), meta(8, 1, 64, dtype=F32)
    ops.rms_norm(x, meta(HIDDEN), 1e-5)
    ops.rms_norm(meta(8, 32, 128), meta(128), 1e-6)
    ops.add_rms_norm(x, x, meta(HIDDEN), 1e-5)
    ops.swiglu(meta(8, 2 * 14336))
    for out, size in (
        (6144, HIDDEN),
        (HIDDEN, HIDDEN),
        (2 * 14336, HIDDEN),
        (HIDDEN, 14336),
        (128256, HIDDEN),
    ):
        ops.linear(meta(8, size), meta(out, size))
    ops.rotate(meta(8, 40, 128), (half, half))


def _decode(longest: int) -> None:
    """Head sizes of Llama-3 and SmolLM2; whole context and a window."""
    for dim, window in ((128, 0), (64, 0), (128, 4096)):
        plan = attention.DecodePlan(
            meta(8, 64, dtype=I64), meta(8, dtype=torch.int32), min(longest, 8192), window
        )
        ops.attend_decode(meta(8, 32, dim), meta(64, 8, 256, 2 * dim), plan, 0.1)


def _prefill(dim: int) -> None:
    for window in (0, 4096):
        width = 128 if dim > 64 else 64
        plan = ops.plan_prefill(meta(8, dtype=I64), 2000, slice(0, 1000), 256, window)
        ops.attend_prefill(meta(1000, 32, width), meta(64, 8, 256, 2 * width), plan, 0.1)


def _bf16_experts(block: int) -> None:
    tokens = block * 8
    groups = grouping.group_pairs(meta(tokens, 8, dtype=I32), local=range(128), block=block)
    inner = multiply(meta(tokens, 2048), meta(128, 1536, 2048), groups=groups, share=8, limit=float("inf"))
    multiply(inner, meta(128, 2048, 768), groups=groups, factors=meta(tokens * 8, dtype=F32))


def _other_cases() -> Iterator[Case]:
    yield Case("draw", lambda _: ops.draw(meta(8, 129280, dtype=F32), meta(8, dtype=F32), meta(8, dtype=I64)))
    yield Case("moves", _moves)
    yield Case("digests", _digests)


def _moves(_: int) -> None:
    slab, ids = meta(64, 1 << 20, dtype=U8), meta(8, dtype=I64)
    ops.scatter_units(slab, ids, ops.gather_units(slab, ids))


def _digests(_: int) -> None:
    for row_bytes in (584, 132, 130):
        spec = StateSpec("c", 0, Growth.PAGED, row_bytes, tokens_per_row=4)
        fields = lay_out([spec], page_tokens=256).page_fields
        units = [Units(Kind.PAGE, (3, 1), 0, 0, 512)]
        memory = {Kind.PAGE: meta(8, 64 * row_bytes, dtype=U8)}
        digest.start_digests(fields, memory, units, start=0, stop=512, last=True)
