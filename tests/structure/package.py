"""What the structure tests look at: the package's source files, and which of them belong to the torch-free zone."""

from __future__ import annotations

import ast
import tomllib
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "splitserve"


def sources() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def zone() -> list[str]:
    """Modules of the torch-free zone: what the import-linter contract in pyproject.toml names, and all below it."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    contract = next(c for c in contracts if c["type"] == "forbidden")
    outside = {line.split(" -> ")[0] for line in contract["ignore_imports"]}
    named = [name.removesuffix(".*") for name in contract["source_modules"]]
    found = {module_name(p) for p in sources()}
    return sorted(m for m in found - outside for n in named if m == n or m.startswith(f"{n}."))
