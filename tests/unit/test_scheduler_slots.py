"""The scheduler with a model that has slots and guesses tokens: snapshots continue prefixes, guesses change no token.

Beside the rows of pages, the machine keeps in each slot the tokens whose state it stands for. Loads and marks copy them
as a runner does; a slot that does not hold what a chunk continues from is found at once.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from splitserve.engine.limits import Limits
from splitserve.engine.request import Request
from splitserve.engine.scheduler import Scheduler
from splitserve.engine.step import PENDING, Chunk, Sampled, Step, StepResult
from splitserve.kv.cache import Cache
from splitserve.types import FinishReason
from tests.unit.test_scheduler import PAGE, Machine, World, expected, next_token, request


class SlotMachine(Machine):
    """`guesses` says of each place of a request whether the guess for it is right; without it there are none."""

    def __init__(self, guesses: list[bool] | None = None) -> None:
        super().__init__()
        self.slots: dict[int, tuple[int, ...]] = {}
        self.guesses = guesses

    def run(self, step: Step) -> StepResult:
        for source, target in step.loads:
            self.slots[target] = self.slots[source]
        return StepResult(step.index, {c.rid: self.compute(c) for c in step.chunks})

    def compute(self, chunk: Chunk) -> Sampled:
        tokens = [self.last[chunk.rid] if t == PENDING else t for t in chunk.tokens]
        for position, token in zip(range(chunk.start, chunk.stop), tokens, strict=True):
            self.rows[chunk.pages[position // PAGE], position % PAGE] = token
        seen = [self.rows[chunk.pages[p // PAGE], p % PAGE] for p in range(chunk.stop)]
        before = self.slots.get(chunk.slot, ())[: chunk.start] if chunk.start else ()
        assert before == tuple(seen[: chunk.start]), "the slot holds another state than the pages"
        for stop, unit in chunk.marks:
            assert chunk.start <= stop <= chunk.stop - chunk.num_draft
            self.slots[unit] = tuple(seen[:stop])
        self.slots[chunk.slot] = tuple(seen)
        if not chunk.sample:
            return Sampled()
        return self.sample(chunk, seen)

    def sample(self, chunk: Chunk, seen: list[int]) -> Sampled:
        known = chunk.stop - chunk.num_draft
        taken = [next_token(seen[:known])]
        for i in range(chunk.num_draft):
            if seen[known + i] != taken[-1]:
                break
            taken.append(next_token(seen[: known + i + 1]))
        self.last[chunk.rid] = taken[-1]
        if self.guesses is None:
            return Sampled(tuple(taken))
        truth = next_token([*seen[:known], *taken])
        right = self.guesses[(known + len(taken)) % len(self.guesses)]
        return Sampled(tuple(taken), draft=truth if right else truth + 1)


def make(num_pages: int = 64, *, num_slots: int = 8, num_snapshots: int = 4, **limits: int) -> Scheduler:
    cache = Cache(num_pages=num_pages, page_tokens=PAGE, num_slots=num_slots, num_snapshots=num_snapshots)
    return Scheduler(cache, Limits(**{"max_len": 200, "max_seqs": 8, "step_tokens": 16, **limits}))


def world_of(scheduler: Scheduler, *, guesses: list[bool] | None = None, depth: int = 1) -> World:
    world = World(scheduler, depth=depth)
    world.machine = SlotMachine(guesses)
    return world


def ask(world: World, rid: str, prompt: list[int], num: int = 3) -> Request:
    req = request(rid, prompt, num)
    world.scheduler.add(req, world.now)
    world.run()
    assert world.got[rid] == expected(prompt, num)
    return req


def test_a_prompt_that_comes_again_is_continued_from_its_last_border() -> None:
    world, prompt = world_of(make()), list(range(11))
    assert ask(world, "a", prompt).num_cached == 0
    assert ask(world, "b", prompt).num_cached == 8
    assert ask(world, "c", [*prompt[:8], 90, 91]).num_cached == 8


def test_a_prompt_of_whole_pages_keeps_the_border_before_its_last_token_too() -> None:
    world, prompt = world_of(make()), list(range(12))
    ask(world, "a", prompt)
    assert ask(world, "b", prompt).num_cached == 8
    assert ask(world, "c", [*prompt, 90]).num_cached == 12


def test_where_prompts_part_the_state_is_kept_the_second_time() -> None:
    world = world_of(make())
    common = list(range(8))
    ask(world, "a", [*common, *range(20, 30)])
    assert ask(world, "b", [*common, *range(30, 40)]).num_cached == 0  # pages without a state
    assert ask(world, "c", [*common, *range(40, 50)]).num_cached == 8


def test_a_conversation_is_continued_behind_its_answer() -> None:
    world, prompt = world_of(make()), list(range(6))
    ask(world, "a", prompt, 9)
    whole = [*prompt, *expected(prompt, 9)]
    assert ask(world, "b", [*whole, 90, 91, 92]).num_cached == 12


def test_choices_of_one_prompt_compute_it_once() -> None:
    world, prompt = world_of(make()), list(range(4 * PAGE + 2))
    for i in range(4):
        world.scheduler.add(request(f"c{i}", prompt, 3), 0)
    world.run()
    assert world.got == {f"c{i}": expected(prompt, 3) for i in range(4)}
    assert world.scheduler.counters.prompt_tokens == len(prompt) + 3 * 2


def test_without_snapshots_nothing_is_found_again() -> None:
    world, prompt = world_of(make(num_snapshots=0)), list(range(11))
    ask(world, "a", prompt)
    assert ask(world, "b", prompt).num_cached == 0


@pytest.mark.parametrize("guesses", [[True], [False], [True, False, False]], ids=["right", "wrong", "mixed"])
def test_guesses_change_no_token_and_right_ones_save_steps(guesses: list[bool]) -> None:
    plain, world = world_of(make()), world_of(make(), guesses=guesses)
    prompt = list(range(7))
    ask(plain, "a", prompt, 21)
    ask(world, "a", prompt, 21)
    counters = world.scheduler.counters
    assert counters.output_tokens == 21
    if guesses == [True]:
        assert counters.steps == 11
        assert counters.accepted_tokens == counters.drafted_tokens == 10
    if guesses == [False]:
        assert counters.steps == plain.scheduler.counters.steps
        assert counters.accepted_tokens == 0 < counters.drafted_tokens


def test_no_guess_is_tried_that_could_not_be_used() -> None:
    world = world_of(make(), guesses=[True])
    ask(world, "a", [1, 2, 3], 2)  # one token from the prompt, one more: no third is wanted
    assert world.scheduler.counters.drafted_tokens == 0


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_every_history_ends_with_right_tokens(data: st.DataObject) -> None:
    """Prompts with common beginnings, a small pool, few snapshots, steps in flight, aborts, right and wrong guesses."""
    draw = data.draw
    num_pages, depth = draw(st.integers(6, 24)), draw(st.integers(1, 3))
    guesses = draw(st.none() | st.lists(st.booleans(), min_size=1, max_size=5))
    scheduler = make(
        num_pages,
        num_slots=draw(st.integers(2, 4)),
        num_snapshots=draw(st.integers(0, 3)),
        max_len=num_pages * PAGE,
        max_seqs=4,
    )
    world, prompts = world_of(scheduler, guesses=guesses, depth=depth), {}
    for i in range(draw(st.integers(1, 9))):
        common = [draw(st.integers(0, 1))] * draw(st.integers(1, 14))
        prompt = [*common, *draw(st.lists(st.integers(2, 3), max_size=4))]
        prompts[f"r{i}"] = (prompt, draw(st.integers(1, 12)))
        world.scheduler.add(request(f"r{i}", *prompts[f"r{i}"]), world.now)
        for _ in range(draw(st.integers(0, 6))):
            world.turn()
        if draw(st.booleans()):
            world.scheduler.abort(f"r{draw(st.integers(0, 9))}")
    world.run()
    for rid, (prompt, num) in prompts.items():
        got = world.got.get(rid, [])
        assert got == expected(prompt, num)[: len(got)], "a wrong token"
        if rid not in world.errors and world.finish.get(rid) is not FinishReason.ABORT:
            assert len(got) == min(num, num_pages * PAGE - len(prompt)), "the answer is cut short"
    cache = scheduler.cache
    assert cache.num_free + cache.num_evictable == num_pages
    cache.flush()
    assert cache.num_snapshots == 0
    cache.check([])
