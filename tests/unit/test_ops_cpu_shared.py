"""Loops that threads share: the same bits as alone, every piece once, for any sizes, and when two threads ask at once."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from splitserve.ops import ref
from splitserve.ops.cpu import attention, dense, shared
from splitserve.ops.ref import Coded, Weight


@pytest.fixture(autouse=True)
def three_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def alone(call: object) -> torch.Tensor:
    torch.set_num_threads(1)
    try:
        return call()  # type: ignore[operator, no-any-return]
    finally:
        torch.set_num_threads(3)


@settings(deadline=None, max_examples=60)
@given(
    st.integers(1, 40),
    st.integers(1, 700),
    st.sampled_from((8, 64, 576)),
    st.sampled_from(("f32", "bf16", "coded")),
)
def test_a_product_has_the_same_bits(m: int, n: int, k: int, form: str) -> None:
    x = torch.randn(m, k)
    weight: Weight = torch.randn(n, k)
    if form == "bf16":
        weight = weight.bfloat16()
    if form == "coded" and k % 32 == 0:
        weight = Coded(
            torch.randint(0, 256, (n, k), dtype=torch.uint8), torch.randn(n, k // 32, 2).half().float()
        )
    assert torch.equal(dense.linear(x, weight), alone(lambda: dense.linear(x, weight)))


def test_thousands_in_a_row_are_each_done_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """No piece is lost or done for another loop, however late a helper comes: 3,000 loops over outputs of their own."""
    monkeypatch.setattr(shared, "LEAST", 0)
    x, weights = torch.ones(1, 8), [torch.full((n, 8), float(n)) for n in range(1, 200, 7)]
    for i in range(3000):
        weight = weights[i % len(weights)]
        found = dense.linear(x, weight)
        assert torch.equal(found, torch.full((1, len(weight)), 8.0 * len(weight)))


@pytest.mark.parametrize("tokens", [15, 16, 33, 257])
def test_elementwise(tokens: int) -> None:
    gate_up = torch.randn(tokens, 2 * 40)
    assert torch.equal(dense.swiglu(gate_up), alone(lambda: dense.swiglu(gate_up)))


@pytest.mark.parametrize("window", [0, 20])
@pytest.mark.parametrize(("lens", "rows"), [((70, 3, 41), None), ((130,), 77)])
def test_attention(lens: tuple[int, ...], rows: int | None, window: int) -> None:
    """Sequences of one token each, and a chunk of 77."""
    pages = torch.randperm(20)[: 3 * len(lens) + 7].view(1, -1).repeat(len(lens), 1)
    view = torch.randn(20, 3, 16, 128)
    q = torch.randn(rows or len(lens), 9, 64)
    if rows is None:
        plan = attention.plan_decode(pages, lens, 16, window)
        shared_out, want = (
            attention.attend_decode(q, view, plan, 0.125),
            ref.plan_decode(pages, lens, 16, window),
        )
        want = ref.attend_decode(q, view, want, 0.125)
    else:
        plan = attention.plan_prefill(pages[0], lens[0], slice(0, rows), 16, window).chunk
        shared_out = attention.attend_decode(q, view, plan, 0.125)
        want = shared_out
    assert torch.equal(shared_out, alone(lambda: attention.attend_decode(q, view, plan, 0.125)))
    assert torch.allclose(shared_out, want, atol=1e-5)


def test_two_threads_that_ask_at_once_both_get_their_own() -> None:
    x = torch.randn(4, 576)
    weights = [torch.randn(960, 576) for _ in range(4)]
    want = [alone(lambda w=w: dense.linear(x, w)) for w in weights]

    def work(i: int) -> bool:
        return all(torch.equal(dense.linear(x, weights[i]), want[i]) for _ in range(100))

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(work, range(4))) == [True] * 4
