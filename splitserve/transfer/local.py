"""Transport over shared memory: one host, one user, nothing but Linux. For tests and where NIXL has no wheel.

    destination rank                                   source rank
    memfd  ◀── mapped through /proc/<pid>/fd/<n> ───── memmove, a slice at each poll
    abstract unix socket, SO_PEERCRED checked ◀─────── note, once the bytes are there

Memory files and abstract sockets have no name in any file system: whatever way a process dies, the kernel removes
them with it. A write runs in slices, so that a poll never takes longer than one slice's copy.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import socket
import struct
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from splitserve.errors import ConfigError, InvariantError, TransferError
from splitserve.spec import Slab
from splitserve.transfer.layout import Copies
from splitserve.transfer.liveness import host_id
from splitserve.transfer.transport import Broken, Lost, Noted, TransportEvent, Written
from splitserve.wire import Card

if TYPE_CHECKING:
    import torch

SLICE_BYTES = 8 << 20
"""Most bytes one poll copies: about 1 ms on one core."""

MAX_NOTE = 64 << 20
_HEAD = struct.Struct("<I")  # length of what follows


class _Region(msgspec.Struct, frozen=True):
    addr: int
    nbytes: int
    fd: int


class _Address(msgspec.Struct, frozen=True):
    """What goes into Card.agent."""

    socket: str
    regions: tuple[_Region, ...]


@dataclass
class _Write:
    id: int
    runs: deque[tuple[int, int, int]]  # source address, address in our mapping of the peer, bytes
    note: bytes


@dataclass
class _Peer:
    """A destination: its memory, mapped, and the socket its notes go through."""

    name: str
    sock: socket.socket
    regions: tuple[_Region, ...]
    maps: list[mmap.mmap]
    bases: list[int]
    writes: deque[_Write] = field(default_factory=deque)
    unsent: bytearray = field(default_factory=bytearray)

    def locate(self, addr: int, nbytes: int) -> int:
        for region, base in zip(self.regions, self.bases, strict=True):
            if region.addr <= addr and addr + nbytes <= region.addr + region.nbytes:
                return base + addr - region.addr
        raise TransferError(f"{self.name} has not registered [{addr:#x}, +{nbytes})")


@dataclass
class _Caller:
    """A source that writes to us: its name and the part of a note that has come."""

    sock: socket.socket
    name: str = ""
    buffer: bytearray = field(default_factory=bytearray)


class LocalTransport:
    name = "local"

    def __init__(self, agent_name: str) -> None:
        self._agent = agent_name
        self._memory: dict[int, tuple[mmap.mmap, _Region]] = {}  # address -> memory that allocate made
        self._regions: tuple[_Region, ...] = ()
        self._peers: dict[str, _Peer] = {}
        self._callers: list[_Caller] = []
        self._events: list[TransportEvent] = []
        self._next_id = 0
        self._closed = False
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._listener.bind(f"\0splitserve-{agent_name}")
        except OSError as e:
            self._listener.close()
            raise ConfigError(f"the agent name {agent_name!r} is in use on this host: {e}") from e
        self._listener.listen(64)
        self._listener.setblocking(False)

    # ------------------------------------------------------------------ memory

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Zeroed bytes in an anonymous memory file, which a peer of the same user can map."""
        import torch

        memory = self.allocate_buffer(nbytes)
        return (
            torch.frombuffer(memory, dtype=torch.uint8, count=nbytes)
            if nbytes
            else torch.empty(0, dtype=torch.uint8)
        )

    def allocate_buffer(self, nbytes: int) -> mmap.mmap:
        """The same without torch."""
        fd = os.memfd_create(f"splitserve-{self._agent}", os.MFD_CLOEXEC)
        size = max(nbytes, 1)
        os.ftruncate(fd, size)
        memory = mmap.mmap(fd, size)
        addr = _address_of(memory)
        self._memory[addr] = (memory, _Region(addr, size, fd))
        return memory

    def register(self, slabs: Sequence[Slab]) -> bytes:
        """Only memory that `allocate` made can be opened to peers."""
        for slab in slabs:
            if slab.count and slab.addr not in self._memory:
                raise ConfigError(f"slab at {slab.addr:#x} was not made by this transport's allocate")
        self._regions = tuple(self._memory[s.addr][1] for s in slabs if s.count)
        return msgspec.msgpack.encode(_Address(f"splitserve-{self._agent}", self._regions))

    # ------------------------------------------------------------------ peers

    def connect(self, card: Card) -> str:
        if card.agent_name in self._peers:
            return card.agent_name
        if card.host != host_id():
            raise TransferError(f"{card.agent_name} runs on another host; transport 'local' needs one")
        address = msgspec.msgpack.decode(card.agent, type=_Address)
        sock = self._dial(address.socket, card)
        maps: list[mmap.mmap] = []
        try:
            maps = [_map_peer(card.pid, region) for region in address.regions]
        except OSError as e:
            sock.close()
            raise TransferError(f"cannot map the memory of {card.agent_name} (pid {card.pid}): {e}") from e
        bases = [_address_of(m) for m in maps]
        peer = _Peer(card.agent_name, sock, address.regions, maps, bases)
        peer.unsent += _frame(self._agent.encode())
        self._peers[card.agent_name] = peer
        return card.agent_name

    def _dial(self, name: str, card: Card) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.connect(f"\0{name}")
        except OSError as e:
            sock.close()
            raise TransferError(f"{card.agent_name} does not listen: {e}") from e
        pid, uid = _credentials(sock)
        if uid != os.getuid() or pid != card.pid:
            sock.close()
            raise TransferError(f"{card.agent_name} is pid {pid} of user {uid}, its card says pid {card.pid}")
        sock.setblocking(False)
        return sock

    def disconnect(self, peer: str) -> None:
        gone = self._peers.pop(peer, None)
        if gone:
            self._break(gone, "disconnected")

    def _break(self, peer: _Peer, error: str) -> None:
        self._events += [Broken(w.id, error) for w in peer.writes]
        peer.writes.clear()
        peer.sock.close()
        for m in peer.maps:
            m.close()

    # ------------------------------------------------------------------ writing

    def prepare(self, peer: str, copies: Copies) -> None: ...

    def write(self, peer: str, copies: Copies, note: bytes) -> int:
        if peer not in self._peers:
            raise TransferError(f"{peer} is not connected")
        to = self._peers[peer]
        runs: deque[tuple[int, int, int]] = deque()
        for (src, nbytes, _), (dst, _, _) in zip(copies.src.tolist(), copies.dst.tolist(), strict=True):
            runs.append((src, to.locate(dst, nbytes), nbytes))
        self._next_id += 1
        to.writes.append(_Write(self._next_id, runs, note))
        return self._next_id

    def read(self, peer: str, copies: Copies) -> int:
        if peer not in self._peers:
            raise TransferError(f"{peer} is not connected")
        to = self._peers[peer]
        pairs = zip(copies.src.tolist(), copies.dst.tolist(), strict=True)
        runs = deque((to.locate(src, nbytes), dst, nbytes) for (src, nbytes, _), (dst, _, _) in pairs)
        self._next_id += 1
        to.writes.append(_Write(self._next_id, runs, b""))
        return self._next_id

    def poll(self) -> list[TransportEvent]:
        self._accept()
        for caller in list(self._callers):
            self._listen(caller)
        budget = SLICE_BYTES
        for peer in list(self._peers.values()):
            budget = self._advance(peer, budget)
        events, self._events = self._events, []
        return events

    def _advance(self, peer: _Peer, budget: int) -> int:
        """Copy up to `budget` bytes, send what notes can be sent. Returns what is left of the budget."""
        try:
            if peer.sock.recv(1, socket.MSG_DONTWAIT | socket.MSG_PEEK) == b"":
                raise ConnectionResetError("the peer has gone")
        except BlockingIOError:
            pass
        except OSError as e:
            return self._lose(peer, e, budget)
        while peer.writes and budget > 0 and not peer.unsent:
            write = peer.writes[0]
            while write.runs and budget > 0:
                budget -= _copy(write.runs, budget)
            if write.runs:
                break
            peer.writes.popleft()
            if write.note:
                peer.unsent += _frame(write.note)
            self._events.append(Written(write.id))
            if not self._flush(peer):
                return budget
        self._flush(peer)
        return budget

    def _flush(self, peer: _Peer) -> bool:
        """Send what fits into the peer's socket; False when the peer was lost."""
        while peer.unsent:
            try:
                sent = peer.sock.send(peer.unsent)
            except BlockingIOError:
                return True
            except OSError as e:
                self._lose(peer, e, 0)
                return False
            del peer.unsent[:sent]
        return True

    def _lose(self, peer: _Peer, error: OSError, budget: int) -> int:
        self._peers.pop(peer.name, None)
        self._break(peer, str(error))
        self._events.append(Lost(peer.name, str(error)))
        return budget

    # ------------------------------------------------------------------ notes

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except BlockingIOError:
                return
            _, uid = _credentials(sock)
            if uid != os.getuid():
                sock.close()
                continue
            sock.setblocking(False)
            self._callers.append(_Caller(sock))

    def _listen(self, caller: _Caller) -> None:
        gone = False
        try:
            while chunk := caller.sock.recv(1 << 20):
                caller.buffer += chunk
            gone = True
        except BlockingIOError:
            pass
        except OSError:
            gone = True
        gone = not self._parse(caller) or gone
        if gone:
            self._callers.remove(caller)
            caller.sock.close()

    def _parse(self, caller: _Caller) -> bool:
        """Take whole frames: first the caller's name, then notes. False when it does not speak our frames."""
        while len(caller.buffer) >= _HEAD.size:
            (length,) = _HEAD.unpack_from(caller.buffer)
            if length > MAX_NOTE:
                return False
            if len(caller.buffer) < _HEAD.size + length:
                break
            body = bytes(caller.buffer[_HEAD.size : _HEAD.size + length])
            del caller.buffer[: _HEAD.size + length]
            if caller.name:
                self._events.append(Noted(caller.name, body))
            else:
                caller.name = body.decode(errors="replace")
        return True

    # ------------------------------------------------------------------ the rest

    def settled(self, card: Card) -> bool:
        """Copies are made by the sender itself: a dead one leaves nothing under way but notes already read."""
        return not any(c.name == card.agent_name for c in self._callers)

    def lanes(self) -> dict[str, str]:
        return dict.fromkeys(self._peers, "shared memory")

    def fds(self) -> list[int]:
        return [self._listener.fileno(), *(c.sock.fileno() for c in self._callers)]

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for name in list(self._peers):
            self.disconnect(name)
        for caller in self._callers:
            caller.sock.close()
        self._callers.clear()
        self._listener.close()
        for memory, region in self._memory.values():
            os.close(region.fd)
            with contextlib.suppress(BufferError):  # a tensor still views it: unmapped when that goes
                memory.close()
        self._memory.clear()

    def check(self) -> None:
        for name, peer in self._peers.items():
            if peer.sock.fileno() < 0:
                raise InvariantError(f"{name} is connected over a closed socket")
        if self._closed and (self._peers or self._callers or self._memory):
            raise InvariantError("closed, but peers, callers or memory are left")


def _copy(runs: deque[tuple[int, int, int]], budget: int) -> int:
    """Copy at most `budget` bytes of the first run; returns how many."""
    src, dst, nbytes = runs.popleft()
    now = min(nbytes, budget)
    ctypes.memmove(dst, src, now)
    if now < nbytes:
        runs.appendleft((src + now, dst + now, nbytes - now))
    return now


def _map_peer(pid: int, region: _Region) -> mmap.mmap:
    fd = os.open(f"/proc/{pid}/fd/{region.fd}", os.O_RDWR | os.O_CLOEXEC)
    try:
        return mmap.mmap(fd, region.nbytes)
    finally:
        os.close(fd)


def _address_of(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def _credentials(sock: socket.socket) -> tuple[int, int]:
    """(pid, uid) of the process at the other end, as the kernel knows them."""
    pid, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return pid, uid


def _frame(body: bytes) -> bytes:
    return _HEAD.pack(len(body)) + body
