"""Checkpoint files: read right, and whatever is done to them ends in a WeightsError that names the file."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from splitserve.dist.group import SoloGroup
from splitserve.errors import WeightsError
from splitserve.models.read import read_config
from splitserve.models.registry import build
from splitserve.weights.fingerprint import fingerprint
from splitserve.weights.gguf import GgufFile
from splitserve.weights.locate import Source, locate
from splitserve.weights.open import open_checkpoint
from splitserve.weights.safetensors import SafetensorsDir
from tests.tiny import write_checkpoint, write_gguf

Q = gguf.GGMLQuantizationType


def load(path: Path) -> None:
    """Everything that a rank does with a checkpoint."""
    source = locate(path)
    build(read_config(source), SoloGroup(), dtype="f32").load(source)


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hf")
    write_checkpoint(path, "llama", num_hidden_layers=2)
    return path


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sharded")
    write_checkpoint(path, "llama", num_hidden_layers=2, shard="60KB")
    return path


@pytest.fixture(scope="module")
def gguf_file(hf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(hf, tmp_path_factory.mktemp("gguf") / "tiny.gguf", kind="Q8_0")


# ------------------------------------------------------------------ right


def test_a_fingerprint_tells_checkpoints_of_one_shape_apart_and_nothing_else(
    hf: Path, gguf_file: Path, tmp_path: Path
) -> None:
    copy = shutil.copytree(hf, tmp_path / "copy")
    (copy / "README.md").write_text("beside the point")
    other = tmp_path / "other"
    write_checkpoint(other, "llama", num_hidden_layers=2, seed=1)
    same, moved, quantised = (fingerprint(locate(path)) for path in (hf, copy, gguf_file))
    assert same == moved
    assert len({same, fingerprint(locate(other)), quantised, fingerprint(locate(hf), context="theta 2")}) == 4


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q8_0"])
def test_gguf_numbers_equal_the_gguf_packages(kind: str, hf: Path, tmp_path: Path) -> None:
    file = GgufFile(write_gguf(hf, tmp_path / "x.gguf", kind=kind))
    reader = gguf.GGUFReader(file.path)
    assert set(file.names()) == {t.name for t in reader.tensors}
    for tensor in reader.tensors:
        expected = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        assert file.shape(tensor.name) == expected.shape
        rows = len(expected)
        for start, stop in ((0, rows), (rows // 3, rows // 2)):
            got = file.read(tensor.name, start, stop)
            array = got.array
            if got.encoding == "bf16":
                array = (array.astype(np.uint32) << 16).view(np.float32)
            np.testing.assert_array_equal(array.astype(np.float32), expected[start:stop])


@pytest.mark.parametrize("kind", ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL"])
def test_k_quants_are_read_by_rows(kind: str, tmp_path: Path) -> None:
    block, block_bytes = gguf.GGML_QUANT_SIZES[Q[kind]]
    rows = np.random.default_rng(0).integers(0, 256, (6, 512 // block * block_bytes), dtype=np.uint8)
    rows.view(np.uint16)[:] &= 0x3BFF  # no scale is NaN or infinite
    writer = gguf.GGUFWriter(tmp_path / "k.gguf", "llama")
    writer.add_tensor("w", rows, raw_dtype=Q[kind])
    _finish(writer)
    file = GgufFile(tmp_path / "k.gguf")
    assert file.shape("w") == (6, 512)
    np.testing.assert_array_equal(file.read("w", 2, 5).array, gguf.quants.dequantize(rows[2:5], Q[kind]))


def test_gguf_metadata_of_every_type(tmp_path: Path) -> None:
    path = tmp_path / "meta.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    values: dict[str, object] = {
        "flag": True,
        "text": "Straße",
        "list": ["a", "", "Ġb"],
        "numbers": [1, -2, 3],
    }
    writer.add_bool("flag", True)
    writer.add_string("text", "Straße")
    writer.add_array("list", ["a", "", "Ġb"])
    writer.add_array("numbers", [1, -2, 3])
    writer.add_array("shares", [0.5, 1.5])
    for bits in (8, 16, 32, 64):
        getattr(writer, f"add_int{bits}")(f"i{bits}", -bits)
        getattr(writer, f"add_uint{bits}")(f"u{bits}", (1 << bits) - 1)
        values |= {f"i{bits}": -bits, f"u{bits}": (1 << bits) - 1}
    writer.add_float32("f32", 0.25)
    writer.add_float64("f64", 1e300)
    values |= {"f32": 0.25, "f64": 1e300, "shares": [0.5, 1.5], "general.architecture": "llama"}
    _finish(writer)
    assert GgufFile(path).metadata == values


def test_safetensors_are_read_by_rows(sharded: Path) -> None:
    from safetensors import safe_open

    ours = SafetensorsDir(sharded)
    seen = 0
    for file in sorted(sharded.glob("*.safetensors")):
        with safe_open(file, "np") as theirs:
            for name in theirs.keys():  # noqa: SIM118 - not a mapping
                expected = theirs.get_tensor(name)
                assert ours.shape(name) == expected.shape
                np.testing.assert_array_equal(ours.read(name, 3, 9).array, expected[3:9])
                seen += 1
    assert seen == len(ours.names())


# ------------------------------------------------------------------ wrong, one at a time


def without(name: str) -> Callable[[Path], None]:
    def edit(path: Path) -> None:
        rewrite(path, lambda tensors: tensors.pop(name))

    return edit


def rewrite(path: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors")


def configured(**changes: object) -> Callable[[Path], None]:
    def edit(path: Path) -> None:
        config = json.loads((path / "config.json").read_text())
        config.update(changes)
        (path / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v != "gone"}))

    return edit


def cut(name: str, keep: float) -> Callable[[Path], None]:
    def edit(path: Path) -> None:
        raw = (path / name).read_bytes()
        (path / name).write_bytes(raw[: int(len(raw) * keep)])

    return edit


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "a tensor is missing": (
        without("model.layers.1.mlp.up_proj.weight"),
        r"lacks tensor 'model.layers.1.mlp.up_proj",
    ),
    "a tensor too many": (
        lambda p: rewrite(p, lambda t: t.update(stray=torch.zeros(2))),
        r"model.safetensors holds tensor 'stray'",
    ),
    "a tensor of another shape": (
        lambda p: rewrite(p, lambda t: t.update({"model.norm.weight": torch.zeros(63)})),
        r"tensor 'model.norm.weight' has shape \[63\], the configuration says \[64\]",
    ),
    "a tensor of integers": (
        lambda p: rewrite(p, lambda t: t.update({"model.norm.weight": torch.zeros(64, dtype=torch.int32)})),
        r"tensor 'model.norm.weight' is I32",
    ),
    "NaN in a tensor": (
        lambda p: rewrite(p, lambda t: t["lm_head.weight"].__setitem__((200, 3), float("nan"))),
        r"tensor 'lm_head.weight' holds NaN",
    ),
    "the bytes end early": (
        cut("model.safetensors", 0.7),
        r"tensor '.*' ends at byte \d+, the file at \d+: truncated",
    ),
    "the header ends early": (cut("model.safetensors", 0.001), r"model.safetensors: a header of \d+ bytes"),
    "the file is empty": (cut("model.safetensors", 0), r"model.safetensors is empty"),
    "the file is gone": (lambda p: (p / "model.safetensors").unlink(), r"model.safetensors is missing"),
    "the config is no JSON": (lambda p: (p / "config.json").write_text("{"), r"config.json is no JSON"),
    "the config is a list": (lambda p: (p / "config.json").write_text("[]"), r"holds no JSON object"),
    "an unknown architecture": (configured(model_type="mamba"), r"'mamba' is not known"),
    "no architecture": (configured(model_type="gone"), r"None is not known"),
    "no hidden size": (configured(hidden_size="gone"), r"lacks 'hidden_size'"),
    "a hidden size in words": (configured(hidden_size="64"), r"hidden_size is '64'"),
    "half a layer": (configured(num_hidden_layers=1.5), r"num_hidden_layers is 1.5"),
    "no heads": (configured(num_attention_heads=0), r"num_heads is 0"),
    "heads that do not group": (configured(num_key_value_heads=3), r"8 heads are no multiple of 3"),
    "endless layers": (configured(num_hidden_layers=2**31), r"2147483648 layers"),
    "unknown rope": (configured(rope_parameters={"rope_type": "spiral"}), r"'spiral' is not known"),
    "rope of base 0": (
        configured(rope_parameters={"rope_type": "default", "rope_theta": 0}),
        r"impossible rotary",
    ),
    "rope factor infinite": (
        configured(rope_parameters={"rope_type": "linear", "factor": float("inf")}),
        r"impossible rotary",
    ),
    "longrope without factors": (
        configured(rope_parameters={"rope_type": "longrope"}),
        r"longrope scaling has 0 factors",
    ),
    "another activation": (configured(hidden_act="gelu"), r"hidden_act is 'gelu'"),
    "end tokens in words": (configured(eos_token_id=["</s>"]), r"eos_token_id is '</s>'"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_checkpoint_says_what_is_broken(what: str, hf: Path, tmp_path: Path) -> None:
    path = tmp_path / "model"
    shutil.copytree(hf, path)
    edit, message = BROKEN[what]
    edit(path)
    with pytest.raises(WeightsError, match=message) as caught:
        load(path)
    assert "model" in str(caught.value), "the message names the file"


def test_a_missing_shard_and_a_lying_index(sharded: Path, tmp_path: Path) -> None:
    path = tmp_path / "model"
    shutil.copytree(sharded, path)
    index = path / "model.safetensors.index.json"
    claims = json.loads(index.read_text())
    names = list(claims["weight_map"])
    claims["weight_map"][names[0]] = claims["weight_map"][names[-1]]
    index.write_text(json.dumps(claims))
    with pytest.raises(WeightsError, match=r"should be in model-0000\d.* and is not there"):
        load(path)
    (path / claims["weight_map"][names[-1]]).unlink()
    with pytest.raises(WeightsError, match="is missing"):
        load(path)
    index.write_text('{"weight_map": [1]}')
    with pytest.raises(WeightsError, match="weight_map"):
        load(path)


@pytest.mark.parametrize("model", ["/nowhere/at/all", "smollm3-3b", ""])
def test_what_cannot_be_found_says_what_was_looked_for(model: str, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(WeightsError, match=r"neither a file nor a directory|holds no config\.json"):
        locate(model)
    with pytest.raises(WeightsError, match=r"holds no config.json and no .gguf"):
        locate(tmp_path)
    with pytest.raises(WeightsError, match=r"notes.txt is not a .gguf file"):
        locate(tmp_path / "notes.txt")
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    with pytest.raises(WeightsError, match=r"a.gguf, b.gguf: which one"):
        locate(tmp_path)


def test_other_quantisations_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("w", np.zeros((2, 292), dtype=np.uint8), raw_dtype=Q.Q8_K)
    _finish(writer)
    file = GgufFile(path)
    with pytest.raises(WeightsError, match=r"x.gguf: tensor 'w' is quantised as Q8_K"):
        file.read("w", 0, 1)


def test_one_part_of_several_is_not_a_model(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.add_uint16("split.count", 3)
    _finish(writer)
    with pytest.raises(WeightsError, match=r"x.gguf is one of 3 parts"):
        load(tmp_path / "x.gguf")


def _finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


# ------------------------------------------------------------------ wrong anywhere


def outcome(path: Path) -> str:
    try:
        load(path)
    except WeightsError as e:
        return "refused" if str(path) in str(e) else f"no file named: {e}"
    return "loaded"


def header_size(path: Path) -> int:
    if path.suffix == ".gguf":
        return min(t.start for t in GgufFile(path)._tensors.values())
    return 8 + int.from_bytes(path.read_bytes()[:8], "little")


@pytest.mark.parametrize("format", ["gguf", "safetensors"])
def test_cut_anywhere(format: str, hf: Path, gguf_file: Path, tmp_path: Path) -> None:
    file, path = _copy(format, hf, gguf_file, tmp_path)
    raw = file.read_bytes()
    head, draw = header_size(file), random.Random(1)
    for keep in [0, 1, 4, 8, 24, head - 1, head, len(raw) - 1, *(draw.randrange(head) for _ in range(60))]:
        file.write_bytes(raw[:keep])
        assert outcome(path) == "refused", keep


@pytest.mark.parametrize("format", ["gguf", "safetensors"])
def test_a_damaged_header_never_ends_in_a_traceback(
    format: str, hf: Path, gguf_file: Path, tmp_path: Path
) -> None:
    file, path = _copy(format, hf, gguf_file, tmp_path)
    raw = file.read_bytes()
    head, draw = header_size(file), random.Random(2)
    counts = {"refused": 0, "loaded": 0}  # any other outcome is a KeyError
    for _ in range(250):
        damaged = bytearray(raw)
        for _ in range(draw.choice([1, 1, 4])):
            damaged[draw.randrange(head)] = draw.choice([0, 0xFF, 0x7F, draw.randrange(256)])
        file.write_bytes(damaged)
        counts[outcome(path)] += 1
    assert counts["refused"] > 100, counts


@settings(deadline=None, max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_config_of_any_json_is_read_or_refused(data: st.DataObject, hf: Path, tmp_path: Path) -> None:
    config = json.loads((hf / "config.json").read_text())
    scalars = st.none() | st.booleans() | st.integers(-(2**40), 2**40) | st.floats() | st.text(max_size=5)
    values = (
        scalars | st.lists(scalars, max_size=3) | st.dictionaries(st.text(max_size=5), scalars, max_size=2)
    )
    for key in data.draw(st.lists(st.sampled_from(sorted(config)), min_size=1, max_size=3)):
        config[key] = data.draw(values)
    (tmp_path / "config.json").write_text(json.dumps(config))
    try:
        read_config(Source(tmp_path, "safetensors"))
    except WeightsError as e:
        refused = str(e)
    else:
        return
    assert "config.json" in refused


def _copy(format: str, hf: Path, gguf_file: Path, tmp_path: Path) -> tuple[Path, Path]:
    """(the file to damage, what to load)."""
    if format == "gguf":
        return (path := Path(shutil.copy(gguf_file, tmp_path / "model.gguf"))), path
    shutil.copytree(hf, tmp_path / "model")
    return tmp_path / "model" / "model.safetensors", tmp_path / "model"


def test_gguf_is_a_checkpoint(gguf_file: Path) -> None:
    load(gguf_file)
    assert open_checkpoint(locate(gguf_file)).format == "gguf"
