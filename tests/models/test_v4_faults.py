"""Faults planted in the forward pass, one at a time: the comparison that parity rests on must see each of them.

Each fault is an error that an implementation has had or could have, and that still gives plausible numbers. Lost state
is in test_v4_handoff.py. The table in docs/deepseek_v4.md is made from the names here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from splitserve.layers.v4 import kernels as ops
from splitserve.models.deepseek_v4 import DeepseekV4
from splitserve.models.make_checkpoint import TINY, write_checkpoint
from tests.models.v4_oracle import load_model, make_bench, random_text

ATOL = 1e-4  # of tests/models/test_v4_parity.py
LENGTH = 150
SIZES = [50, 1, 80, 1, 18]

Op = Callable[..., Any]


def comb_transposed(op: Op) -> Op:
    return lambda y, streams, post, comb: op(y, streams, post, comb.transpose(1, 2))


def sinkhorn_of_one_round(op: Op) -> Op:
    return lambda *a, iters, **kw: op(*a, iters=1, **kw)


def no_inverse_rope(op: Op) -> Op:
    return lambda x, table, *, inverse=False: x if inverse else op(x, table)


def rope_on_leading_numbers(op: Op) -> Op:
    return lambda x, table, **kw: op(x.flip(-1), table, **kw).flip(-1)


def entry_one_token_late(op: Op) -> Op:
    def shifted(*args: Any, **kwargs: Any) -> ops.Windows:
        windows = op(*args, **kwargs)
        return replace(windows, position=windows.position + 1)

    return shifted


def first_window_has_one_before(op: Op) -> Op:
    def planned(*args: Any, **kwargs: Any) -> ops.Windows:
        windows = op(*args, **kwargs)
        return replace(windows, before=windows.own, has_before=torch.ones_like(windows.has_before))

    return planned


def halves_swapped(op: Op) -> Op:
    def pooled(fresh: torch.Tensor, pending: torch.Tensor, carry: Any, windows: ops.Windows) -> torch.Tensor:
        if carry is None:
            return op(fresh, pending, carry, windows)
        return op(torch.cat(fresh.chunk(2, dim=-1)[::-1], dim=-1), pending, carry, windows)

    return pooled


def window_without_its_oldest(op: Op) -> Op:
    def attended(
        q: torch.Tensor, near: ops.Rows, far: ops.Rows | None, *rest: Any, **kw: Any
    ) -> torch.Tensor:
        index = near.index.clone()
        full = (index >= 0).all(-1)
        index[full, -1] = -1  # in a decoding batch some other row: a row is missing either way
        return op(q, ops.Rows(near.view, index), far, *rest, **kw)

    return attended


def no_compressed_rows(op: Op) -> Op:
    return lambda q, near, far, *rest, **kw: op(q, near, None, *rest, **kw)


def no_sink(op: Op) -> Op:
    return lambda q, near, far, sink, **kw: op(q, near, far, torch.full_like(sink, -1e9), **kw)


def sink_scaled(op: Op) -> Op:
    return lambda q, near, far, sink, *, scale, **kw: op(q, near, far, sink * scale, scale=scale, **kw)


def first_entries_instead_of_the_best(op: Op) -> Op:
    return lambda scores, count: op(
        torch.where(scores == -torch.inf, scores, -torch.arange(scores.shape[1]).float()), count
    )


def index_weights_positive(op: Op) -> Op:
    return lambda q, weights, *rest, **kw: op(q, weights.abs(), *rest, **kw)


def bias_in_the_weights(op: Op) -> Op:
    def routed(logits: torch.Tensor, bias: torch.Tensor, **kw: Any) -> Any:
        return op(logits + bias, torch.zeros_like(bias), **kw)

    return routed


def hash_routes_by_position(op: Op) -> Op:
    return lambda logits, table, tokens, **kw: op(logits, table, torch.arange(len(tokens)), **kw)


def groups_interleaved(op: Op) -> Op:
    def mixed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return op(x.flatten(1).unflatten(1, (-1, x.shape[1])).transpose(1, 2).contiguous(), weight)

    return mixed


def heads_not_normed(op: Op) -> Op:
    return lambda x, weight, eps: x if weight is None else op(x, weight, eps)


FAULTS = {
    "comb is applied transposed": ("hc_post", comb_transposed),
    "Sinkhorn stops after one round": ("hc_pre", sinkhorn_of_one_round),
    "the output is not turned back": ("rotate_tail", no_inverse_rope),
    "rope turns leading numbers": ("rotate_tail", rope_on_leading_numbers),
    "a compressed entry is placed one token late": ("plan_windows", entry_one_token_late),
    "the first window pools a window before it": ("plan_windows", first_window_has_one_before),
    "halves A and B are swapped": ("pool_windows", halves_swapped),
    "the window lacks a row": ("attend", window_without_its_oldest),
    "compressed rows are not read": ("attend", no_compressed_rows),
    "no sink": ("attend", no_sink),
    "the sink is scaled": ("attend", sink_scaled),
    "the indexer takes the first, not the best": ("choose_entries", first_entries_instead_of_the_best),
    "index weights lose their sign": ("index_scores", index_weights_positive),
    "the selection's bias enters the weights": ("route", bias_in_the_weights),
    "hash routing reads positions": ("route_by_token", hash_routes_by_position),
    "output groups take interleaved heads": ("grouped_linear", groups_interleaved),
    "query heads are not normed": ("rms_norm", heads_not_normed),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> DeepseekV4:
    path: Path = tmp_path_factory.mktemp("tiny")
    write_checkpoint(path, TINY)
    return load_model(path)


@pytest.fixture(scope="module")
def sound(model: DeepseekV4) -> torch.Tensor:
    return make_bench(model).run(random_text(LENGTH), SIZES)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_caught(
    fault: str, model: DeepseekV4, sound: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, plant = FAULTS[fault]
    monkeypatch.setattr(ops, name, plant(getattr(ops, name)))
    logits = make_bench(model).run(random_text(LENGTH), SIZES)
    assert not torch.allclose(logits, sound, atol=100 * ATOL, rtol=0)


def test_without_a_fault_nothing_moves(model: DeepseekV4, sound: torch.Tensor) -> None:
    torch.testing.assert_close(make_bench(model).run(random_text(LENGTH), [LENGTH]), sound, atol=ATOL, rtol=0)
