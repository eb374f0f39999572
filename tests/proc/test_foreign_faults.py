"""kill -9 of other engines' processes under load: supervised like ours, and every client gets an answer or a typed error.

The engines are tests/proc/fake_vllm.py behind the real adapter, supervisor and router. That the real vLLM behaves like
it was seen once by hand (docs/engines.md).
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path

import pytest

from splitserve.errors import DeadlineExceeded, PeerLost
from splitserve.launch.identity import Identity, descendants
from splitserve.net.client import Client
from tests.proc.fake_vllm import installation
from tests.proc.real import Deployment, until

FILE = """
[deployment]
name = "v"
engine = "vllm"
model = "nobody/reads-this"
max_restarts = 20
[engine]
python = "{python}"
[prefill]
[decode]
replicas = {decodes}
[router]
port = 0
request_deadline_s = 20.0
"""
NUM_TOKENS = 20
HUNG_S = 30.0
BACK_S = 15.0
"""From a kill until a token comes through every pair: back-off, an interpreter's start, a health check, a probe."""


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Deployment]:
    d = Deployment(Path("none"), name="v")
    d.file.write_text(FILE.format(python=installation(tmp_path), decodes=1))
    d.up()
    try:
        yield d
    finally:
        d.close()


class Load:
    """Streams without a pause until told to stop; how each ended."""

    def __init__(self, url: str) -> None:
        self.ended: Counter[str] = Counter()
        self.since = 0  # answered since somebody set this to 0
        self._url = url
        self._client = Client()
        self._stop = False

    async def run(self, concurrency: int) -> None:
        await asyncio.gather(*(self._ask_on() for _ in range(concurrency)))
        await self._client.close()

    def stop(self) -> None:
        self._stop = True

    async def _ask_on(self) -> None:
        while not self._stop:
            try:
                how = await asyncio.wait_for(self._one(), HUNG_S)
            except (TimeoutError, DeadlineExceeded):
                how = "hung"
            except PeerLost as e:
                how = f"cut: {e.message}"
            self.ended[how] += 1
            self.since += how == "answered"
            await asyncio.sleep(0.0 if how == "answered" else 0.2)

    async def _one(self) -> str:
        body = {"prompt": "one two three", "max_tokens": NUM_TOKENS, "stream": True}
        headers = (("content-type", "application/json"),)
        words, done, error = 0, False, ""
        async with self._client.stream(
            "POST", self._url + "/v1/completions", body=json.dumps(body).encode(), headers=headers
        ) as stream:
            if stream.status != 200:
                return f"typed: {json.loads(await stream.read())['error']['code']}"
            async for event in stream.events():
                done = event == b"[DONE]"
                told = {} if done else json.loads(event)
                error = told.get("error", {}).get("code", error)
                words += len(told.get("choices", []))
        if error and done:
            return f"typed: {error}"
        return "answered" if done and words == NUM_TOKENS else f"short: {words} words, done {done}"


def victim(d: Deployment, name: str, what: str) -> int:
    """The pid of an engine's attendant, API server or engine core."""
    attendant = d.process(name)["pid"]
    below = [who.pid for who in descendants(attendant)]
    server = next(pid for pid in below if b"cli.main" in Path(f"/proc/{pid}/cmdline").read_bytes())
    return {"attendant": attendant, "server": server, "core": descendants(server)[0].pid}[what]


async def strike(d: Deployment, name: str, what: str) -> None:
    """Kill, and wait until the service is whole again: a new life of that engine, the old one of the others."""
    others = {p["name"]: p["pid"] for p in d.state()["processes"] if p["name"] != name}
    old = [who for who in map(Identity.of, tree(d.process(name)["pid"])) if who is not None]
    restarts = d.process(name)["restarts"]
    os.kill(victim(d, name, what), signal.SIGKILL)
    begun = time.monotonic()

    def whole() -> bool:
        now = d.process(name)
        again = now["restarts"] > restarts and now["phase"] == "ready"
        return again and d.call("router", "/ready")[1].get("proven", 0) > 0

    await asyncio.to_thread(until, f"{what} of {name} back", whole, within_s=BACK_S)
    assert time.monotonic() - begun < BACK_S
    assert {p["name"]: p["pid"] for p in d.state()["processes"] if p["name"] != name} == others
    assert [who.pid for who in old if who.alive] == []


def tree(pid: int) -> list[int]:
    return [pid, *(who.pid for who in descendants(pid))]


def busy(d: Deployment) -> bool:
    """Whether `status` shows what the engines do, which it knows from the router's last health checks."""
    shown = json.loads(d.run("status", "--json").stdout)["deployments"][0]["processes"]
    told = {p["name"]: (p["load"], p["tokens_per_s"]) for p in shown}
    (prefill, made), (decode, said) = told["prefill-0"], told["decode-0"]
    assert prefill["total_pages"] == decode["total_pages"] == 1000
    assert said["prompt"] == 0.0  # all of it came from prefill
    return decode["num_running"] > 0 and made["prompt"] > 0 and said["output"] > NUM_TOKENS


async def drill(d: Deployment, strikes: Sequence[tuple[str, str]]) -> None:
    """Kill one after another under a load of six streams; between two of them requests are answered."""
    load = Load(d.url("router"))
    asking = asyncio.create_task(load.run(6))
    await asyncio.to_thread(until, "status shows the load", lambda: busy(d))
    for name, what in strikes:
        await strike(d, name, what)
        load.since = 0
        await asyncio.to_thread(until, "answers again", lambda: load.since > 0)
    load.stop()
    await asking
    assert all(how == "answered" or how.startswith("typed") for how in load.ended), load.ended
    assert any(how.startswith("typed") for how in load.ended), "no request met a kill"


def test_status_shows_what_other_engines_do_and_killed_ones_come_back_under_load(pair: Deployment) -> None:
    asyncio.run(drill(pair, (("decode-0", "server"), ("prefill-0", "core"))))
    assert "output tok/s" in pair.run("status").stdout


@pytest.mark.slow
@pytest.mark.timeout(400)  # from the sixth death on a restart waits ten seconds
def test_every_process_of_other_engines_three_times(pair: Deployment) -> None:
    victims = product(("decode-0", "prefill-0"), ("attendant", "server", "core"))
    asyncio.run(drill(pair, tuple(victims) * 3))
