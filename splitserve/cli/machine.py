"""`topology`, `doctor` and `version`: what this machine and this installation are."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict

from splitserve import __version__
from splitserve.cli import report
from splitserve.launch import drawing
from splitserve.launch import topology as machine


def topology(args: argparse.Namespace) -> int:
    """Cpus, memory nodes, limits and GPUs that a deployment may use here."""
    found = machine.read()
    print(json.dumps(found.to_dict()) if args.json else "\n".join(drawing.draw(found)))
    return 0


def doctor(args: argparse.Namespace) -> int:
    """Check what a deployment needs; exit code 1 where something it needs is missing."""
    from splitserve.launch.doctor import examine

    if args.fabric is not None:
        return _fabric(args)
    findings = examine(machine.read())
    if args.json:
        print(json.dumps({"ok": all(f.ok for f in findings), "findings": [f.to_dict() for f in findings]}))
    else:
        for f in findings:
            print(f"{'ok  ' if f.ok else 'FAIL'}  {f.subject:<12} {f.text}")
            if not f.ok:
                print(f"      fix: {f.fix}")
    return 0 if all(f.ok for f in findings) else 1


def _fabric(args: argparse.Namespace) -> int:
    """Measure the links between ranks; exit code 1 where one is not what it should be."""
    from splitserve.config import TransferConfig
    from splitserve.launch import deployment, fabric, placement
    from splitserve.plan.fabric import judge

    config = TransferConfig()
    sources: fabric.Cores = ((),)
    targets: fabric.Cores = ((),)
    found = machine.read()
    cores = [(c.cpus[0],) for c in found.cores]
    if args.fabric:
        loaded = deployment.load(args.fabric)
        config = loaded.transfer
        sources, targets = placement.rank_cpus(placement.place(found, loaded))
    elif len(cores) > 1:
        sources, targets = (cores[0],), (cores[-1],)
    measured = fabric.measure(
        config, sources=sources, targets=targets, say=lambda s: print(s, file=sys.stderr)
    )
    verdict = judge(measured)
    if args.json:
        print(json.dumps({"fabric": asdict(measured), "verdict": asdict(verdict)}))
    else:
        print("\n".join(report.fabric(measured, verdict)))
    return 1 if verdict.findings else 0


def version(args: argparse.Namespace) -> int:
    print(json.dumps({"splitserve": __version__}) if args.json else f"splitserve {__version__}")
    return 0
