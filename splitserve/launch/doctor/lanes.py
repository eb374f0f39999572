"""Tries NIXL between two processes of this host and asks UCX's own tables what carried the bytes. Decides nothing.

    target process: registers memory, polls   ◀── one put of 1 MiB ──   source process: asks for the lane

Once for host memory and, where there are GPUs and a torch that has CUDA, once from GPU 0 to GPU 1 (or between two
processes on the only one). How fast the lanes are is measured elsewhere (`doctor --fabric`); this says which they are,
in a few seconds.
"""

from __future__ import annotations

import ctypes
import multiprocessing as mp
import os
import time
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from splitserve import wire
from splitserve.config import TransferConfig
from splitserve.errors import SplitserveError, TransferError
from splitserve.launch.doctor.facts import Lanes
from splitserve.spec import Growth, Kind, Slab, StateSpec, Units, lay_out
from splitserve.transfer import transport as transports
from splitserve.transfer.layout import copies
from splitserve.transfer.port import make_card
from splitserve.transfer.transport import Broken, Transport, Written

_BYTES = 1 << 20
_WITHIN_S = 90.0
_PUT_S = 20.0
_POLL_S = 0.001
_HOST = -1


def ask(config: TransferConfig, *, gpus: int) -> Lanes:
    """What a put takes with these settings; `gpus` is how many torch could use. Raises nothing: trouble is a fact."""
    try:
        ucx, host = _try(config, _HOST, _HOST)
        gpu = _try(config, 0, min(1, gpus - 1))[1] if gpus else ""
    except SplitserveError as e:
        return Lanes(trouble=e.message)
    return Lanes(ucx=ucx, host=host, gpu=gpu)


def _try(config: TransferConfig, source: int, target: int) -> tuple[str, str]:
    """(version of UCX, lane) of one put. TransferError where a process dies or is late."""
    context = mp.get_context("spawn")
    lines: list[Connection] = []
    children = []
    for role, device in (("target", target), ("source", source)):
        ours, theirs = context.Pipe()
        child = context.Process(target=_main, args=(theirs, role, device, config), daemon=True)
        child.start()
        theirs.close()
        lines.append(ours)
        children.append(child)
    try:
        card = _answer(lines[0])
        _answer(lines[1])
        lines[1].send(card)
        ucx, lane = _answer(lines[1])
        return str(ucx), str(lane)
    finally:
        for line, child in zip(lines, children, strict=True):
            line.close()  # a child leaves when its line ends
            child.join(5.0)
            if child.is_alive():
                child.kill()
                child.join(5.0)


def _answer(line: Connection) -> Any:
    try:
        if not line.poll(_WITHIN_S):
            raise TransferError(f"NIXL does not start, or moves nothing, within {_WITHIN_S:g} s")
        ok, value = line.recv()
    except EOFError:
        raise TransferError("a process with NIXL died") from None
    if not ok:
        raise TransferError(str(value))
    return value


def _main(line: Connection, role: str, device: int, config: TransferConfig) -> None:
    """A child: the target gives its card and polls until its line ends; the source puts and tells the lane."""
    with suppress(EOFError, OSError):
        try:
            end = _End(f"doctor-{role}-{os.getpid()}", device, config)
            line.send((True, wire.encode(end.card)))
            if role == "source":
                line.send((True, end.put(wire.decoder(wire.Card).decode(line.recv()))))
        except (SplitserveError, RuntimeError) as e:  # RuntimeError: torch's, of a GPU that is not to be had
            line.send((False, str(e)))
            return
        while not line.poll(_POLL_S):
            end.transport.poll()


class _End:
    """Registered memory of one process and its transport."""

    def __init__(self, name: str, device: int, config: TransferConfig) -> None:
        self.transport: Transport = transports.make(config.transport, agent_name=f"{name}.0", config=config)
        memory = self.transport.allocate(_BYTES)
        self._memory = memory if device == _HOST else memory.to(f"cuda:{device}")
        slab = Slab(Kind.PAGE, self._memory.data_ptr(), _BYTES, 1, device)
        self.card = make_card(
            self.transport,
            agent=self.transport.register([slab]),
            engine=name,
            layout=lay_out([StateSpec("probe", 0, Growth.PAGED, _BYTES)], page_tokens=1),
            slabs=[slab],
            rank=0,
            size=1,
        )

    def put(self, card: wire.Card) -> tuple[str, str]:
        """(version of UCX, lane). TransferError where the put does not end."""
        peer = self.transport.connect(card)
        units = (Units(Kind.PAGE, (0,), 0, 0, 1),)
        what = copies(self.card, card, units, units, start=0, stop=1, last=True)
        number = self.transport.write(peer, what, b"probe")
        end = time.monotonic() + _PUT_S
        while time.monotonic() < end:
            for event in self.transport.poll():
                if event == Written(number):
                    return _ucx_version(), self.transport.lanes()[peer]
                if isinstance(event, Broken) and event.id == number:
                    raise TransferError(f"a put broke: {event.error}")
        raise TransferError(f"a put of {_BYTES} bytes did not end within {_PUT_S:g} s")


def _ucx_version() -> str:
    """Of the UCX that this process has loaded; "" where it has none."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.partition("/")[2]
        if "libucp" in path:
            library = ctypes.CDLL(f"/{path}")
            library.ucp_get_version_string.restype = ctypes.c_char_p
            return str(library.ucp_get_version_string().decode())
    return ""
