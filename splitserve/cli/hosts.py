"""`up` for a deployment on the hosts of a cluster: the same supervisor, whose engines run where relays reach them."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from splitserve.cli import PROGRAM, deploy
from splitserve.errors import SplitserveError
from splitserve.launch import fits, topology
from splitserve.launch.deployment import Deployment
from splitserve.launch.doctor.finding import Finding, Level
from splitserve.launch.hosts.moving import Mover
from splitserve.launch.hosts.spread import Host, place_all, spread
from splitserve.launch.ports import Claims
from splitserve.launch.procs import ProcSpec
from splitserve.launch.rundir import RunDir

if TYPE_CHECKING:
    from splitserve.launch.hosts.cluster import Cluster


def up(args: argparse.Namespace, deployment: Deployment) -> int:
    """Start it and stay with it; --dry-run with --topology for each host needs no cluster."""
    if args.topology:
        planned = [
            Host(f"host-{i}", f"host-{i}", topology.load(path)) for i, path in enumerate(args.topology)
        ]
        return deploy.dry_run(args, deployment, place_all(planned, deployment), {})
    if args.detach:
        return deploy.detach(args, deployment)
    from splitserve.launch.hosts.cluster import Cluster

    command = () if args.program == PROGRAM else args.program
    with Cluster(deployment, command=command, only_look=args.dry_run) as cluster:
        where = spread(cluster.hosts, deployment)
        wanted = place_all(cluster.hosts, deployment, where)
        if args.program == PROGRAM:  # tests start other programs, which know other models
            for warning in check(cluster, deployment, wanted):
                print(f"warning: {warning}", file=sys.stderr, flush=True)
        if args.dry_run:
            return deploy.dry_run(args, deployment, wanted, {})
        specs = place_all(cluster.hosts, deployment, cluster.reserve(deployment, where))
        return _run(args, deployment, specs, cluster)


def check(cluster: Cluster, deployment: Deployment, specs: Sequence[ProcSpec]) -> list[str]:
    """Warnings about what would run on each host. Raises what is wrong there, with the host's address before it."""
    warnings: dict[str, None] = {}
    for host in cluster.hosts:
        own = [s for s in specs if s.host == host.name]
        count = Counter(s.role for s in own)
        groups = tuple(replace(g, replicas=count[g.role]) for g in deployment.groups if count[g.role])
        needed, told = cluster.check(host, groups)
        warnings |= dict.fromkeys(f"host {host.address}: {warning}" for warning in told)
        try:
            fits.check_quota(host.topology, replace(deployment, groups=groups))
            fits.check_memory(host.topology, own, needed)
        except SplitserveError as e:
            e.message = f"host {host.address}: {e.message}"
            raise
    return list(warnings)


def examine(args: argparse.Namespace, deployment: Deployment) -> list[tuple[str, list[Finding]]]:
    """`doctor FILE`: what each host's own doctor finds, and what FILE wants of all of them, by a host's address."""
    from splitserve.launch.hosts.cluster import Cluster

    flags = ("--quick",) if args.quick or deployment.transfer.transport != "nixl" else ()
    with Cluster(deployment, only_look=True) as cluster:
        told = cluster.doctor(flags)
        found = [
            (host.address, [_finding(f) for f in findings if f["subject"] not in _OF_A_FILE])
            for host, findings in zip(cluster.hosts, told, strict=True)
        ]
        return [*found, ("all hosts", [_placed(cluster, deployment)])]


_OF_A_FILE = ("ports", "models", "placement")
"""Checks that a host cannot make without the file."""


def _finding(told: dict[str, str]) -> Finding:
    return Finding(told["subject"], Level(told["level"]), told["text"], told["fix"])


def _placed(cluster: Cluster, deployment: Deployment) -> Finding:
    """Whether the file fits these hosts, and its models are there."""
    try:
        specs = place_all(cluster.hosts, deployment, spread(cluster.hosts, deployment))
        warnings = check(cluster, deployment, specs)
    except SplitserveError as e:
        return Finding("placement", Level.FAILURE, e.message, e.fix or "")
    where = {h.name: h.address for h in cluster.hosts}
    text = ", ".join(f"{s.name} on {where[s.host]}" for s in specs if s.host)
    if warnings:
        return Finding("placement", Level.WARNING, f"{text}; {'; '.join(warnings)}", "see docs/engines.md")
    return Finding("placement", Level.OK, text)


def _run(args: argparse.Namespace, deployment: Deployment, specs: list[ProcSpec], cluster: Cluster) -> int:
    """Ports are held where they will be used, the router's here."""
    run_dir = RunDir(deployment.name)
    run_dir.acquire()
    code = 1
    try:
        with Claims() as claims:
            ports = {**claims.claim_all([s for s in specs if not s.host]), **cluster.claim(specs)}
            relayed = [cluster.relayed(spec, ports) for spec in specs]
            if args.detached:
                deploy.write_errors_to(run_dir.log("supervisor"))
            keys = deployment.router.api_key_file
            move = Mover(cluster, deployment, specs, ports, key=lambda: deploy.first_key(keys))
            outcome = deploy.supervise(args, deployment, relayed, run_dir, ports, notes={}, move=move)
        code = outcome.code
    finally:
        run_dir.release(keep_logs=code in (1, 2))
    return deploy.say_outcome(args, outcome)
