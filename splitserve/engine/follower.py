"""The loop of every rank but 0: run the steps and carry out the orders that rank 0 sends, report what the port saw."""

from __future__ import annotations

from splitserve import log
from splitserve.engine.channel import Events, Line, Poison
from splitserve.engine.runner import Pending, Runner
from splitserve.engine.step import Step
from splitserve.engine.waiting import Waiting
from splitserve.kv.pool import Pool
from splitserve.transfer.events import PortEvent
from splitserve.transfer.port import Port

_log = log.get(__name__)

IDLE_S = 0.5
PORT_POLL_S = 0.001
ARRIVAL_S = 0.005
"""Most time that a peer's write lies here unnoticed: nobody tells a rank that one is coming, and no descriptor does."""


class Watched:
    """A port, if there is one, and what it has reported since it was last told: between layers too."""

    def __init__(self, port: Port | None) -> None:
        self.port = port
        self._seen: list[PortEvent] = []

    def progress(self) -> None:
        """Called between layers: poll only while something moves."""
        if self.port is not None and self.port.moving():
            self._seen.extend(self.port.poll())

    def take(self) -> tuple[PortEvent, ...]:
        if self.port is not None:
            self._seen.extend(self.port.poll())
        seen, self._seen = self._seen, []
        return tuple(seen)


class Follower:
    def __init__(
        self, line: Line, runner: Runner, *, pool: Pool, watched: Watched, alive_fd: int | None = None
    ) -> None:
        self._line = line
        self._runner = runner
        self._pool = pool
        self._watched = watched
        self._stopping = False
        self._pending: Pending | None = None
        self._waiting = Waiting(line.socket, alive_fd=alive_fd)

    def stop(self) -> None:
        self._stopping = True

    def run(self) -> None:
        """Until rank 0's server has gone or `stop` is called."""
        while not self._stopping:
            self._turn()
            port = self._watched.port
            if not self._waiting.wait(patience(port), port.fds() if port is not None else ()):
                _log.info("the server has gone; leaving")
                return

    def _turn(self) -> None:
        for message in self._line.receive():
            if isinstance(message, Step):  # one may be under way while the next is launched, as on rank 0
                before, self._pending = self._pending, self._runner.launch(message)
                if before is not None:
                    before.result()
                continue
            self._settle()  # what comes now may speak of rows that the last step writes
            match message:
                case Poison(pages=pages, slots=slots):
                    self._pool.poison(pages, slots)
                case _ if self._watched.port is not None:
                    self._watched.port.post(message)
        if seen := self._watched.take():
            self._line.send(Events(seen))

    def _settle(self) -> None:
        if self._pending is not None:
            self._pending.result()
            self._pending = None


def patience(port: Port | None) -> float:
    """Seconds to sleep where no message comes."""
    if port is None:
        return IDLE_S
    return PORT_POLL_S if port.moving() else ARRIVAL_S
