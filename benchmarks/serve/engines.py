"""A real pair of vLLM servers behind our router and supervisor against one vLLM server: same answers, and did KV move?

    python -m benchmarks.serve.engines --python VENV/bin/python [--model DIR] [--tokens 24]

`make engines-vllm` makes the environment and runs this. Prefill and decode have one core each. For every prompt the
greedy answers of both are compared; where they part, how near the two tokens were is told, since kernels that batch
differently may turn a tie. What moved is read in decode's own metrics. Exits with 1 unless all of it holds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import shlex
import sys
import time
from contextlib import AsyncExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console

from benchmarks.measure import keep
from splitserve.errors import SplitserveError
from splitserve.launch import stage
from splitserve.net.client import Client

FILE = "deploy/vllm-cpu.toml"
MODEL = Path(".cache/engines/smollm2-135m-f32")
NEAR_TIE = 0.05  # nat between the two best tokens where answers may part
TIMEOUT_S = 240.0
PROMPTS = [
    "The capital of France is",
    "Water boils at a temperature of",
    "def fibonacci(n):\n",
    "Once upon a time there was a lighthouse keeper who " * 12,
    "A train leaves at nine and arrives at noon. " * 20,
    "One, two, three, four, five, six, seven, eight, nine, ten. " * 16,
]
SHOWN = (
    "vllm:external_prefix_cache_queries",
    "vllm:external_prefix_cache_hits",
    "vllm:nixl_bytes_transferred_sum",
    "vllm:nixl_xfer_time_seconds_count",
    "vllm:nixl_num_failed_transfers",
)


async def ask(client: Client, url: str, path: str, body: dict[str, Any]) -> Any:
    """The decoded answer. SplitserveError and AssertionError for what is none."""
    answer = await client.request(
        "POST",
        url + path,
        body=json.dumps(body).encode(),
        headers=(("content-type", "application/json"),),
        timeout_s=TIMEOUT_S,
    )
    assert answer.status == 200, (answer.status, answer.body[:500])
    return answer.json


async def answers(client: Client, url: str, tokens: int) -> list[dict[str, Any]]:
    """Of every prompt: tokens as text, and the two best logprobs at each."""
    found = []
    for prompt in PROMPTS:
        body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "logprobs": 2}
        choice = (await ask(client, url, "/v1/completions", body))["choices"][0]
        found.append({"tokens": choice["logprobs"]["tokens"], "top": choice["logprobs"]["top_logprobs"]})
    return found


async def streamed(client: Client, url: str, tokens: int) -> str:
    """The text of a streamed chat, whose stream must end in [DONE]."""
    body = {
        "messages": [{"role": "user", "content": "Say hello."}],
        "max_tokens": tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    headers = (("content-type", "application/json"),)
    text, last, usage = "", b"", None
    async with client.stream(
        "POST", url + "/v1/chat/completions", body=json.dumps(body).encode(), headers=headers
    ) as stream:
        assert stream.status == 200, await stream.read()
        async for event in stream.events():
            last = event
            if event != b"[DONE]":
                told = json.loads(event)
                usage = told.get("usage") or usage
                text += "".join(c["delta"].get("content") or "" for c in told["choices"])
    assert last == b"[DONE]", last
    assert usage, "no usage came"
    return text


async def leaves(client: Client, url: str) -> None:
    """A client that goes away after the first event."""
    body = {"prompt": PROMPTS[0], "max_tokens": 400, "stream": True, "ignore_eos": True}
    headers = (("content-type", "application/json"),)
    async with client.stream(
        "POST", url + "/v1/completions", body=json.dumps(body).encode(), headers=headers
    ) as stream:
        async for _ in stream.events():
            return


async def figures(client: Client, url: str) -> dict[str, float]:
    """Sums of the counters in SHOWN, with or without Prometheus' _total."""
    text = (await client.request("GET", url + "/metrics", timeout_s=30.0)).body.decode()
    sums: dict[str, float] = {}
    for line in text.splitlines():
        name = re.split(r"[{ ]", line, maxsplit=1)[0].removesuffix("_total")
        if name in SHOWN:
            sums[name] = sums.get(name, 0.0) + float(line.rpartition(" ")[2])
    return sums


def compare(pair: list[dict[str, Any]], single: list[dict[str, Any]]) -> list[dict[str, Any]]:
    rows = []
    for prompt, a, b in zip(PROMPTS, pair, single, strict=True):
        same = next(
            (i for i, (x, y) in enumerate(zip(a["tokens"], b["tokens"], strict=False)) if x != y), None
        )
        margin = None
        if same is not None:
            best = sorted(b["top"][same].values(), reverse=True)
            margin = round(best[0] - best[1], 4)
        rows.append({"prompt": prompt[:40], "equal": same is None, "parted_at": same, "margin_nat": margin})
    return rows


async def pair_of(args: argparse.Namespace, sets: list[str]) -> dict[str, Any]:
    async with AsyncExitStack() as closing, Client() as client:
        begun = time.monotonic()
        state = await stage.up(FILE, "engines-vllm", closing, sets=sets)
        ready_s = time.monotonic() - begun
        decode = next(p["url"] for p in state["processes"] if p["role"] == "decode")
        before = await figures(client, decode)
        found = await answers(client, state["url"], args.tokens)
        chat = await streamed(client, state["url"], args.tokens)
        moved = {k: v - before.get(k, 0.0) for k, v in (await figures(client, decode)).items()}
        two = await ask(
            client, state["url"], "/v1/completions", {"prompt": PROMPTS[:2], "max_tokens": 2, "n": 2}
        )
        assert len(two["choices"]) == 4, two
        await leaves(client, state["url"])
        idle = False
        for _ in range(100):
            load = (await client.request("GET", state["url"] + "/get_load", timeout_s=30.0)).json
            if idle := all(m["num_reqs"] == 0 and m["num_inflight"] == 0 for m in load):
                break
            await asyncio.sleep(0.2)
        return {"ready_s": round(ready_s, 1), "answers": found, "chat": chat, "moved": moved, "idle": idle}


async def single_of(args: argparse.Namespace, sets: list[str], where: Path) -> dict[str, Any]:
    file = where / "single.toml"
    text = Path(FILE).read_text()
    file.write_text(re.sub(r"\[prefill\]\s*\[decode\]", "[unified]", text))
    async with AsyncExitStack() as closing, Client() as client:
        state = await stage.up(str(file), "engines-vllm-one", closing, sets=sets)
        return {
            "answers": await answers(client, state["url"], args.tokens),
            "chat": await streamed(client, state["url"], args.tokens),
        }


async def run(args: argparse.Namespace) -> dict[str, Any]:
    sets = [f"engine.python={args.python}", f"deployment.model={args.model}", "engine.served_name=m"]
    sets += [f"engine.env={','.join(args.env)}"] if args.env else []
    pair = await pair_of(args, sets)
    with TemporaryDirectory() as where:
        single = await single_of(args, sets, Path(where))
    rows = compare(pair["answers"], single["answers"])
    return {
        "ready_s": pair["ready_s"],
        "answers": rows,
        "chat_equal": pair["chat"] == single["chat"],
        "moved": pair["moved"],
        "idle_after_a_client_left": pair["idle"],
    }


def holds(found: dict[str, Any]) -> bool:
    """Every answer equal but for near-ties, every prompt's blocks moved, nothing left running."""
    equal = all(r["equal"] or r["margin_nat"] < NEAR_TIE for r in found["answers"])
    moved = found["moved"].get("vllm:nixl_bytes_transferred_sum", 0.0) > 0
    hits = found["moved"].get("vllm:external_prefix_cache_hits", 0.0) > 0
    return equal and moved and hits and found["idle_after_a_client_left"]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--python", required=True, metavar="FILE", help="interpreter that has vLLM")
    parser.add_argument("--model", default="", metavar="DIR", help=f"safetensors; default: made in {MODEL}")
    parser.add_argument("--tokens", type=int, default=24, metavar="N")
    parser.add_argument(
        "--env", action="append", default=[], metavar="NAME=VALUE", help="for vLLM's environment"
    )
    args = parser.parse_args()
    if not args.model:
        args.model = str(MODEL.resolve())
        if not (MODEL / "config.json").exists():
            print(f"make it first: python -m benchmarks.serve.as_safetensors {shlex.quote(str(MODEL))}")
            return 2
    try:
        found = asyncio.run(run(args))
    except SplitserveError as e:
        print(f"error: {e.message}", file=sys.stderr)
        return 1
    Console().print_json(json.dumps(found))
    path = keep("engines_vllm", found, places=("--python", "--model", "--env"))
    print(f"kept in {path}")
    return 0 if holds(found) else 1


if __name__ == "__main__":
    sys.exit(main())
