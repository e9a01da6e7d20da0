"""The running batch: whatever joins, leaves, fails or shares text, a request is answered as if it were alone."""

import random

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from jaxbench.serve import blocks, engine, lookup, scheduler
from jaxbench.serve.engine import Engine, QueueFull
from jaxbench.serve.request import Request, Sampling
from jaxbench.serve.scheduler import Limits
from jaxbench.serve.study.fuzz import ACTIONS, Fuzz
from jaxbench.serve.study.oracle import HashModel, HashRunner, SlotRunner


class Busy(RuleBasedStateMachine):
    """An engine that anything may happen to."""

    @initialize(seed=st.integers(0, 2**32))
    def begin(self, seed):
        self.fuzz = Fuzz(seed)

    @rule(
        names=st.lists(st.sampled_from([name for name, weight in ACTIONS.items() for _ in range(weight)]), max_size=8)
    )
    def act(self, names):
        for name in names:
            self.fuzz.act(name)

    @rule(count=st.integers(1, 12))
    def steps(self, count):
        for _ in range(count):
            self.fuzz.act("step")

    @invariant()
    def books_are_right(self):
        if hasattr(self, "fuzz"):
            self.fuzz.engine.scheduler.check()

    def teardown(self):
        if hasattr(self, "fuzz"):
            self.fuzz.drain()


TestBusy = Busy.TestCase
TestBusy.settings = settings(
    max_examples=80, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)


def run(seeds, actions=150):
    """Number of steps, and of guesses that were right."""
    steps = right = 0
    for seed in seeds:
        fuzz = Fuzz(seed)
        for _ in range(actions):
            fuzz.act(fuzz.random.choices(list(ACTIONS), list(ACTIONS.values()))[0])
        fuzz.drain()
        steps, right = steps + fuzz.engine.num_steps, right + fuzz.engine.num_right
    return steps, right


def test_ten_thousand_steps_of_random_engines_answer_as_each_request_alone():
    steps, right = run(range(1000, 1170))
    assert steps > 10_000 and right > 1_000


def _no_copies(self):
    plan = scheduler.Scheduler.whole_plan(self)
    return plan._replace(copies=[])


def _one_too_many(self, tokens):
    found = blocks.BlockPool.whole_acquire_prefix(self, tokens)
    return found if found.tail is None else found._replace(tail_length=found.tail_length + 1)


def _row_before(self, plan):
    batch = engine.Engine.whole__batch(self, plan)
    return batch._replace(wanted=np.maximum(batch.wanted - 1, 0))


def _forgets(self, state):
    scheduler.Scheduler.whole_preempt(self, state)
    state.tokens = list(state.request.prompt)


def _shares_its_last_block(self, tokens):
    found = blocks.BlockPool.whole_acquire_prefix(self, tokens)
    if found.tail is not None:
        self._add_reader(found.tail)
        return found._replace(blocks=[*found.blocks, found.tail], tail=None, tail_length=0)
    return found


def _takes_every_guess(self, part, logits):
    events = engine.Engine.whole__next_tokens(self, part, logits)
    self.scheduler.computed(part, len(part.guess))
    return events


def _whatever_is_in_front(self, parent, tokens):
    return blocks.BlockPool.whole_acquire(self, blocks.ROOT, tokens)


def _cut_where_the_step_is_full(self, state, budget):
    return min(state.num_uncomputed, budget)


BUGS = {
    "a block's beginning is not copied": (scheduler.Scheduler, "plan", _no_copies),
    "a block is known by its own text alone": (blocks, "digest", lambda parent, tokens: bytes(tokens)),
    "a block that others read is written to": (blocks.BlockPool, "acquire_prefix", _shares_its_last_block),
    "one token of a copied block counts too much": (blocks.BlockPool, "acquire_prefix", _one_too_many),
    "an answer is lost where its blocks are": (scheduler.Scheduler, "preempt", _forgets),
    "a cache is trusted behind a failed step": (blocks.BlockPool, "invalidate_all", lambda self: None),
    "a wrong guess counts as computed": (engine.Engine, "_next_tokens", _takes_every_guess),
    "a block is taken whatever is in front of it": (blocks.BlockPool, "acquire", _whatever_is_in_front),
    "a prompt is cut where the step is full": (scheduler.Scheduler, "_length", _cut_where_the_step_is_full),
    "logits are those of the row before": (engine.Engine, "_batch", _row_before),
}  # fmt: skip


@pytest.mark.parametrize("bug", BUGS)
def test_a_bug_in_the_books_is_a_wrong_token_or_a_wrong_book(bug, monkeypatch):
    owner, name, replaced = BUGS[bug]
    monkeypatch.setattr(owner, f"whole_{name}", getattr(owner, name), raising=False)
    monkeypatch.setattr(owner, name, replaced)
    with pytest.raises((AssertionError, KeyError, IndexError)):
        run(range(2000, 2060))


# One engine, looked at


def made(limits=None, **changes):
    settings = {
        "num_blocks": 20, "block_size": 4, "max_seq_len": 40, "vocab_size": 11, "sizes": (4, 16), "max_wanted": 4,
    } | changes  # fmt: skip
    runner = HashRunner(**settings)
    return Engine(runner, limits or Limits(max_running=4, max_batch_tokens=16, max_waiting=4))


DRAFTED = {
    "num_blocks": 60, "block_size": 4, "max_seq_len": 40, "vocab_size": 11, "sizes": (4, 16), "max_wanted": 16,
}  # fmt: skip


def test_a_draft_of_the_same_model_is_always_right_and_takes_fewer_steps():
    limits = Limits(max_running=4, max_batch_tokens=16, max_waiting=4, max_guessed=3)
    stem = tuple(np.random.default_rng(0).integers(0, 11, 12).tolist())
    requests = [Request(f"r{i}", stem[: 3 * i] + (i, 1), 20) for i in range(4)]
    found = []
    for has_draft in (False, True):
        tested = Engine(HashRunner(**DRAFTED), limits, draft=HashRunner(**DRAFTED) if has_draft else None)
        events = tested.generate(requests)
        found.append((
            {name: [each.token for each in mine] for name, mine in events.items()}, tested.num_steps,
            tested.num_guessed, tested.num_right,
        ))  # fmt: skip
    (plain, steps, *_), (drafted, fewer, guessed, right) = found
    assert plain == drafted and right > 40 and guessed <= right + 2 and fewer < 0.5 * steps  # one guess was the text's


def test_a_draft_that_fails_is_left_out_and_one_that_does_not_fit_is_refused():
    limits = Limits(max_running=4, max_batch_tokens=16, max_waiting=4, max_guessed=3)
    draft = HashRunner(**DRAFTED)
    draft.fails = 1
    tested = Engine(HashRunner(**DRAFTED), limits, draft=draft)
    (events,) = tested.generate([Request("a", (1, 2, 3), 8)]).values()
    assert [each.token for each in events] == alone(Request("a", (1, 2, 3), 8)) and tested.num_guessed == 0
    for name, value in (("vocab_size", 12), ("num_blocks", 59), ("sizes", (16,))):
        with pytest.raises(ValueError, match=f"draft: {name} is "):
            Engine(HashRunner(**DRAFTED), limits, draft=HashRunner(**DRAFTED | {name: value}))


def alone(request):
    model, tokens = HashModel(11), list(request.prompt)
    for _ in range(request.max_new_tokens):
        tokens.append(int(np.argmax(model.logits(tokens))))
    return tokens[len(request.prompt) :]


def tokens_of(events):
    return [event.token for event in events if event.token is not None]


def test_a_prompt_is_computed_beside_the_answers_of_others():
    busy = made()
    busy.add(Request("short", (1, 2), 30))
    busy.step()
    busy.add(Request("long", tuple(range(10)) * 3, 5))
    found = [busy.step(), busy.step()]
    assert [[event.id for event in events] for events in found] == [["short"], ["short", "long"]]


def steps_to_first_tokens(share, requests, runner=None):
    """Steps of an engine until the first token of each request, all of them there before the first step."""
    limits = Limits(max_running=4, max_batch_tokens=16, max_waiting=8, short_prompt_share=share)
    busy = Engine(runner or HashRunner(**LONG_TEXTS), limits)
    for each in requests:
        busy.add(each)
    found = {}
    while busy.is_busy:
        for event in busy.step():
            found.setdefault(event.id, busy.num_steps)
    return found


LONG_TEXTS = {
    "num_blocks": 80, "block_size": 4, "max_seq_len": 120, "vocab_size": 11, "sizes": (4, 16), "max_wanted": 4,
}  # fmt: skip


def test_short_prompts_behind_a_long_one_take_their_share_of_a_step_and_no_more():
    long = Request("long", tuple(range(10)) * 8, 2)
    shorts = [Request(f"short{i}", (9, i, 2, 3, 4, 5), 2) for i in range(3)]
    by_rank = steps_to_first_tokens(0.0, [long, *shorts])
    assert by_rank == {"long": 5, "short0": 6, "short1": 6, "short2": 7}
    shared = steps_to_first_tokens(0.5, [long, *shorts])
    assert shared == {"short0": 1, "short1": 2, "short2": 3, "long": 7}  # 18 + 6 tokens of others: one or two steps
    assert steps_to_first_tokens(0.9, [long, *shorts])["long"] <= 7
    # A prompt that does not end within the share keeps its place, as one of lower priority does.
    other = Request("other", (7,) * 9, 2)
    assert steps_to_first_tokens(0.5, [long, other])["other"] == by_rank["short0"]
    late = Request("late", (7, 1, 2), 2, priority=1)
    assert steps_to_first_tokens(0.5, [long, late])["late"] == by_rank["short0"]


@pytest.mark.parametrize("share", [0.0, 0.5, 0.99])
def test_a_long_prompt_in_a_slot_goes_on_by_a_segment_a_step_whoever_is_ahead(share):
    long = Request("long", tuple(range(10)) * 8, 2)
    shorts = [Request(f"short{i}", (i, 1, 2), 20) for i in range(3)]
    runner = SlotRunner(num_slots=4, segment=8, max_seq_len=120, vocab_size=11, max_rows=16)
    found = steps_to_first_tokens(share, [long, *shorts], runner)
    assert found["short0"] == (1 if share else 6) and found["long"] == (10 if share else 5)


def test_the_beginning_of_a_text_is_computed_once_and_a_part_of_a_block_is_copied():
    busy = made()
    first = Request("first", tuple(range(10)) + (3, 4, 5), 4)
    events = busy.generate([first])["first"]
    assert tokens_of(events) == alone(first)
    second = Request("second", (*range(10), 7), 4)
    busy.add(second)
    state = busy.state("second")
    events = busy.step()
    assert state.num_cached == 10  # two whole blocks and two of the third
    while busy.is_busy:
        events += busy.step()
    assert tokens_of(events) == alone(second)


def test_requests_that_come_together_and_begin_alike_read_their_beginning_once():
    class Counted(HashRunner):
        rows = 0

        def run(self, batch):
            self.rows += int((batch.positions >= 0).sum())
            return super().run(batch)

    prompt = tuple(np.random.default_rng(0).integers(0, 11, 80).tolist())
    requests, few = [Request(f"r{i}", (*prompt, i), 3) for i in range(4)], {"max_running": 4, "max_batch_tokens": 16}
    for limits in (Limits(**few), Limits(**few, max_guessed=2)):
        runner = Counted(**LONG_TEXTS | {"max_wanted": 12})
        draft = HashRunner(**LONG_TEXTS | {"max_wanted": 12}) if limits.max_guessed else None
        busy = Engine(runner, limits, draft=draft)
        found = busy.generate(requests)
        assert all(tokens_of(found[each.id]) == alone(each) for each in requests)
        assert [found[each.id][-1].num_cached for each in requests] == [0, 80, 80, 80]
        assert runner.rows - busy.num_guessed == 81 + 3 * 1 + 4 * 2 - busy.num_right
        assert busy.num_right == busy.num_guessed  # the draft has read what was shared


def test_who_ranks_last_waits_again_when_blocks_are_out_and_answers_all_the_same():
    busy = made(num_blocks=9)  # eight for two requests of six
    requests = [Request(f"r{i}", (i, i + 1, 5), 20) for i in range(2)]
    found = busy.generate(requests)
    assert busy.scheduler.num_preempted > 0
    assert all(tokens_of(found[each.id]) == alone(each) for each in requests)


def test_a_request_of_lower_priority_gives_its_room_to_one_of_higher():
    busy = made(num_blocks=9)
    busy.add(Request("low", (1,) * 12, 16, priority=1))
    busy.step()
    busy.add(Request("high", (2,) * 20, 4, priority=0))
    assert [event.id for event in busy.step() + busy.step()] == ["high"]
    low, high = busy.state("low"), busy.state("high")
    assert busy.scheduler.running == [high] and busy.scheduler.waiting == [low]


def test_a_request_of_lower_priority_keeps_its_room_where_giving_it_up_helps_nobody():
    busy = made(num_blocks=11)  # ten blocks for six, four and seven
    requests = [Request("one", (1,) * 16, 8), Request("low", (2,) * 8, 7, priority=1), Request("two", (3,) * 24, 4)]
    for each in requests[:2]:
        busy.add(each)
    events = busy.step() + sum(busy.generate(requests[2:]).values(), [])
    assert busy.scheduler.num_preempted == 0
    for one in requests:
        assert tokens_of(event for event in events if event.id == one.id) == alone(one)


def test_a_step_that_raises_twice_costs_the_requests_that_were_in_it_and_nobody_else():
    busy = made(Limits(max_running=1, max_batch_tokens=16, max_waiting=4))
    requests = [Request("a", (1, 2), 6), Request("b", (3, 4), 6)]
    for each in requests:
        busy.add(each)
    busy.runner.fails = 2
    events = []
    while busy.is_busy:
        events += busy.step()
    ended = {event.id: event for event in events if event.ended}
    assert ended["a"].ended == "error" and "told to fail" in ended["a"].error
    assert ended["b"].ended == "length"
    assert tokens_of([event for event in events if event.id == "b"]) == alone(requests[1])
    assert busy.scheduler.pool.num_available == 19


def test_logits_that_are_nan_end_one_request_with_an_error():
    busy = made()
    for each in ("a", "b"):
        busy.add(Request(each, (1, 2, 3), 5))
    busy.runner.spoilt = {0}
    events = busy.step()
    assert [(event.id, event.ended) for event in events] == [("a", "error"), ("b", None)]
    assert "the largest of 11 is nan" in events[0].error


def test_a_text_with_logits_that_were_nan_is_not_found_again():
    busy = made()
    request = Request("a", tuple(range(9)), 5)
    busy.add(request)
    busy.runner.spoilt = {0}
    assert busy.step()[-1].ended == "error" and busy.scheduler.pool.num_known == 0
    assert tokens_of(busy.generate([request])["a"]) == alone(request)


def test_a_grammar_that_refuses_a_token_costs_one_request():
    class Stubborn:
        is_over = False

        def masked(self, logits):
            return logits

        def accept(self, token):
            raise ValueError(f"token {token} may not come")

    busy = made()
    for each in ("a", "b"):
        busy.add(Request(each, (1, 2, 3), 5))
    busy.state("a").constraint = Stubborn()
    events = busy.step()
    assert [(event.id, event.ended) for event in events] == [("a", "error"), ("b", None)]
    assert "may not come" in events[0].error


def test_bad_requests_are_refused_and_change_nothing():
    busy = made()
    good = Request("r", (1, 2), 3)
    bad = {
        "no token": good._replace(prompt=()),
        "tokens from 2 to 11; wanted some, each from 0 to 10": good._replace(prompt=(2, 11)),
        "2 tokens of the prompt and max_new_tokens=0": good._replace(max_new_tokens=0),
        "39 together|40 together at most": good._replace(max_new_tokens=39),
        "logit_bias of token 11": good._replace(sampling=Sampling(logit_bias={11: 1.0})),
    }
    for match, request in bad.items():
        with pytest.raises(ValueError, match=match):
            busy.add(request)
    small = made(num_blocks=3)
    with pytest.raises(ValueError, match="9 tokens; the cache has room for 8"):
        small.add(good._replace(max_new_tokens=7))
    busy.add(good)
    with pytest.raises(ValueError, match="'r': the id is in use"):
        busy.add(good)
    for i in range(7):  # four may run and four wait
        busy.add(good._replace(id=f"w{i}"))
    with pytest.raises(QueueFull, match="8 requests are here"):
        busy.add(good._replace(id="last"))
    with pytest.raises(ValueError, match="1e-300; wanted 0, or at least"):
        Sampling(temperature=1e-300)
    with pytest.raises(ValueError, match="max_batch_tokens=2 is less than max_running=4"):
        Limits(max_running=4, max_batch_tokens=2)
    with pytest.raises(ValueError, match="the runner takes 16 rows, 4 with logits"):
        made(Limits(max_running=8, max_batch_tokens=16))
    busy.scheduler.check()


def test_a_text_that_repeats_itself_is_guessed_from_itself_and_bad_guesses_pause():
    known, hot = lookup.Lookup(), lookup.Lookup(temperature=1.0)
    text = [1, 2, 3, 4, 5, 6, 1, 2, 3]
    assert known.guess(text, 4) == (4, 5) and known.guess(text, 0) == ()  # nobody knows yet how good they are
    for _ in range(8):
        known.record(4, 4, len(text))
    assert known.guess(text, 4) == (4, 5, 6, 1)
    assert known.guess([*text, 9], 4) == ()
    for _ in range(8):
        known.record(4, 0, len(text))
    assert hot.guess(text, 4) == (4, 5)
    hot.record(2, 0, len(text))
    assert hot.guess(text, 4) == ()  # one was enough
    longer = text + [7] * 30 + text
    assert known.guess(text, 4) == () and known.guess(longer, 2) == ()  # the third pause is as long as four
    assert known.guess(longer + [8] * 200 + text, 2) == (4,)


def test_all_requests_of_a_long_list_are_answered_although_few_may_wait():
    busy = made()
    random_, requests = random.Random(0), []
    for i in range(30):
        prompt = tuple(random_.randrange(11) for _ in range(random_.randint(1, 20)))
        requests.append(Request(f"r{i}", prompt, random_.randint(1, 12)))
    found = busy.generate(iter(requests))
    assert all(tokens_of(found[each.id]) == alone(each) for each in requests)
