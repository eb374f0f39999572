"""Where ops/cpu's machine code is kept on disk, and whether there is any yet. Imports neither numba nor torch.

The directory is named after the contents of the whole package (cpu/compiled.py says why).
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

PREFIX = "splitserve-"

_PACKAGE = Path(__file__).parent / "cpu"


def places(chosen: str) -> list[Path]:
    """Where the code may lie, best first: in `chosen` (NUMBA_CACHE_DIR), else beside the package or in the user's."""
    contents = hashlib.sha256()
    for file in sorted(_PACKAGE.rglob("*.py")):
        contents.update(file.read_bytes())
    name = f"{PREFIX}{contents.hexdigest()[:16]}"
    user = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    parents = (Path(chosen),) if chosen else (_PACKAGE / "__pycache__", user / "splitserve")
    return [parent / name for parent in parents]


def is_compiled() -> bool:
    """Whether an engine has started here with this package before, so that its code is found and not compiled."""
    found = places(os.environ.get("NUMBA_CACHE_DIR", ""))
    return any(next(place.rglob("*.nbi"), None) is not None for place in found)
