"""Which group sizes a model can be dealt out to, known before a process starts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from splitserve.errors import ConfigError
from splitserve.models.shares import check_decoder, check_deepseek_v4


def config(**sizes: Any) -> Any:
    """What the checks look at, of DeepSeek-V4-Flash's shape."""
    flash = {"num_heads": 64, "out_groups": 8, "num_experts": 256, "expert_ffn": 2048}
    return SimpleNamespace(**{**flash, **sizes})


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_flash_is_dealt_out_to_powers_of_two(size: int):
    check_deepseek_v4(config(), size)
    check_deepseek_v4(config(), size, whole_experts=True)


@pytest.mark.parametrize(
    ("sizes", "size", "whole", "says", "fix"),
    [
        ({}, 3, False, "tp=3 does not divide 8 output groups", "tp may be 1, 2, 4, 8;"),
        ({"out_groups": 12}, 3, False, "tp=3 does not divide 64 heads", "1, 2, 4, 8, 16;"),
        ({"num_experts": 6}, 4, True, "tp=4 does not divide 6 experts", "tp may be 1, 2, 3, 6;"),
        (
            {"expert_ffn": 96},
            2,
            False,
            "tp=2 cuts experts of 96 into parts that are no multiple of 32",
            "1, 3;",
        ),
    ],
)
def test_what_cannot_be_dealt_out_is_named_with_what_can(
    sizes: dict[str, int], size: int, whole: bool, says: str, fix: str
):
    with pytest.raises(ConfigError, match=says) as caught:
        check_deepseek_v4(config(**sizes), size, whole_experts=whole)
    assert caught.value.field == "tp"
    assert fix in (caught.value.fix or "")


def test_a_decoder_deals_out_its_heads():
    check_decoder(config(num_heads=9), 3)
    with pytest.raises(ConfigError, match="tp=2 does not divide 9 heads") as caught:
        check_decoder(config(num_heads=9), 2)
    assert "tp may be 1, 3, 9;" in (caught.value.fix or "")
