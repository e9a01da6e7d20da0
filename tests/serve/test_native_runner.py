"""The engine on real models: an answer is the bits that the request gets alone, in any company, on both backends."""

import functools

import jax
import jax.monitoring
import numpy as np
import pytest

from jaxbench import initial, sample
from jaxbench.config import TransformerConfig
from jaxbench.native import checkpoint, library, paged
from jaxbench.native import model as native
from jaxbench.serve import sampler
from jaxbench.serve.batch_rows import Batch
from jaxbench.serve.engine import Engine
from jaxbench.serve.native_runner import NativeRunner
from jaxbench.serve.request import Request, Sampling
from jaxbench.serve.scheduler import Limits
from jaxbench.serve.sizes import row_sizes
from tests.serve.playing import Unfinished, answers, played

pytestmark = pytest.mark.skipif(not library.is_available(), reason="native kernels cannot be had here")

CONFIG = TransformerConfig(
    vocab_size=96, d_model=64, d_ff=96, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, max_seq_len=320
)
LIMITS = Limits(max_running=3, max_batch_tokens=48, max_waiting=8)
KINDS = {
    "float32": ("float32", "float32", "float32"), "int8": ("q8_0", "int8", "float32"),
    "int8-activations": ("q8_0", "int8", "int8"), "bfloat16": ("bfloat16", "bfloat16", "float32"),
}  # fmt: skip


@functools.cache
def packed(weights):
    return checkpoint.pack_params(CONFIG, initial.initial_params(CONFIG, 3, distinct=True), weights_as=weights)


@functools.cache
def runner(kind, package="jaxbench"):
    weights, cache, activations = KINDS[kind]
    made, of = native, NativeRunner
    if package == "torch_ref":
        from torch_ref.native import model as made
        from torch_ref.serve.native_runner import NativeRunner as of
    model = made.build(packed(weights), cache_dtype=cache, activations=activations)
    return of(model, num_blocks=9, sizes=row_sizes(LIMITS), max_wanted=LIMITS.max_running * 5)


@functools.cache
def trace():
    """(step at which it comes, request): shared beginnings, long and short, greedy and drawn, some with penalties."""
    random = np.random.default_rng(0)
    stem, found = tuple(random.integers(0, 96, 150).tolist()), []
    for i in range(10):
        shared = (0, 70, 150)[i % 3]
        prompt = stem[:shared] + tuple(random.integers(0, 96, random.integers(2, 60)).tolist())
        sampling = Sampling(
            temperature=0.9 * (i % 2), top_k=20 * (i % 4 == 1), seed=i, frequency_penalty=0.3 * (i % 5 == 2)
        )
        found.append((3 * i, Request(f"r{i}", prompt, int(random.integers(4, 40)), sampling, logprobs=2)))
    return found


def play(engine):
    """Play the trace; a request is cancelled at step 12, and one loses its blocks at step 20."""
    return played(engine, trace(), cancelled=(12, "r1"), preempted=(20,))


@functools.cache
def together(kind, package="jaxbench"):
    engine = Engine(runner(kind, package), LIMITS)
    engine.runner.reset()
    found = answers(play(engine))
    assert engine.scheduler.num_preempted > 0 and engine.scheduler.pool.num_available == 8
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_and_log_probabilities_are_those_of_the_request_alone(kind):
    busy = together(kind)
    for _, request in trace():
        engine = Engine(runner(kind), LIMITS)
        engine.runner.reset()
        (alone,) = answers(engine.generate([request])).values()
        count = len(busy[request.id]) if request.id == "r1" else request.max_new_tokens
        assert len(busy[request.id]) == count and busy[request.id] == alone[:count], request.id


def test_the_loss_of_an_answer_does_not_depend_on_how_its_text_is_cut_into_steps():
    from jaxbench import train, transformer
    from jaxbench.serve.study import answers as study

    random = np.random.default_rng(1)
    text = random.integers(0, 96, 101).tolist()  # two steps of 48 tokens and 4 more
    model = transformer.build(CONFIG, initial.initial_params(CONFIG, 3, distinct=True))
    tokens = np.array([text[:-1]], np.int32)
    logits = model(tokens, np.arange(100, dtype=np.int32)[None])
    for count in (1, 4, 6):  # asked for in one step, in one and a part of another
        own = study.loss(runner("float32"), study.Question(text[:-count], text[-count:]))
        mask = np.arange(100)[None] >= 100 - count
        wanted = train.cross_entropy(logits, np.array([text[1:]], np.int32), mask) * count
        assert own == pytest.approx(float(wanted), rel=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_guesses_change_the_number_of_steps_and_no_bit_of_an_answer(kind):
    requests = [
        Request(f"g{i}", (5, 6, 7, 8) * 9 + (i,), 120, Sampling(temperature=0.3 * i), logprobs=1) for i in (0, 1)
    ]
    found = []
    for guessed in (0, 4):
        engine = Engine(runner(kind), LIMITS.model_copy(update={"max_guessed": guessed}))
        engine.runner.reset()
        found.append((answers(engine.generate(requests)), engine.num_steps, engine.num_right))
    (plain, steps, _), (guessing, fewer, right) = found
    assert plain == guessing and right > 20 and fewer < steps


@pytest.mark.parametrize("package", ["jaxbench", "torch_ref"])
def test_guesses_of_a_draft_change_the_number_of_steps_and_no_bit_of_an_answer(package):
    limits, found = LIMITS.model_copy(update={"max_guessed": 4}), []
    requests = [
        Request(f"d{i}", tuple(range(3 * i, 40 + i)), 60 - 30 * i, Sampling(temperature=0.3 * i), logprobs=1)
        for i in (0, 1)
    ]
    for draft in (None, runner("int8", package)):
        engine = Engine(runner("float32", package), limits, draft=draft)
        engine.runner.reset()
        found.append((answers(engine.generate(requests)), engine.num_steps, engine.num_right))
    (plain, steps, _), (drafted, fewer, right) = found
    assert plain == drafted and right > 20 and fewer < steps


def test_both_backends_give_the_same_tokens():
    flax, torch = (together("float32", package) for package in ("jaxbench", "torch_ref"))
    for name, answer in flax.items():
        assert [token for token, _ in answer] == [token for token, _ in torch[name]], name
        given, other = ([each.token for _, each in found[name]] for found in (flax, torch))
        np.testing.assert_allclose(given, other, atol=1e-4)


def test_answers_are_those_of_the_generator_too():
    model = native.build(packed("float32"))
    for _, request in trace()[:2]:
        generate = sample.Generator(model, eos_id=None, sampling=request.sampling.params())
        how = {"max_new_tokens": request.max_new_tokens, "seed": request.sampling.seed}
        tokens = generate([list(request.prompt)], **how)[0][0].tolist()
        busy = [token for token, _ in together("float32")[request.id]]
        assert busy == tokens[: len(busy)], request.id


def test_without_native_kernels_the_same_tokens_are_drawn():
    random = np.random.default_rng(0)
    for seed in range(40):
        logits = (4 * random.standard_normal(300)).astype(np.float32)
        how = Sampling(
            temperature=float(random.uniform(0.3, 2)), top_k=int(random.choice([0, 5, 40])), seed=seed,
            top_p=float(random.choice([1.0, 0.8])), min_p=float(random.choice([0.0, 0.1])), choice=seed % 3,
        )  # fmt: skip
        native_token = sampler.drawn(logits, how, step=seed)
        with library.switched_off():
            assert sampler.drawn(logits, how, step=seed) == native_token


def test_nothing_is_compiled_behind_the_first_request():
    engine, compiled = Engine(runner("float32"), LIMITS), []
    engine.runner.reset()

    def listen(event, *_, **__):
        compiled.append(event) if "compile" in event else None

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        play(engine)
    finally:
        jax.monitoring.clear_event_listeners()
    assert compiled == []


def test_an_int8_cache_of_the_default_models_heads_is_3_7_times_smaller_than_float32s():
    heads = CONFIG.model_copy(update={"num_heads": 9, "num_kv_heads": 3, "head_dim": 64})

    def size(dtype):
        pages = jax.eval_shape(lambda: paged.empty(heads, 9, paged.PAGE_SIZE, dtype)[:4])
        return sum(each.size * each.dtype.itemsize for each in jax.tree.leaves(pages))

    assert size("float32") > 3.7 * size("int8") and size("bfloat16") > 1.8 * size("int8")


def test_steps_have_little_padding_and_few_sizes():
    sizes = row_sizes(Limits(max_running=32, max_batch_tokens=256))
    assert sizes[-1] == 256 and len(sizes) < 24 and list(sizes) == sorted(set(sizes))
    least = {count: next(size for size in sizes if size >= count) for count in range(4, 257)}
    assert all(size - count <= max(size / 4, 3) for count, size in least.items())
    assert row_sizes(Limits(max_running=1, max_batch_tokens=1)) == (1,)


def test_a_step_of_a_prompt_waits_for_its_program_where_no_logits_are_wanted(monkeypatch):
    steps, pages, none = runner("float32"), Unfinished(), np.zeros((0, 2), np.int32)
    size, hidden = steps.sizes[0], Unfinished()
    monkeypatch.setitem(steps._programs, size, lambda *_: (hidden, pages))
    monkeypatch.setattr(steps, "_pages", None)
    row = np.zeros(size, np.int32)
    found = steps.run(Batch(row, row, np.zeros((size, 5), np.int32), none[:, 0], none))
    assert found.shape == (0, steps.vocab_size) and pages.was_waited_for
