"""The compiled kernels against their twins in torch, and that no token's bits depend on what is computed beside it."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from splitserve.ops import cpu, ref
from splitserve.ops.choose import kernels
from splitserve.ops.ref import Coded, Weight, widen

NAN = float("nan")


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5 * max(1.0, float(want.abs().max())))


def weights(form: str, n: int, k: int) -> Weight:
    if form == "coded":
        halves = torch.randn(n, k // 32, 2).half().float() / 64
        return Coded(torch.randint(0, 256, (n, k), dtype=torch.uint8), halves)
    return torch.randn(n, k).to({"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}[form])


FORMS = ["f32", "f16", "bf16", "coded"]


@pytest.mark.parametrize("form", FORMS)
@settings(deadline=None, max_examples=25)
@given(
    m=st.integers(1, 37),
    n=st.sampled_from([1, 3, 4, 11, 12, 13, 40]),
    k=st.sampled_from([32, 64, 256, 288, 1536]),
)
def test_linear(form: str, m: int, n: int, k: int) -> None:
    torch.manual_seed(m * n * k)
    x, weight, bias = torch.randn(m, k), weights(form, n, k), torch.randn(n)
    close(cpu.linear(x, weight, bias), ref.linear(x.double(), weight, bias.double()).float())


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("n", [1, 5, 12, 31])
@pytest.mark.parametrize("k", [32, 576, 800])
def test_a_row_of_linear_has_the_same_bits_in_any_batch_and_from_any_form(form: str, n: int, k: int) -> None:
    """23 and 19 rows are outer products, with tiles moved back at both ends; fewer rows are not."""
    x, weight = torch.randn(23, k), weights(form, n, k)
    whole = cpu.linear(x, weight)
    assert torch.equal(cpu.linear(x, widen(weight, torch.float32)), whole)
    for rows in (slice(0, 1), slice(3, 5), slice(7, 10), slice(2, 6), slice(1, 6), slice(4, 23)):
        assert torch.equal(cpu.linear(x[rows], weight), whole[rows])


def test_linear_reads_strided_inputs_and_leaves_odd_rows_to_torch() -> None:
    x, weight = torch.randn(5, 3, 64), torch.randn(7, 64)
    close(cpu.linear(x[:, 1], weight), x[:, 1] @ weight.T)
    close(cpu.linear(x[..., 0].T, weight[:, :5].contiguous()), x[..., 0].T @ weight[:, :5].T)
    close(cpu.linear(x[0, :, ::2], weight[:, :32].contiguous()), x[0, :, ::2] @ weight[:, :32].T)
    assert cpu.linear(torch.randn(0, 64), weight).shape == (0, 7)


def test_sums_of_long_rows_are_nearer_to_the_truth_than_one_chain() -> None:
    """What holds SmolLM2's logits within 1e-4: a chain of 4096 / 8 additions would be off by about three times this."""
    x, weight = torch.rand(8, 4096) + 0.5, torch.rand(16, 4096) + 0.5
    truth = x.double() @ weight.double().T
    assert float(((cpu.linear(x, weight) - truth) / truth).abs().max()) < 4e-7


def test_norms_activation_and_rotation() -> None:
    x, y, weight = torch.randn(5, 576) * 30, torch.randn(5, 576), torch.randn(576)
    close(cpu.rms_norm(x, weight, 1e-5), ref.rms_norm(x, weight, 1e-5))
    heads, small = torch.randn(5, 12, 64), torch.randn(64)
    close(cpu.rms_norm(heads[:, :9], small, 1e-6), ref.rms_norm(heads[:, :9], small, 1e-6))
    for got, want in zip(
        cpu.add_rms_norm(x, y, weight, 1e-5), ref.add_rms_norm(x, y, weight, 1e-5), strict=True
    ):
        close(got, want)
    gate_up = torch.randn(5, 96) * torch.tensor([1.0, 10.0, 100.0, 1e4, 1e-3])[:, None]
    torch.testing.assert_close(cpu.swiglu(gate_up), ref.swiglu(gate_up), rtol=1e-5, atol=1e-20)
    table = ref.rope_table(torch.tensor([3, 1, 5000, 7, 9]), torch.rand(32), 1.5)
    close(cpu.rotate(heads[:, 2:11], table), ref.rotate(heads[:, 2:11], table))


class Pages:
    """Sequences of given lengths on shuffled pages of a strided view; whatever nobody wrote is NaN."""

    def __init__(self, lens: list[int], page_tokens: int, kv_heads: int, size: int) -> None:
        counts = [-(-n // page_tokens) for n in lens]
        pool = torch.full((sum(counts) + 2, kv_heads, 3, page_tokens, 2 * size), NAN)
        self.view, order = pool[:, :, 1], torch.randperm(sum(counts) + 2).tolist()
        self.pages = torch.full((len(lens), max(counts)), 10**6, dtype=torch.int64)
        for i, (n, c) in enumerate(zip(lens, counts, strict=True)):
            self.pages[i, :c], order = torch.tensor(order[:c]), order[c:]
            k, v = torch.randn(2, n, kv_heads, size) * 2
            token = torch.arange(n)
            cpu.write_rows(self.view, k, v, self.pages[i, token // page_tokens], token % page_tokens)


@settings(deadline=None, max_examples=60)
@given(
    lens=st.lists(st.integers(1, 70), min_size=1, max_size=5),
    page_tokens=st.sampled_from([1, 4, 16]),
    window=st.sampled_from([0, 1, 5, 16, 100]),
    shape=st.sampled_from([(1, 1, 8), (2, 3, 16), (3, 3, 64), (1, 20, 24)]),
)
def test_decode_attention(
    lens: list[int], page_tokens: int, window: int, shape: tuple[int, int, int]
) -> None:
    kv_heads, group, size = shape
    case = Pages(lens, page_tokens, kv_heads, size)
    q = torch.randn(len(lens), kv_heads * group + 2, size)[:, 1:-1]
    plans = [ops.plan_decode(case.pages, lens, page_tokens, window) for ops in (cpu, ref)]
    close(
        cpu.attend_decode(q, case.view, plans[0], size**-0.5),
        ref.attend_decode(q, case.view, plans[1], size**-0.5),
    )


@settings(deadline=None, max_examples=60)
@given(
    length=st.integers(2, 90),
    start=st.integers(0, 60),
    page_tokens=st.sampled_from([4, 16]),
    window=st.sampled_from([0, 1, 5, 16, 100]),
)
def test_prefill_attention_and_that_each_token_has_the_bits_of_decoding(
    length: int, start: int, page_tokens: int, window: int
) -> None:
    start = min(start, length - 1)
    case = Pages([length], page_tokens, 2, 16)
    q = torch.randn(length - start, 6, 16)
    plans = [
        ops.plan_prefill(
            case.pages[0, : -(-length // page_tokens)], length, slice(0, len(q)), page_tokens, window
        )
        for ops in (cpu, ref)
    ]
    got = cpu.attend_prefill(q, case.view, plans[0], 0.25)
    close(got, ref.attend_prefill(q, case.view, plans[1], 0.25))
    for i in range(len(q)):
        alone = cpu.plan_decode(case.pages, [start + i + 1], page_tokens, window)
        assert torch.equal(cpu.attend_decode(q[i : i + 1], case.view, alone, 0.25)[0], got[i])


def test_written_rows_lie_where_the_twin_puts_them() -> None:
    k, v, page, row = (
        torch.randn(3, 2, 8),
        torch.randn(3, 2, 8),
        torch.tensor([4, 0, 4]),
        torch.tensor([3, 0, 1]),
    )
    ours, theirs = torch.zeros(5, 2, 3, 4, 16)[:, :, 1], torch.zeros(5, 2, 3, 4, 16)[:, :, 1]
    cpu.write_rows(ours, k, v, page, row)
    ref.write_rows(theirs, k, v, page, row)
    assert torch.equal(ours, theirs)
    assert int((ours != 0).sum()) == 3 * 2 * 16


def test_twins_have_the_same_names() -> None:
    assert set(cpu.__all__) == set(ref.__all__) - {"plan_decode_any"}  # for steps that a GPU replays


def test_who_gets_which_kernels() -> None:
    assert kernels("cpu", torch.float32, head_dim=64) is cpu
    assert kernels("cpu", torch.bfloat16, head_dim=64) is ref
    assert kernels("cuda", torch.float32, head_dim=64) is ref
    assert kernels("cpu", torch.float32, head_dim=20) is ref


def test_after_prepare_nothing_is_compiled() -> None:
    """In a process of its own: whatever a model calls must have been compiled, or read from disk, before."""
    code = """
import torch
from numba.core.dispatcher import Dispatcher
from splitserve.ops import cpu
from splitserve.ops.cpu import elementwise, paged, products
loops = [f for module in (elementwise, paged, products) for f in vars(module).values() if isinstance(f, Dispatcher)]
assert not any(f.signatures for f in loops)
done = []
cpu.prepare(done.append)
assert done[0] == 0 and done[-1] == 1 and done == sorted(done), done
before = [len(f.signatures) for f in loops]
x = torch.randn(9, 64)
for form in (x.half(), x.bfloat16(), x, cpu.Coded(x.byte(), torch.ones(9, 2, 2))):
    for m in (1, 2, 3, 4, 9):
        cpu.linear(x[:m], form, torch.zeros(9))
cpu.add_rms_norm(x, cpu.rms_norm(x, x[0], 1e-5), x[0], 1e-6)
cpu.swiglu(x)
heads = cpu.rotate(x.view(9, 4, 16), cpu.rope_table(torch.arange(9), torch.ones(8)))
view = torch.zeros(2, 2, 16, 32)
cpu.write_rows(view, heads[:, :2], heads[:, 2:], torch.zeros(9, dtype=torch.int64), torch.arange(9))
cpu.attend_decode(heads[:1], view, cpu.plan_decode(torch.zeros(1, 1, dtype=torch.int64), [9], 16), 0.25)
plan = cpu.plan_prefill(torch.zeros(1, dtype=torch.int64), 9, slice(0, 9), 16, 4)
cpu.attend_prefill(heads, view, plan, 0.25)
assert [len(f.signatures) for f in loops] == before
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=170)


def test_importing_the_choice_does_not_import_numba() -> None:
    code = "import sys, splitserve.models.llama; assert not {'numba', 'llvmlite'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
