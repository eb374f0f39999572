"""The judge objects to each thing that would make a proof worthless, and to nothing else."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from splitserve.proof import main
from splitserve.proof.judge import Answer, Case, Crossing, first_divergence, judge

GOOD = Answer((1, 2, 3), (-0.1, -0.2, -0.3), (1.0, 0.001, 1.0))
CROSSED = Crossing(
    num_bytes=100,
    expected_bytes=100,
    num_pages=2,
    sent_digest="ab",
    received_digest="ab",
    digest_checked=True,
    poisoned_pages=9,
    seconds=1e-6,
)
CASE = Case("q", 10, True, GOOD, GOOD, CROSSED)


def test_a_good_case_has_no_finding() -> None:
    assert judge(CASE, bound=0.0) == []


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"recomputations": 1}, "recomputation"),
        ({"num_bytes": 99}, "StateSpecs"),
        ({"num_bytes": 0, "expected_bytes": 0}, "no byte"),
        ({"received_digest": "cd"}, "digests differ"),
        ({"digest_checked": False}, "not compared"),
        ({"poisoned_pages": 0}, "poisoned"),
    ],
)
def test_each_flaw_of_a_crossing_is_named(change, says) -> None:
    findings = judge(replace(CASE, crossing=replace(CROSSED, **change)), bound=0.0)
    assert any(says in f for f in findings), findings


def test_no_record_is_no_proof() -> None:
    assert judge(replace(CASE, crossing=None), bound=0.0)


@pytest.mark.parametrize(
    ("split", "bound", "good"),
    [
        (replace(GOOD, tokens=(1, 9, 3)), 0.0, False),
        (replace(GOOD, tokens=(1, 9, 3)), 0.01, True),  # a near tie: margin 0.001 < 2 x 0.01
        (replace(GOOD, tokens=(9, 2, 3)), 0.01, False),  # margin 1.0 is no tie
        (replace(GOOD, tokens=(1, 2)), 0.01, False),  # a token is missing
        (replace(GOOD, logprobs=(-0.1, -0.25, -0.3)), 0.01, False),
        (replace(GOOD, logprobs=(-0.1, -0.205, -0.3)), 0.01, True),
        (replace(GOOD, logprobs=(-0.1, -0.2000001, -0.3)), 0.0, False),
        (Answer(error="HTTP 503"), 0.01, False),
        (Answer(), 0.01, False),
    ],
)
def test_answers_may_differ_only_within_the_bound(split, bound, good) -> None:
    assert (judge(replace(CASE, split=split), bound=bound) == []) is good


def test_a_sampled_answer_is_never_excused_by_a_tie_of_logprobs() -> None:
    """Its noise is not in the margins, so a tie there says nothing."""
    case = replace(CASE, greedy=False, split=replace(GOOD, tokens=(1, 9, 3)))
    assert judge(case, bound=0.01)


@pytest.mark.parametrize(
    ("a", "b", "at"), [((1, 2), (1, 2), None), ((1,), (1, 2), 1), ((3, 2), (1, 2), 0), ((), (), None)]
)
def test_first_divergence(a, b, at) -> None:
    assert first_divergence(a, b) == at


def test_the_table_of_a_full_run_is_whole_at_80_columns() -> None:
    answer = Answer((1,), (-0.5,))
    crossing = Crossing(520_000_000, 520_000_000, 12345, 12345, "cuda_ipc/cuda", 0.01, "520b1c9d", "520b1c9d")
    told = io.StringIO()
    case = Case("chunk + 1, seeded", 12345, greedy=False, split=answer, unified=answer, crossing=crossing)
    console = Console(file=told, width=80)
    main._print(console, [case, replace(case, unified=Answer((1,), (-0.6,)))], [])
    lines = told.getvalue().splitlines()
    assert max(map(len, lines[:6])) <= 80
    row = "chunk + 1, seeded 12345 bit-equal 520.00 12345 12345 52.00 520b1c"
    assert any(" ".join(line.split()) == row for line in lines)
    assert "lane: cuda_ipc/cuda" in lines
