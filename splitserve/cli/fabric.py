"""`doctor --fabric [FILE]`: measure the links between ranks, say what they mean, and keep it for `up FILE`."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict

from splitserve.cli import report
from splitserve.config import TransferConfig
from splitserve.errors import ConfigError
from splitserve.launch import deployment, fabric, measured, placement
from splitserve.launch import topology as machine
from splitserve.launch.pairing import RankSeat, rank_seats
from splitserve.launch.topology import Topology
from splitserve.plan.fabric import Fabric, Verdict, judge

Seats = tuple[tuple[RankSeat, ...], tuple[RankSeat, ...]]


def run(args: argparse.Namespace) -> int:
    """Exit code 1 where a link is not what it should be. Without a file: one pair, on the first and the last core."""
    found = machine.read()
    file = args.fabric or args.file  # `doctor --fabric FILE` and `doctor FILE --fabric` say the same
    if not file:
        seats = _lone_pair(found)
        taken, verdict = _measure(TransferConfig(), seats)
        return _say(args, taken, verdict, kept="")
    loaded = deployment.load(file, overrides=args.set)
    if loaded.hosts.backend != "local":
        raise ConfigError(
            f"doctor --fabric measures one host, and {file} is for several",
            field="hosts",
            fix="measure a file of one host on each; `splitserve verify` tells the lane between hosts",
        )
    seats = rank_seats(placement.place(found, loaded))
    taken, verdict = _measure(loaded.transfer, seats)
    path = measured.path_of(loaded)
    measured.keep(measured.of(loaded, found, taken, verdict, seats), path)
    return _say(args, taken, verdict, kept=str(path))


def _lone_pair(found: Topology) -> Seats:
    cores = [(c.cpus[0],) for c in found.cores]
    cpus = (cores[0], cores[-1]) if len(cores) > 1 else ((), ())
    return (RankSeat("prefill", 0, cpus[0]),), (RankSeat("decode", 0, cpus[1]),)


def _measure(config: TransferConfig, seats: Seats) -> tuple[Fabric, Verdict]:
    taken = fabric.measure(
        config, sources=seats[0], targets=seats[1], say=lambda s: print(s, file=sys.stderr, flush=True)
    )
    return taken, judge(taken)


def _say(args: argparse.Namespace, taken: Fabric, verdict: Verdict, *, kept: str) -> int:
    if args.json:
        print(json.dumps({"fabric": asdict(taken), "verdict": asdict(verdict), "kept": kept}))
    else:
        lines = report.fabric(taken, verdict)
        print("\n".join([*lines, f"kept for `up`: {kept}"] if kept else lines))
    return 1 if verdict.findings else 0
