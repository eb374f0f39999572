"""`splitserve doctor`: reads this machine and prints verdicts; `--setup` prints, and runs, what installs the rest."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace

from splitserve.errors import ConfigError, SplitserveError
from splitserve.launch import deployment
from splitserve.launch import topology as machine
from splitserve.launch.deployment import Deployment
from splitserve.launch.doctor.facts import Plan
from splitserve.launch.doctor.finding import Finding, Level
from splitserve.launch.topology import Topology

Ports = tuple[tuple[str, str, int], ...]

_MARKS = {Level.OK: "ok  ", Level.SKIPPED: "skip", Level.WARNING: "WARN", Level.FAILURE: "FAIL"}


def doctor(args: argparse.Namespace) -> int:
    """Check what a deployment needs; exit code 1 where something is in the way."""
    if args.set and not (args.file or args.fabric):
        raise ConfigError(
            "--set changes a deployment file's settings", field="set", fix="splitserve doctor FILE --set ..."
        )
    if args.setup or args.run_setup:
        return _setup(args)
    if args.fabric is not None:
        from splitserve.cli import fabric

        return fabric.run(args)
    if args.file:
        loaded = deployment.load(args.file, overrides=args.set)
        if loaded.hosts.backend != "local":
            return _on_hosts(args, loaded)
    findings = _examine(args)
    good = all(f.ok for f in findings)
    if args.json:
        print(json.dumps({"ok": good, "findings": [f.to_dict() for f in findings]}))
    else:
        print("\n".join(_lines(findings)))
    return 0 if good else 1


def _on_hosts(args: argparse.Namespace, loaded: Deployment) -> int:
    """The same for a file of several hosts: what each of them finds, under its address."""
    from splitserve.cli import hosts

    found = hosts.examine(args, loaded)
    good = all(f.ok for _, findings in found for f in findings)
    if args.json:
        told = [{**f.to_dict(), "host": host} for host, findings in found for f in findings]
        print(json.dumps({"ok": good, "findings": told}))
    else:
        print("\n".join(line for host, findings in found for line in (f"{host}:", *_lines(findings))))
    return 0 if good else 1


def _examine(args: argparse.Namespace) -> list[Finding]:
    """What is here, and what the deployment file asks for where one was given; NIXL is tried unless --quick."""
    from splitserve.config import TransferConfig
    from splitserve.launch.doctor import examine, gather, lanes

    found = machine.read()
    plan: Plan | None = None
    ports: Ports = gather.DEFAULT_PORTS
    config = TransferConfig()
    if args.file:
        loaded = deployment.load(args.file, overrides=args.set)
        plan, ports = _plan(loaded, found)
        config = loaded.transfer
    software = gather.read_software()
    tried = None
    if not args.quick and config.transport == "nixl" and "nixl" in software.packages:
        tried = lanes.ask(config, gpus=len(found.gpus) if software.torch_cuda else 0)
    return examine(gather.gather(found, software, ports=ports, lanes=tried, plan=plan))


def _plan(loaded: Deployment, found: Topology) -> tuple[Plan, Ports]:
    """What the file adds, and the ports that it names. What is wrong with it becomes a fact, not an error."""
    from splitserve.launch import fits, placement
    from splitserve.launch.doctor import gather
    from splitserve.launch.doctor.facts import Model
    from splitserve.launch.precheck import check_engines, check_model

    models, needed = [], {}
    for group in loaded.groups:
        try:
            footprint = check_model(group, free=found.memory_free)
            models.append(Model(group.engine.model))
            needed.update({str(group.role): footprint} if footprint else {})
        except SplitserveError as e:
            models.append(Model(group.engine.model, e.message, e.fix or ""))
    uses_nixl = loaded.transfer.transport == "nixl"
    plan = Plan(loaded.path, tuple(dict.fromkeys(models)), uses_nixl=uses_nixl, name=loaded.name)
    try:
        plan = replace(plan, warning="; ".join(dict.fromkeys(check_engines(loaded.groups))))
        specs = placement.place(found, loaded)
        fits.check_quota(found, loaded)
        fits.check_memory(found, specs, needed)
    except SplitserveError as e:
        return replace(plan, trouble=e.message, fix=e.fix or ""), ()
    computing = {cpu for s in specs for cpu in s.cpus}
    idle = [c for c in found.cores if not computing & set(c.cpus)]
    return replace(plan, spins=loaded.transfer.progress_thread and not idle), gather.wished_ports(specs)


def _setup(args: argparse.Namespace) -> int:
    """Print what installs the builds that suit the driver here, and with --run do it."""
    from splitserve.launch.doctor import gather, setup

    if not args.setup:
        raise ConfigError(
            "--run runs what --setup prints", field="run", fix="splitserve doctor --setup --run"
        )
    chosen = setup.choose(machine.read(), gather.read_software())
    if args.json:
        print(json.dumps({**asdict(chosen), "commands": chosen.commands(sys.executable)}))
    else:
        print("\n".join(setup.show(chosen, sys.executable)), flush=True)
    if args.run_setup:
        setup.run(chosen, sys.executable, say=lambda line: print(f"+ {line}", file=sys.stderr, flush=True))
    return 0


def _lines(findings: Sequence[Finding]) -> list[str]:
    lines = []
    for f in findings:
        lines.append(f"{_MARKS[f.level]}  {f.subject:<12} {f.text}")
        if f.fix:
            lines.append(f"      fix: {f.fix}")
    return lines
