"""`make-checkpoint` and `state` as a person types them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from splitserve.cli.parser import parse
from splitserve.errors import ConfigError
from splitserve.models import registry
from splitserve.models.make_checkpoint import FLASH
from splitserve.text import tokenizer


def run(*words: str) -> int:
    args = parse(words)
    return int(args.run(args))


def test_make_checkpoint_writes_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("make-checkpoint", str(tmp_path / "m"), "--tiny", "--json") == 0
    assert json.loads(capsys.readouterr().out)["bytes"] == 6_320_998
    assert (tmp_path / "m" / "model.safetensors.index.json").is_file()
    with pytest.raises(ConfigError, match="not empty"):
        run("make-checkpoint", str(tmp_path / "m"), "--tiny")


def test_make_checkpoint_changes_what_is_asked(tmp_path: Path) -> None:
    """Without weights, and with a tokenizer that a server can load."""
    where = tmp_path / "m"
    words = ("--tiny", "--config-only", "--set", "o_groups=4", "--set", "vocab_size=300")
    assert run("make-checkpoint", str(where), *words) == 0
    config = json.loads((where / "config.json").read_text())
    assert (config["o_groups"], config["vocab_size"]) == (4, 300)
    assert not list(where.glob("*.safetensors*"))
    loaded = tokenizer.load(where)
    assert loaded.decode(loaded.encode("Grüße 299")) == "Grüße 299"
    assert loaded.decode([299, 262]) == " 299 262"  # ids that stand for no text show all the same


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ((), "one of --tiny, --t1 and --layers"),
        (("--tiny", "--t1"), "one of --tiny, --t1 and --layers"),
        (("--tiny", "--like", "gpt-5"), "'gpt-5' is not known"),
        (("--layers", "44"), "has 43"),
        (("--tiny", "--set", "o_group=4"), "o_group=4: no change"),
        (("--tiny", "--set", "o_groups=many"), "o_groups=many: no change"),
        (("--tiny", "--config-only", "--set", "vocab_size=100"), "no room"),
    ],
    ids=["nothing", "both", "like", "layers", "misspelt", "words", "few"],
)
def test_make_checkpoint_says_what_is_wrong(tmp_path: Path, words: tuple[str, ...], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        run("make-checkpoint", str(tmp_path / "m"), *words)
    assert not (tmp_path / "m").exists()


def test_state_of_flash(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(FLASH))
    assert (
        run("state", str(tmp_path), "--dtype", "bf16", "--kv-dtype", "fp8", "--lengths", "4096", "--json")
        == 0
    )
    shown = json.loads(capsys.readouterr().out)
    assert shown["bytes_per_token"] == 3850.25
    (row,) = shown["prompts"]
    held = row.pop("held")
    assert row == {
        "tokens": 4096,
        "moved": 19_845_120,
        "pages": 15_770_624,
        "slot": 4_074_496,
        "least": 19_845_120,
    }
    assert held > row["moved"]
    assert run("state", str(tmp_path), "--device", "cuda") == 0
    told = capsys.readouterr().out
    assert "6,880.00 bytes" in told
    assert "a page of 256 tokens" in told
    assert "state in bf16, as an engine on a GPU keeps it by default" in told


@pytest.mark.parametrize(("flags", "dtype"), [("avx512f avx512_bf16", "bf16"), ("avx2", "f32")])
def test_state_is_that_of_an_engine_on_this_machine(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    flags: str,
    dtype: str,
) -> None:
    """Pages of 64 tokens, numbers as this CPU is fast with them; a GPU has the checkpoint's."""
    decoder = {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 64,
        "torch_dtype": "float16",
    }
    (tmp_path / "config.json").write_text(json.dumps(decoder))
    monkeypatch.setattr(registry, "_cpu_has_bf16", lambda: "avx512_bf16" in flags.split())
    for device, wanted in (("cpu", dtype), ("cuda", "f16")):
        assert run("state", str(tmp_path), "--device", device, "--json") == 0
        shown = json.loads(capsys.readouterr().out)
        assert (shown["device"], shown["dtype"], shown["page_tokens"]) == (device, wanted, 64)


@pytest.mark.parametrize("kv", ["auto", "fp8"])
def test_flash_keeps_little_more_than_it_must(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kv: str
) -> None:
    """At 256, 4,096, 4,097 and 131,072 tokens; beyond it pages and the slot are whole."""
    (tmp_path / "config.json").write_text(json.dumps(FLASH))
    assert run("state", str(tmp_path), "--dtype", "bf16", "--kv-dtype", kv, "--json") == 0
    rows = json.loads(capsys.readouterr().out)["prompts"]
    assert [r["tokens"] for r in rows] == [256, 4096, 4097, 131_072]
    for row in rows:
        assert row["moved"] <= 1.05 * row["least"], row
