"""What the kernel still holds of a process that is gone, with real sockets and a real child that dies."""

from __future__ import annotations

import os
import socket

import pytest

from splitserve.transfer.sockets import unfinished


def sender_that_dies(address: tuple[str, int], nbytes: int) -> None:
    """A process that sends without waiting for its reader, and is gone."""
    pid = os.fork()
    if pid == 0:
        with socket.create_connection(address[:2]) as s:
            s.setblocking(False)
            sent = 0
            while sent < nbytes:
                try:
                    sent += s.send(b"x" * min(1 << 16, nbytes - sent))
                except BlockingIOError:
                    break  # both queues are full
        os._exit(0)
    os.waitpid(pid, 0)


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
@pytest.mark.parametrize("nbytes", [1, 64 << 20], ids=["little", "more than the queues hold"])
def test_bytes_of_a_dead_process_are_seen_until_they_have_been_read(family: int, nbytes: int) -> None:
    try:
        listener = socket.create_server(
            ("::1" if family == socket.AF_INET6 else "127.0.0.1", 0), family=family
        )
    except OSError:
        pytest.skip("no IPv6 here")
    with listener:
        before = unfinished()
        sender_that_dies(listener.getsockname(), nbytes)
        reader, _ = listener.accept()
        with reader:
            assert unfinished() == before + 1
            reader.settimeout(10)
            first = reader.recv(1)
            if nbytes > 1:
                assert unfinished() == before + 1, "one byte is read and the rest is forgotten"
            while reader.recv(1 << 20):
                pass
            assert first == b"x"
            assert unfinished() == before


def test_a_living_peer_is_nothing_to_wait_for() -> None:
    before = unfinished()
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as near,
    ):
        far, _ = listener.accept()
        with far:
            near.send(b"unread")
            assert unfinished() == before
