"""`topology`, `doctor` and `version`: what this machine and this installation are."""

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


def doctor(args: argparse.Namespace) -> int:
    """Check what a deployment needs; exit code 1 where something it needs is missing."""
    if args.fabric is not None:
        from splitserve.cli import fabric

        return fabric.run(args)
    from splitserve.launch.doctor import examine

    findings = examine(machine.read())
    if args.json:
        print(json.dumps({"ok": all(f.ok for f in findings), "findings": [f.to_dict() for f in findings]}))
    else:
        for f in findings:
            print(f"{'ok  ' if f.ok else 'FAIL'}  {f.subject:<12} {f.text}")
            if not f.ok:
                print(f"      fix: {f.fix}")
    return 0 if all(f.ok for f in findings) else 1


def version(args: argparse.Namespace) -> int:
    print(json.dumps({"splitserve": __version__}) if args.json else f"splitserve {__version__}")
    return 0
