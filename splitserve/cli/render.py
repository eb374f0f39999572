"""`render`: a deployment file in another system's words."""

from __future__ import annotations

import argparse

from splitserve.launch import deployment


def render(args: argparse.Namespace) -> int:
    """Print manifests for `kubectl apply -f -`. Nothing is started and no cluster is asked."""
    from splitserve.launch import kubernetes

    wishes = kubernetes.Wishes(
        image=args.image,
        namespace=args.namespace,
        cpus=args.cpus,
        memory=args.memory,
        shm=args.shm,
        models=args.models,
    )
    loaded = deployment.load(args.file, overrides=args.set)
    print(kubernetes.to_yaml(kubernetes.render(loaded, wishes)), end="")
    return 0
