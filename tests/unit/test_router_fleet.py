"""Membership, health, proof and counts: random histories keep every invariant."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from splitserve.errors import ConfigError, InvariantError, NotFound
from splitserve.router.fleet import Endpoint, Fleet, LoadSnapshot, Member, Reject, Route
from splitserve.router.policy import Chooser, Features
from splitserve.router.rates import Rate
from splitserve.types import Role


def test_endpoint_as_on_the_command_line() -> None:
    assert Endpoint.parse("http://h:1,8998", Role.PREFILL) == Endpoint("http://h:1", Role.PREFILL, 8998)
    assert Endpoint.parse("h:1", Role.DECODE) == Endpoint("http://h:1", Role.DECODE)
    for bad in (
        "http://h:1,",
        "http://h:1,x",
        "http://h:1,0",
        "http://h:1,70000",
        "https://h",
        "http://h:1/v1",
    ):
        with pytest.raises(ConfigError):
            Endpoint.parse(bad, Role.PREFILL)


def test_the_same_url_twice() -> None:
    fleet = Fleet()
    fleet.add(Endpoint("http://h:1", Role.DECODE))
    with pytest.raises(ConfigError, match="decode-0"):
        fleet.add(Endpoint("http://h:1", Role.PREFILL))


def test_rates_are_of_the_last_seconds_and_of_this_life() -> None:
    rate = Rate()
    assert rate.per_s == 0.0
    for second in range(60):
        rate.tell(100 * second if second < 30 else 3000, float(second))
        if second == 20:
            assert rate.per_s == pytest.approx(100.0)
    assert rate.per_s == 0.0  # nothing came for longer than the window
    rate.tell(4000, 60.0)
    assert rate.per_s == pytest.approx(1000 / 10)
    rate.tell(5, 61.0)  # a new life
    assert rate.per_s == 0.0
    rate.tell(25, 62.0)
    assert rate.per_s == pytest.approx(20.0)
    rate.tell(25, 62.0)
    assert rate.per_s == pytest.approx(20.0)


def test_an_engine_without_totals_tells_its_own_rate() -> None:
    fleet = Fleet()
    member = fleet.add(Endpoint("http://h:1", Role.DECODE))
    fleet.healthy(member, LoadSnapshot(prompt_tokens=10, output_per_s=7.5), now=1.0)
    fleet.healthy(member, LoadSnapshot(prompt_tokens=40, output_per_s=8.5), now=3.0)
    assert member.tokens_per_s == {"prompt": 15.0, "output": 8.5}


def test_unknown_ids_name_the_known_ones() -> None:
    fleet = Fleet()
    fleet.add(Endpoint("http://h:1", Role.DECODE))
    with pytest.raises(NotFound, match="decode-0"):
        fleet.remove("decode-9")


def test_health_is_lost_slowly_unless_it_is_certain() -> None:
    fleet = Fleet(max_bad=3)
    member = fleet.add(Endpoint("http://h:1", Role.UNIFIED))
    assert fleet.healthy(member, LoadSnapshot())
    fleet.prove(None, member)
    assert not fleet.unhealthy(member, "late")
    assert not fleet.unhealthy(member, "late")
    assert member.healthy
    assert fleet.ready
    assert fleet.unhealthy(member, "late")
    assert not fleet.ready  # the proof went with the health
    fleet.healthy(member, LoadSnapshot())
    assert not fleet.ready
    assert fleet.unproven() == [(None, member)]
    fleet.prove(None, member)
    assert fleet.unhealthy(member, "refused", certain=True)


def test_check_finds_lost_counts() -> None:
    fleet = Fleet()
    member = fleet.add(Endpoint("http://h:1", Role.UNIFIED))
    member.num_inflight = -1
    with pytest.raises(InvariantError, match="unified-0"):
        fleet.check()


class Histories(RuleBasedStateMachine):
    """Members come and go, get sick and well, while requests begin and end."""

    def __init__(self) -> None:
        super().__init__()
        self.fleet = Fleet(max_bad=2)
        self.chooser = Chooser("least_loaded")
        self.now = 0.0
        self.port = 0
        self.running: list[tuple[Route, int]] = []
        self.members: list[Member] = []

    @rule(role=st.sampled_from(list(Role)))
    def add(self, role: Role) -> None:
        self.port += 1
        self.members.append(self.fleet.add(Endpoint(f"http://h:{self.port}", role, 1)))

    @precondition(lambda self: self.members)
    @rule(data=st.data(), what=st.sampled_from(["up", "down", "gone", "drain", "undrain", "remove", "fail"]))
    def happens(self, data: st.DataObject, what: str) -> None:
        member = data.draw(st.sampled_from(self.members))
        match what:
            case "up":
                self.fleet.healthy(member, LoadSnapshot(num_running=1))
            case "down":
                self.fleet.unhealthy(member, "late")
            case "gone":
                self.fleet.unhealthy(member, "refused", certain=True)
            case "drain":
                self.fleet.drain(member.id)
            case "undrain":
                self.fleet.undrain(member.id)
            case "remove":
                self.fleet.remove(member.id)
                self.members.remove(member)
            case "fail":
                self.fleet.failed(member, self.now)

    @rule()
    def prove(self) -> None:
        for pair in self.fleet.unproven():
            self.fleet.prove(*pair)

    @rule(cost=st.integers(1, 50), step=st.floats(0, 3))
    def request(self, cost: int, step: float) -> None:
        self.now += step
        route = self.chooser.choose(Features(cost), self.fleet, self.now)
        if isinstance(route, Reject):
            assert not self.fleet.ready
            return
        assert all(m.healthy and not m.draining and m in self.fleet for m in route.members)
        self.fleet.begin(route, cost, self.now)
        self.running.append((route, cost))

    @precondition(lambda self: self.running)
    @rule(data=st.data(), ok=st.booleans())
    def end(self, data: st.DataObject, ok: bool) -> None:
        route, cost = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        for member in route.members:
            self.fleet.succeeded(member) if ok else self.fleet.failed(member, self.now)
        self.fleet.end(route, cost)

    @invariant()
    def holds(self) -> None:
        self.fleet.check()
        for member in self.members:
            mine = [cost for route, cost in self.running if member in route.members]
            assert (member.num_inflight, member.inflight_cost) == (len(mine), sum(mine))


Histories.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestHistories = Histories.TestCase
