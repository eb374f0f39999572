"""The processes of one deployment on one of several hosts: starts, watches and ends them for whoever asks from afar.

    relay ── start, poll, signal ──▶ Crew ──▶ engine    its own process group; holds the read end of our alive pipe

Ray makes it an actor (cluster.py), but it knows nothing of Ray: calls come in, each in a thread of its own. Ports are
held here, logs lie here, and silent peers on this host are fenced from here. A process whose relay has not asked for
`LEASE_S` is killed: nobody is left who could stop it.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from splitserve import __version__
from splitserve.errors import PeerLost, PortTaken, RequestError
from splitserve.launch import children, control, precheck, rundir, topology
from splitserve.launch.commands import with_flags
from splitserve.launch.deployment import Group
from splitserve.launch.fence import fence
from splitserve.launch.fits import Footprint
from splitserve.launch.identity import Identity
from splitserve.launch.logs import Follower
from splitserve.launch.ports import Claims
from splitserve.launch.rundir import RunDir

LEASE_S = 15.0
DOCTOR_S = 120.0
ORPHAN_S = 2.0
PAUSE_S = 0.02

Wish = tuple[str, str, int]
"""("process.port", address, number or 0)."""


@dataclass
class _Member:
    """One process and what of it has not been told yet."""

    running: children.Running
    log: Follower
    asked: float
    lines: deque[str] = field(default_factory=deque)
    code: int | None = None


class Crew:
    """Call `close` at the end; should this process die instead, its alive pipe ends and its children leave."""

    def __init__(self, name: str, command: Sequence[str] = ()) -> None:
        """`command` begins every child's command line; empty: splitserve, by this interpreter.

        ConfigError where a crew of this name is here already.
        """
        children.adopt_orphans()
        rundir.sweep(where := rundir.subdirectory(".hosts"))
        self._run_dir = RunDir(name, where=where)
        self._run_dir.acquire()
        self._command = tuple(command) or (sys.executable, "-m", "splitserve")
        self._alive = children.AlivePipe()
        self._claims = Claims()
        self._members: dict[str, _Member] = {}
        self._change = threading.Condition()
        self._loop = asyncio.new_event_loop()
        for target in (self._serve, self._watch):
            threading.Thread(target=target, daemon=True).start()

    def describe(self) -> dict[str, Any]:
        """This host: its name, the version here, and its topology as `splitserve topology --json` prints it."""
        found = topology.read().to_dict()
        return {"host": socket.gethostname(), "version": __version__, "topology": json.dumps(found)}

    def check(self, groups: Sequence[Group], free: int) -> tuple[dict[str, Footprint], list[str]]:
        """Models and programs of engines that are to run here; `free` bytes of memory. See precheck.py."""
        warnings = precheck.check_engines(groups)
        return precheck.check_models(groups, free=free), warnings

    def doctor(self, flags: Sequence[str]) -> list[dict[str, Any]]:
        """The findings of `splitserve doctor` here, in a process of its own. PeerLost where it ends without any."""
        words = [sys.executable, "-m", "splitserve", "doctor", "--json", *flags]
        done = subprocess.run(words, capture_output=True, text=True, timeout=DOCTOR_S, check=False)
        try:
            return list(json.loads(done.stdout)["findings"])
        except (ValueError, KeyError):
            said = (done.stderr.splitlines() or [f"exit code {done.returncode}"])[-1]
            raise PeerLost(f"doctor on {socket.gethostname()} did not end well: {said}") from None

    def claim(self, wishes: Sequence[Wish]) -> dict[str, int]:
        """Hold a port for each; PortTaken where a wished one is not free."""
        return {name: self._claims.claim(name, host, port=port) for name, host, port in wishes}

    def start(
        self,
        name: str,
        words: Sequence[str],
        env: Mapping[str, str],
        cpus: Sequence[int],
        ports: Sequence[Wish],
    ) -> int:
        """Start a process, ending an older one of its name; returns its pid. `ports` are held if they are not yet."""
        self.signal(name, signal.SIGKILL)
        for key, host, port in ports:
            if key not in self._claims.ports:  # another crew before us held them
                with suppress(PortTaken):
                    self._claims.claim(key, host, port=port)
        own = self._run_dir.path / name
        own.mkdir(mode=0o700, exist_ok=True)
        flags = ("--run-dir", str(own), "--control", str(self._run_dir.control))
        kept = {k: v for k, v in os.environ.items() if k != "CUDA_VISIBLE_DEVICES"}  # Ray's, for itself
        log = self._run_dir.log(name)
        follower = Follower(log)
        running = children.start(
            with_flags(tuple(words), flags),
            log,
            alive=self._alive,
            cpus=tuple(cpus),
            env=children.child_env(env, kept),
            command=self._command,
        )
        member = _Member(running, follower, time.monotonic())
        self._members[name] = member
        for target in (self._read, self._wait):
            threading.Thread(target=target, args=(member,), daemon=True).start()
        return running.pid

    def poll(self, name: str, within_s: float) -> dict[str, Any]:
        """What it has said and logged since the last call, and its exit code once it is gone; waits for any of it."""
        member = self._members.get(name)
        if member is None:
            raise RequestError(f"{name} was never started here", field="name")
        member.asked = time.monotonic()
        with self._change:
            self._change.wait_for(lambda: member.lines or member.code is not None, within_s)
            code = member.code  # before its last lines are taken: they are all here by then
            lines, member.lines = list(member.lines), deque()
        return {"lines": lines, "log": list(member.log.new_lines()), "code": code}

    def signal(self, name: str, number: int) -> None:
        """To the process and its group; nothing where it is gone."""
        member = self._members.get(name)
        if member is not None and member.code is None:
            member.running.signal(number)

    def close(self) -> None:
        """End everything here."""
        for member in self._members.values():
            member.running.signal(signal.SIGKILL)
        end = time.monotonic() + ORPHAN_S
        while any(m.code is None for m in self._members.values()) and time.monotonic() < end:
            time.sleep(PAUSE_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._claims.close()
        self._alive.close()
        self._run_dir.release()

    # ------------------------------------------------------------------ threads

    def _read(self, member: _Member) -> None:
        """Its messages, one line each, until it closes them."""
        assert member.running.popen.stdout is not None
        for raw in member.running.popen.stdout:
            with self._change:
                member.lines.append(raw.decode(errors="replace").rstrip("\n"))
                self._change.notify_all()

    def _wait(self, member: _Member) -> None:
        """Its end: the group first, then what it leaves behind, and only then is it told."""
        os.waitid(os.P_PID, member.running.pid, os.WEXITED | os.WNOWAIT)
        code = member.running.reap()
        end = time.monotonic() + ORPHAN_S
        while left := [who for who in children.orphans(self._known()) if _is_ours(who)]:
            for who in left if time.monotonic() > end else ():
                who.kill()
            with suppress(ChildProcessError):
                for who in left:
                    os.waitpid(who.pid, os.WNOHANG)
            time.sleep(PAUSE_S)
        with self._change:
            member.code = code
            self._change.notify_all()

    def _watch(self) -> None:
        """Kill processes whose relay has gone without a word."""
        while True:
            time.sleep(LEASE_S / 4)
            for member in list(self._members.values()):
                if member.code is None and time.monotonic() > member.asked + LEASE_S:
                    member.running.signal(signal.SIGKILL)

    def _serve(self) -> None:
        """The socket at which engines here ask for a silent peer on this host to be ended."""

        async def answer(request: dict[str, Any]) -> dict[str, Any]:
            match request:
                case {"op": "fence", "pid": int(pid), "start": int(start)}:
                    return await fence(Identity(pid, start), self._known())
                case _:
                    raise RequestError("unknown operation", field="op", fix="fence")

        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(control.serve(self._run_dir.control, answer))
        self._loop.run_forever()

    def _known(self) -> dict[int, str]:
        return {m.running.pid: name for name, m in self._members.items() if not m.running.ended}


def _is_ours(who: Identity) -> bool:
    """Ranks of a server that has died; Ray may have children of its own here."""
    try:
        with open(f"/proc/{who.pid}/cmdline", "rb") as f:
            return b"splitserve" in f.read()
    except OSError:
        return False
