"""A `splitserve` whose engines and router are stubs: what the supervisor's tests start instead of real models.

`serve` and `router` open their port, print the same JSON lines and leave at SIGTERM or when the alive pipe ends, as the
real ones do. Everything else is the real command line, with this file as its program. What a stub does wrong is told
by its model's name:

    ok           ready at once
    slow         loading for ever
    die-once     exits with 1 once it was ready and RUN_DIR/die is there; not again after its restart
    die-always   the same, again and again
    die-loading  prints to its log and exits with 1 before it is ready
    bad-config   exits with 2 before it is ready
    deaf         ignores SIGTERM
    rank         starts a rank process that outlives a killed server unless the supervisor sees to it
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

PROGRAM = (sys.executable, str(Path(__file__).resolve()))


def main() -> int:
    words = sys.argv[1:]
    if words[:1] in (["serve"], ["router"]):
        return asyncio.run(_child(words))
    from splitserve.cli import main as real

    return real(words, program=PROGRAM)


async def _child(words: list[str]) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", nargs="?", default="ok")
    parser.add_argument("--port", type=int)
    parser.add_argument("--alive-fd", type=int)
    parser.add_argument("--run-dir")
    args, _ = parser.parse_known_args(words[1:] if words[0] == "serve" else ["ok", *words[1:]])
    loop, done = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(args.alive_fd, done.set)
    loop.add_signal_handler(signal.SIGTERM, (lambda: None) if args.model == "deaf" else done.set)
    print("to the log", file=sys.stderr, flush=True)
    print("a stray line that is no message", flush=True)
    _say({"loading": "weights", "done": 0.5})
    if args.model == "die-loading":
        print("the reason is here", file=sys.stderr)
        return 1
    if args.model == "bad-config":
        print("error: no such model", file=sys.stderr)
        return 2
    if args.model == "rank":
        rank = "import os, sys\nos.read(int(sys.argv[1]), 1)"
        words = [sys.executable, "-c", rank, str(args.alive_fd)]
        subprocess.Popen(words, pass_fds=(args.alive_fd,), stdout=sys.stderr, start_new_session=True)
    server = await asyncio.start_server(_answer, "127.0.0.1", args.port)
    if args.model != "slow":
        _say({"ready": True, "url": f"http://127.0.0.1:{args.port}"})
    if args.model == "die-always" or (args.model == "die-once" and _first_time(Path(args.run_dir))):
        asked = asyncio.create_task(_file(Path(args.run_dir) / "die"))  # the test says when: once all is up
        await asyncio.wait([asyncio.create_task(done.wait()), asked], return_when=asyncio.FIRST_COMPLETED)
        if not done.is_set():
            return 1
    await done.wait()
    server.close()
    return 0


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readline()
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
    await writer.drain()
    writer.close()


def _first_time(run_dir: Path) -> bool:
    mark = run_dir / "died"
    if mark.exists():
        return False
    mark.touch()
    return True


async def _file(path: Path) -> None:
    while not path.exists():
        await asyncio.sleep(0.02)


def _say(message: dict[str, object]) -> None:
    print(json.dumps(message), flush=True)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)
