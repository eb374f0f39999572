"""Thousands of malformed requests to real processes, server and router: no 500, no hang, nothing left behind."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from urllib.parse import urlsplit

import psutil
import pytest

from tests.fake_engine import save_tokenizer
from tests.malformed import case
from tests.proc.test_server_process import ROOT, Server
from tests.wire_http import go

AT_ONCE = 32
ANSWER_S = 15.0
"""A complete request is answered by then; the slowest is one whose head or body the server waits for."""

PATIENCE_S = 0.1
"""How long we stay for an answer to what is not complete."""

_STATUS = re.compile(rb"HTTP/1\.1 (\d{3}) ")


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, tuple[int, psutil.Process]]]:
    """(port, process) of a server, and of a router in front of two more; the engines behind them compute nothing."""
    home = tmp_path_factory.mktemp("fuzz")
    model = save_tokenizer(home / "model")
    with ExitStack() as stack:
        urls = {}
        found = {}
        for role in ("unified", "prefill", "decode"):
            (home / role).mkdir()
            server = Server(
                model, home / role, role=role, server={"port": 0, "max_body_mb": 1.0, "log_level": "error"}
            )
            stack.callback(end, server.process)
            urls[role] = server.ready()["url"]
            if role == "unified":
                found["server"] = (urlsplit(urls[role]).port or 0, psutil.Process(server.process.pid))
        words = ["--prefill", f"{urls['prefill']},4567", "--decode", urls["decode"], "--port", "0"]
        router = subprocess.Popen(
            [sys.executable, "-m", "splitserve", "router", *words, "--log-level", "error"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        stack.callback(end, router)
        assert router.stdout is not None
        port = int(json.loads(router.stdout.readline())["port"])
        found["router"] = (port, psutil.Process(router.pid))
        yield found


def end(process: subprocess.Popen[str]) -> None:
    """Kill it, and see that nothing surprised it."""
    process.kill()
    assert "Traceback" not in process.communicate()[1]


@pytest.mark.parametrize("name", ["server", "router"])
def test_malformed_requests(targets: dict[str, tuple[int, psutil.Process]], name: str) -> None:
    fuzz(*targets[name], num=600, seed=1)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["server", "router"])
def test_ten_thousand_malformed_requests(targets: dict[str, tuple[int, psutil.Process]], name: str) -> None:
    """The two together are the 20,000 that are promised."""
    seed = int(os.environ.get("FUZZ_SEED", "7"))
    print(f"{name}: {dict(sorted(fuzz(*targets[name], num=10_000, seed=seed).items()))}")


def fuzz(port: int, process: psutil.Process, *, num: int, seed: int) -> Counter[str]:
    """Send them, `AT_ONCE` at a time; what came back, by status."""
    go(ready(port))
    before = process.num_fds(), process.memory_info().rss
    outcomes: Counter[str] = Counter()

    async def run() -> None:
        rng = random.Random(seed)
        cases = (
            iter([case(rng) for _ in range(min(num, 500))]) if num <= 500 else (case(rng) for _ in range(num))
        )

        async def work() -> None:
            for sent, complete in cases:
                outcomes[await outcome(port, sent, complete=complete)] += 1

        await asyncio.gather(*(work() for _ in range(AT_ONCE)))

    go(run(), within_s=60 + num / 20)
    go(ready(port))
    assert sum(outcomes.values()) == num
    settle(port, process)
    assert process.num_fds() <= before[0] + 2 * AT_ONCE, (
        "descriptors leak"
    )  # a router keeps connections to engines
    assert process.memory_info().rss < before[1] + (128 << 20)
    return outcomes


async def outcome(port: int, sent: bytes, *, complete: bool) -> str:
    """Send one, read what comes. AssertionError for a server error, or silence where an answer is due."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    got = b""
    try:
        with suppress(ConnectionError):
            writer.write(sent)
            async with asyncio.timeout(ANSWER_S if complete else PATIENCE_S):
                while piece := await reader.read(65536):
                    got += piece
    except TimeoutError:
        assert not complete, f"no end within {ANSWER_S} s after {got[:200]!r} to {sent[:600]!r}"
    finally:
        writer.transport.abort()
    statuses = [int(s) for s in _STATUS.findall(got)]
    assert all(s < 500 or s == 503 for s in statuses), f"{got[:600]!r} to {sent[:600]!r}"
    assert b"internal_error" not in got, f"{got[:600]!r} to {sent[:600]!r}"
    assert statuses or not complete, f"closed without an answer to {sent[:600]!r}"
    return str(statuses[0]) if statuses else "closed" if complete else "left"


async def ready(port: int) -> None:
    """Ordinary requests are answered."""
    end = time.monotonic() + 20
    body = b'{"prompt":"Hi","max_tokens":2}'
    ask = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: %d\r\n\r\n%s"
    while True:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(ask % (len(body), body))
        got = await asyncio.wait_for(reader.read(-1), 20)
        writer.close()
        if got.startswith(b"HTTP/1.1 200"):
            return
        assert time.monotonic() < end, got
        await asyncio.sleep(0.05)


def settle(port: int, process: psutil.Process) -> None:
    """Wait until no connection of a client is left."""
    end = time.monotonic() + 15
    while left := [
        c for c in process.net_connections("tcp") if c.laddr.port == port and c.status != psutil.CONN_LISTEN
    ]:
        assert time.monotonic() < end, f"{len(left)} connections are left"
        time.sleep(0.05)
