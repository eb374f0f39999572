"""llama.cpp's own server from the xllamacpp wheel, in the foreground: one more peer of peers.py.

    VENV/bin/python benchmarks/serve/llama_server.py FILE.gguf --port N [--threads 2] [--seats 8]

It needs nothing but xllamacpp (2026.10.11549 was measured) in a venv of its own. The weights stay as the file has them,
quantised or not. The wheel's code is built for AVX2, whatever the machine has.
"""

from __future__ import annotations

import argparse
import os
import signal
from typing import Any


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("file", help="GGUF")
    p.add_argument("--port", type=int, required=True)
    p.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    p.add_argument("--seats", type=int, default=8, help="requests at once")
    p.add_argument("--max-len", type=int, default=2048, help="tokens of each request")
    args = p.parse_args()
    server = serve(args)
    print(f"listening at {server.listening_address}", flush=True)
    signal.sigwait({signal.SIGTERM, signal.SIGINT})
    os._exit(0)  # the server's threads have no other end


def serve(args: argparse.Namespace) -> Any:
    """A running server; its threads take their cores from the kernel."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = args.file
    params.hostnames, params.port = ["127.0.0.1"], args.port
    params.n_parallel, params.n_ctx = args.seats, args.seats * args.max_len
    for cores in (params.cpuparams, params.cpuparams_batch):
        cores.n_threads = args.threads
    params.cache_ram_mib = 0  # no prompts kept for later: each is new, and the machine is small
    return xllamacpp.Server(params)


if __name__ == "__main__":
    main()
