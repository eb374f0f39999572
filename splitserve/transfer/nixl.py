"""Transport over NIXL, by default with UCX below it. The only file that knows NIXL: its strings and None stop here.

    register ── slabs, once ──▶ agent metadata ──▶ Card.agent
    connect  ◀─ a peer's metadata
    write    ── descriptors [n, 3] ──▶ transfer request, posted ──▶ its note leaves when its bytes are there
    poll     ── request states ──▶ Written, Broken            notes ──▶ Noted

The agent has no progress thread unless asked for: it spins, and takes a whole core away from whoever computes there.
So bytes move while somebody polls, on both sides: over TCP the receiver's own poll puts them into its memory.

UCX settings are read from the environment when the library loads and when an agent is made: they are set around that
moment and taken back. UCX's log goes to a memory file without a name, where `lanes` finds what carries the bytes.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from splitserve import log
from splitserve.config import TransferConfig
from splitserve.errors import ConfigError, InvariantError, TransferError
from splitserve.spec import Slab
from splitserve.transfer.layout import Copies
from splitserve.transfer.liveness import host_id
from splitserve.transfer.sockets import unfinished
from splitserve.transfer.transport import Broken, Noted, TransportEvent, Written
from splitserve.wire import Card

if TYPE_CHECKING:
    import torch

_log = log.get(__name__)

MAX_READY = 64
"""Requests made before their writes; the oldest is dropped for one more, and its write makes its own."""

LOG_NAME = "splitserve-ucx-log"

SETTLED_POLLS = 64
"""Polls after a peer's death before we believe that nothing is left of it: empties UCX's shared-memory queues (256
entries, at least 16 a poll) four times over; takes about 30 ms at the engine's poll interval."""

QUIET: Mapping[str, str] = {
    "UCX_LOG_LEVEL": "info",  # endpoint configurations are logged at this level
    "UCX_PROTO_INFO": "y",  # and with this, a table of which lane a put of which size takes
    "NIXL_LOG_LEVEL": "WARN",
}


@dataclass
class _Peer:
    """A destination and how its memory is addressed."""

    card: Card
    memory: str  # NIXL's name of its memory kind
    leaving: bool = False


@dataclass
class _Ready:
    """A request made before its write: for these very copies."""

    copies: Copies
    peer: str
    handle: Any


@dataclass
class _Write:
    """A posted request. `error` is why it was given up; it is told once NIXL has let go of the source memory."""

    id: int
    peer: str
    handle: Any
    error: str = ""


class NixlTransport:
    name = "nixl"

    def __init__(self, agent_name: str, config: TransferConfig) -> None:
        """Start an agent. Raises ConfigError where NIXL is missing or its backend does not start as configured."""
        self._name = agent_name
        self._peers: dict[str, _Peer] = {}
        self._writes: dict[int, _Write] = {}
        self._ready: dict[int, _Ready] = {}  # id of its copies -> the request
        self._events: list[TransportEvent] = []
        self._slabs: Any = None
        self._memory = "DRAM"
        self._next_id = 0
        self._quiet: dict[str, int] = {}  # dead peer -> polls since its death
        self._agent: Any = None
        with _environment({**QUIET, **_ucx(config.ucx)}), _log_file(), _affinity():
            self._agent, self._errors = _start(agent_name, config)

    # ------------------------------------------------------------------ memory

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Zeroed host memory; NIXL can register any."""
        import torch

        return torch.zeros(nbytes, dtype=torch.uint8)

    def register(self, slabs: Sequence[Slab]) -> bytes:
        slabs = [s for s in slabs if s.count]
        kinds = {_memory(s) for s in slabs} or {"DRAM"}
        if len(kinds) > 1:
            raise ConfigError("the slabs of one rank must all be in host memory or all on its device")
        (self._memory,) = kinds
        rows = [(s.addr, s.count * s.unit_bytes, max(s.device, 0), "") for s in slabs]
        try:
            self._slabs = self._agent.register_memory(rows, self._memory) if rows else None
            metadata = self._agent.get_agent_metadata()
        except self._errors as e:
            raise ConfigError(
                f"NIXL cannot register {sum(r[1] for r in rows):,} bytes of {self._memory}: {e}"
            ) from e
        return bytes(metadata)

    # ------------------------------------------------------------------ peers

    def connect(self, card: Card) -> str:
        name = card.agent_name
        if name in self._peers:
            if self._peers[name].leaving:
                raise TransferError(f"{name} is being disconnected: writes to it have not ended yet")
            return name
        try:
            known = _text(self._agent.add_remote_agent(card.agent))
        except self._errors as e:
            raise TransferError(f"cannot connect to {name}: {e}") from e
        if known != name:
            raise TransferError(f"the card of {name} carries the metadata of {known}")
        self._peers[name] = _Peer(card, _memory(card.slabs[0]) if card.slabs else "DRAM")
        return name

    def disconnect(self, peer: str) -> None:
        if peer not in self._peers:
            return
        self._peers[peer].leaving = True
        for ready in [r for r in self._ready.values() if r.peer == peer]:
            self._drop(ready)
        for write in [w for w in self._writes.values() if w.peer == peer]:
            self._give_up(write, "disconnected")
        self._remove_left()

    def _remove_left(self) -> None:
        """Forget peers that are leaving and to which no request is left."""
        busy = {w.peer for w in self._writes.values()}
        for name in [n for n, p in self._peers.items() if p.leaving and n not in busy]:
            del self._peers[name]
            with contextlib.suppress(*self._errors):  # it has gone by itself
                self._agent.remove_remote_agent(name)

    # ------------------------------------------------------------------ writing

    def prepare(self, peer: str, copies: Copies) -> None:
        """Make the request; `write` of the same object posts it."""
        to = self._peers.get(peer)
        if to is None or to.leaving or not len(copies):
            return
        with contextlib.suppress(*self._errors):  # the write itself will say so
            self._ready[id(copies)] = _Ready(copies, peer, self._request("WRITE", copies.src, copies.dst, to))
        while len(self._ready) > MAX_READY:
            self._drop(next(iter(self._ready.values())))

    def _drop(self, ready: _Ready) -> None:
        del self._ready[id(ready.copies)]
        with contextlib.suppress(*self._errors):
            ready.handle.release()

    def write(self, peer: str, copies: Copies, note: bytes) -> int:
        to = self._peers.get(peer)
        if to is None or to.leaving:
            raise TransferError(f"{peer} is not connected")
        self._next_id += 1
        number = self._next_id
        try:
            if not len(copies):
                if note:
                    self._agent.send_notif(peer, note)
                self._events.append(Written(number))
                return number
            ready = self._ready.pop(id(copies), None)
            handle = ready.handle if ready else self._request("WRITE", copies.src, copies.dst, to)
        except self._errors as e:
            raise TransferError(f"cannot post {copies.num_bytes:,} bytes to {peer}: {e}") from e
        return self._post(number, peer, handle, note)

    def read(self, peer: str, copies: Copies) -> int:
        to = self._peers.get(peer)
        if to is None or to.leaving:
            raise TransferError(f"{peer} is not connected")
        try:
            handle = self._request("READ", copies.dst, copies.src, to)
        except self._errors as e:
            raise TransferError(f"cannot fetch {copies.num_bytes:,} bytes from {peer}: {e}") from e
        self._next_id += 1
        return self._post(self._next_id, peer, handle, b"")

    def _post(self, number: int, peer: str, handle: Any, note: bytes) -> int:
        self._writes[number] = write = _Write(number, peer, handle)
        self._advance(write, lambda: self._agent.transfer(handle, note))
        return number

    def _request(self, verb: str, here: Any, there: Any, to: _Peer) -> Any:
        mine = self._agent.get_xfer_descs(np.ascontiguousarray(here), self._memory)
        theirs = self._agent.get_xfer_descs(np.ascontiguousarray(there), to.memory)
        return self._agent.initialize_xfer(verb, mine, theirs, to.card.agent_name)

    def _advance(self, write: _Write, act: Callable[[], str] | None = None) -> None:
        """Post (`act`) or look at one request, and let go of it at its end."""
        if write.error:
            self._give_up(write, write.error)
            return
        try:
            state = act() if act else self._agent.check_xfer_state(write.handle)
        except self._errors as e:
            self._give_up(write, str(e))
            return
        if state == "DONE":
            write.handle.release()
            del self._writes[write.id]
            self._events.append(Written(write.id))
        elif state == "ERR":
            self._give_up(write, "NIXL reports a failed transfer")

    def _give_up(self, write: _Write, error: str) -> None:
        """Report Broken, but not before NIXL has let go: until then it may read the source memory."""
        write.error = error
        try:
            write.handle.release()
        except self._errors:
            return  # still active: tried again by the next poll
        del self._writes[write.id]
        self._events.append(Broken(write.id, error))

    def poll(self) -> list[TransportEvent]:
        for write in list(self._writes.values()):
            self._advance(write)
        for sender, notes in self._agent.get_new_notifs().items():
            self._events += [Noted(_text(sender), bytes(note)) for note in notes]
        if any(p.leaving for p in self._peers.values()):
            self._remove_left()
        self._quiet = {name: polls + 1 for name, polls in self._quiet.items()}
        events, self._events = self._events, []
        return events

    # ------------------------------------------------------------------ the rest

    def settled(self, card: Card) -> bool:
        """See sockets.py: over TCP a dead peer's bytes land when we poll. Reads /proc, so not at every poll."""
        name = card.agent_name
        polls = self._quiet.setdefault(name, 0)
        if polls < SETTLED_POLLS:
            return False
        if unfinished():
            self._quiet[name] = SETTLED_POLLS // 2
            return False
        del self._quiet[name]
        return True

    def lanes(self) -> dict[str, str]:
        """Lane of a put to each peer, from UCX's log; "unknown" before the first write to a peer of its kind."""
        found = put_lanes(_read_log(), memory="cuda" if self._memory == "VRAM" else "")
        here = host_id()
        return {
            name: found.get("intra-node" if peer.card.host == here else "inter-node", "unknown")
            for name, peer in self._peers.items()
        }

    def fds(self) -> list[int]:
        return []  # NIXL has none to offer: poll

    def close(self) -> None:
        if self._agent is None:
            return
        for ready in list(self._ready.values()):
            self._drop(ready)
        for write in list(self._writes.values()):
            with contextlib.suppress(*self._errors):  # the agent's end takes what is left
                write.handle.release()
        self._writes.clear()
        for name in list(self._peers):
            with contextlib.suppress(*self._errors):
                self._agent.remove_remote_agent(name)
        self._peers.clear()
        if self._slabs is not None:
            with contextlib.suppress(*self._errors):
                self._agent.deregister_memory(self._slabs)
            self._slabs = None
        self._agent = None

    def check(self) -> None:
        for write in self._writes.values():
            if write.peer not in self._peers:
                raise InvariantError(f"write {write.id} goes to {write.peer}, which is not connected")
        if self._agent is None and (self._writes or self._peers or self._slabs is not None):
            raise InvariantError("closed, but writes, peers or registered memory are left")


def put_lanes(ucx_log: str, *, memory: str = "") -> dict[str, str]:
    """What carries a put between hosts or within one, from UCX's protocol tables: {"intra-node": "cma/memory"}.

    A table has a title of two lines and rows `| range | description | lanes |`; several ranges are joined with their
    sizes. The last table of a kind counts; with `memory` ("cuda") only those of such memory, since notes travel from
    host memory all the same.
    """
    lanes: dict[str, str] = {}
    kind, is_put = "", False
    rows: list[tuple[str, str]] = []
    for line in (*ucx_log.splitlines(), "| end |"):
        cells = [c.strip() for c in line[line.find("|") :].strip("|").split("|")] if "|" in line else []
        if len(cells) == 1:
            if rows:
                lanes[kind] = rows[0][1] if len(rows) == 1 else "; ".join(f"{r}: {c}" for r, c in rows)
                rows = []
            where = re.search(r"(self|intra-node|inter-node) cfg#", cells[0])
            kind = where[1] if where else kind
            is_put = cells[0].startswith("remote memory write by ucp_put*") and f"from {memory}" in cells[0]
        elif len(cells) == 3 and is_put and cells[0] != "Range":
            rows.append((cells[0], cells[2]))
    return lanes


def _start(agent_name: str, config: TransferConfig) -> tuple[Any, tuple[type[Exception], ...]]:
    """An agent with its backend, and all of NIXL's errors, which have no class in common."""
    try:
        from nixl import _bindings
        from nixl._api import nixl_agent, nixl_agent_config
    except ImportError as e:
        raise ConfigError(
            f"transport is nixl, but NIXL cannot be imported: {e}",
            field="transport",
            fix="pip install nixl, or transport = 'local' on one host",
        ) from e
    errors = tuple(c for c in vars(_bindings).values() if isinstance(c, type) and issubclass(c, Exception))
    settings = nixl_agent_config(enable_prog_thread=config.progress_thread, backends=[config.backend])
    try:
        agent = nixl_agent(agent_name, settings)
    except errors as e:
        given = ", ".join(config.ucx) or "no UCX settings"
        raise ConfigError(
            f"NIXL backend {config.backend} does not start with {given}: {e}",
            field="ucx",
            fix="leave ucx empty, or name transports that this host has (ucx = ['TLS=tcp,self'])",
        ) from e
    if config.backend not in agent.backends:
        raise ConfigError(
            f"NIXL has no backend {config.backend!r}",
            field="backend",
            fix=f"one of {', '.join(agent.get_plugin_list())}",
        )
    return agent, errors


def _ucx(settings: Sequence[str]) -> dict[str, str]:
    """{"UCX_TLS": "tcp,self"} from "TLS=tcp,self"; a name may have its prefix already."""
    out = {}
    for setting in settings:
        name, sep, value = setting.partition("=")
        if not sep or not name:
            raise ConfigError(f"ucx setting {setting!r} is not NAME=VALUE", field="ucx")
        out[name if name.startswith("UCX_") else f"UCX_{name}"] = value
    return out


@contextlib.contextmanager
def _environment(settings: Mapping[str, str]) -> Iterator[None]:
    """Environment variables for the time of an agent's start."""
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _log_file() -> Iterator[None]:
    """Have UCX, when it loads now, open its log on a memory file; it keeps it open for the life of the process."""
    fd = os.memfd_create(LOG_NAME, os.MFD_CLOEXEC)
    try:
        with _environment({"UCX_LOG_FILE": f"/proc/self/fd/{fd}"}):
            yield
    finally:
        os.close(fd)


def _read_log() -> str:
    """What UCX has logged in this process, "" where it was loaded by somebody else."""
    ctypes.CDLL(None).fflush(None)  # UCX writes by C's own buffers: the last table may still lie in one
    for name in os.listdir("/proc/self/fd"):
        path = f"/proc/self/fd/{name}"
        with contextlib.suppress(OSError):  # closed meanwhile
            if LOG_NAME in os.readlink(path):
                return Path(path).read_text(errors="replace")
    return ""


@contextlib.contextmanager
def _affinity() -> Iterator[None]:
    """Undo what libraries do to the cpus of threads while they start."""
    before = {int(t): os.sched_getaffinity(int(t)) for t in os.listdir("/proc/self/task")}
    mine = os.sched_getaffinity(0)
    yield
    for name in os.listdir("/proc/self/task"):
        thread = int(name)
        with contextlib.suppress(ProcessLookupError):
            wanted = before.get(thread, mine)
            if os.sched_getaffinity(thread) != wanted:
                _log.warning(
                    "NIXL moved thread %d to cpus %s; moved back", thread, os.sched_getaffinity(thread)
                )
                os.sched_setaffinity(thread, wanted)


def _memory(slab: Slab) -> str:
    return "DRAM" if slab.device < 0 else "VRAM"


def _text(name: str | bytes) -> str:
    return name.decode() if isinstance(name, bytes) else name
