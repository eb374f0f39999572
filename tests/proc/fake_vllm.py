"""Something that speaks vLLM's API and metrics, for faults only: started as `python -m vllm.entrypoints.cli.main serve`.

As the real one it is two processes: the API server, and an engine core that outlives a killed server and takes the
server along when it dies itself. It answers with as many words as tokens were asked for, one every GAP_S, and prefill
gives out kv_transfer_params that only its present life accepts: decode asks prefill's life by HTTP, where the real one
would meet it at the side channel, and computes the prompt itself if that has ended.

`installation` makes an interpreter that finds it under vLLM's name and version.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import urllib.request
import uuid
from pathlib import Path
from typing import Any

GAP_S = 0.02
VERSION = "0.32.0"


def installation(where: Path) -> Path:
    """A program that is this python with the fake as its vLLM."""
    package = where / "site" / "vllm" / "entrypoints" / "cli"
    package.mkdir(parents=True)
    (package / "main.py").write_text("from tests.proc.fake_vllm import main\nmain()\n")
    info = where / "site" / f"vllm-{VERSION}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VERSION}\n")
    python = where / "python"
    path = f"{where / 'site'}:{Path(__file__).parents[2]}"
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{path}" exec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    return python


class Server:
    """One life."""

    def __init__(self, host: str, port: int, core: subprocess.Popen[bytes]) -> None:
        self.host, self.port = host, port
        self.core = core
        self.life = uuid.uuid4().hex
        self.running = 0
        self.computed = self.taken = self.generated = 0

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
                method, path, _ = head.split(" ", 2)
                lines = dict(line.lower().split(": ", 1) for line in head.split("\r\n")[1:] if ": " in line)
                raw = await reader.readexactly(int(lines.get("content-length", "0")))
                await self.one(method, path, raw, writer)
        except (asyncio.IncompleteReadError, OSError):
            pass
        finally:
            writer.close()

    async def one(self, method: str, path: str, raw: bytes, writer: asyncio.StreamWriter) -> None:
        if path == "/health":
            whole(writer, b"")
        elif path == "/metrics":
            whole(writer, self.metrics())
        elif path.startswith("/life/"):
            whole(writer, b"", 200 if path.removeprefix("/life/") == self.life else 404)
        elif method == "POST" and path in ("/v1/completions", "/v1/chat/completions"):
            self.running += 1
            try:
                await self.generate(json.loads(raw), writer)
            finally:
                self.running -= 1
        else:
            whole(writer, b"", 404)
        await writer.drain()

    async def generate(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        prompt = str(body.get("prompt") or body.get("messages"))
        params = body.get("kv_transfer_params") or {}
        num_prompt, count = len(prompt.split()), int(body.get("max_tokens") or 16)
        if params.get("do_remote_prefill") and await asyncio.to_thread(lives, params):
            self.taken += num_prompt
        else:
            self.computed += num_prompt
        give = {
            "do_remote_prefill": True,
            "remote_host": self.host,
            "remote_port": self.port,
            "remote_engine_id": self.life,
        }
        told = {"kv_transfer_params": give} if params.get("do_remote_decode") else {}
        if not body.get("stream"):
            await asyncio.sleep(GAP_S * count)
            self.generated += count
            choice = {"index": 0, "text": " word" * count, "finish_reason": "length"}
            whole(writer, json.dumps({"choices": [choice], **told}).encode())
            return
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        )
        for i in range(count):
            await asyncio.sleep(GAP_S)
            self.generated += 1
            frame(writer, json.dumps({"choices": [{"index": 0, "text": f" w{i}"}]}).encode())
            await writer.drain()
        frame(writer, b"[DONE]")
        writer.write(b"0\r\n\r\n")

    def metrics(self) -> bytes:
        label = '{engine="0",model_name="m"}'
        by_source = '{engine="0",model_name="m",source="%s"}'
        return "\n".join(
            (
                f"vllm:num_requests_running{label} {float(self.running)}",
                f"vllm:num_requests_waiting{label} 0.0",
                f"vllm:kv_cache_usage_perc{label} {min(1.0, self.running / 10)}",
                f"vllm:prompt_tokens_total{label} {float(self.computed + self.taken)}",
                f"vllm:prompt_tokens_by_source_total{by_source % 'local_compute'} {float(self.computed)}",
                f"vllm:prompt_tokens_by_source_total{by_source % 'external_kv_transfer'} {float(self.taken)}",
                f"vllm:generation_tokens_total{label} {float(self.generated)}",
                "",
            )
        ).encode()


def lives(params: dict[str, Any]) -> bool:
    """Whether that life of a prefill server is still there."""
    url = f"http://{params['remote_host']}:{params['remote_port']}/life/{params['remote_engine_id']}"
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:
            return answer.status == 200
    except OSError:
        return False


def whole(writer: asyncio.StreamWriter, body: bytes, status: int = 200) -> None:
    writer.write(b"HTTP/1.1 %d X\r\ncontent-length: %d\r\n\r\n%s" % (status, len(body), body))


def frame(writer: asyncio.StreamWriter, event: bytes) -> None:
    event = b"data: " + event + b"\n\n"
    writer.write(b"%x\r\n%s\r\n" % (len(event), event))


async def serve(host: str, port: int) -> None:
    """Until SIGTERM, or the core's death, which is exit code 1."""
    loop, done = asyncio.get_running_loop(), asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, done.set)
    core = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    server = await asyncio.start_server(Server(host, port, core).answer, host, port)
    while not done.is_set() and core.poll() is None:
        await asyncio.sleep(0.05)
    server.close()
    died = core.poll() is not None
    core.kill()
    core.wait()
    os._exit(1 if died else 0)


def main() -> None:
    words = sys.argv[1:]
    host, port = (words[words.index(flag) + 1] for flag in ("--host", "--port"))
    asyncio.run(serve(host, int(port)))
