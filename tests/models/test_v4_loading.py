"""DeepSeek's original checkpoint format: read bit for bit, cut for any rank, refused with names when it is wrong."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from splitserve.errors import WeightsError
from splitserve.models.deepseek_v4 import DeepseekV4
from splitserve.models.deepseek_v4_config import from_json
from splitserve.models.deepseek_v4_weights import Share, parameters
from splitserve.models.make_checkpoint import TINY, flash, write_checkpoint
from splitserve.ops.ref import v4 as ops
from splitserve.weights.parameters import (
    Form,
    Parameter,
    check_checkpoint,
    expected_tensors,
    read_parameters,
)
from splitserve.weights.safetensors import SafetensorsDir
from tests.models.v4_oracle import dequantised, load_model

CFG = from_json(TINY, Path("config.json"))
SHARES = [Share(0, 1), Share(0, 2), Share(1, 2), Share(1, 2, whole_experts=True)]


@pytest.fixture(scope="module", params=[False, True], ids=["fp4-experts", "fp8-experts"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    write_checkpoint(path, TINY, shard_bytes=1 << 20, fp8_experts=request.param)
    return path


def expert_form_of(path: Path) -> Form:
    values = json.loads((path / "config.json").read_text())
    return Form.TILES if values["expert_dtype"] == "fp8" else Form.MXFP4


def expected_value(parameter: Parameter, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """A parameter cut and joined from whole dequantised tensors, zeros beyond the end of an axis."""
    stack = []
    for parts in parameter.stack:
        joined = []
        for part in parts:
            whole = tensors[part.tensor]
            rows = part.row_range
            cut = whole[rows.start : rows.stop]
            cut = torch.cat((cut, cut.new_zeros(len(rows) - len(cut), *cut.shape[1:])))
            joined.append(cut[:, part.column_range.start : part.column_range.stop] if cut.dim() > 1 else cut)
        stack.append(torch.cat(joined))
    return torch.stack(stack) if len(stack) > 1 else stack[0]


@pytest.mark.parametrize("share", SHARES, ids=str)
def test_every_number_of_every_rank_is_the_files(checkpoint: Path, share: Share) -> None:
    wanted = parameters(CFG, share, expert_form=expert_form_of(checkpoint))
    loaded = read_parameters(SafetensorsDir(checkpoint), wanted, dtype=torch.float32)
    tensors = dequantised(checkpoint)
    for parameter in wanted:
        found: ops.Weight = loaded[parameter.name]
        if parameter.form is Form.TILES:
            found = ops.Tiles(loaded[parameter.name], loaded[f"{parameter.name}.scales"], parameter.tile)
        if parameter.form is Form.MXFP4:
            found = ops.Mxfp4(loaded[parameter.name], loaded[f"{parameter.name}.scales"])
        expected = expected_value(parameter, tensors)
        actual = found.long() if parameter.form is Form.INT else ops.dequantise(found, torch.float32)
        assert torch.equal(actual, expected), parameter.name


def test_quantised_weights_stay_quantised(checkpoint: Path) -> None:
    wanted = parameters(CFG, Share(0, 1), expert_form=expert_form_of(checkpoint))
    loaded = read_parameters(SafetensorsDir(checkpoint), wanted, dtype=torch.bfloat16)
    held = sum(t.numel() * t.element_size() for t in loaded.values())
    in_file = sum(f.stat().st_size for f in checkpoint.glob("*.safetensors"))
    assert held < 1.05 * in_file


def test_two_ranks_share_what_is_cut(checkpoint: Path) -> None:
    """Bytes that both ranks hold are those of the replicated parts and no others."""
    form = expert_form_of(checkpoint)

    def held(rank: int, size: int) -> dict[str, int]:
        wanted = parameters(CFG, Share(rank, size), expert_form=form)
        loaded = read_parameters(SafetensorsDir(checkpoint), wanted, dtype=torch.float32)
        return {
            name: t.numel() * t.element_size() for name, t in loaded.items() if not name.endswith("scales")
        }

    one, first, second = held(0, 1), held(0, 2), held(1, 2)
    twice = {re.sub(r"^(layers\.\d+|mtp)\.", "", n) for n in one if first[n] + second[n] != one[n]}
    assert {
        n for n in twice if n.startswith(("q_b", "out_", "sink", "experts.", "shared.", "embed", "head"))
    } == set()
    assert {"qkv_a", "gate", "compressor.weight", "indexer.q_b", "hc_attn.fn"} <= twice


def test_progress_and_the_sharded_whole(checkpoint: Path) -> None:
    seen: list[float] = []
    wanted = parameters(CFG, Share(0, 1), expert_form=expert_form_of(checkpoint))
    read_parameters(SafetensorsDir(checkpoint), wanted, dtype=torch.float32, progress=seen.append)
    assert seen == sorted(seen)
    assert seen[-1] == pytest.approx(1.0)
    assert len(list(checkpoint.glob("*.safetensors"))) > 3


def test_the_base_variant_runs(checkpoint: Path) -> None:
    assert isinstance(load_model(checkpoint), DeepseekV4)


def test_checkpoints_follow_from_their_seed(tmp_path: Path) -> None:
    small = TINY | {"num_hidden_layers": 2, "compress_ratios": [0, 4, 0], "num_hash_layers": 2}
    for name, config, seed in (("a", small, 0), ("b", small, 0), ("c", small, 1), ("d", TINY, 0)):
        write_checkpoint(tmp_path / name, config, seed=seed)
    a, b, c, d = (load_file(next((tmp_path / n).glob("*.safetensors"))) for n in "abcd")
    assert all(torch.equal(as_bytes(a[n]), as_bytes(b[n])) for n in a)
    assert not torch.equal(a["embed.weight"], c["embed.weight"])
    assert all(torch.equal(as_bytes(t), as_bytes(d[n])) for n, t in a.items()), "fewer layers are a beginning"


def as_bytes(t: torch.Tensor) -> torch.Tensor:
    return t.contiguous().view(torch.uint8)


def test_flash_has_the_tensors_and_bytes_of_the_released_file() -> None:
    tensors = expected_tensors(parameters(from_json(flash(43), Path("config.json")), Share(0, 1)))
    sizes = {"F8_E4M3": 1, "I8": 1, "F8_E8M0": 1, "I64": 8}
    total = 0
    for name, tensor in tensors.items():
        kind = tensor.types[0]
        wide = name.endswith(("_fn", "_base", "_scale", "attn_sink", "ape", "gate.bias"))
        count = 1
        for n in tensor.shape:
            count *= n
        total += count * sizes.get(kind, 4 if wide else 2)
    assert (len(tensors), total) == (69_187, 159_609_485_896)


@pytest.fixture
def damaged(tmp_path: Path) -> Callable[[Callable[[dict[str, torch.Tensor]], None]], str]:
    """Damage a checkpoint of one file and return what loading it says."""

    def load(damage: Callable[[dict[str, torch.Tensor]], None]) -> str:
        write_checkpoint(tmp_path, TINY)
        file = next(tmp_path.glob("*.safetensors"))
        tensors = load_file(file)
        damage(tensors)
        save_file(tensors, file)
        (tmp_path / "model.safetensors.index.json").unlink()
        with pytest.raises(WeightsError) as raised:
            load_model(tmp_path)
        assert str(file if file.name in str(raised.value) else tmp_path) in str(raised.value)
        return str(raised.value)

    return load


WQ = "layers.1.attn.wq_a.weight"
W1 = "layers.2.ffn.experts.3.w1.weight"


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda t: t.pop(WQ), f"lacks tensor '{WQ}'"),
        (lambda t: t.pop("layers.1.attn.wq_a.scale"), "lacks tensor 'layers.1.attn.wq_a.scale'"),
        (lambda t: t.update(extra=torch.zeros(2)), "holds tensor 'extra'"),
        (lambda t: t.update({WQ: t[WQ][:64].clone()}), f"'{WQ}' has shape [64, 256]"),
        (lambda t: t.update({WQ: t[WQ].float()}), f"'{WQ}' is F32, must be F8_E4M3"),
        (lambda t: t.update({W1: t[W1].to(torch.int32)}), f"'{W1}' is I32, must be I8 or U8"),
        (lambda t: t["norm.weight"].fill_(float("nan")), "'norm.weight' holds NaN"),
        (lambda t: t[WQ].view(torch.uint8)[3, 5].fill_(0x7F), f"'{WQ}' holds NaN"),
        (
            lambda t: t["layers.2.ffn.experts.3.w2.scale"].view(torch.uint8)[0, 0].fill_(0xFF),
            "'layers.2.ffn.experts.3.w2.scale' holds NaN",
        ),
    ],
    ids=["missing", "no scale", "extra", "shape", "type", "expert type", "nan", "nan code", "nan scale"],
)
def test_a_wrong_tensor_is_named(
    damaged: Callable[..., str], damage: Callable[[dict[str, torch.Tensor]], None], says: str
) -> None:
    assert says in damaged(damage)


def test_a_missing_shard_and_a_cut_one_are_named(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, TINY, shard_bytes=1 << 20)
    second = sorted(tmp_path.glob("*.safetensors"))[1]
    whole = second.read_bytes()
    second.write_bytes(whole[:-1000])
    with pytest.raises(WeightsError, match="truncated by 1000 bytes") as raised:
        load_model(tmp_path)
    assert second.name in str(raised.value)
    second.unlink()
    with pytest.raises(WeightsError, match="is missing"):
        load_model(tmp_path)


def test_a_rank_with_some_experts_still_knows_the_others(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, TINY)
    share = Share(0, 2, whole_experts=True)
    checkpoint = SafetensorsDir(tmp_path)
    check_checkpoint(checkpoint, parameters(CFG, Share(0, 1)))
    names = expected_tensors(parameters(CFG, share))
    assert "layers.0.ffn.experts.7.w1.weight" not in names, "rank 0 of 2 holds experts 0 to 3"
    assert "layers.0.ffn.experts.3.w1.weight" in names
