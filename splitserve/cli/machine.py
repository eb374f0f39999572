"""`topology` and `version`: what this machine and this installation are."""

from __future__ import annotations

import argparse
import json

from splitserve import __version__
from splitserve.launch import drawing
from splitserve.launch import topology as machine


def topology(args: argparse.Namespace) -> int:
    """Cpus, memory nodes, limits and GPUs that a deployment may use here."""
    found = machine.read()
    print(json.dumps(found.to_dict()) if args.json else "\n".join(drawing.draw(found)))
    return 0


def version(args: argparse.Namespace) -> int:
    print(json.dumps({"splitserve": __version__}) if args.json else f"splitserve {__version__}")
    return 0
