"""Where machine code is kept: old directories go, those in use and young ones stay, whoever else prunes meanwhile."""

import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from splitserve import cli
from splitserve.ops import code_place
from splitserve.ops.cpu.compiled import prune


def _directories(parent: Path, ages_s: dict[str, float]) -> None:
    for name, age in ages_s.items():
        (parent / name).mkdir()
        (parent / name / "code.nbc").write_bytes(b"code")
        then = time.time() - age
        os.utime(parent / name, (then, then))


def _left(parent: Path) -> set[str]:
    return {p.name for p in parent.iterdir()}


def test_only_old_directories_beyond_the_newest_few_go(tmp_path):
    days = {f"splitserve-{i}": 86400.0 * (i + 1) for i in range(6)}
    _directories(tmp_path, days | {"splitserve-own": 1e7, "of-numba": 1e7})
    prune(tmp_path, "splitserve-own")
    assert _left(tmp_path) == {"of-numba", "splitserve-own", "splitserve-0", "splitserve-1", "splitserve-2"}


def test_young_directories_stay_however_many(tmp_path):
    names = {f"splitserve-{i}": 60.0 * i for i in range(9)}
    _directories(tmp_path, names)
    prune(tmp_path, "splitserve-0")
    assert _left(tmp_path) == set(names)


def test_many_at_once_are_as_one(tmp_path):
    _directories(tmp_path, {f"splitserve-{i:02}": 86400.0 * (i + 1) for i in range(40)})
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: prune(tmp_path, "splitserve-00"), range(8)))
    assert _left(tmp_path) == {f"splitserve-{i:02}" for i in range(4)}


def test_a_parent_that_is_gone_or_closed_is_no_error(tmp_path):
    prune(tmp_path / "gone", "splitserve-own")


def test_a_first_start_says_that_it_compiles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    dry = ["up", "deploy/demo.toml", "--dry-run", "--set", "router.port=0"]
    assert cli.main(dry) == 0
    assert "first start: float32 kernels are compiled" in capsys.readouterr().out
    (place,) = code_place.places(str(tmp_path))
    (place / "cpu").mkdir(parents=True)
    (place / "cpu" / "decoder.attend-1.py311.nbi").touch()
    assert cli.main(dry) == 0
    assert "first start" not in capsys.readouterr().out
