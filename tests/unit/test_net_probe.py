"""Ports: free ones are free and different, taken ones say by whom."""

from __future__ import annotations

import socket

import pytest

from splitserve.errors import ConfigError, PortTaken
from splitserve.net.probe import bound_socket, free_ports, is_listening


def test_free_ports_are_different_and_free() -> None:
    ports = free_ports(20)
    assert len(set(ports)) == 20
    for port in ports:
        bound_socket("127.0.0.1", port).close()


def test_a_taken_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert is_listening("127.0.0.1", port)
        with pytest.raises(PortTaken, match=str(port)):
            bound_socket("127.0.0.1", port)
    assert not is_listening("127.0.0.1", port)


def test_ipv6_and_nonsense() -> None:
    bound_socket("::1").close()
    with pytest.raises(ConfigError, match="no-such-host"):
        bound_socket("no-such-host.invalid")
    with pytest.raises(ConfigError, match=r"203\.0\.113\.7"):
        bound_socket("203.0.113.7")  # a documentation address: not ours
