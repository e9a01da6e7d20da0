"""Decoders with memory behind the engine: an answer is the bits that the request gets alone, on both backends."""

import functools

import jax
import numpy as np
import pytest

from jaxbench import initial, sample, transformer
from jaxbench.config import TransformerConfig
from jaxbench.memory import decoder
from jaxbench.memory.decoder_config import with_memory
from jaxbench.serve.batch_rows import Batch
from jaxbench.serve.engine import Engine
from jaxbench.serve.request import Request, Sampling
from jaxbench.serve.scheduler import Limits
from jaxbench.serve.slot_runner import SlotRunner
from tests.memory.test_decoder import PLAIN, memory
from tests.serve.playing import Unfinished, answers, played

pytestmark = pytest.mark.usefixtures("plain_codegen")

LIMITS = Limits(max_running=3, max_batch_tokens=16, max_waiting=8)
KINDS = ("mac", "bank", "insert-neural")


@functools.cache
def config(kind):
    return with_memory(PLAIN.model_copy(update={"max_seq_len": 48}), memory(kind, max_documents=1))


@functools.cache
def runner(kind, package="jaxbench"):
    make, of = decoder, SlotRunner
    if package == "torch_ref":
        from torch_ref.memory import decoder as make
        from torch_ref.serve.slot_runner import SlotRunner as of
    model = make.build(config(kind), initial.initial_params(config(kind), 3, distinct=True))
    return of(model, num_slots=3, slot_tokens=48, segment=8, max_rows=LIMITS.max_batch_tokens)


@functools.cache
def trace():
    """(step at which it comes, request): prompts below, at and above multiples of a segment, greedy and drawn."""
    random, found = np.random.default_rng(0), []
    for i, length in enumerate((1, 7, 8, 9, 16, 20)):
        prompt = tuple(random.integers(0, 31, length).tolist())
        sampling = Sampling(temperature=0.9 * (i % 2), seed=i)
        found.append((2 * i, Request(f"r{i}", prompt, int(random.integers(4, 14)), sampling, logprobs=1)))
    return found


def play(engine):
    """Play the trace; a request is cancelled at step 5, and another loses its slot at steps 6, 13 and 21."""
    return played(engine, trace(), cancelled=(5, "r2"), preempted=(6, 13, 21))


@functools.cache
def together(kind, package="jaxbench"):
    engine = Engine(runner(kind, package), LIMITS)
    engine.runner.reset()
    found = answers(play(engine))
    assert engine.scheduler.num_preempted == 3 and engine.scheduler.pool.num_available == 3
    return found


@pytest.mark.parametrize("package", ["jaxbench", "torch_ref"])
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_and_log_probabilities_are_those_of_the_request_alone(kind, package):
    busy = together(kind, package)
    for _, request in trace():
        engine = Engine(runner(kind, package), LIMITS)
        engine.runner.reset()
        (alone,) = answers(engine.generate([request])).values()
        assert request.id == "r2" or len(busy[request.id]) == request.max_new_tokens
        assert busy[request.id] == alone[: len(busy[request.id])], request.id


@pytest.mark.parametrize("kind", KINDS)
def test_both_backends_give_the_same_tokens(kind):
    flax, torch = (together(kind, package) for package in ("jaxbench", "torch_ref"))
    for name, answer in flax.items():
        assert [token for token, _ in answer] == [token for token, _ in torch[name]], name
        given, other = ([each.token for _, each in found[name]] for found in (flax, torch))
        np.testing.assert_allclose(given, other, atol=1e-4)


def test_answers_are_those_of_the_generator_too(kind="mac"):
    flax = together(kind)
    model = decoder.build(config(kind), initial.initial_params(config(kind), 3, distinct=True))
    for _, request in trace()[4:6]:
        generate = sample.Generator(model, eos_id=None, sampling=request.sampling.params())
        how = {"max_new_tokens": request.max_new_tokens, "seed": request.sampling.seed}
        tokens = generate([list(request.prompt)], **how)[0][0].tolist()
        assert [token for token, _ in flax[request.id]] == tokens[: len(flax[request.id])], request.id


def test_a_slot_starts_empty_and_memory_is_part_of_what_it_holds():
    one = Request("a", tuple(range(20)), 12, logprobs=1)
    found = []
    for before in ((), (Request("b", (5,) * 24, 20),)):
        engine = Engine(runner("mac"), LIMITS.model_copy(update={"max_running": 1}))
        engine.runner.reset()
        engine.generate(before)
        found.append(answers(engine.generate([one])))
    assert found[0] == found[1]
    state = jax.tree.leaves(runner("mac")._cache.memory)
    assert sum(np.abs(np.asarray(each, np.float32)).sum() for each in state) > 0


def test_every_slot_gives_the_same_bits_at_the_width_of_the_default_model():
    shape = {"d_model": 576, "d_ff": 1536, "num_heads": 9, "num_kv_heads": 3, "head_dim": 64, "num_layers": 1}
    wide = TransformerConfig(vocab_size=512, max_seq_len=64, **shape)
    model = transformer.build(wide, initial.initial_params(wide, 3, distinct=True))
    slots = SlotRunner(model, num_slots=8, slot_tokens=32, segment=8, max_rows=32)
    limits = Limits(max_running=8, max_batch_tokens=32)
    found = []
    for count in (1, 8):
        engine = Engine(slots, limits)
        slots.reset()
        requests = [Request(f"r{i}", tuple(range(11)), 12, logprobs=1) for i in range(count)]
        found += list(answers(engine.generate(requests)).values())
    assert len(found) == 9 and all(each == found[0] for each in found)


def test_nothing_is_compiled_behind_the_first_request():
    engine, compiled = Engine(runner("bank"), LIMITS), []
    engine.runner.reset()

    def listen(event, *_, **__):
        compiled.append(event) if "compile" in event else None

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        play(engine)
    finally:
        jax.monitoring.clear_event_listeners()
    assert compiled == []


@pytest.mark.parametrize(
    "limits, words",
    [
        (LIMITS.model_copy(update={"max_batch_tokens": 10}), "max_batch_tokens=10: slots want at least 11"),
        (LIMITS.model_copy(update={"max_guessed": 2}), "max_guessed=2"),
    ],
)
def test_limits_that_do_not_go_with_slots_are_refused(limits, words):
    with pytest.raises(ValueError, match=words):
        Engine(runner("mac"), limits)


def test_a_segment_of_a_prompt_is_waited_for_where_no_logits_are_wanted(monkeypatch):
    slots, cache, none = runner("bank"), Unfinished(), np.zeros((0, 2), np.int32)
    monkeypatch.setattr(slots, "_read", lambda *_: (Unfinished(), cache))
    monkeypatch.setattr(slots, "_clear", lambda *_: cache)
    monkeypatch.setattr(slots, "_cache", cache)
    places = np.arange(8, dtype=np.int32)
    found = slots.run(Batch(places, places, np.ones((8, 1), np.int32), none[:, 0], none))
    assert found.shape == (0, slots.vocab_size) and cache.was_waited_for
