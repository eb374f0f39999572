"""DeepSeek-V4 over several ranks (gloo, threads of one process): logits equal one rank's, on every rank."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from splitserve.errors import ConfigError
from splitserve.layers.forward import Group
from splitserve.models.deepseek_v4 import DeepseekV4
from splitserve.models.deepseek_v4_config import from_json
from splitserve.models.deepseek_v4_weights import Share
from splitserve.models.make_checkpoint import FLASH, TINY, write_checkpoint
from splitserve.models.read import read_config
from splitserve.weights.locate import locate
from tests.models.v4_oracle import load_model, make_bench, random_text
from tests.unit.test_dist import on_ranks

SIZES = [60, 1, 75, 1, 1]
LENGTH = sum(SIZES)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("tiny")
    write_checkpoint(path, TINY | {"o_groups": 4, "o_lora_rank": 64})
    return path


def run_rank(path: Path, tp: Group, whole_experts: bool = False) -> torch.Tensor:
    source = locate(path)
    model = DeepseekV4(read_config(source), tp, "f32", whole_experts=whole_experts)
    model.load(source)
    return make_bench(model).run(random_text(LENGTH), SIZES)


@pytest.mark.parametrize(("size", "whole_experts"), [(2, False), (2, True), (4, False)])
def test_ranks_equal_one(checkpoint: Path, size: int, whole_experts: bool) -> None:
    expected = make_bench(load_model(checkpoint)).run(random_text(LENGTH), SIZES)
    for logits in on_ranks(size, lambda tp: run_rank(checkpoint, tp, whole_experts), timeout_s=120):
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("changes", "size", "whole_experts", "says"),
    [
        ({}, 16, False, "tp=16 does not divide 8 output groups"),
        ({}, 3, False, "tp=3 does not divide 8 output groups"),
        ({"n_routed_experts": 6}, 4, True, "tp=4 does not divide 6 experts"),
        ({"moe_intermediate_size": 64}, 4, False, "no multiple of 32"),
    ],
    ids=["too many", "odd", "experts", "features"],
)
def test_a_size_that_does_not_fit_is_refused(
    changes: dict[str, int], size: int, whole_experts: bool, says: str
) -> None:
    cfg = from_json(FLASH | changes, Path("config.json"))
    with pytest.raises(ConfigError, match=says):
        Share(0, size, whole_experts).check(cfg)


def test_every_even_share_of_flash_fits() -> None:
    cfg = from_json(FLASH, Path("config.json"))
    for size in (1, 2, 4, 8):
        for whole_experts in (False, True):
            Share(size - 1, size, whole_experts).check(cfg)
