"""A layer in two calls against the same layer operation by operation: the same bits, for any mixture of sequences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch

from splitserve.ops import cpu
from splitserve.ops.cpu import decoder
from splitserve.ops.ref import Coded, Weight

HEADS, KV_HEADS, SIZE, PAGE, HIDDEN, FFN, EPS = 6, 2, 16, 4, 96, 160, 1e-5


@pytest.fixture(params=[1, 3], autouse=True)
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def matrix(n: int, k: int, form: str) -> Weight:
    if form == "coded":
        scales = torch.randn(n, k // 32, 2).half().float() / 256
        return Coded(torch.randint(0, 256, (n, k), dtype=torch.uint8), scales)
    return (torch.randn(n, k) / k**0.5).to(torch.bfloat16 if form == "bf16" else torch.float32)


def some_layers(form: str) -> list[decoder.LayerWeights]:
    width = (HEADS + 2 * KV_HEADS) * SIZE
    shapes = ((width, HIDDEN), (HIDDEN, HEADS * SIZE), (2 * FFN, HIDDEN), (HIDDEN, FFN))
    return [
        decoder.LayerWeights(
            tuple(matrix(*shape, form) for shape in shapes),
            (torch.rand(HIDDEN), torch.rand(HIDDEN)),
            window=window,
            qkv_bias=torch.randn(width) if i else None,
            gate_up_bias=torch.randn(2 * FFN) if i else None,
            head_norms=(torch.rand(SIZE), torch.rand(SIZE)) if i else None,
        )
        for i, window in enumerate((0, 5))
    ]


def one_by_one(
    layers: Sequence[decoder.LayerWeights],
    x: torch.Tensor,
    table: tuple[torch.Tensor, torch.Tensor],
    rows: decoder.Rows,
    views: Sequence[torch.Tensor],
) -> torch.Tensor:
    for layer, view in zip(layers, views, strict=True):
        qkv, out, gate_up, down = layer.matrices
        heads = cpu.linear(cpu.rms_norm(x, layer.norms[0], EPS), qkv, layer.qkv_bias).unflatten(
            -1, (-1, SIZE)
        )
        turning = heads[:, :-KV_HEADS]
        if layer.head_norms:
            parts, norms = (turning[:, :HEADS], turning[:, HEADS:]), layer.head_norms
            turning = torch.cat(
                [cpu.rms_norm(part, norm, EPS) for part, norm in zip(parts, norms, strict=True)], 1
            )
        turned = cpu.rotate(turning, table)
        q, k = turned[:, :HEADS], turned[:, HEADS:]
        cpu.write_rows(view, k, heads[:, -KV_HEADS:], rows.write_page, rows.write_row)
        mixed, first = torch.empty_like(q), 0
        for pages, start, count in zip(rows.pages, rows.starts, rows.counts, strict=True):
            its = slice(first, first + count)
            plan = cpu.plan_prefill(pages, start + count, its, PAGE, layer.window)
            mixed[its] = cpu.attend_prefill(q[its], view, plan, SIZE**-0.5)
            first += count
        x, normed = cpu.add_rms_norm(x, cpu.linear(mixed.flatten(1), out), layer.norms[1], EPS)
        x = x + cpu.linear(cpu.swiglu(cpu.linear(normed, gate_up, layer.gate_up_bias)), down)
    return x


@pytest.mark.parametrize("form", ["f32", "bf16", "coded"])
@pytest.mark.parametrize(
    ("starts", "counts"), [((0,), (1,)), ((9, 3), (1, 1)), ((0,), (40,)), ((7, 0, 2, 5), (1, 1, 19, 33))]
)
def test_the_same_bits(form: str, starts: tuple[int, ...], counts: tuple[int, ...]) -> None:
    torch.manual_seed(len(starts))
    layers = some_layers(form)
    tables = torch.randperm(64)[: 10 * len(starts)].view(len(starts), 10)
    positions = [
        (i, start + j) for i, (start, n) in enumerate(zip(starts, counts, strict=True)) for j in range(n)
    ]
    write_page = torch.tensor([int(tables[i, at // PAGE]) for i, at in positions])
    rows = decoder.Rows(
        tables, starts, counts, write_page, torch.tensor([at % PAGE for _, at in positions]), PAGE
    )
    past = [torch.randn(64, KV_HEADS, PAGE, 2 * SIZE) for _ in layers]
    x, table = torch.randn(len(positions), HIDDEN), (torch.rand(len(positions), SIZE // 2),) * 2
    views = [view.clone() for view in past]
    want = one_by_one(layers, x, table, rows, views)

    run = decoder.Decoder(layers, heads=HEADS, kv_heads=KV_HEADS, size=SIZE, eps=EPS).begin(x, table, rows)
    pending: torch.Tensor | None = None
    for i, view in enumerate(past):
        pending = run.ffn(i, run.attention(i, view, pending))
    assert pending is not None
    assert torch.equal(run.end(pending), want)
    assert all(map(torch.equal, past, views))


def test_a_matrix_of_odd_rows_is_not_served() -> None:
    layers = some_layers("f32")
    assert decoder.serves(layers)
    odd = (*layers[0].matrices[:3], torch.zeros(HIDDEN, 9))
    assert not decoder.serves([decoder.LayerWeights(odd, layers[0].norms)])
