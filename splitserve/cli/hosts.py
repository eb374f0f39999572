"""`up` for a deployment on the hosts of a cluster: the same supervisor, whose engines run where relays reach them."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from splitserve.cli import PROGRAM, deploy
from splitserve.launch import topology
from splitserve.launch.deployment import Deployment
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

    with Cluster(deployment, command=() if args.program == PROGRAM else args.program) as cluster:
        where = spread(cluster.hosts, deployment)
        if args.dry_run:
            return deploy.dry_run(args, deployment, place_all(cluster.hosts, deployment, where), {})
        specs = place_all(cluster.hosts, deployment, cluster.reserve(deployment, where))
        return _run(args, deployment, specs, cluster)


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
            outcome = deploy.supervise(args, deployment, relayed, run_dir, ports, notes={})
        code = outcome.code
    finally:
        run_dir.release(keep_logs=code in (1, 2))
    return deploy.say_outcome(args, outcome)
