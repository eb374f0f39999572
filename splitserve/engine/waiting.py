"""Sleeping until something happens: one poller for messages, peers' descriptors and the life of the parent."""

from __future__ import annotations

import math
import time
from collections.abc import Collection

import zmq

MILLISECOND = 0.001


class Waiting:
    def __init__(self, *sockets: zmq.Socket[bytes], alive_fd: int | None) -> None:
        self._poller = zmq.Poller()
        self._alive_fd = alive_fd
        self._watched: set[int] = set()
        for socket in sockets:
            self._poller.register(socket, zmq.POLLIN)
        if alive_fd is not None:
            self._poller.register(alive_fd, zmq.POLLIN)

    def wait(self, at_most_s: float, fds: Collection[int] = ()) -> bool:
        """Sleep until a socket or one of `fds` is readable. False when the parent has gone.

        Less than a millisecond is slept through: the poller knows whole ones only.
        """
        self._watch(set(fds))
        if 0 < at_most_s < MILLISECOND:
            time.sleep(at_most_s)
            at_most_s = 0.0
        ready = dict(self._poller.poll(max(0, math.ceil(at_most_s / MILLISECOND))))
        return self._alive_fd is None or self._alive_fd not in ready

    def _watch(self, wanted: set[int]) -> None:
        for fd in self._watched - wanted:
            self._poller.unregister(fd)
        for fd in wanted - self._watched:
            self._poller.register(fd, zmq.POLLIN)
        self._watched = wanted
