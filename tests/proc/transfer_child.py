"""A process of its own for transfer tests: a transport, a slab and, where asked for, a Sender or a Receiver.

Reads one JSON command a line on stdin and answers with one JSON line. Between commands it polls, as an engine loop
would, unless it is told to hold still. Started by tests/proc/children.py.
"""

from __future__ import annotations

import base64
import json
import os
import select
import signal
import sys
import time
import types
from typing import Any

import msgspec
import numpy as np

from splitserve.config import TransferConfig
from splitserve.errors import InvariantError, SplitserveError
from splitserve.spec import Growth, Kind, Slab, StateSpec, Units, lay_out
from splitserve.transfer import transport as transports
from splitserve.transfer.events import Arrived, Released
from splitserve.transfer.layout import Copies
from splitserve.transfer.local import LocalTransport
from splitserve.transfer.port import Port, PortGroup
from splitserve.transfer.receiver import Receiver
from splitserve.transfer.rendezvous import Rendezvous
from splitserve.transfer.sender import Sender
from splitserve.wire import Card, FirstToken, Room

PAGE_TOKENS = 64
SPECS = [StateSpec("kv", layer, Growth.PAGED, 1024, pieces=2) for layer in range(4)]
LAYOUT = lay_out(SPECS, page_tokens=PAGE_TOKENS)


class Child:
    def __init__(self, engine: str, transport: str, num_pages: int, settings: dict[str, Any]) -> None:
        self.before = self.belongings()
        self.config = TransferConfig(transport=transport, **settings)
        self.transport = transports.make(transport, agent_name=f"{engine}.0", config=self.config)
        self.bytes = self.allocate(num_pages * LAYOUT.page_bytes)
        slab = Slab(Kind.PAGE, self.bytes.ctypes.data, LAYOUT.page_bytes, num_pages)
        self.port = Port(self.transport, layout=LAYOUT, slabs=[slab], engine=engine)
        self.sender: Sender | None = None
        self.receiver: Receiver | None = None
        self.still = False
        self.events: list[dict[str, Any]] = []
        self.peers: dict[str, Card] = {}

    def allocate(self, nbytes: int) -> np.ndarray:
        """Without torch, whose import would be most of this process's start."""
        if isinstance(self.transport, LocalTransport):
            return np.frombuffer(self.transport.allocate_buffer(nbytes), np.uint8)
        return np.zeros(nbytes, np.uint8)

    # ------------------------------------------------------------------ transport commands

    def do_card(self) -> str:
        return base64.b64encode(msgspec.msgpack.encode(self.port.card)).decode()

    def do_connect(self, card: str) -> str:
        theirs = msgspec.msgpack.decode(base64.b64decode(card), type=Card)
        handle = self.transport.connect(theirs)
        self.peers[handle] = theirs
        return handle

    def do_prepare(self, peer: str, runs: list[list[int]]) -> None:
        self.prepared = self.copies(peer, runs)
        self.transport.prepare(peer, self.prepared)

    def do_write_prepared(self, peer: str, note: str) -> int:
        return self.transport.write(peer, self.prepared, note.encode())

    def do_write(self, peer: str, runs: list[list[int]], note: str, pad: int = 0) -> int:
        return self.transport.write(peer, self.copies(peer, runs), note.encode() + b"." * pad)

    def copies(self, peer: str, runs: list[list[int]]) -> Copies:
        """`runs`: [[source offset, destination offset, bytes], ...]"""
        mine, theirs = self.port.card.slabs[0].addr, self.peers[peer].slabs[0].addr
        table = np.array(runs, np.uint64).reshape(-1, 3)
        zero = np.zeros(len(table), np.uint64)
        src = np.stack([table[:, 0] + np.uint64(mine), table[:, 2], zero], 1)
        dst = np.stack([table[:, 1] + np.uint64(theirs), table[:, 2], zero], 1)
        return Copies(src, dst)

    def do_disconnect(self, peer: str) -> None:
        self.transport.disconnect(peer)

    def do_fill(self, seed: int, start: int, stop: int) -> None:
        self.bytes[start:stop] = np.random.default_rng(seed).integers(0, 256, stop - start, np.uint8)

    def do_sum(self, start: int, stop: int) -> int:
        return int(self.bytes[start:stop].astype(np.uint64).sum())

    def do_equals(self, seed: int, start: int, stop: int) -> bool:
        wanted = np.random.default_rng(seed).integers(0, 256, stop - start, np.uint8)
        return bool((self.bytes[start:stop] == wanted).all())

    def do_changed(self, value: int, start: int, stop: int) -> int:
        """How many bytes are not `value` any more."""
        return int((self.bytes[start:stop] != value).sum())

    def do_set(self, value: int, start: int, stop: int) -> None:
        self.bytes[start:stop] = value

    def do_events(self) -> list[dict[str, Any]]:
        events, self.events = self.events, []
        return events

    def do_still(self, still: bool) -> None:
        self.still = still

    def do_polls(self, count: int) -> float:
        """Seconds that the slowest of `count` polls took."""
        slowest = 0.0
        for _ in range(count):
            begin = time.perf_counter()
            self.poll_transport()
            slowest = max(slowest, time.perf_counter() - begin)
        return slowest

    def do_lanes(self) -> dict[str, str]:
        return self.transport.lanes()

    def do_surroundings(self) -> dict[str, Any]:
        """What a library could have changed around us when it started."""
        threads = [sorted(os.sched_getaffinity(int(t))) for t in os.listdir("/proc/self/task")]
        return {"threads": threads, "ucx": sorted(n for n in os.environ if n.startswith(("UCX_", "NIXL_")))}

    def do_settled(self, card: str) -> bool:
        return self.transport.settled(msgspec.msgpack.decode(base64.b64decode(card), type=Card))

    def do_check(self) -> None:
        self.transport.check()

    def do_leak(self) -> str:
        """Damage the books the way a bug would; what check says."""
        self.still = True
        if self.transport.name == "nixl":
            self.transport._writes[10**9] = type("W", (), {"id": 10**9, "peer": "nobody"})  # type: ignore[attr-defined]
        else:
            next(iter(self.transport._peers.values())).sock.close()  # type: ignore[attr-defined]
        try:
            self.transport.check()
        except InvariantError as e:
            return e.message
        return ""

    def do_close(self) -> dict[str, list[str]]:
        """What this process has after close that it did not have before."""
        self.still = True
        del self.bytes  # a view keeps its memory
        self.transport.close()
        self.transport.close()
        self.transport.check()
        after = self.belongings()
        return {kind: sorted(after[kind] - self.before[kind]) for kind in after}

    def belongings(self) -> dict[str, set[str]]:
        fds = set()
        for name in os.listdir("/proc/self/fd"):
            if os.path.lexists(f"/proc/self/fd/{name}"):
                fds.add(os.readlink(f"/proc/self/fd/{name}"))
        return {"fds": fds, "shm": set(os.listdir("/dev/shm"))}

    # ------------------------------------------------------------------ handoff commands

    def do_prefill(self) -> int:
        self.sender = Sender(PortGroup(self.port), Rendezvous(), config=self.config)
        return self.sender._door.port

    def do_decode(self, fences: bool = False) -> None:
        fence = (lambda card: os.kill(card.pid, signal.SIGKILL)) if fences else None
        self.receiver = Receiver(PortGroup(self.port), config=self.config, fence=fence)

    def do_open(self, room: int, num_tokens: int, deadline_s: float = 30.0) -> None:
        assert self.sender is not None
        now = time.monotonic()
        self.sender.open(room, num_tokens, now=now, deadline=now + deadline_s)

    def do_computed(self, room: int, start: int, stop: int, pages: list[int], last: bool) -> None:
        assert self.sender is not None
        units = (Units(Kind.PAGE, tuple(pages), 0, 0, stop),)
        first = FirstToken(42) if last else None
        self.sender.computed(room, start, stop, units=units, last=last, first=first, now=time.monotonic())

    def do_fail(self, room: int, reason: str) -> None:
        assert self.sender is not None
        self.sender.fail(room, reason=reason, now=time.monotonic())

    def do_ask(
        self, room: int, port: int, num_tokens: int, pages: list[int], deadline_s: float = 30.0
    ) -> None:
        assert self.receiver is not None
        now = time.monotonic()
        units = (Units(Kind.PAGE, tuple(pages), 0, 0, num_tokens),)
        where = Room(room, "127.0.0.1", port)
        self.receiver.open(where, num_tokens, start=0, units=units, now=now, deadline=now + deadline_s)

    def do_cancel(self, room: int) -> None:
        assert self.receiver is not None
        self.receiver.cancel(room, reason="the client left", now=time.monotonic())

    def do_stats(self) -> dict[str, float]:
        side = self.sender or self.receiver
        assert side is not None
        side.check()
        return side.stats()

    def do_records(self) -> list[dict[str, Any]]:
        side = self.sender or self.receiver
        assert side is not None
        return side.records()

    # ------------------------------------------------------------------ the loop

    def poll_transport(self) -> None:
        for event in self.transport.poll():
            made = {"kind": type(event).__name__, **msgspec.structs.asdict(event)}
            if "note" in made:
                made["note"] = made["note"].decode(errors="replace").rstrip(".")
                made["size"] = len(event.note)  # type: ignore[union-attr]
                made["sum"] = int(
                    self.bytes[: 1 << 20].astype(np.uint64).sum()
                )  # as it was when the note came
            self.events.append(made)

    def poll(self) -> None:
        now = time.monotonic()
        if self.sender is None and self.receiver is None:
            self.poll_transport()
        for side in (self.sender, self.receiver):
            for event in side.poll(now) if side else ():
                made = {"kind": type(event).__name__, "at": now, **msgspec.to_builtins(event)}
                if isinstance(event, Released | Arrived):
                    made["sum"] = int(self.bytes.astype(np.uint64).sum())
                self.events.append(made)

    def run(self) -> None:
        lines = os.fdopen(sys.stdin.fileno(), "rb", buffering=0)
        while True:
            ready, _, _ = select.select([lines], [], [], 1.0 if self.still else 0.0005)
            if ready:
                line = lines.readline()
                if not line:
                    return
                self.answer(json.loads(line))
            elif not self.still:
                self.poll()

    def answer(self, command: dict[str, Any]) -> None:
        name = command.pop("do")
        try:
            reply = {"ok": getattr(self, f"do_{name}")(**command)}
        except SplitserveError as e:
            reply = {"error": e.message, "code": e.code}
        sys.stdout.write(json.dumps(reply) + "\n")
        sys.stdout.flush()


def without_torch() -> None:
    """NIXL imports torch only to learn which CUDA it was built for, unless another library says so."""
    sys.modules.setdefault("cuda.bindings", types.SimpleNamespace(__version__="13.0"))  # type: ignore[arg-type]


if __name__ == "__main__":
    without_torch()
    given = json.loads(sys.argv[1])
    child = Child(given["engine"], given["transport"], given["num_pages"], given["settings"])
    sys.stdout.write(json.dumps({"ok": "ready"}) + "\n")
    sys.stdout.flush()
    child.run()
