"""`up`, `down`, `status`, `logs`, `restart`: everything about one deployment file and its run directory."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shlex
import subprocess
import sys
import time
from typing import Any
from urllib.parse import urlsplit

from splitserve.cli import PROGRAM, complain, report
from splitserve.errors import ConfigError, PeerLost
from splitserve.launch import control, fits, measured, placement, probe, topology
from splitserve.launch import logs as log_files
from splitserve.launch.commands import fill, fill_word
from splitserve.launch.deployment import Deployment, load
from splitserve.launch.identity import Identity
from splitserve.launch.ports import Claims, check_address
from splitserve.launch.precheck import check_engines, check_models
from splitserve.launch.procs import ProcSpec
from splitserve.launch.rundir import RunDir, names
from splitserve.launch.supervisor import Move, Outcome, Supervisor
from splitserve.net import keys
from splitserve.ops.code_place import is_compiled
from splitserve.ops.kernels.archs import kernel_path

FOLLOW_PAUSE_S = 0.2
LOG_LINES = 50


def up(args: argparse.Namespace) -> int:
    """Start a deployment and stay with it, or (--detach) return once it is ready."""
    deployment = load(args.file, overrides=args.set)
    if args.topology and not args.dry_run:
        raise ConfigError("--topology plans for another machine", field="topology", fix="add --dry-run")
    if deployment.hosts.backend != "local":
        from splitserve.cli import hosts

        return hosts.up(args, deployment)
    if len(args.topology) > 1:
        raise ConfigError(
            f"{len(args.topology)} topologies for one host", field="topology", fix='[hosts] backend = "ray"'
        )
    machine = topology.load(args.topology[0]) if args.topology else topology.read()
    # Another machine has other files; tests start other programs, which know other models.
    ours = args.program == PROGRAM and not args.topology
    needed = check_models(deployment.groups, free=machine.memory_free) if ours else {}
    if ours:
        for warning in dict.fromkeys(check_engines(deployment.groups)):
            print(f"warning: {warning}", file=sys.stderr, flush=True)
    links, note = measured.fresh(deployment, machine)
    specs = placement.place(machine, deployment, links)
    fits.check_quota(machine, deployment)
    fits.check_memory(machine, specs, needed)
    if args.detach:
        return detach(args, deployment)
    told = {
        "kernels": _kernel_path(machine, specs),
        "first start": _first_start(deployment) if ours else "",
        "fabric": note,
    }
    notes = {name: text for name, text in told.items() if text}
    if args.dry_run:
        return dry_run(args, deployment, specs, notes)
    run_dir = RunDir(deployment.name)
    run_dir.acquire()
    code = 1
    try:
        check_address(deployment.transfer.bootstrap_host, field="bootstrap_host")
        with Claims() as claims:
            ports = claims.claim_all(specs)
            if args.detached:  # all that a person can get wrong has been said by now
                write_errors_to(run_dir.log("supervisor"))
            outcome = supervise(args, deployment, specs, run_dir, ports, notes=notes)
        code = outcome.code
    finally:
        run_dir.release(keep_logs=code in (1, 2))
    return say_outcome(args, outcome)


def down(args: argparse.Namespace) -> int:
    """Stop a deployment and wait until every process of it is gone."""
    run_dir = _find(args.name, missing_ok=True)
    if run_dir is None:
        _print(
            args, {"stopped": None}, [f"nothing is up{f' under the name {args.name}' if args.name else ''}"]
        )
        return 0
    state = _state_of(run_dir)
    supervisor = Identity(state["supervisor"]["pid"], state["supervisor"]["start"])
    control.ask(run_dir.control, {"op": "stop", "kill": args.kill})
    if not supervisor.wait_gone(state["stop_within_s"] + 10.0):
        raise PeerLost(
            f"supervisor pid {supervisor.pid} of {run_dir.name} does not stop",
            fix=f"splitserve down {run_dir.name} --kill, or kill -9 {supervisor.pid} and then splitserve status",
        )
    _print(args, {"stopped": run_dir.name}, [f"stopped {run_dir.name}: every process is gone"])
    return 0


def status(args: argparse.Namespace) -> int:
    """Show what is up. Exit code 1 where nothing is, or something in it is not ready."""
    wait_s = _number(args.wait, "--wait")
    end = time.monotonic() + wait_s
    states, lines = _states(args.name)
    said = ""
    while not _all_ready(states) and time.monotonic() < end:
        if (waits := _waits_for(states)) != said and not args.json:
            print(f"waiting: {waits}", file=sys.stderr, flush=True)
            said = waits
        time.sleep(FOLLOW_PAUSE_S)
        states = _states(args.name)[0]
    for state in states:
        _add_loads(state)
        age = _duration(time.time() - state["since"])
        answers = "ready" if state["ready"] else "not ready (no token comes through a pair)"
        lines.append(f"{state['name']}: {state['overall']} and {answers}, started {age} ago, {state['url']}")
        lines += [*report.table(state), "", *report.loads(state)]
    if not states:
        lines.append(f"nothing is up{f' under the name {args.name}' if args.name else ''}")
    _print(args, {"deployments": states}, lines)
    return 0 if _all_ready(states) else 1


def logs(args: argparse.Namespace) -> int:
    """Print the last lines of the logs; with --follow go on until the deployment stops.

    Exit code 1 where --request names what no line has.
    """
    lines = _count(args.lines, "--lines") if args.lines else None
    name, process = args.name, args.process
    if name and not process and name not in names():
        name, process = "", name  # `logs decode-0`, where only one deployment can be meant
    run_dir = _find(name, with_logs=True)
    assert run_dir is not None
    have = sorted(run_dir.logs.glob("*.log"))
    paths = [p for p in have if process in ("", p.stem)]
    if not paths:
        fix = f"one of {', '.join(p.stem for p in have)}"
        raise ConfigError(f"{run_dir.name} has no process {process!r}", field="process", fix=fix)
    followers = {p.stem: log_files.Follower(p) for p in paths}
    every = bool(args.request) and lines is None
    last = LOG_LINES if lines is None else lines
    tails = {p.stem: log_files.whole(p) if every else log_files.tail(p, last) for p in paths}
    found = _print_logs(args, tails)
    if args.request and not found and not args.follow:
        where = "kept" if every else f"among the last {last} of each log"
        return complain(
            f"no line {where} names {args.request!r}",
            'only requests that failed or were slow have lines, and every request at log_level = "debug"',
            code=1,
        )
    while args.follow and run_dir.running():
        time.sleep(FOLLOW_PAUSE_S)
        _print_logs(args, {name: list(f.new_lines()) for name, f in followers.items()})
    return 0


def restart(args: argparse.Namespace) -> int:
    """Stop one process and start it again."""
    run_dir = _find(args.name)
    assert run_dir is not None
    answer = control.ask(run_dir.control, {"op": "restart", "name": args.process})
    if not answer.get("ok"):
        raise ConfigError(str(answer.get("error")), field="process", fix=answer.get("fix"))
    _print(args, answer, [f"{args.process} of {run_dir.name} is being restarted; see `splitserve status`"])
    return 0


# ------------------------------------------------------------------ up


def supervise(
    args: argparse.Namespace,
    deployment: Deployment,
    specs: list[ProcSpec],
    run_dir: RunDir,
    ports: dict[str, int],
    *,
    notes: dict[str, str],
    move: Move | None = None,
) -> Outcome:
    shown = report.choose(as_json=args.json)
    for name, text in notes.items():
        shown({"event": "note", "name": name, "text": text})

    def tell(event: dict[str, Any]) -> None:
        shown(event)
        if event["event"] == "up" and not args.json:
            print("\n".join(_welcome(event["state"])), flush=True)

    try:
        supervisor = Supervisor(
            deployment, specs, run_dir=run_dir, ports=ports, report=tell, command=args.program, move=move
        )
        return asyncio.run(supervisor.run())
    finally:
        shown.close()


def _kernel_path(machine: topology.Topology, specs: list[ProcSpec]) -> str:
    """Which kernels the engines of these processes take, so that nobody is on a fallback without knowing it."""
    used = {index for spec in specs for index in spec.gpus}
    return kernel_path([(g.name, g.arch) for g in machine.gpus if g.index in used])


def _first_start(deployment: Deployment) -> str:
    """A line where engines here will compile their kernels, so that nobody thinks every start takes as long."""
    engines = [g.engine for g in deployment.groups if not g.program.foreign]
    if is_compiled() or not any(e.device == "cpu" and e.dtype in ("auto", "f32") for e in engines):
        return ""
    return "float32 kernels are compiled for this CPU, once: up to a minute longer, at the stage weights"


def detach(args: argparse.Namespace, deployment: Deployment) -> int:
    """Start `up` again in a session of its own and show what it reports until it is up or has failed."""
    words = [*args.program, "up", args.file, "--json", "--detached"]
    words += [word for text in args.set for word in ("--set", text)]
    shown = report.choose(as_json=args.json)
    child = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, start_new_session=True)
    assert child.stdout is not None
    heard, ended = False, dict[str, Any]()
    try:
        for line in child.stdout:
            event, heard = json.loads(line), True
            if event["event"] == "outcome":
                ended = event
                continue
            shown(event)
            if event["event"] == "up":
                shown.close()
                if not args.json:
                    print(
                        "\n".join(
                            [*_welcome(event["state"]), f"stop it with: splitserve down {deployment.name}"]
                        )
                    )
                return 0
    except KeyboardInterrupt:
        child.terminate()
        child.wait(deployment.config.drain_s + 2 * deployment.config.kill_after_s + 10)
        return 130
    finally:
        shown.close()
        child.stdout.close()
    code = child.wait()
    if not ended and heard:
        return complain(
            "the supervisor ended without a word", f"see {RunDir(deployment.name).log('supervisor')}", code=1
        )
    if ended:
        said = say_outcome(args, Outcome(ended["code"], ended["why"], ended["log"], tuple(ended["tail"])))
        # Whoever waits for it would go on: nothing is up.
        return said or complain("it was stopped before it was ready", code=1)
    return code or 1  # it has told why on stderr, which was ours until then


def dry_run(
    args: argparse.Namespace, deployment: Deployment, specs: list[ProcSpec], notes: dict[str, str]
) -> int:
    from splitserve.config import explain

    lines = [
        "settings that are not defaults:",
        *(f"  {line}" for line in explain(list(deployment.settings), only_set=True)),
    ]
    lines += ["", *(f"{name}: {text}" for name, text in notes.items())]
    lines += ["", "placement:", *(f"  {line}" for line in placement.explain(specs)), "", "commands:"]
    shown = {f"{s.name}.{w.key}": w.port for s in specs for w in s.ports if w.port}
    for spec in specs:
        marks = {f"{s.name}.{w.key}": shown.get(f"{s.name}.{w.key}", 0) for s in specs for w in s.ports}
        env = "".join(f"{name}={shlex.quote(fill_word(value, marks))} " for name, value in spec.env.items())
        lines.append(f"  {env}splitserve {shlex.join(fill(spec.argv, marks))}")
    lines.append("  (port 0 stands for one that is free when it starts)")
    body = {"name": deployment.name, **notes, "processes": [s.to_dict() for s in specs]}
    _print(args, body, lines)
    return 0


def _welcome(state: dict[str, Any]) -> list[str]:
    url = state["url"]
    return [
        "",
        *report.table(state),
        "",
        f"OpenAI API: {url}/v1    ready: {url}/ready    metrics: {url}/metrics",
    ]


def say_outcome(args: argparse.Namespace, outcome: Outcome) -> int:
    if args.json:
        report.JsonReport()({"event": "outcome", "name": "", "text": outcome.why, **outcome.to_dict()})
    if outcome.code not in (1, 2):
        return outcome.code
    for line in outcome.tail:
        print(f"  | {line}", file=sys.stderr)
    fix = f"the whole log: {outcome.log}" if outcome.log else None
    return complain(outcome.why, fix, code=outcome.code)


def write_errors_to(path: Any) -> None:
    """From here on nobody watches stderr."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(fd, 2)
    os.close(fd)


# ------------------------------------------------------------------ finding one


def _find(name: str, *, with_logs: bool = False, missing_ok: bool = False) -> RunDir | None:
    """The deployment of this name, or the only one.

    ConfigError for a name that is none's and for several; PeerLost where nothing is up.
    """
    found = []
    for each in [name] if name else names():
        run_dir = RunDir(each)
        run_dir.clean() if not with_logs else None
        if run_dir.running() or (with_logs and run_dir.logs.is_dir()):
            found.append(run_dir)
    if len(found) > 1:
        running = [r for r in found if r.running()]
        found = running if len(running) == 1 else found
    if len(found) > 1:
        have = ", ".join(r.name for r in found)
        raise ConfigError(f"{len(found)} deployments: {have}", field="name", fix="name the one that is meant")
    if found or missing_ok:
        return found[0] if found else None
    if name:
        have = ", ".join(n for n in names() if RunDir(n).running())
        fix = f"up: {have}" if have else "nothing is up; start one: splitserve up deploy/demo.toml"
        raise ConfigError(f"no deployment {name!r} is up", field="name", fix=fix)
    raise PeerLost("no deployment is up", fix="start one: splitserve up deploy/demo.toml")


def _states(name: str) -> tuple[list[dict[str, Any]], list[str]]:
    """What runs, with "ready" as its router says, and a line for each process of a dead supervisor that was ended."""
    states, ended = [], []
    for each in [name] if name else names():
        run_dir = RunDir(each)
        ended += [f"{each}: its supervisor had died; ended {gone}" for gone in run_dir.clean()]
        if not run_dir.running():
            continue
        try:
            states.append(_state_of(run_dir))
        except (
            PeerLost
        ):  # just starting or just stopping, or stopped by a debugger: what it wrote last must do
            states += [state for state in [run_dir.read_state()] if state]
    for state in states:
        at = urlsplit(state["url"])
        state["ready"] = asyncio.run(probe.ask(str(at.hostname), at.port or 80)).ready
    return states, ended


def _add_loads(state: dict[str, Any]) -> None:
    """To each engine what it does, as its router has it: "load" and "tokens_per_s"; {} where that is not known."""
    at = urlsplit(state["url"])
    told = asyncio.run(probe.workers(str(at.hostname), at.port or 80, first_key(state["api_key_file"])))
    known: dict[tuple[Any, Any], dict[str, Any]] = {}
    known |= {(w.get("worker_type"), urlsplit(str(w.get("url"))).netloc): w for w in told}
    known |= {(w.get("id"), urlsplit(str(w.get("url"))).port): w for w in told}
    for process in state["processes"]:
        where = process["role"], urlsplit(process["url"]).netloc
        worker = known.get((process["name"], process["ports"].get("http"))) or known.get(where, {})
        process["load"] = worker.get("load", {}) if worker.get("is_healthy") else {}
        process["tokens_per_s"] = worker.get("tokens_per_s", {})


def first_key(path: str) -> str:
    """Of the router's API keys; "" where there are none or they are not ours to read."""
    try:
        return keys.first_key(path)
    except ConfigError:
        return ""


def _waits_for(states: list[dict[str, Any]]) -> str:
    late = [p for s in states for p in s["processes"] if p["phase"] != "ready"]
    if not late:
        return "a token through every pair" if states else "nothing is up"
    return ", ".join(f"{p['name']} {p['phase']} {p['loading']}".strip() for p in late)


def _all_ready(states: list[dict[str, Any]]) -> bool:
    ready = all(p["phase"] == "ready" for s in states for p in s["processes"])
    return bool(states) and ready and all(s["ready"] and s["overall"] == "up" for s in states)


def _state_of(run_dir: RunDir) -> dict[str, Any]:
    """The state, from the supervisor itself."""
    answer = control.ask(run_dir.control, {"op": "status"})
    if not answer.get("ok"):
        raise PeerLost(f"{run_dir.name}: {answer.get('error')}", fix=answer.get("fix"))
    state: dict[str, Any] = answer["state"]
    return state


# ------------------------------------------------------------------ printing


def _print(args: argparse.Namespace, body: dict[str, Any], lines: list[str]) -> None:
    print(json.dumps(body) if args.json else "\n".join(lines).rstrip())


def _print_logs(args: argparse.Namespace, tails: dict[str, list[str]]) -> int:
    """Of all processes in the order of time; with --request only lines that name it. How many there were."""
    num = 0
    for process, line in log_files.merged(tails, time.strftime("%H:%M:%S")):
        if args.request in line:
            num += 1
            print(
                json.dumps({"process": process, "line": line}) if args.json else f"{process:<12} | {line}",
                flush=True,
            )

    return num


def _count(text: str, flag: str) -> int:
    if not text.isdecimal():
        raise ConfigError(f"{flag} {text}: not a whole number", field=flag, fix=f"for example {flag} 60")
    return int(text)


def _number(text: str, flag: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"{flag} {text}: not a number", field=flag, fix=f"for example {flag} 60") from None


def _duration(seconds: float) -> str:
    minutes, s = divmod(int(seconds), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours} h {m} min" if hours else f"{m} min {s} s" if m else f"{s} s"
