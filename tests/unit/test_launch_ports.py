"""Ports: free when chosen, still ours when the child listens, never given twice."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from splitserve.errors import PortTaken
from splitserve.launch.ports import Claims

HOST = "127.0.0.1"


def listen(port: int) -> socket.socket:
    """As servers do: SO_REUSEADDR, bind, listen."""
    s = socket.socket()
    s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    s.bind((HOST, port))
    s.listen()
    return s


def test_a_child_can_listen_on_a_held_port_again_and_again():
    with Claims() as claims:
        port = claims.claim("prefill-0.http", HOST)
        for _ in range(3):
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection((HOST, port))
            with listen(port) as server, socket.create_connection((HOST, port)):
                server.accept()[0].close()


def test_deployments_started_at_once_never_share_a_port():
    """Many supervisors claim at the same moment and hold what they got; every number must be given once."""
    threads, each = 16, 40
    begin = threading.Barrier(threads)
    with ThreadPoolExecutor(threads) as pool:

        def take(_: int) -> tuple[Claims, list[int]]:
            claims = Claims()
            begin.wait()
            return claims, [claims.claim(f"p{i}.http", HOST) for i in range(each)]

        taken = list(pool.map(take, range(threads)))
    ports = [port for _, own in taken for port in own]
    for claims, _ in taken:
        claims.close()
    assert len(set(ports)) == threads * each


LAUNCHERS = """
import json, multiprocessing, sys
from splitserve.launch import topology
from splitserve.launch.deployment import load
from splitserve.launch.placement import place
from splitserve.launch.ports import Claims

def launch(begin, line):
    with Claims() as claims:
        specs = place(topology.read(nvml=False), load(sys.argv[1], overrides=["router.port=0", "decode.replicas=3"]))
        begin.wait()
        line.send(list(claims.claim_all(specs).values()))
        line.recv()  # holds them until the last has its own

context = multiprocessing.get_context("fork")
begin = context.Barrier(20)
lines = []
for _ in range(20):
    ours, theirs = context.Pipe()
    context.Process(target=launch, args=(begin, theirs), daemon=True).start()
    lines.append(ours)
print(json.dumps([line.recv() for line in lines]))
for line in lines:
    line.send(None)
"""


def test_twenty_launchers_at_once_on_one_host_never_collide():
    """Processes, each with every port of a pair of 1 + 3 engines; forked from one that has imported all they need."""
    file = str(Path(__file__).parents[2] / "deploy" / "demo.toml")
    words = [sys.executable, "-c", LAUNCHERS, file]
    taken = json.loads(subprocess.run(words, capture_output=True, check=True, text=True, timeout=60).stdout)
    assert len(taken) == 20
    assert len({port for ports in taken for port in ports}) == sum(map(len, taken)) >= 20 * 6


def test_of_many_who_wish_one_port_exactly_one_gets_it():
    with Claims() as free:
        port = free.claim("x.http", HOST)
    begin = threading.Barrier(8)

    def wish(_: int) -> Claims | None:
        claims = Claims()
        begin.wait()
        try:
            claims.claim("router.http", HOST, port=port)
        except PortTaken:
            return None
        return claims

    with ThreadPoolExecutor(8) as pool:
        got = [c for c in pool.map(wish, range(8)) if c is not None]
    assert len(got) == 1
    got[0].close()


def test_a_held_port_is_not_handed_to_a_stranger():
    with Claims() as claims:
        ports = {claims.claim(f"p{i}.http", HOST) for i in range(50)}
        strangers = []
        for _ in range(200):
            s = socket.socket()
            s.bind((HOST, 0))
            strangers.append(s)
        assert not ports & {s.getsockname()[1] for s in strangers}
        for s in strangers:
            s.close()


def test_a_taken_port_is_told_with_its_number_and_a_fix():
    with listen(0) as server, Claims() as claims:
        port = server.getsockname()[1]
        with pytest.raises(PortTaken, match=f"port {port} on 127.0.0.1, wanted for router.http") as caught:
            claims.claim("router.http", HOST, port=port)
        assert "--set router.port=0" in (caught.value.fix or "")


def test_a_port_in_time_wait_is_free():
    """The server closes first, so the port stays in TIME_WAIT: a restarted deployment must still get it."""
    with Claims() as first:
        port = first.claim("router.http", HOST)
        server = listen(port)
        client = socket.create_connection((HOST, port))
        server.accept()[0].close()
        server.close()
        client.close()
    with Claims() as second:
        assert second.claim("router.http", HOST, port=port) == port


@pytest.mark.parametrize("host", ["192.0.2.1", "no.such.host.invalid"])
def test_an_address_that_is_not_ours_is_told(host: str):
    with Claims() as claims, pytest.raises(PortTaken, match="cannot bind") as caught:
        claims.claim("router.http", host)
    assert "address of this host" in (caught.value.fix or "")


def test_closing_gives_the_port_back():
    claims = Claims()
    port = claims.claim("x.http", HOST)
    claims.close()
    with Claims() as again:
        assert again.claim("x.http", HOST, port=port) == port
