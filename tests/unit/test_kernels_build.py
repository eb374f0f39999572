"""The gate: every kernel compiles, within shared memory, without spills, on tensor cores. No GPU is needed.

By default one form of each kernel in each case for sm_120, which has the least shared memory and the default tiles. The
same for sm_90 (tiles of its own, overlapped kernels, warpgroup products), and all forms for all five architectures, are
slow tests; `make kernels` does the latter. What was compiled once is remembered under .cache by a digest of the sources.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from splitserve.errors import ConfigError
from splitserve.ops.kernels.archs import ARCHS, SHARED_LIMIT, parse_archs
from splitserve.ops.kernels.build import Built, missing
from splitserve.ops.kernels.machine_code import Code
from splitserve.ops.kernels.main import read_built, report, sources_digest
from splitserve.ops.kernels.tuned import sizes, tuned

CACHE = Path(__file__).parents[2] / ".cache" / "kernels"


SHARE = (120,)


def compiled(*arguments: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own: the interpreter, which other tests use here, must be off when kernels are defined."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [
        sys.executable,
        "-m",
        "splitserve",
        "kernels",
        "build",
        "--cache",
        str(CACHE / "triton"),
        "--jobs",
        "2",
    ]
    return subprocess.run(
        [*command, *arguments], capture_output=True, text=True, env=environment, check=False, timeout=3600
    )


def remembered(name: str, *arguments: str) -> list[Built]:
    path = CACHE / f"{sources_digest()}.{name}.json"
    if not path.is_file():
        CACHE.mkdir(parents=True, exist_ok=True)
        done = compiled(*arguments, "--report", str(path))
        assert path.is_file(), done.stdout + done.stderr
    return read_built(path)


def check(built: list[Built], archs: tuple[int, ...]) -> None:
    """Prints the list of kernels; it is complete and has no problem."""
    print(report(built))
    assert missing(built, archs) == []
    assert [f"sm_{b.arch} {b.case} {b.kernel}: {b.problem} ({b.constants})" for b in built if b.problem] == []


@pytest.fixture(scope="module")
def share() -> list[Built]:
    return remembered("share", "--quick", "--arch", ",".join(map(str, SHARE)))


@pytest.mark.timeout(900)
def test_every_kernel_compiles(share: list[Built]) -> None:
    check(share, SHARE)


def test_matrix_kernels_use_the_instructions_of_their_generation(share: list[Built]) -> None:
    """What they are called is NVIDIA's affair; that there are some is ours."""
    assert {t for b in share for t in b.code.tensor}


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_hopper_multiplies_by_warpgroups_in_sixteen_and_in_eight_bits() -> None:
    built = remembered("hopper", "--quick", "--arch", "90")
    check(built, (90,))
    assert {t for b in built for t in b.code.tensor} >= {"HGMMA", "QGMMA"}


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_form_for_every_architecture() -> None:
    built = remembered("whole")
    check(built, ARCHS)
    assert any("MMA" in t and t.startswith("UTC") for b in built if b.arch == 100 for t in b.code.tensor)


def test_what_the_gate_refuses() -> None:
    good = Built("case", "kernel", 120, "", 99 * 1024, Code(128, 0, ("HMMA",)), True)
    assert good.problem == ""
    assert "shared memory" in Built("case", "kernel", 120, "", 99 * 1024 + 1, good.code, True).problem
    assert "spills 8 bytes" in Built("case", "kernel", 90, "", 0, Code(255, 8, ("HMMA",)), True).problem
    assert "tensor cores" in Built("case", "kernel", 90, "", 0, Code(255, 0, ()), True).problem
    assert Built("case", "kernel", 90, "", 0, Code(255, 0, ()), False).problem == ""
    early = Built("case", "kernel", 90, "", 0, Code(32, 0, ()), False, follows=False)
    assert "before it has not written yet" in early.problem
    assert replace(early, arch=89).problem == ""
    assert (
        Built("case", "?", 90, "", 0, Code(0, 0, ()), False, error="CompilationError: x").problem
        == "CompilationError: x"
    )
    assert missing([good], [120]) != []


def test_architectures_are_known() -> None:
    assert parse_archs("80,120") == (80, 120)
    assert set(ARCHS) <= set(SHARED_LIMIT)
    for text in ("", "90,", "hopper", "70"):
        with pytest.raises(ConfigError, match="not a list of architectures"):
            parse_archs(text)


def test_unknown_architectures_have_tiles() -> None:
    """Every kernel's default table ends in an entry for any size; sm_103 has no file of its own."""
    from splitserve.ops.kernels.tuned import _table

    for kernel in _table("default"):
        assert tuned(kernel, 103, 1 << 30)
        assert len(sizes(kernel, 103)) == len(_table("default")[kernel])
        for arch in ARCHS:
            assert tuned(kernel, arch, 1 << 30)
            names = {frozenset(tuned(kernel, arch, size)) for size in sizes(kernel, arch)}
            assert names == {frozenset(tuned(kernel, 103, 1))}
    with pytest.raises(ConfigError, match="no tuned configuration"):
        tuned("nothing", 90)


def test_an_entry_may_be_for_one_version_of_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """What spills under the newest Triton is kept for the one whose code is good, without touching the others."""
    from splitserve.ops.kernels.tuned import _table, _tuned

    def forget() -> None:
        _table.cache_clear()
        _tuned.cache_clear()

    def keeps(version: str) -> bool:
        forget()
        monkeypatch.setattr("splitserve.ops.kernels.tuned.triton_version", lambda: version)
        return bool(tuned("attend_split", 90, 512)["KEEP"])

    assert [keeps("3.6.0"), keeps("3.9.0"), keeps("")] == [True, False, False]
    forget()
