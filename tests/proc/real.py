"""Real deployments for tests: written to a file, brought up by the command line, asked over HTTP, taken down."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from splitserve.launch import deployment, measured, placement, topology
from splitserve.launch.pairing import rank_seats
from splitserve.plan.fabric import Fabric, Link, judge

PROGRAM = [sys.executable, "-m", "splitserve"]
UP_S = 120.0

FILE = """
[deployment]
name = "{name}"
model = "{model}"
[engine]
dtype = "f32"
page_tokens = 16
step_tokens = {step_tokens}
num_pages = {num_pages}
max_seqs = 16
threads = 1
allow_faults = true
[prefill]
tp = {tp[0]}
[decode]
tp = {tp[1]}
replicas = {decodes}
[transfer]
transport = "{transport}"
deadline_s = {deadline_s}
hold_lease_s = 2.0
[router]
port = 0
"""


def until(what: str, true: Callable[[], Any], *, within_s: float = 30.0) -> Any:
    """Poll until `true()` is; bounded, and says what was waited for."""
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        if got := true():
            return got
        time.sleep(0.02)
    raise AssertionError(f"not within {within_s} s: {what}")


class Deployment:
    """One deployment under a run directory of its own. `close` takes it down and checks that nothing is left."""

    def __init__(
        self,
        model: Path,
        *,
        name: str = "t",
        transport: str = "nixl",
        deadline_s: float = 6.0,
        tp: tuple[int, int] = (1, 1),
        decodes: int = 1,
        num_pages: int = 256,
        step_tokens: int = 32,
    ) -> None:
        self.home = Path(tempfile.mkdtemp(prefix="ss-"))
        own = {"XDG_RUNTIME_DIR": str(self.home), "XDG_STATE_HOME": str(self.home / "state")}
        self.env = {**os.environ, **own, "OMP_NUM_THREADS": "1"}
        self.name = name
        self.file = self.home / f"{name}.toml"
        text = FILE.format(
            name=name,
            model=model,
            transport=transport,
            deadline_s=deadline_s,
            tp=tp,
            decodes=decodes,
            num_pages=num_pages,
            step_tokens=step_tokens,
        )
        self.file.write_text(text)

    def keep_rates(self, gb_per_s: float) -> None:
        """As if the fabric doctor had measured the only pair; before `up`."""
        loaded, machine = deployment.load(self.file, environ={}), topology.read()
        seats = rank_seats(placement.place(machine, loaded))
        rates = {1 << 16: gb_per_s, 1 << 24: gb_per_s}
        taken = Fabric((Link(0, 0, rates, "shared memory"),), memcpy=1.0, tcp=0.1)
        state = Path(self.env["XDG_STATE_HOME"])
        measured.keep(
            measured.of(loaded, machine, taken, judge(taken), seats), measured.path_of(loaded, base=state)
        )

    def run(self, *words: str, timeout_s: float = UP_S) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*PROGRAM, *words], env=self.env, capture_output=True, text=True, timeout=timeout_s, check=False
        )

    def up(self) -> None:
        done = self.run("up", str(self.file), "--detach")
        assert done.returncode == 0, done.stdout + done.stderr

    def state(self) -> dict[str, Any]:
        return json.loads((self.home / "splitserve" / self.name / "state.json").read_text())

    def process(self, name: str) -> dict[str, Any]:
        return next(p for p in self.state()["processes"] if p["name"] == name)

    def url(self, name: str) -> str:
        return str(self.process(name)["url"])

    def call(
        self, name: str, path: str, body: dict[str, Any] | None = None, *, timeout_s: float = 60.0
    ) -> Any:
        """(status, JSON) of a GET, or of a POST where there is a body."""
        return call(self.url(name) + path, body, timeout_s=timeout_s)

    def generate(
        self, tokens: list[int], num: int, *, at: str = "router", timeout_s: float = 60.0, **more: Any
    ) -> Any:
        sampling = {"temperature": 0, "max_new_tokens": num, "ignore_eos": True}
        body = {"input_ids": tokens, "sampling_params": sampling, **more}
        return self.call(at, "/generate", body, timeout_s=timeout_s)

    def check(self) -> None:
        """Both engines' own books are in order."""
        for name in ("prefill-0", "decode-0"):
            status, answer = self.call(name, "/debug/check", {})
            assert status == 200, answer

    def all_pages_free(self) -> bool:
        loads = [self.call(n, "/debug/stats")[1] for n in ("prefill-0", "decode-0")]
        return all(s["free_pages"] == s["total_pages"] and not s["quarantined_pages"] for s in loads)

    def close(self) -> None:
        self.run("down", self.name)
        left = self.leftovers()
        shutil.rmtree(self.home, ignore_errors=True)
        assert not left, f"left behind: {left}"

    def leftovers(self) -> list[str]:
        """Processes that name our directory, and run directories."""
        found = [str(p) for p in (self.home / "splitserve").glob("*/*") if p.name != "logs"]
        for proc in Path("/proc").iterdir():
            if proc.name.isdigit():
                try:
                    words = (proc / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                except OSError:
                    continue
                if str(self.home) in words and "pytest" not in words:
                    found.append(f"{proc.name}: {words}")
        return found


def call(url: str, body: dict[str, Any] | None = None, *, timeout_s: float = 60.0) -> Any:
    raw = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, raw, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as response:
            text = response.read()
            return response.status, json.loads(text) if text else {}
    except urllib.error.HTTPError as e:
        return e.code, json.loads(e.read())
