"""The scheduler over random histories: arrivals, aborts, failed handoffs, a pool that is too small, steps in flight.

The machine below stands for model and memory: it writes each token into the row that the step names and, to sample,
reads the whole sequence back from the pages. A row that was shared, freed too early or never written shows as a wrong
sequence, so every test of this file is a test of ownership too.
"""

from __future__ import annotations

import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from splitserve.engine.chunks import share
from splitserve.engine.limits import Limits
from splitserve.engine.request import Phase, Request
from splitserve.engine.scheduler import Scheduler
from splitserve.engine.step import PENDING, Sampled, Step, StepResult
from splitserve.errors import RequestError, TransferError
from splitserve.kv.cache import Cache
from splitserve.types import FinishReason, Grammar, GrammarKind, SamplingParams
from splitserve.wire import Room

PAGE = 4


def next_token(tokens: list[int]) -> int:
    """What our model says: depends on every token before."""
    return zlib.crc32(bytes(t % 251 for t in tokens)) % 90 + 5


def expected(prompt: list[int], num: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(num):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


class Machine:
    def __init__(self) -> None:
        self.rows: dict[tuple[int, int], int] = {}
        self.last: dict[str, int] = {}

    def run(self, step: Step) -> StepResult:
        sampled = {}
        for chunk in step.chunks:
            tokens = [self.last[chunk.rid] if t == PENDING else t for t in chunk.tokens]
            for position, token in zip(range(chunk.start, chunk.stop), tokens, strict=True):
                self.rows[chunk.pages[position // PAGE], position % PAGE] = token
            if chunk.sample:
                seen = [self.rows[chunk.pages[p // PAGE], p % PAGE] for p in range(chunk.stop)]
                sampled[chunk.rid] = Sampled((next_token(seen),))
        self.last.update({rid: s.tokens[-1] for rid, s in sampled.items()})
        return StepResult(step.index, sampled)

    def write(self, pages: list[int], tokens: list[int]) -> None:
        """What a peer does to a decode half's rows."""
        for position, token in enumerate(tokens):
            self.rows[pages[position // PAGE], position % PAGE] = token


def make(num_pages: int = 64, **limits: int | float) -> Scheduler:
    limits = {"max_len": 200, "max_seqs": 8, "step_tokens": 16, **limits}
    return Scheduler(Cache(num_pages=num_pages, page_tokens=PAGE), Limits(**limits))


def request(rid: str, prompt: list[int], num: int, **more: object) -> Request:
    sampling = SamplingParams(max_tokens=num, **more.pop("sampling", {}))
    return Request(rid, list(prompt), len(prompt), sampling, **more)


class World:
    """A scheduler, its machine, steps in flight, and what each client has been sent."""

    def __init__(self, scheduler: Scheduler, *, depth: int = 1) -> None:
        self.scheduler, self.machine, self.depth = scheduler, Machine(), depth
        self.flying: list[StepResult] = []
        self.got: dict[str, list[int]] = {}
        self.finish: dict[str, FinishReason] = {}
        self.errors: dict[str, Exception] = {}
        self.arriving: list[Request] = []
        self.now = 0.0

    def turn(self) -> bool:
        self.now += 1
        step = self.scheduler.plan(self.now)
        if step:
            assert step.num_tokens <= self.scheduler.limits.step_tokens
            assert len({c.rid for c in step.chunks}) == len(step.chunks)
            self.flying.append(self.machine.run(step))
        applied = bool(self.flying) and (len(self.flying) >= self.depth or step is None)
        if applied:
            self.scheduler.apply(self.flying.pop(0))
        self.collect()
        return bool(step or applied)

    def collect(self) -> None:
        events, ended, offers, _ = self.scheduler.drain()
        for e in events:
            self.got.setdefault(e.rid, []).extend(e.tokens)
            if e.finish:
                assert e.rid not in self.finish, "finished twice"
                self.finish[e.rid] = e.finish
        for r in ended:
            if r.error:
                self.errors[r.rid] = r.error
        self.arriving.extend(offers)
        self.scheduler.check()

    def run(self, limit: int = 3000) -> None:
        for _ in range(limit):
            if not self.turn():
                return
        raise AssertionError(f"no end after {limit} turns: {self.scheduler.requests}")


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_tokens_are_those_of_the_model_alone(depth: int) -> None:
    world = World(make(), depth=depth)
    prompts = {f"r{i}": [i, *range(3 + 7 * i)] for i in range(6)}
    for rid, prompt in prompts.items():
        world.scheduler.add(request(rid, prompt, 9), world.now)
    world.run()
    assert world.got == {rid: expected(p, 9) for rid, p in prompts.items()}
    assert world.scheduler.cache.num_free + world.scheduler.cache.num_evictable == 64


@pytest.mark.parametrize("depth", [1, 2])
def test_preemption_changes_no_token(depth: int) -> None:
    world = World(make(num_pages=12), depth=depth)
    for i in range(5):
        world.scheduler.add(request(f"r{i}", [i] * 6, 20), world.now)
    world.run()
    assert world.scheduler.counters.preemptions > 0, "the pool was meant to be too small"
    assert world.got == {f"r{i}": expected([i] * 6, 20) for i in range(5)}


def test_a_short_prompt_passes_a_long_one_and_the_long_one_still_ends() -> None:
    world = World(make(num_pages=100, max_len=400))
    world.scheduler.add(request("long", [1] * 300, 1), world.now)
    world.turn()
    world.scheduler.add(request("short", [2] * 8, 1), world.now)
    turns = 0
    while "short" not in world.finish:
        world.turn()
        turns += 1
    assert turns <= 3, "the short prompt waited for the long one"
    for i in range(200):
        world.scheduler.add(request(f"s{i}", [3, i] * 4, 1), world.now)
        if not world.turn() or "long" in world.finish:
            break
    assert "long" in world.finish, "the long prompt starved"


def test_higher_priority_goes_first() -> None:
    world = World(make(max_seqs=1))
    for rid, priority in (("a", 0), ("b", 0), ("c", 5)):
        world.scheduler.add(request(rid, [1, 2, 3], 2, priority=priority), world.now)
    order = []
    while world.turn():
        order += [rid for rid in world.finish if rid not in order]
    assert order == ["c", "a", "b"]


def test_stop_token_and_min_tokens() -> None:
    prompt = [1, 2, 3]
    stop = expected(prompt, 3)[1]
    world = World(make())
    world.scheduler.add(request("a", prompt, 9, sampling={"stop_token_ids": (stop,)}), 0)
    world.run()
    assert world.got["a"] == expected(prompt, 2)
    assert world.finish["a"] is FinishReason.STOP


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_choices_of_one_prompt_compute_it_once(depth: int) -> None:
    world, prompt = World(make(), depth=depth), list(range(4 * PAGE + 2))
    for i in range(5):
        world.scheduler.add(request(f"c{i}", prompt, 3), 0)
    world.run()
    assert world.got == {f"c{i}": expected(prompt, 3) for i in range(5)}
    assert world.scheduler.counters.prompt_tokens == len(prompt) + 4 * 2


def test_nobody_waits_for_a_prompt_that_cannot_be_shared() -> None:
    """Shorter than a page, or to be rated, or an aborted sibling's: all of these are computed at once."""
    rated = {"prompt_logprobs": 0}
    for prompt, sampling in (([1, 2, 3], {}), (list(range(3 * PAGE)), rated)):
        scheduler = make(step_tokens=64)
        for i in range(3):
            scheduler.add(request(f"c{i}", prompt, 3, sampling=sampling), 0)
        scheduler.plan(0)
        assert len(scheduler.running) == 3
    scheduler = make(step_tokens=8)
    for i in range(2):
        scheduler.add(request(f"c{i}", list(range(30)), 3), 0)
    scheduler.plan(0)
    scheduler.plan(0)
    assert [r.rid for r in scheduler.running] == ["c0"]
    scheduler.abort("c0")
    scheduler.plan(0)
    assert [r.rid for r in scheduler.running] == ["c1"]


def test_a_grammar_s_end_is_the_answer_s_even_before_min_tokens() -> None:
    prompt = [1, 2, 3]
    sampling = {"stop_token_ids": (expected(prompt, 3)[1],), "min_tokens": 5}
    for grammar, num in ((None, 9), (Grammar(GrammarKind.REGEX, "x"), 2)):
        world = World(make())
        world.scheduler.add(request("a", prompt, 9, sampling={**sampling, "grammar": grammar}), 0)
        world.run()
        assert len(world.got["a"]) == num


def test_a_grammar_that_cannot_be_followed_is_the_client_s_error_not_a_token() -> None:
    scheduler = make()
    scheduler.add(request("a", [1, 2], 4), 0)
    step = scheduler.plan(0)
    scheduler.apply(StepResult(step.index, {"a": Sampled((3,), refusal="too much")}))
    events, ended, _, _ = scheduler.drain()
    assert (ended[0].error.status, ended[0].error.field, ended[0].error.message) == (
        400,
        "grammar",
        "too much",
    )
    assert not events


def test_refusals_name_the_field() -> None:
    world = World(make())
    world.scheduler.add(request("long", [1] * 200, 1), 0)
    world.scheduler.add(request("empty", [], 1), 0)
    world.collect()
    assert {e.field for e in world.errors.values()} == {"prompt"}
    world.scheduler.add(request("a", [1], 1), 0)
    with pytest.raises(RequestError, match="already in use"):
        world.scheduler.add(request("a", [1], 1), 0)


def test_a_deadline_ends_a_request_in_every_phase() -> None:
    world = World(make(max_seqs=2, num_pages=8))
    world.scheduler.add(request("running", [1] * 6, 90, deadline=5.0), 0)
    world.scheduler.add(request("arriving", [2] * 6, 9, half="decode", room=Room(1, "h", 1), deadline=5.0), 0)
    world.scheduler.add(request("waiting", [3] * 6, 9, deadline=5.0), 0)
    for _ in range(6):
        world.turn()
    assert set(world.errors) == {"running", "arriving", "waiting"}
    assert {e.code for e in world.errors.values()} == {"deadline_exceeded"}
    assert world.scheduler.cache.num_quarantined == 2, "rows that a peer may write must stay"
    world.scheduler.rows_free("arriving")
    assert not world.scheduler.requests
    world.scheduler.check()


def decode_half(rid: str, prompt: list[int], num: int) -> Request:
    return request(rid, prompt, num, half="decode", room=Room(7, "h", 1))


def test_a_decode_half_goes_on_with_the_rows_its_peer_wrote() -> None:
    world = World(make())
    prompt = list(range(10))
    world.scheduler.add(decode_half("d", prompt, 6), 0)
    world.turn()
    (req,) = world.arriving
    assert req.phase is Phase.ARRIVING
    world.machine.write(req.holding.pages, prompt)
    world.scheduler.arrived("d", Sampled((next_token(prompt),)))
    world.run()
    assert world.got["d"] == expected(prompt, 6)
    assert world.scheduler.counters.recomputations == 0


@pytest.mark.parametrize("emitted", [1, 3, 6])
def test_a_request_goes_on_where_another_engine_stopped(emitted: int) -> None:
    prompt = list(range(10, 21))
    whole = expected(prompt, 8)
    world = World(make())
    world.scheduler.add(
        Request("r", [*prompt, *whole[:emitted]], len(prompt), SamplingParams(max_tokens=8)), 0
    )
    world.run()
    assert world.got["r"] == whole[emitted:]
    assert world.finish["r"] is FinishReason.LENGTH


def test_halves_go_on_where_another_engine_stopped() -> None:
    """The handoff carries the rows of emitted tokens too; prefill adds one token, decode the others."""
    prompt = list(range(10, 21))
    whole = expected(prompt, 8)
    given = [*prompt, *whole[:3]]
    sampling = SamplingParams(max_tokens=8)
    prefill = World(make())
    prefill.scheduler.add(
        Request("p", list(given), len(prompt), sampling, half="prefill", room=Room(7, "h", 1)), 0
    )
    prefill.run()
    assert prefill.got["p"] == whole[3:4]
    prefill.scheduler.rows_free("p")
    prefill.collect()
    assert prefill.finish["p"] is FinishReason.LENGTH

    decode = World(make())
    decode.scheduler.add(
        Request("d", list(given), len(prompt), sampling, half="decode", room=Room(7, "h", 1)), 0
    )
    decode.turn()
    (req,) = decode.arriving
    assert req.holding is not None
    decode.machine.write(req.holding.pages, given)
    decode.scheduler.arrived("d", Sampled((whole[3],)), num_cached=13)
    decode.run()
    assert decode.got["d"] == whole[3:]


def test_a_lost_handoff_is_recomputed_in_other_rows_than_those_at_stake() -> None:
    world = World(make())
    prompt = list(range(10))
    world.scheduler.add(decode_half("d", prompt, 6), 0)
    world.turn()
    (req,) = world.arriving
    at_stake = set(req.holding.pages)
    world.scheduler.lost("d", TransferError("digest"), retriable=True)
    while world.turn():
        world.machine.write(sorted(at_stake), [99] * 10)  # the late write of a peer that was stopped
        if req.holding:
            assert not at_stake & set(req.holding.pages)
    assert world.got["d"] == expected(prompt, 6)
    assert world.scheduler.counters.recomputations == 1
    assert world.scheduler.cache.num_quarantined == 3
    world.scheduler.rows_free("d")
    world.scheduler.check()
    assert world.scheduler.cache.num_quarantined == 0


def test_a_recomputed_request_that_is_preempted_is_not_offered_again() -> None:
    world = World(make(num_pages=9))
    world.scheduler.add(decode_half("d", [9] * 8, 14), 0)
    world.turn()
    world.scheduler.lost("d", TransferError("x"), retriable=True)
    world.scheduler.rows_free("d")
    for i in range(2):
        r = request(f"r{i}", [i] * 6, 14, priority=1)
        world.scheduler.add(r, world.now)
    world.arriving.clear()
    world.run()
    assert world.scheduler.counters.preemptions > 0
    assert not world.arriving
    assert world.got["d"] == expected([9] * 8, 14)


def test_recomputation_is_bounded() -> None:
    world = World(make(recompute_share=0.0))
    world.scheduler.add(decode_half("d", [1] * 8, 4), 0)
    world.turn()
    world.scheduler.lost("d", TransferError("gone"), retriable=True)
    world.collect()
    assert world.errors["d"].code == "transfer_failed"


def test_a_prefill_half_ends_when_its_rows_have_left() -> None:
    world = World(make())
    world.scheduler.add(request("p", list(range(20)), 50, half="prefill", room=Room(7, "h", 1)), 0)
    world.run()
    assert world.got["p"] == expected(list(range(20)), 1)
    assert "p" not in world.finish
    assert world.scheduler.requests["p"].phase is Phase.LEAVING
    world.scheduler.rows_free("p")
    world.collect()
    assert world.finish["p"] is FinishReason.LENGTH
    assert not world.scheduler.requests


def test_logits_that_are_not_finite_are_an_error_not_a_token() -> None:
    scheduler = make()
    scheduler.add(request("a", [1, 2], 4), 0)
    step = scheduler.plan(0)
    scheduler.apply(StepResult(step.index, {"a": Sampled((3,), finite=False)}))
    events, ended, _, _ = scheduler.drain()
    assert ended[0].error.code == "invariant_error"
    assert not events


@given(
    lefts=st.lists(st.integers(1, 50), max_size=8),
    budget=st.integers(0, 64),
    makeup=st.integers(1, 16),
    flags=st.lists(st.booleans(), min_size=8, max_size=8),
)
def test_share_spends_the_budget_and_starves_nobody_first(lefts, budget, makeup, flags) -> None:
    prompts = [request(f"r{i}", [0] * n, 1) for i, n in enumerate(lefts)]
    for req, flag in zip(prompts, flags, strict=False):
        req.recomputing = flag
    got = dict.fromkeys((r.rid for r in prompts), 0)
    for req, size in share(prompts, budget, makeup=makeup):
        assert 0 < size <= req.num_left
        got[req.rid] += size
    assert sum(got.values()) <= budget
    assert sum(got[r.rid] for r in prompts if r.recomputing) <= makeup
    if not any(flags[: len(prompts)]):
        assert sum(got.values()) == min(budget, sum(lefts))
        if prompts and budget:
            assert got["r0"] >= min(lefts[0], -(-budget // 2))


@st.composite
def histories(draw: st.DrawFn) -> list[tuple]:
    """Moves of clients and peers between turns."""
    moves = []
    for i in range(draw(st.integers(1, 12))):
        kind = draw(st.sampled_from(["", "", "decode", "prefill"]))
        prompt = [draw(st.integers(0, 2))] * draw(st.integers(1, 24))
        moves.append(("add", f"r{i}", prompt, draw(st.integers(1, 12)), kind))
        for _ in range(draw(st.integers(0, 3))):
            moves.append(("turn",))
        if draw(st.booleans()):
            kind = draw(st.sampled_from(["abort", "arrive", "lose", "free"]))
            moves.append((kind, draw(st.integers(0, 11))))
    return moves


@settings(max_examples=150, deadline=None)
@given(moves=histories(), depth=st.integers(1, 3), num_pages=st.integers(8, 24))
def test_every_history_ends_with_right_tokens_and_no_lost_page(moves, depth, num_pages) -> None:
    world = World(make(num_pages=num_pages, max_len=num_pages * PAGE), depth=depth)
    prompts: dict[str, tuple[list[int], int]] = {}
    stakes: set[str] = set()
    for move in moves:
        play(world, move, prompts, stakes)
    for _ in range(400):
        busy = world.turn()
        settle(world, stakes)
        if not busy and not world.scheduler.requests and not stakes:
            break
    assert not world.scheduler.requests, "somebody never ended"
    for rid, (prompt, num) in prompts.items():
        got = world.got.get(rid, [])
        assert got == expected(prompt, num)[: len(got)], "a wrong token"
        if rid not in world.errors and world.finish.get(rid) is not FinishReason.ABORT:
            assert len(got) == min(num, num_pages * PAGE - len(prompt)), "the answer is cut short"
    cache = world.scheduler.cache
    assert cache.num_free + cache.num_evictable == num_pages
    assert cache.num_quarantined == 0


def play(world: World, move: tuple, prompts: dict, stakes: set[str]) -> None:
    match move:
        case ("add", rid, prompt, num, half):
            room = Room(len(prompts), "h", 1) if half else None
            prompts[rid] = (prompt, 1 if half == "prefill" else num)
            world.scheduler.add(request(rid, prompt, num, half=half, room=room), world.now)
            world.collect()
        case ("turn",):
            world.turn()
        case ("abort", i):
            world.scheduler.abort(f"r{i}")
            world.collect()
        case ("arrive" | "lose", _) if world.arriving:
            end_handoff(world, world.arriving.pop(0), stakes, good=move[0] == "arrive")
        case ("free", _) if stakes:
            world.scheduler.rows_free(stakes.pop())
            world.collect()


def end_handoff(world: World, req: Request, stakes: set[str], *, good: bool) -> None:
    if req.phase is Phase.ENDED:
        stakes.add(req.rid)
    elif good:
        world.machine.write(req.holding.pages, req.tokens)
        world.scheduler.arrived(req.rid, Sampled((next_token(req.tokens),)))
    else:
        world.scheduler.lost(req.rid, TransferError("test"), retriable=True)
        stakes.add(req.rid)
    world.collect()


def settle(world: World, stakes: set[str]) -> None:
    """Peers answer in the end: handoffs finish, rows come free."""
    while world.arriving:
        end_handoff(world, world.arriving.pop(0), stakes, good=True)
    for req in list(world.scheduler.requests.values()):
        if req.phase is Phase.LEAVING or (req.phase is Phase.ENDED and req.in_transfer):
            stakes.add(req.rid)
    while stakes:
        world.scheduler.rows_free(stakes.pop())
        world.collect()
