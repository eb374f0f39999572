"""`render`: a deployment file in another system's words."""

from __future__ import annotations

import argparse
import os
import sys

from splitserve.launch import deployment


def render(args: argparse.Namespace) -> int:
    """Print manifests for `kubectl apply -f -`, or a systemd unit. Nothing is started and no system is asked."""
    loaded = deployment.load(args.file, overrides=args.set)
    print(_unit(args, loaded) if args.what == "systemd" else _manifests(args, loaded), end="")
    return 0


def _manifests(args: argparse.Namespace, loaded: deployment.Deployment) -> str:
    from splitserve.launch import kubernetes

    wishes = kubernetes.Wishes(
        image=args.image,
        namespace=args.namespace,
        cpus=args.cpus,
        memory=args.memory,
        shm=args.shm,
        models=args.models,
    )
    return kubernetes.to_yaml(kubernetes.render(loaded, wishes))


def _unit(args: argparse.Namespace, loaded: deployment.Deployment) -> str:
    from splitserve.launch import systemd

    return systemd.render(
        loaded,
        python=os.path.abspath(sys.executable),  # unresolved: a venv's python is a link that must stay one
        file=os.path.abspath(args.file),
        directory=os.getcwd(),
        sets=args.set,
        user=args.user,
    )
