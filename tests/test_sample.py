"""Sampling: equal tokens on three backends, buckets and endings; processors and filters have files of their own."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from jaxbench import initial, prng, prompts, sample, transformer
from jaxbench.measure import inductor
from tests.three_backends import BACKENDS, CONFIG, NEW, PARAMS, PROMPTS, VOCAB, make
from torch_ref import sample as torch_sample
from torch_ref import transformer as torch_transformer

FIELDS = sample.SamplingParams._fields
SETTINGS = [
    {},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.02, "repetition_penalty": 1.3},
    {"temperature": 1.5, "top_p": 0.95},
    {"frequency_penalty": 0.7, "presence_penalty": -0.4},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=["greedy", "plain", "filtered", "nucleus", "by count"])
def test_three_backends_draw_the_same_tokens(settings):
    reference = make("torch", **settings)(PROMPTS, max_new_tokens=NEW, seed=5)
    assert reference.tokens.shape == (3, NEW)
    if settings:
        assert len(np.unique(reference.tokens)) > 10
    for backend in ("flax", "equinox"):
        generation = make(backend, **settings)(PROMPTS, max_new_tokens=NEW, seed=5)
        np.testing.assert_array_equal(generation.tokens, reference.tokens)


@pytest.mark.parametrize("backend", list(BACKENDS))
@pytest.mark.parametrize("settings", [{}, {"temperature": 1.0, "repetition_penalty": 1.3}], ids=["greedy", "drawn"])
def test_a_token_past_the_vocabulary_stands_for_its_vector(backend, settings):
    generator = make(backend, **settings)
    table = np.asarray(PARAMS["embed.embedding"], np.float32)[[1, 2, 7, 9]]
    vectors = {1: VOCAB, 2: VOCAB + 1, 7: VOCAB + 2, 9: VOCAB + 3}
    given = [[vectors.get(token, token) for token in prompt] for prompt in PROMPTS]
    found = generator(given, max_new_tokens=NEW, seed=5, vectors=table)
    if "repetition_penalty" not in settings:  # a vector is no token that could be repeated
        np.testing.assert_array_equal(found.tokens, generator(PROMPTS, max_new_tokens=NEW, seed=5).tokens)
    other = make("flax" if backend == "torch" else "torch", **settings)
    np.testing.assert_array_equal(found.tokens, other(given, max_new_tokens=NEW, seed=5, vectors=table).tokens)


@pytest.mark.parametrize(
    "vectors, words",
    [
        (None, "token outside"),
        (np.zeros((1, 32)), f"token outside \\[0, {VOCAB + 1}\\)"),
        (np.zeros((0, 32)), "vectors of shape"),
        (np.full((2, 32), np.nan), "wanted finite ones"),
    ],
)
def test_vectors_that_do_not_fit_are_named(vectors, words):
    with pytest.raises(ValueError, match=words):
        make("flax").prefill([[1, VOCAB + 1]], max_new_tokens=2, seed=0, vectors=vectors)


@pytest.mark.parametrize("backend", list(BACKENDS))
def test_vectors_of_another_width_are_refused_before_and_after_a_program_is_compiled(backend):
    generator, width = make(backend), CONFIG.d_model
    for _ in range(2):
        with pytest.raises(ValueError, match=f"vectors: 5 wide, wanted the model's {width}"):
            generator([[1, VOCAB]], max_new_tokens=2, seed=0, vectors=np.zeros((2, 5)))
        assert generator([[1, VOCAB]], max_new_tokens=2, seed=0, vectors=np.ones((2, width))).tokens.shape == (1, 2)


def test_a_model_that_is_not_causal_generates_nothing():
    model = transformer.build(CONFIG.model_copy(update={"is_causal": False}), PARAMS)
    with pytest.raises(ValueError, match="is_causal=False"):
        sample.Generator(model, eos_id=None, sampling=sample.SamplingParams())


@pytest.fixture(scope="module")
def generators():
    return {backend: make(backend, temperature=1.0) for backend in ("flax", "torch")}


@pytest.mark.parametrize("backend", ["flax", "torch"])
def test_a_rows_tokens_do_not_depend_on_its_batch(generators, backend):
    together = generators[backend](PROMPTS, max_new_tokens=NEW, seed=1)
    alone = generators[backend](PROMPTS[1:2], max_new_tokens=NEW, seed=1, row_ids=[1])
    np.testing.assert_array_equal(together.tokens[1], alone.tokens[0])


@pytest.mark.parametrize("backend", ["flax", "torch"])
def test_decoding_in_two_calls_equals_one(generators, backend):
    whole = generators[backend](PROMPTS, max_new_tokens=NEW, seed=1)
    state = generators[backend].prefill(PROMPTS, max_new_tokens=NEW, seed=1)
    state = generators[backend].decode(generators[backend].decode(state, 7), NEW)
    tokens, lengths = prompts.continuations(PROMPTS, np.asarray(state.tokens), np.asarray(state.lengths))
    np.testing.assert_array_equal(tokens, whole.tokens)


def test_calls_of_one_bucket_compile_nothing_new(generators):
    generator = generators["flax"]
    generator(PROMPTS, max_new_tokens=NEW, seed=0)
    before = len(generator.programs)
    events = []
    jax.monitoring.register_event_duration_secs_listener(lambda name, *_, **__: events.append(name))
    try:
        for seed, lengths in enumerate([(3, 9, 16), (1, 2, 3), (16, 16, 16)]):
            generator([[1] * n for n in lengths], max_new_tokens=NEW - seed, seed=seed)
    finally:
        jax.monitoring.clear_event_listeners()
    assert len(generator.programs) == before
    assert not [name for name in events if "backend_compile" in name]


@pytest.mark.parametrize("backend", list(BACKENDS))
def test_a_row_ends_with_its_end_token_and_the_others_go_on(backend):
    free = make(backend, temperature=1.0)(PROMPTS, max_new_tokens=NEW, seed=5)
    end = int(free.tokens[0, 4])
    assert end not in free.tokens[0, :4]
    ended = make(backend, temperature=1.0, eos_id=end)(PROMPTS, max_new_tokens=NEW, seed=5)
    assert ended.lengths[0] == 5 and ended.tokens[0, 4] == end and (ended.tokens[0, 5:] == -1).all()
    for row in (1, 2):
        stop = ended.lengths[row]
        np.testing.assert_array_equal(ended.tokens[row, :stop], free.tokens[row, :stop])


@pytest.mark.parametrize("backend", list(BACKENDS))
def test_a_row_ends_with_the_first_of_several_end_tokens(backend):
    free = make(backend, temperature=1.0)(PROMPTS, max_new_tokens=NEW, seed=5)
    ends = (int(free.tokens[0, 4]), int(free.tokens[1, 2]))
    ended = make(backend, temperature=1.0, eos_id=ends)(PROMPTS, max_new_tokens=NEW, seed=5)
    for row in range(len(PROMPTS)):
        is_end = np.isin(free.tokens[row], ends)
        stop = int(is_end.argmax()) + 1 if is_end.any() else NEW
        assert ended.lengths[row] == stop and (ended.tokens[row, stop:] == -1).all()
        np.testing.assert_array_equal(ended.tokens[row, :stop], free.tokens[row, :stop])
    assert {int(ended.tokens[row, ended.lengths[row] - 1]) for row in (0, 1)} == set(ends)


@pytest.mark.parametrize("backend", ["flax", "equinox"])
def test_kernels_turned_for_a_single_row_draw_the_same_tokens_and_leave_the_models_own(backend, monkeypatch):
    plain = make(backend, temperature=1.0)
    wanted = [plain(each, max_new_tokens=NEW, seed=5).tokens for each in (PROMPTS[:1], PROMPTS[:2])]
    assert plain._transposed_leaves is None
    monkeypatch.setattr(sample, "TRANSPOSES_ON", ("cpu",))
    generator = make(backend, temperature=1.0)
    two = generator(PROMPTS[:2], max_new_tokens=NEW, seed=5)
    assert generator._transposed_leaves is None, "two rows read the kernels as they are"
    for _ in range(2):  # the second finds them turned
        np.testing.assert_array_equal(generator(PROMPTS[:1], max_new_tokens=NEW, seed=5).tokens, wanted[0])
    np.testing.assert_array_equal(two.tokens, wanted[1])
    np.testing.assert_array_equal(generator(PROMPTS[:2], max_new_tokens=NEW, seed=5).tokens, wanted[1])
    assert len(generator.programs) == 2
    assert sum(generator._is_transposable) == sum(name.endswith(".kernel") for name in PARAMS) > 0
    for turned, own, before, is_kernel in zip(
        generator._transposed_leaves,
        generator._weights.leaves,
        plain._weights.leaves,
        generator._is_transposable,
        strict=True,
    ):
        np.testing.assert_array_equal(own, before)
        np.testing.assert_array_equal(turned, own.T if is_kernel else own)


def test_one_new_token_needs_no_decode_program():
    generator = make("flax")
    first = generator(PROMPTS, max_new_tokens=1, seed=0)
    assert first.tokens.shape == (3, 1) and [p.decode for p in generator.programs.values()] == [None]
    both = generator(PROMPTS, max_new_tokens=2, seed=0)  # the same bucket, now with its decode program
    np.testing.assert_array_equal(both.tokens[:, :1], first.tokens)
    assert len(generator.programs) == 1


@pytest.mark.parametrize(
    ("backend", "room", "refusal"),
    [("flax", 48, "prefill it with max_new_tokens above 1"), ("torch", 1, "max_new_tokens=2, but prefill made room")],
)
def test_decoding_past_the_room_that_prefill_made_is_refused(backend, room, refusal):
    generator = make(backend)
    state = generator.prefill(PROMPTS, max_new_tokens=1, seed=0)
    with pytest.raises(ValueError, match=refusal):
        generator.decode(state, 2)
    with pytest.raises(ValueError, match=f"max_new_tokens=500, but prefill made room for {room}"):
        generator.decode(state, 500)
    full = generator.decode(generator.prefill(PROMPTS, max_new_tokens=48, seed=0), 48)
    assert np.asarray(full.lengths)[1] == 64  # the longest row fills its 64 slots


@pytest.mark.parametrize("backend", ["flax", "torch"])
def test_decoding_past_the_models_context_is_refused_where_the_cache_has_more_slots(backend):
    build, sampling = BACKENDS[backend]
    model = build.build(CONFIG.model_copy(update={"max_seq_len": 20}), PARAMS)
    generator = sampling.Generator(model, eos_id=None, sampling=sampling.SamplingParams())
    state = generator.prefill(PROMPTS, max_new_tokens=4, seed=0)
    with pytest.raises(ValueError, match="max_new_tokens=5, but prefill made room for 4"):
        generator.decode(state, 5)
    assert np.asarray(generator.decode(state, 4).lengths)[1] == 20


def test_the_cache_of_a_used_state_is_donated(generators):
    state = generators["flax"].prefill(PROMPTS, max_new_tokens=NEW, seed=0)
    generators["flax"].decode(state, NEW)
    assert state.cache.keys[0].is_deleted()


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ([[]], "prompt 0 is empty"),
        ([], "wanted at least one"),
        ([[1], [VOCAB]], "prompt 1 has a token outside"),
        ([[1], [1.5]], r"prompt 1 is float64 of shape \(1,\), wanted a row of whole numbers"),
        ([[1], [True]], r"prompt 1 is bool of shape \(1,\), wanted a row of whole numbers"),
        (["ab"], r"prompt 0 is <U2 of shape \(\), wanted a row of whole numbers"),
        ([[1] * 50], "prompt 0 has 50 tokens and max_new_tokens=24, together more than the model's context of 64"),
    ],
)
def test_bad_prompts_are_named(generators, bad, message):
    for generator in generators.values():
        with pytest.raises(ValueError, match=message):
            generator(bad, max_new_tokens=NEW, seed=0)


def test_prompts_may_be_the_rows_of_an_array(generators):
    rows = np.array([[1, 2, 3], [4, 5, 6]], np.int32)
    for generator in generators.values():
        found, expected = (generator(x, max_new_tokens=NEW, seed=0).tokens for x in (rows, rows.tolist()))
        np.testing.assert_array_equal(found, expected)


def test_a_number_of_new_tokens_that_is_not_whole_is_named(generators):
    for generator in generators.values():
        with pytest.raises(ValueError, match="max_new_tokens=2.5, wanted a whole number, at least 1"):
            generator([[1]], max_new_tokens=2.5, seed=0)


@pytest.mark.parametrize(("eos_id", "shown"), [(2.0, "2.0"), ((3, -1), "-1"), ("</s>", "'</s>'"), (True, "True")])
def test_an_end_token_that_no_token_equals_is_named(eos_id, shown):
    for backend in ("flax", "torch"):
        with pytest.raises(ValueError, match=f"generate: eos_id has {shown}, wanted ids of tokens"):
            make(backend, eos_id=eos_id)


@pytest.mark.parametrize("row_id", [-1, 2**31, 2**32, 2**64, 0.5])
def test_row_ids_outside_31_bits_are_named(generators, row_id):
    for generator in generators.values():
        with pytest.raises(ValueError, match=rf"row_ids\[1\]={row_id}, wanted one in \[0, 2\*\*31\)"):
            generator([[1], [2]], max_new_tokens=1, seed=0, row_ids=[2**31 - 1, row_id])


@pytest.mark.parametrize("field", FIELDS)
def test_settings_out_of_range_are_named(field):
    sampling = sample.SamplingParams()._replace(**{field: -3})
    with pytest.raises(ValueError, match=f"sampling: {field}=-3, wanted"):
        prompts.check_sampling(SimpleNamespace(**sampling._asdict()))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", 1e-40),
        ("temperature", float("inf")),
        ("repetition_penalty", float("inf")),
        ("repetition_penalty", 1e-320),
        ("repetition_penalty", 1e8),
        ("top_p", float("nan")),
        ("frequency_penalty", 2.5),
        ("presence_penalty", float("nan")),
    ],
)
def test_settings_that_overflow_the_logits_are_named(field, value):
    sampling = sample.SamplingParams()._replace(**{field: value})
    with pytest.raises(ValueError, match=f"sampling: {field}={value}, wanted"):
        prompts.check_sampling(sampling)


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("value", ["1", None, True])
def test_settings_that_are_no_numbers_are_named(field, value):
    with pytest.raises(ValueError, match=f"sampling: {field}={value!r}, wanted a .*number"):
        prompts.check_sampling(sample.SamplingParams()._replace(**{field: value}))


def test_a_share_of_a_token_is_no_top_k():
    for count, is_number in ((np.int32(2), True), (jnp.int32(2), True), (True, False), (2.0, False), ("2", False)):
        assert prompts.is_number(count, whole=True) is is_number
    for value, is_number in ((jnp.float32(1), True), (np.float64(1), True), (1j, False), (None, False), (False, False)):
        assert prompts.is_number(value, whole=False) is is_number
    with pytest.raises(ValueError, match="sampling: top_k=1.5, wanted a whole number"):
        prompts.check_sampling(sample.SamplingParams(top_k=1.5))


def test_the_least_temperature_draws_the_most_probable_token():
    logits = np.random.default_rng(0).normal(size=(3, 40)).astype(np.float32)
    where = {"key": prng.key_from_seed(0), "step": jnp.int32(0), "row_ids": jnp.arange(3)}
    drawn = sample.draw(jnp.asarray(logits), sample.SamplingParams(temperature=prompts.MIN_TEMPERATURE), **where)
    assert drawn.tolist() == logits.argmax(1).tolist()


@given(st.integers(1, 40), st.integers(1, 4000), st.integers(1, 500))
def test_buckets_hold_what_they_are_made_for(batch_size, prompt_length, max_new_tokens):
    size = prompts.bucket(batch_size, prompt_length, max_new_tokens)
    assert batch_size <= size.batch_size <= batch_size * 4 / 3
    assert prompt_length <= size.prompt_length <= max(16, prompt_length + 7, prompt_length * 1.25)
    assert size.prompt_length + max_new_tokens <= size.num_slots < size.prompt_length + max_new_tokens + 64
    assert prompts.bucket(*size[:2], max_new_tokens) == size


def test_prompts_up_to_a_context_of_1024_take_31_buckets():
    assert len({prompts.bucket(1, length, 1).prompt_length for length in range(1, 1025)}) == 31
    padded = [prompts.bucket(1, length, 1).prompt_length for length in (3, 37, 70, 200, 257, 520)]
    assert padded == [16, 40, 80, 208, 320, 576]


def test_prompts_of_two_buckets_share_a_decode_program():
    generator = make("flax")
    short, long = (generator([[1] * n], max_new_tokens=4, seed=0) for n in (16, 17))
    first, second = generator.programs.values()
    assert first.prefill is not second.prefill and first.decode is second.decode
    np.testing.assert_array_equal(short.tokens, make("torch")([[1] * 16], max_new_tokens=4, seed=0).tokens)
    np.testing.assert_array_equal(long.tokens, make("torch")([[1] * 17], max_new_tokens=4, seed=0).tokens)


def watched(model) -> list[tuple]:
    """Shapes that a PyTorch model is called with, as they come: tokens, positions, slots of the cache."""
    seen, features = [], model.features

    def watch(tokens, positions, *, cache=None, slot=None):
        slots = None if cache is None else cache.keys[0].shape[2]
        seen.append((tuple(tokens.shape), None if positions is None else tuple(positions.shape), slots))
        return features(tokens, positions, cache=cache, slot=slot)

    model.features = watch
    return seen


@pytest.mark.parametrize("implementation", ["dense", "fused"])
def test_eager_torch_computes_with_exact_sizes_and_masks_only_uneven_rows(implementation):
    model = torch_transformer.build(CONFIG, PARAMS, implementation=implementation)
    generator = torch_sample.Generator(model, eos_id=None, sampling=torch_sample.SamplingParams())
    seen = watched(model)
    even = generator([[3] * 19, [4] * 19, [5] * 19], max_new_tokens=3, seed=0)
    assert seen == [((3, 19), None, None)] + [((3, 1), None, 22)] * 2
    seen.clear()
    uneven = generator(PROMPTS, max_new_tokens=3, seed=0)
    assert seen == [((3, 16), (3, 16), None)] + [((3, 1), (3, 1), 19)] * 2
    flax = make("flax")
    for found, given_prompts in ((even, [[3] * 19, [4] * 19, [5] * 19]), (uneven, PROMPTS)):
        np.testing.assert_array_equal(found.tokens, flax(given_prompts, max_new_tokens=3, seed=0).tokens)


@pytest.mark.skipif(bool(inductor.unusable("cpu")), reason=inductor.unusable("cpu") or "-")
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method:DeprecationWarning")  # that Inductor imports
def test_torch_compiled_by_layer_or_by_step_draws_what_eager_torch_draws():
    torch._dynamo.reset()
    config = CONFIG.model_copy(update={"num_layers": 1})
    params = initial.initial_params(config, 0, distinct=True)
    found = []
    for how in ("", "layers", "step"):
        model = torch_transformer.build(config, params, implementation="fused", torch_compile=how)
        generator = torch_sample.Generator(model, eos_id=None, sampling=torch_sample.SamplingParams(temperature=1.0))
        drawn = [generator(each, max_new_tokens=6, seed=2).tokens for each in (PROMPTS, [[3] * 16] * 3, PROMPTS)]
        found.append(np.stack(drawn))
    np.testing.assert_array_equal(found[1], found[0])
    np.testing.assert_array_equal(found[2], found[0])
    assert len(generator.programs) == 1 and list(generator._caches) == [(3, 64)]


def test_a_narrow_model_keeps_its_cache_in_float32_on_a_cpu():
    for build, sampling in BACKENDS.values():
        generator = sampling.Generator(
            build.build(CONFIG, PARAMS, dtype="bfloat16"), eos_id=None, sampling=sampling.SamplingParams()
        )
        assert str(generator.prefill([[1] * 16], max_new_tokens=2, seed=0).cache.keys[0].dtype).endswith("float32")
