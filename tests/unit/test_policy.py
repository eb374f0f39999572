"""Policies: whatever the fleet's state, only members that can serve are chosen, and each policy keeps its promise."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from splitserve.errors import ConfigError
from splitserve.router.fleet import Endpoint, Fleet, LoadSnapshot, Member, Reject, Route
from splitserve.router.policy import BLOCK, Chooser, Features, SeenPrefixes, chain
from splitserve.types import Role

POLICIES = ("round_robin", "random", "least_loaded", "power_of_two", "cache_aware")
MAX_QUEUED = 1000


def make_fleet(
    num_prefill: int = 2, num_decode: int = 2, num_unified: int = 0, *, proven: bool = True
) -> Fleet:
    fleet = Fleet()
    port = 1000
    for role, count in ((Role.PREFILL, num_prefill), (Role.DECODE, num_decode), (Role.UNIFIED, num_unified)):
        for _ in range(count):
            port += 1
            fleet.healthy(fleet.add(Endpoint(f"http://h:{port}", role, 1)), LoadSnapshot())
    if proven:
        for pair in fleet.unproven():
            fleet.prove(*pair)
    return fleet


def chooser(policy: str, *, alone: bool = False) -> Chooser:
    return Chooser(policy, max_queued_tokens=MAX_QUEUED, alone=alone, rng=random.Random(1))


# ---------------------------------------------------------------- for every policy and every fleet


MEMBER = st.fixed_dictionaries(
    {
        "role": st.sampled_from(list(Role)),
        "healthy": st.booleans(),
        "draining": st.sampled_from([False, False, True]),
        "failures": st.sampled_from([0, 0, 4, 5, 9]),
        "queued": st.sampled_from([0, 10, MAX_QUEUED, MAX_QUEUED + 1]),
        "starved": st.sampled_from([False, False, True]),
        "inflight": st.integers(0, 5),
    }
)


@settings(max_examples=150, deadline=None)
@given(
    policy=st.sampled_from(POLICIES),
    members=st.lists(MEMBER, max_size=8),
    unproven=st.sets(st.tuples(st.integers(0, 7), st.integers(0, 7)), max_size=6),
    avoid=st.sets(st.integers(0, 7), max_size=4),
    now=st.floats(0, 20),
    text=st.binary(max_size=2000),
    alone=st.booleans(),
)
def test_only_members_that_can_serve_and_never_a_reject_without_need(
    policy: str,
    members: list[dict[str, object]],
    unproven: set[tuple[int, int]],
    avoid: set[int],
    now: float,
    text: bytes,
    alone: bool,
) -> None:
    fleet = Fleet(max_failures=5, open_s=5.0)
    made: list[Member] = []
    for i, want in enumerate(members):
        member = fleet.add(Endpoint(f"http://h:{i + 1}", want["role"], 1))  # type: ignore[arg-type]
        pages = {"free_pages": 0, "total_pages": 100, "num_waiting": 1} if want["starved"] else {}
        fleet.healthy(member, LoadSnapshot(queued_tokens=want["queued"], **pages))  # type: ignore[arg-type]
        made.append(member)
    order = {m.id: i for i, m in enumerate(made)}
    for prefill, answer in fleet.unproven():
        if (order.get(prefill.id, -1) if prefill else -1, order[answer.id]) not in unproven:
            fleet.prove(prefill, answer)
    for member, want in zip(made, members, strict=True):
        for _ in range(want["failures"]):  # type: ignore[call-overload]
            fleet.failed(member, 0.0)
        if not want["healthy"]:
            fleet.unhealthy(member, "test", certain=True)
        fleet.drain(member.id) if want["draining"] else None
        member.num_inflight = int(want["inflight"])  # type: ignore[call-overload]
    avoided = {m.id for m in made if order[m.id] in avoid}
    found = chooser(policy, alone=alone).choose(Features(len(text), chain(text)), fleet, now, avoid=avoided)

    def can(m: Member) -> bool:
        return m.healthy and not m.draining and not m.full(MAX_QUEUED)

    able = [m for m in made if can(m)]
    routes = [Route(None, m) for m in able if m.role is Role.UNIFIED and fleet.is_proven(None, m)]
    routes += [
        Route(p, d)
        for p in able
        for d in able
        if p.role is Role.PREFILL and d.role is Role.DECODE and fleet.is_proven(p, d)
    ]
    if alone and not routes:
        routes = [Route(None, m) for m in able if m in fleet.left_alone]
    if isinstance(found, Reject):
        assert not routes  # the last pair is never taken away in silence
        assert found.reason
        assert found.retry_after_s >= 1
        return
    assert any(found.prefill is r.prefill and found.answer is r.answer for r in routes)
    if not all(m.circuit.allows(now) for m in found.members):
        assert found.warning  # an open circuit is used knowingly
    answers = {r.answer.id: r.answer for r in routes}.values()
    if any(m.circuit.allows(now) and m.id not in avoided for m in answers):
        assert found.answer.circuit.allows(now)
        assert found.answer.id not in avoided


@pytest.mark.parametrize("policy", POLICIES)
def test_an_open_circuit_is_avoided_and_the_last_one_is_not(policy: str) -> None:
    fleet = make_fleet(1, 2)
    bad, good = (m for m in fleet if m.role is Role.DECODE)
    for _ in range(5):
        fleet.failed(bad, 0.0)
    choose = chooser(policy)
    for _ in range(20):
        route = choose.choose(Features(), fleet, 1.0)
        assert isinstance(route, Route)
        assert route.answer is good
        assert not route.warning
    fleet.unhealthy(good, "gone", certain=True)
    route = choose.choose(Features(), fleet, 1.0)
    assert isinstance(route, Route)
    assert route.answer is bad
    assert bad.id in route.warning


def test_half_open_lets_one_request_through() -> None:
    fleet = make_fleet(1, 2)
    bad = fleet.get("decode-0")
    for _ in range(5):
        fleet.failed(bad, 0.0)
    choose = chooser("round_robin")
    trial = None
    for _ in range(4):
        route = choose.choose(Features(), fleet, 6.0)
        assert isinstance(route, Route)
        if route.answer is bad:
            assert trial is None, "two trials at once"
            trial = route
            fleet.begin(route, 1, 6.0)
    assert trial is not None
    fleet.failed(bad, 6.0)
    fleet.end(trial, 1)
    assert bad.circuit.state(10.0) == "open"  # again, from the failure on
    assert bad.circuit.state(11.0) == "half_open"
    fleet.begin(trial, 1, 11.0)
    fleet.succeeded(bad)
    fleet.end(trial, 1)
    assert bad.circuit.state(11.0) == "closed"


def test_a_trial_that_told_nothing_frees_the_next() -> None:
    fleet = make_fleet(1, 1)
    decode = fleet.get("decode-0")
    for _ in range(5):
        fleet.failed(decode, 0.0)
    route = Route(fleet.get("prefill-0"), decode)
    fleet.begin(route, 1, 6.0)
    assert not decode.circuit.allows(6.0)
    fleet.end(route, 1)  # the client left
    assert decode.circuit.allows(6.0)


# ---------------------------------------------------------------- each policy


def test_round_robin_is_even() -> None:
    fleet = make_fleet(2, 3)
    choose = chooser("round_robin")
    counts: dict[str, int] = {}
    for _ in range(12):
        route = choose.choose(Features(), fleet, 0.0)
        assert isinstance(route, Route)
        for member in route.members:
            counts[member.id] = counts.get(member.id, 0) + 1
    assert counts == {"prefill-0": 6, "prefill-1": 6, "decode-0": 4, "decode-1": 4, "decode-2": 4}


def test_random_reaches_everybody() -> None:
    fleet = make_fleet(1, 4)
    choose = chooser("random")
    found = {choose.choose(Features(), fleet, 0.0).answer.id for _ in range(100)}  # type: ignore[union-attr]
    assert len(found) == 4


@pytest.mark.parametrize("policy", ["least_loaded", "power_of_two"])
def test_load_decides(policy: str) -> None:
    fleet = make_fleet(1, 2)
    busy, free = (m for m in fleet if m.role is Role.DECODE)
    fleet.healthy(busy, LoadSnapshot(num_running=4))
    for _ in range(5):
        route = chooser(policy).choose(Features(), fleet, 0.0)
        assert isinstance(route, Route)
        assert route.answer is free


def test_least_loaded_counts_its_own_requests_between_reports() -> None:
    fleet = make_fleet(1, 3)
    choose = chooser("least_loaded")
    for _ in range(9):
        route = choose.choose(Features(), fleet, 0.0)
        assert isinstance(route, Route)
        fleet.begin(route, 1, 0.0)
    assert [m.num_inflight for m in fleet if m.role is Role.DECODE] == [3, 3, 3]


def test_requests_of_others_count_but_our_own_only_once() -> None:
    fleet = make_fleet(1, 1)
    decode = fleet.get("decode-0")
    fleet.begin(Route(fleet.get("prefill-0"), decode), 1, 0.0)
    fleet.healthy(decode, LoadSnapshot(num_running=3))
    assert decode.pressure == 3  # ours and two of somebody else
    fleet.end(Route(fleet.get("prefill-0"), decode), 1)
    assert decode.pressure == 2


def test_cache_aware_comes_back_to_who_knows_the_prompt() -> None:
    fleet = make_fleet(4, 1)
    choose = chooser("cache_aware")
    rng = random.Random(3)
    homes = {}
    for number in range(20):
        text = rng.randbytes(BLOCK * 8)
        features = Features(8, chain(text))
        route = choose.choose(features, fleet, 0.0)
        assert isinstance(route, Route)
        choose.chosen(route, features)
        homes[number] = (text, route.prefill)
    assert len({p.id for _, p in homes.values() if p}) == 4  # new prompts spread
    for text, prefill in homes.values():
        longer = text + rng.randbytes(BLOCK * 2)  # the conversation has grown
        route = choose.choose(Features(10, chain(longer)), fleet, 0.0)
        assert isinstance(route, Route)
        assert route.prefill is prefill
        assert "seen=8/10" in route.why


@pytest.mark.parametrize(("prefills", "decodes", "wanted"), [(1, 1, False), (2, 1, True), (1, 2, True)])
def test_prompts_are_hashed_only_where_there_is_a_choice(prefills: int, decodes: int, wanted: bool) -> None:
    fleet = make_fleet(prefills, decodes)
    assert chooser("cache_aware").wants_chain(fleet) is wanted
    assert not chooser("round_robin").wants_chain(fleet)


def test_an_engine_that_is_down_is_still_a_choice() -> None:
    """What is asked meanwhile must be known to have gone to the other when it comes back."""
    fleet = make_fleet(2, 1)
    choose = chooser("cache_aware")
    fleet.unhealthy(fleet.get("prefill-1"), "gone", certain=True)
    assert choose.wants_chain(fleet)


def test_cache_aware_leaves_a_busy_home() -> None:
    fleet = make_fleet(2, 1)
    choose = chooser("cache_aware")
    features = Features(4, chain(b"x" * BLOCK * 4))
    first = choose.choose(features, fleet, 0.0)
    assert isinstance(first, Route)
    choose.chosen(first, features)
    fleet.begin(first, 20, 0.0)  # five times the work that the cache saves
    second = choose.choose(features, fleet, 0.0)
    assert isinstance(second, Route)
    assert second.prefill is not first.prefill


def test_seen_prefixes_forget_the_oldest_first() -> None:
    fleet = make_fleet(1, 1)
    member = fleet.get("prefill-0")
    seen = SeenPrefixes(max_entries=80)
    kept = chain(b"a" * BLOCK * 4)
    seen.saw(kept, [member])
    for i in range(40):
        seen.saw(chain(bytes([i]) * BLOCK * 4), [member])
        seen.saw(kept, [member])  # used all the time
        assert len(seen) <= 84
    assert seen.depths(kept, [member]) == [4]
    assert seen.depths(chain(bytes([0]) * BLOCK * 4), [member]) == [0]


def test_a_beginning_that_is_gone_hides_what_came_after_it() -> None:
    one, other = make_fleet(2, 1), SeenPrefixes()
    first, second = one.get("prefill-0"), one.get("prefill-1")
    hashes = chain(bytes(range(4)) * BLOCK)
    other.saw(hashes, [first])
    other.saw(hashes[2:], [second])  # its first blocks were forgotten
    assert other.depths(hashes, [first, second]) == [4, 0]


@given(a=st.binary(max_size=3000), b=st.binary(max_size=3000))
def test_chains_agree_as_far_as_the_texts_do(a: bytes, b: bytes) -> None:
    common = 0
    while common < min(len(a), len(b)) and a[common] == b[common]:
        common += 1
    one, other = chain(a), chain(b)
    equal = [x == y for x, y in zip(one, other, strict=False)]
    assert equal == [i < common // BLOCK for i in range(len(equal))]


def test_unknown_policy() -> None:
    with pytest.raises(ConfigError, match="fastest"):
        Chooser("fastest")


# ---------------------------------------------------------------- what a reject says


def test_rejects_say_what_is_missing() -> None:
    choose = chooser("round_robin")

    def reason(fleet: Fleet) -> str:
        found = choose.choose(Features(), fleet, 0.0)
        assert isinstance(found, Reject)
        return found.reason

    assert "no engine is registered" in reason(Fleet())
    assert "no token has come through" in reason(make_fleet(1, 1, proven=False))
    down = make_fleet(1, 1)
    down.unhealthy(down.get("decode-0"), "cannot connect", certain=True)
    assert "decode-0 (cannot connect)" in reason(down)
    drained = make_fleet(1, 1)
    drained.drain("prefill-0")
    assert "prefill-0 (draining)" in reason(drained)
    full = make_fleet(1, 1)
    full.healthy(full.get("prefill-0"), LoadSnapshot(num_waiting=7, queued_tokens=5000))
    assert "full: prefill-0 (7 waiting" in reason(full)


# ---------------------------------------------------------------- one half alone


def test_who_is_left_alone_has_served_in_this_life_and_has_no_living_partner() -> None:
    fleet = make_fleet(1, 2)
    prefill, first, second = fleet
    assert fleet.left_alone == []
    fleet.unhealthy(prefill, "dead", certain=True)
    assert fleet.left_alone == [first, second]
    fleet.unhealthy(second, "dead", certain=True)
    fleet.healthy(second, LoadSnapshot())
    assert fleet.left_alone == [first]  # nobody has seen the other's new life compute anything
    route = chooser("round_robin", alone=True).choose(Features(), fleet, 0.0)
    assert isinstance(route, Route)
    assert (route.prefill, route.answer) == (None, first)
    assert isinstance(chooser("round_robin").choose(Features(), fleet, 0.0), Reject)
    fleet.healthy(prefill, LoadSnapshot())
    assert fleet.left_alone == []  # the pair is about to prove itself
    fleet.unhealthy(first, "dead", certain=True)
    fleet.unhealthy(second, "dead", certain=True)
    assert fleet.left_alone == []  # prefill's own proof went with its life
