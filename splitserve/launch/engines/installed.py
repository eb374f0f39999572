"""Which version of another engine an interpreter has: asked of its importlib.metadata, before anything is started.

Nothing of the engine is imported: that takes seconds, and may fail for reasons of its own, which its log will say.
"""

from __future__ import annotations

import json
import subprocess
import sys

from splitserve.errors import ConfigError
from splitserve.launch.engines import ADAPTERS
from splitserve.launch.engines.seat import Adapter, Program

_ASK = """
import importlib.metadata, json, sys
found = {}
for name in sys.argv[1:]:
    try:
        found[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        pass
print(json.dumps(found))
"""
_TIMEOUT_S = 30.0


def check(program: Program) -> str:
    """A warning about an engine's version, or "". ConfigError, with the line that installs it, where it is missing."""
    adapter = ADAPTERS[program.name]
    python = program.python or sys.executable
    version = _version(python, adapter)
    if version.startswith(adapter.known_versions):
        return ""
    known = " and ".join(f"{v.rstrip('.')}{'.x' if v.endswith('.') else ''}" for v in adapter.known_versions)
    return (
        f"{adapter.name} {version} is not known here (known: {known}): its flags or its protocol may differ"
    )


def _version(python: str, adapter: Adapter) -> str:
    try:
        asked = subprocess.run(
            [python, "-c", _ASK, *adapter.distributions],
            capture_output=True,
            text=True,
            check=True,
            timeout=_TIMEOUT_S,
        )
        found: dict[str, str] = json.loads(asked.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as e:
        raise ConfigError(
            f"{python} cannot be asked for {adapter.name}: {e}",
            field="python",
            fix="set python to the interpreter of the environment that has it, such as /venv/bin/python",
        ) from None
    for name in adapter.distributions:
        if name in found:
            return found[name]
    raise ConfigError(
        f"{adapter.name} is not installed for {python}",
        field="engine",
        fix=f"{adapter.install.format(python=python)}; or set python to an interpreter that has it",
    )
