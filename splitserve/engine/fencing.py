"""Asks the supervisor to kill a peer that has gone silent with our rows at stake. It never kills anything itself.

Without a supervisor nobody is fenced: the rows stay quarantined until the peer answers or is proven dead.
"""

from __future__ import annotations

import json
import socket

from splitserve import log
from splitserve.wire import Card

_log = log.get(__name__)

TIMEOUT_S = 0.2
"""For handing the question to a socket on this host; the answer is not awaited, a pidfd tells of the death."""


class Fencing:
    """Callable as `fence(card)`. Keeps the connections of unanswered questions open until `close`."""

    def __init__(self, control: str) -> None:
        self._control = control
        self._asked: list[socket.socket] = []

    def __call__(self, card: Card) -> None:
        if not self._control:
            _log.warning(
                "pid %d (%s) is silent and there is no supervisor to fence it", card.pid, card.agent_name
            )
            return
        line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        line.settimeout(TIMEOUT_S)
        try:
            line.connect(self._control)
            line.sendall(
                json.dumps({"op": "fence", "pid": card.pid, "start": card.pid_start}).encode() + b"\n"
            )
        except OSError as e:
            _log.error("the supervisor could not be asked to fence pid %d: %s", card.pid, e)
            line.close()
            return
        _log.warning(
            "asked the supervisor to fence pid %d (%s), silent for too long", card.pid, card.agent_name
        )
        self._asked.append(line)

    def close(self) -> None:
        for line in self._asked:
            line.close()
        self._asked.clear()
