"""The Dockerfiles, read and not built (no container engine runs here): they install what pyproject.toml names."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
FILES = sorted((ROOT / "deploy/docker").glob("*.Dockerfile"))


def instructions(path: Path) -> list[tuple[str, str]]:
    """(instruction, the rest of its line), continued lines joined and comments left out."""
    text = "\n".join(line for line in path.read_text().splitlines() if not line.startswith("#"))
    lines = re.sub(r"\\\n", " ", text).splitlines()
    return [(word, rest.strip()) for line in lines if line.strip() for word, _, rest in [line.partition(" ")]]


def test_there_is_one_for_cpus_and_one_for_gpus() -> None:
    assert [p.name for p in FILES] == ["cpu.Dockerfile", "cuda.Dockerfile"]


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_it_installs_the_package_with_the_extra_of_its_name(path: Path) -> None:
    extras = re.findall(r'"\.\[([\w,]+)\]"', path.read_text())
    assert extras[0].split(",")[0] == path.stem
    assert set(extras[0].split(",")) <= set(PROJECT["optional-dependencies"])


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_it_is_made_with_care(path: Path) -> None:
    """Pinned bases, nothing copied that is not there, nobody is root, and the entry point is our program."""
    found = instructions(path)
    assert {word for word, _ in found} <= {
        "FROM",
        "RUN",
        "ENV",
        "WORKDIR",
        "COPY",
        "USER",
        "EXPOSE",
        "ENTRYPOINT",
    }
    for word, rest in found:
        if word == "FROM":
            assert re.search(r":[\w.-]*\d", rest.split()[0]), f"{rest} is not pinned"
        if word == "COPY" and not rest.startswith("--from"):
            assert all((ROOT / name).exists() for name in rest.split()[:-1]), rest
        if word == "RUN" and "pip install" in rest:
            assert "--no-cache-dir" in rest
    last = dict(found)
    assert last["USER"] not in ("root", "0")
    (program,) = json.loads(last["ENTRYPOINT"])
    assert program in PROJECT["scripts"]


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_all_that_the_build_reads_is_copied_first(path: Path) -> None:
    """The readme and the licence are part of the package's metadata."""
    names = [word for kind, rest in instructions(path) if kind == "COPY" for word in rest.split()[:-1]]
    assert {"pyproject.toml", PROJECT["readme"], "LICENSE", "splitserve"} <= set(names)


def test_torch_on_cpus_is_the_one_that_the_package_wants() -> None:
    pinned = re.search(r'"torch==([\d.]+)"', (ROOT / "deploy/docker/cpu.Dockerfile").read_text())
    assert pinned is not None
    assert f'TORCH = "torch=={pinned[1]}"' in (ROOT / "scripts/venv.py").read_text()
