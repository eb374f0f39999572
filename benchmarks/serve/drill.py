"""kill -9 of every kind of process while 1,000 requests run: none may hang, be answered wrongly or be forgotten.

    python -m benchmarks.serve.drill [--num 1000] [--concurrency 8] [--turns 2] [--decodes 2] [--keep drill]

Brings up a deployment of its own over a tiny random model: one prefill engine, two decode engines, router, supervisor,
NIXL between them. Half of the requests stream, half are greedy and half seeded; the answer to each prompt is known from
before the first kill. Victims, in turn: HTTP server and rank of prefill and of the decode engine that is busiest, and
the router. A hundred requests belong to each kill: a third have ended when it comes, the others meet what it leaves,
and all processes are well again before the next hundred begin. At the end no engine may have a page that is not free.

A request may end in three ways: the known answer; a typed error (a status of 4xx or 5xx with a code, or an error event
and [DONE] behind a beginning of the known answer); or, when the router itself died, a connection that closed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.measure import keep
from splitserve.errors import DeadlineExceeded, PeerLost
from splitserve.net.client import Client
from tests.proc.real import Deployment
from tests.tiny_chat import write_chat_checkpoint

NUM_PROMPTS = 24
NUM_TOKENS = 48
HUNG_S = 30.0
ROUTER_BACK_S = 15.0  # for so long after its death nobody may listen there
PAUSE_S = 0.5  # after an error: a client that asks again at once would use up its requests in a moment
VICTIMS = ("prefill server", "prefill rank", "decode server", "decode rank", "router")


@dataclass
class Prompt:
    text: str
    seed: int | None
    answer: str = ""

    def body(self, *, stream: bool) -> bytes:
        sampling = {"temperature": 0} if self.seed is None else {"temperature": 0.8, "seed": self.seed}
        return msgspec.json.encode(
            {"prompt": self.text, "max_tokens": NUM_TOKENS, "ignore_eos": True, "stream": stream, **sampling}
        )


@dataclass
class Ended:
    """How one request ended."""

    how: str  # answered, typed error, closed, wrong, hung
    seconds: float
    code: str = ""


@dataclass
class Drill:
    deployment: Deployment
    url: str
    client: Client
    rng: random.Random
    prompts: list[Prompt]
    ended: list[Ended] = field(default_factory=list)
    kills: list[dict[str, Any]] = field(default_factory=list)
    router_died_at: float = -1e9
    num_resumed: int = 0

    # -------------------------------------------------------------- requests

    async def learn(self) -> None:
        """The answers of the unharmed deployment."""
        for prompt in self.prompts:
            url = self.url + "/v1/completions"
            told = await self.client.request("POST", url, body=prompt.body(stream=False))
            prompt.answer = told.json["choices"][0]["text"]

    async def load(self, num: int, concurrency: int, victim: str, *, until_well: bool) -> None:
        """`num` requests; `victim` dies when a third of them have ended. `until_well`: and more until it is back."""
        left = iter(range(num))
        kill_at = len(self.ended) + num // 3
        killed, well = asyncio.Event(), asyncio.Event()

        async def heal() -> None:
            await killed.wait()
            await self.recovered()
            well.set()

        async def work() -> None:
            while next(left, None) is not None or (until_well and not well.is_set()):
                ended = await self.one(self.rng.choice(self.prompts), stream=self.rng.random() < 0.5)
                self.ended.append(ended)
                if len(self.ended) == kill_at:
                    await self.kill(victim)
                    killed.set()
                if ended.how != "answered":
                    await asyncio.sleep(PAUSE_S)

        await asyncio.gather(*(work() for _ in range(concurrency)), heal())

    async def one(self, prompt: Prompt, *, stream: bool) -> Ended:
        begun = time.monotonic()
        url = self.url + "/v1/completions"
        try:
            told = await self.client.request(
                "POST", url, body=prompt.body(stream=stream), timeout_s=HUNG_S, idempotent=False
            )
            how, code = judge(prompt, told.status, told.body, stream=stream)
        except DeadlineExceeded:
            how, code = "hung", ""
        except PeerLost as e:  # only the router's own death may look like this
            how, code = ("closed" if begun < self.router_died_at + ROUTER_BACK_S else "forgotten"), e.message
        return Ended(how, time.monotonic() - begun, code)

    # -------------------------------------------------------------- kills

    async def kill(self, victim: str) -> None:
        name, pid = await self.find(victim)
        if victim == "router":
            await self.count_resumed()
            self.router_died_at = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        self.kills.append({"victim": victim, "process": name, "after": len(self.ended), "pid": pid})
        print(f"{len(self.ended)} requests: killed {victim} ({name})", flush=True)

    async def count_resumed(self) -> None:
        """Streams that went on at another engine, in this life of the router."""
        name = "splitserve_router_resumed_streams_total "
        metrics = (await self.client.request("GET", self.url + "/metrics")).body.decode()
        self.num_resumed += sum(int(x.removeprefix(name)) for x in metrics.splitlines() if x.startswith(name))

    async def recovered(self) -> None:
        """The last victim has a successor, and all is well."""
        last = self.kills[-1]
        begun = time.monotonic()
        while last["pid"] in pids(self.deployment.process(last["process"])):
            await asyncio.sleep(0.05)
        await self.until_well()
        last["well_again_s"] = round(time.monotonic() - begun, 1)
        del last["pid"]

    async def until_well(self, within_s: float = 90.0) -> None:
        end = time.monotonic() + within_s
        while time.monotonic() < end:
            phases = [p["phase"] for p in self.deployment.state()["processes"]]
            try:
                told = await self.client.request("GET", self.url + "/ready", timeout_s=5.0)
            except (PeerLost, DeadlineExceeded):
                told = None
            well = (
                told is not None
                and told.status == 200
                and not told.json["unproven"]
                and not told.json["down"]
            )
            if well and set(phases) == {"ready"}:
                return
            await asyncio.sleep(0.05)
        raise SystemExit(f"not well again within {within_s:g} s: {self.deployment.state()}")

    async def lost_pages(self, within_s: float = 15.0) -> int:
        """Pages of all engines that are still not free when nothing has run for a while; their books must agree."""
        end = time.monotonic() + within_s
        names = [p["name"] for p in self.deployment.state()["processes"] if p["name"] != "router"]
        lost = 0
        while time.monotonic() < end:
            stats = [
                (await self.client.request("GET", self.deployment.url(n) + "/debug/stats")).json
                for n in names
            ]
            lost = sum(s["total_pages"] - s["free_pages"] for s in stats)
            if not lost:
                break
            await asyncio.sleep(0.2)
        for name in names:
            told = await self.client.request("POST", self.deployment.url(name) + "/debug/check", body=b"{}")
            if told.status != 200:
                raise SystemExit(f"{name}'s books are not in order: {told.body.decode()}")
        return lost

    async def find(self, victim: str) -> tuple[str, int]:
        """(process, pid): the decode engine is the one that runs most requests."""
        kind, _, part = victim.partition(" ")
        names = [p["name"] for p in self.deployment.state()["processes"] if p["name"].startswith(kind)]
        if kind == "decode":
            stats = [await self.client.request("GET", self.deployment.url(n) + "/debug/stats") for n in names]
            names = [names[max(range(len(names)), key=lambda i: stats[i].json["num_running"])]]
        own, *ranks = pids(self.deployment.process(names[0]))
        return names[0], ranks[0] if part == "rank" else own


def pids(process: dict[str, Any]) -> list[int]:
    """Its own, then those of its ranks."""
    return [process["pid"], *(r["pid"] for r in process.get("ranks", []))]


def judge(prompt: Prompt, status: int, body: bytes, *, stream: bool) -> tuple[str, str]:
    """(how it ended, the error's code)."""
    if status != 200:
        code = json.loads(body).get("error", {}).get("code", "")
        return ("typed error" if code else "wrong"), code
    if not stream:
        return ("answered" if json.loads(body)["choices"][0]["text"] == prompt.answer else "wrong"), ""
    events = [e.removeprefix("data: ") for e in body.decode().split("\n\n") if e]
    if not events or events[-1] != "[DONE]":
        return "wrong", "no [DONE]"
    told = [json.loads(e) for e in events[:-1]]
    text = "".join(c["text"] for e in told for c in e.get("choices", ()))
    error = next((e["error"] for e in told if "error" in e), None)
    if error is not None:
        return ("typed error" if prompt.answer.startswith(text) and error["code"] else "wrong"), error["code"]
    return ("answered" if text == prompt.answer else "wrong"), ""


async def run(deployment: Deployment, args: argparse.Namespace) -> dict[str, Any]:
    rng = random.Random(args.seed)
    words = ("the quick brown fox jumps over a lazy dog while rain falls on old stones").split()  # noqa: SIM905
    prompts = [
        Prompt(" ".join(rng.choices(words, k=rng.randrange(4, 40))), i if i % 2 else None)
        for i in range(NUM_PROMPTS)
    ]
    async with Client() as client:
        url = deployment.url("router")
        drill = Drill(deployment, url, client, rng, prompts)
        await drill.until_well()
        await drill.learn()
        begun = time.monotonic()
        for victim in VICTIMS * args.turns:
            num = args.num // (len(VICTIMS) * args.turns)
            await drill.load(num, args.concurrency, victim, until_well=args.until_well)
        seconds = time.monotonic() - begun
        await drill.count_resumed()
        lost_pages = await drill.lost_pages()
    counts = Counter(e.how for e in drill.ended)
    failed = [e for e in drill.ended if e.how != "answered"]
    return {
        "seconds": round(seconds, 1),
        "requests": len(drill.ended),
        "hung": counts["hung"],
        "wrong": counts["wrong"],
        "unanswered": counts["forgotten"],
        "lost_pages": lost_pages,
        "slowest_recovery_s": max(kill["well_again_s"] for kill in drill.kills),
        "ended": dict(counts),
        "codes": dict(Counter(e.code for e in failed if e.how == "typed error")),
        "slowest_answer_s": round(max(e.seconds for e in drill.ended if e.how == "answered"), 2),
        "slowest_failure_s": round(max((e.seconds for e in failed), default=0.0), 2),
        "kills": drill.kills,
        "resumed_streams": drill.num_resumed,
        "decodes": args.decodes,
        "concurrency": args.concurrency,
        "tokens": NUM_TOKENS,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--num", type=int, default=1000)
    parser.add_argument("--turns", type=int, default=2, help="deaths of each kind")
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--decodes", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--until-well",
        action="store_true",
        help="go on asking until each victim is back: more than NUM requests",
    )
    parser.add_argument("--keep", default="drill", help="name of the result file; empty: keep nothing")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as home:
        deployment = Deployment(
            write_chat_checkpoint(Path(home) / "tiny"), name="drill", decodes=args.decodes
        )
        # More deaths in two minutes than a service should have: a supervisor that gives up is another test's.
        deployment.env["SPLITSERVE_DEPLOYMENT_MAX_RESTARTS"] = "100"
        deployment.up()
        try:
            result = asyncio.run(run(deployment, args))
        finally:
            deployment.close()
    print(json.dumps(result, indent=1))
    if args.keep:
        print(keep(args.keep, result))
    if any(result[name] for name in ("hung", "wrong", "unanswered", "lost_pages")):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
