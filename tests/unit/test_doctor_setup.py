"""`doctor --setup`: which builds suit which driver, and that the steps are run as argv lists by this interpreter."""

from __future__ import annotations

import json
import sys
import tomllib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from doctor_facts import LAPTOP, box, gpu

from splitserve import cli
from splitserve.errors import ConfigError, FetchError
from splitserve.launch.doctor import setup
from splitserve.launch.doctor.setup import Setup, choose
from splitserve.launch.topology import Topology

INDEX = "https://download.pytorch.org/whl"


def machine(cuda: str, *archs: int) -> Topology:
    return box(cuda=cuda, gpus=tuple(gpu(n, arch=arch) for n, arch in enumerate(archs))).topology


@pytest.mark.parametrize(
    ("topology", "build", "torch", "nixl"),
    [
        (LAPTOP.topology, "cpu", setup.TORCH, ["nixl>=1.5,<2"]),
        (machine("13.0", 120, 120), "cu130", setup.TORCH, ["nixl>=1.5,<2", "nixl-cu13>=1.5,<2"]),
        (machine("13.2", 89), "cu130", setup.TORCH, ["nixl>=1.5,<2", "nixl-cu13>=1.5,<2"]),
        (machine("12.8", 120), "cu128", "torch>=2.11,<2.12", ["nixl>=1.5,<2", "nixl-cu12>=1.5,<2"]),
        (machine("12.9", 90, 100), "cu128", "torch>=2.11,<2.12", ["nixl>=1.5,<2", "nixl-cu12>=1.5,<2"]),
        (machine("12.2", 89, 90), "cu126", setup.TORCH, ["nixl>=1.5,<2", "nixl-cu12>=1.5,<2"]),
    ],
)
def test_the_build_follows_from_driver_and_gpus(topology: Topology, build: str, torch: str, nixl: list[str]):
    chosen = choose(topology, LAPTOP.software)
    assert (chosen.build, chosen.torch, list(chosen.nixl)) == (build, torch, nixl)
    *_, first = [argv for argv in chosen.commands("py") if torch in argv]
    assert first[:6] == ["py", "-m", "pip", "install", "--index-url", f"{INDEX}/{build}"]
    assert (setup.TRITON in first) is (build != "cpu")
    assert (setup.NVML in chosen.extras) is (build != "cpu")


@pytest.mark.parametrize(("cuda", "arch"), [("11.8", 80), ("12.6", 120), ("", 90)])
def test_a_driver_too_old_for_every_build_is_refused_with_the_one_to_install(cuda: str, arch: int):
    with pytest.raises(ConfigError, match="no build of torch") as caught:
        choose(machine(cuda, arch), LAPTOP.software)
    assert "driver 580" in (caught.value.fix or "")


def test_another_build_of_torch_is_taken_out_first():
    """pip takes any build of a good version for what was asked."""
    gpus = machine("13.0", 120)
    assert choose(gpus, LAPTOP.software).commands("py")[0][3:] == ["uninstall", "--yes", "torch", "triton"]
    same = replace(LAPTOP.software, torch_cuda="13.0")
    assert choose(gpus, same).commands("py")[0][3] == "install"
    bare = replace(LAPTOP.software, packages={})
    assert choose(gpus, bare).commands("py")[0][3] == "install"


CHOSEN = Setup("torch", "cpu", ("nixl",), (), "because")


def test_steps_run_in_order_and_stop_at_the_first_that_fails():
    ran: list[Sequence[str]] = []

    def call(argv: Sequence[str]) -> int:
        ran.append(argv)
        return 1 if "nixl" in argv else 0

    said: list[str] = []
    with pytest.raises(FetchError, match="exit code 1: py -m pip install nixl"):
        setup.run(CHOSEN, "py", say=said.append, call=call)
    assert ran == CHOSEN.commands("py")
    assert len(said) == 2


def test_run_calls_programs_and_not_a_shell(tmp_path: Path):
    """A name that a shell would take apart arrives whole."""
    out = tmp_path / "words"
    script = tmp_path / "py"
    script.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" >> {out}\n')
    script.chmod(0o755)
    setup.run(replace(CHOSEN, nixl=("nixl>=1.5,<2; true",)), str(script), say=lambda _: None)
    assert "nixl>=1.5,<2; true" in out.read_text().splitlines()


def test_the_command_prints_and_runs_only_when_told(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    ran: list[Sequence[str]] = []
    monkeypatch.setattr(setup, "run", lambda chosen, python, **_: ran.extend(chosen.commands(python)))
    assert cli.main(["doctor", "--setup"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("# ")
    assert f"{sys.executable} -m pip install --index-url {INDEX}/" in printed
    assert cli.main(["doctor", "--setup", "--json"]) == 0
    commands = json.loads(capsys.readouterr().out)["commands"]
    assert ran == []
    assert cli.main(["doctor", "--setup", "--run"]) == 0
    assert ran == commands
    assert cli.main(["doctor", "--run"]) == 2
    assert "--setup --run" in capsys.readouterr().err


def test_ranges_and_extras_are_those_of_the_project():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    assert setup.TORCH in project["dependencies"]
    assert setup.NIXL in extras["cpu"]
    assert {setup.NIXL, setup.TRITON, setup.NVML} <= set(extras["cuda"])
    assert any(each.startswith("ray") for each in extras["ray"])
