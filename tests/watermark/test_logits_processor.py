"""Watermarks during generation: equal tokens on three backends, marked as the definition says, keys row by row."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jaxbench import initial, philox, prng, sample, transformer
from jaxbench.config import TransformerConfig
from jaxbench.eqx import transformer as eqx_transformer
from jaxbench.watermark import config, green_lists, logits_processor, reference
from jaxbench.watermark.keys import Key
from torch_ref import prng as torch_prng
from torch_ref import sample as torch_sample
from torch_ref import transformer as torch_transformer
from torch_ref.watermark import logits_processor as torch_logits_processor

pytestmark = pytest.mark.usefixtures("plain_codegen")

VOCAB, NEW = 150, 32
MODEL = TransformerConfig(
    vocab_size=VOCAB, d_model=32, d_ff=48, num_layers=1, num_heads=2, num_kv_heads=2, head_dim=16, max_seq_len=64
)
PARAMS = initial.initial_params(MODEL, 0, distinct=True)
BACKENDS = {
    "flax": (transformer, sample, logits_processor),
    "equinox": (eqx_transformer, sample, logits_processor),
    "torch": (torch_transformer, torch_sample, torch_logits_processor),
}
PROMPTS = [[1, 2, 3, 4, 5, 6, 7, 8, 9], [7, 8, 9, 10, 11, 12], [9, 10]]
KEYS = [Key(2**63 + 12345), None, Key(99)]


class Lists:
    """Stand-in for green_lists.GreenLists of MarkLLM's lists: random lists of a small vocabulary."""

    def __init__(self, combine, width, bias=6.0):
        self.width, self.vocab_size, random = width, VOCAB, np.random.default_rng(0)
        self.rule = green_lists.ListRule(
            bias=bias,
            combine=combine,
            lag=width,
            values=random.permutation(VOCAB) if combine == "min" else np.arange(VOCAB),
            rows=random.permutation(VOCAB),
            row_seeds=np.arange(VOCAB),
        )
        self.is_green = random.random((VOCAB, VOCAB)) < 0.5

    def bits(self):
        return np.packbits(self.is_green, axis=1, bitorder="little")

    def seeds(self, tokens):
        values = self.rule.values[tokens].astype(np.int64)
        before = reference.windows(values, self.width)
        found = {
            "time": lambda: functools.reduce(lambda a, b: a * b % VOCAB, np.moveaxis(before, -1, 0)),
            "additive": lambda: before.sum(-1) % VOCAB,
            "skip": lambda: before[..., 0],
            "min": lambda: before.min(-1),
        }[self.rule.combine]()
        return self.rule.rows[found]

    def green(self, tokens):
        return self.is_green[self.seeds(tokens), tokens]


SCHEMES = {
    "kgw left": {"scheme": "kgw", "delta": 6.0},
    "kgw min": {"scheme": "kgw", "delta": 6.0, "context": {"kind": "min", "width": 4}},
    "kgw skip": {"scheme": "kgw", "delta": 6.0, "context": {"kind": "skip", "width": 2}},
    "kgw self": {"scheme": "kgw", "delta": 6.0, "context": {"kind": "self", "width": 4}},
    "kgw self alone": {"scheme": "kgw", "delta": 6.0, "context": {"kind": "self", "width": 1}},
    "kgw payload": {"scheme": "kgw", "delta": 6.0, "payload_bits": 5},
    "kgw self payload": {"scheme": "kgw", "delta": 6.0, "payload_bits": 5, "context": {"kind": "self", "width": 3}},
    "unigram": {"scheme": "unigram", "delta": 6.0},
    "gumbel": {"scheme": "gumbel", "context": {"width": 2}},
    "gumbel payload": {"scheme": "gumbel", "payload_bits": 4},
    "gumbel dual": {"scheme": "gumbel", "dual_key_alpha": 0.3, "deduplicate": False},
    "gumbel vllm": {"scheme": "gumbel", "prf": "vllm"},
    "gumbel vllm dual": {"scheme": "gumbel", "prf": "vllm", "dual_key_alpha": 0.1},
    "synthid": {"scheme": "synthid", "context": {"width": 2}},
    "dip": {"scheme": "dip", "context": {"width": 2}},
    "morphmark": {"scheme": "morphmark", "form": "linear", "k": 1.55},
    "markllm time": {"scheme": "kgw_markllm", "delta": 6.0, "prefix_length": 2},
    "markllm additive": {"scheme": "kgw_markllm", "delta": 6.0, "prefix_length": 3, "f_scheme": "additive"},
    "markllm skip": {"scheme": "kgw_markllm", "delta": 6.0, "prefix_length": 2, "f_scheme": "skip"},
    "markllm min": {"scheme": "kgw_markllm", "delta": 6.0, "prefix_length": 2, "f_scheme": "min"},
    "transformers": {"scheme": "kgw_transformers", "bias": 6.0},
}


def lists_of(scheme):
    if scheme.scheme == "kgw_markllm":
        return Lists(scheme.f_scheme, scheme.prefix_length)
    return Lists("skip", 1) if scheme.scheme == "kgw_transformers" else None


@functools.cache
def generate(backend, name, *, temperature=1.0, top_k=0):
    build, sampling, marks = BACKENDS[backend]
    scheme = config.parse_scheme(SCHEMES[name])
    watermark = marks.Watermark(scheme, vocab_size=VOCAB, green_lists=lists_of(scheme))
    generator = sampling.Generator(
        build.build(MODEL, PARAMS),
        eos_id=None,
        sampling=sampling.SamplingParams(temperature=temperature, top_k=top_k),
        processors=[watermark],
    )
    payloads = [3, 0, 9] if config.num_payloads(scheme) > 1 else None
    states = [watermark.state(KEYS, payloads=payloads, seed=5)]
    return generator(PROMPTS, max_new_tokens=NEW, seed=5, processor_states=states).tokens


@functools.cache
def plain(backend="torch"):
    build, sampling, _ = BACKENDS[backend]
    model = build.build(MODEL, PARAMS)
    generator = sampling.Generator(model, eos_id=None, sampling=sampling.SamplingParams(temperature=1.0))
    return generator(PROMPTS, max_new_tokens=NEW, seed=5).tokens


def texts(tokens):
    rows = [prompt + list(row) for prompt, row in zip(PROMPTS, tokens)]
    padded = np.zeros((3, max(map(len, rows))), np.int32)
    for row, ids in enumerate(rows):
        padded[row, : len(ids)] = ids
    return padded, np.array([len(ids) for ids in rows]), np.array([len(prompt) for prompt in PROMPTS])


def evidence_of(name, tokens, keys, payload=0):
    scheme = config.parse_scheme(SCHEMES[name])
    padded, lengths, starts = texts(tokens)
    options = {"prompt_lengths": starts, "payload": payload, "green_lists": lists_of(scheme)}
    return scheme, reference.evidence(scheme, keys, padded, lengths, vocab_size=VOCAB, **options)


@pytest.mark.parametrize("name", SCHEMES)
def test_three_backends_generate_the_same_tokens(name):
    in_torch = generate("torch", name)
    assert in_torch.shape == (3, NEW) and len(np.unique(in_torch[0])) > 5
    for backend in ("flax", "equinox") if name in ("kgw left", "gumbel") else ("flax",):
        np.testing.assert_array_equal(generate(backend, name), in_torch)


@pytest.mark.parametrize("name", SCHEMES)
def test_a_row_without_a_key_is_drawn_as_ever_and_the_others_are_not(name):
    tokens = generate("torch", name)
    np.testing.assert_array_equal(tokens[1], plain()[1])
    assert (tokens[0] != plain()[0]).any() and (tokens[2] != plain()[2]).any()


@pytest.mark.parametrize("name", [name for name in SCHEMES if name.startswith(("kgw", "uni", "mark", "trans"))])
def test_marked_tokens_are_green_under_the_rows_own_key_and_payload(name):
    keys = [key or Key(1) for key in KEYS]
    for row, payload in ((0, 3), (2, 9)):
        scheme, found = evidence_of(name, generate("torch", name), keys, payload if "payload" in name else 0)
        green = scheme.is_green(found.words)[row][found.scored[row]]
        assert len(green) > NEW / 2
        assert green.mean() > 0.9  # a bias of 6 nats; few tokens are not green, for few lists of 150 tokens are bare
    if scheme.scheme in ("kgw", "unigram"):
        _, found = evidence_of(name, generate("torch", name), [Key(7)] * 3)
        assert scheme.is_green(found.words)[found.scored].mean() < 0.7


@pytest.mark.parametrize("name", [name for name in SCHEMES if name.startswith("gumbel")])
def test_gumbel_marks_have_large_uniforms_under_the_rows_own_key(name):
    tokens, keys = generate("torch", name), [key or Key(1) for key in KEYS]
    scheme, found = evidence_of(name, tokens, keys, 3 if "payload" in name else 0)
    words = found.words if found.second_words is None else np.maximum(found.words, found.second_words)
    scores = [-np.log1p(-philox.uniform(words[row][found.scored[row]])).mean() for row in range(3)]
    assert scores[0] > 2.5 and scores[1] < 2.2  # 1 without a mark, 1.5 for the larger of two
    assert "payload" in name or scores[2] > 2.5


@pytest.mark.parametrize(("name", "floor"), [("synthid", 0.55), ("dip", 0.6)])
def test_tournaments_and_reweighting_leave_their_mark(name, floor):
    tokens, keys = generate("torch", name), [key or Key(1) for key in KEYS]
    scheme, found = evidence_of(name, tokens, keys)
    for row in (0, 2):
        words = found.words[row][found.scored[row]]
        if name == "dip":
            assert scheme.is_green(words).mean() > floor
        else:
            assert np.mean([(words >> np.uint32(i)) & 1 for i in range(10)]) > floor


def test_a_context_seen_before_is_drawn_with_ordinary_randomness():
    drawn, ordinary = draws_after({"scheme": "gumbel"}, [[3], [4], [3], [5], [4]])
    assert [tokens[0] >= 0 for tokens in drawn] == [True, True, False, True, False]
    assert drawn[0] != drawn[1] and drawn[0] != ordinary[0]


@pytest.mark.parametrize("scheme", [{"scheme": "gumbel"}, {"scheme": "gumbel", "payload_bits": 2}, {"scheme": "dip"}])
def test_a_seen_context_beside_a_marked_row_gets_its_ordinary_token_from_the_same_draw(scheme):
    drawn, ordinary = draws_after(scheme, [[3, 3], [4, 4], [3, 5], [5, 4]])
    alone, _ = draws_after(scheme, [[3], [4], [5], [4]], first_row=1)
    assert (drawn[2][0], drawn[3][1]) == (ordinary[2][0], ordinary[3][1])
    assert [tokens[1] for tokens in drawn[:3]] == [tokens[0] for tokens in alone[:3]]
    assert scheme["scheme"] == "dip" or drawn[2][1] != ordinary[2][1]  # dip keeps most tokens


def draws_after(scheme, contexts, *, first_row=0):
    """Return the tokens that both backends draw after contexts of one token, and the ordinary ones, a list a step."""
    rows = np.arange(first_row, first_row + len(contexts[0]))
    logits, keys = np.random.default_rng(0).normal(size=(2, VOCAB)).astype(np.float32)[rows], [Key(5), Key(6)]
    payloads = [int(row) + 1 for row in rows] if "payload_bits" in scheme else None
    scheme, found = scheme | {"context": {"width": 1}}, {}
    for backend, array, prng_of in (("flax", jnp.asarray, prng), ("torch", torch.asarray, torch_prng)):
        sampling, marks = BACKENDS[backend][1:]
        watermark, drawn, ordinary = marks.Watermark(scheme, vocab_size=VOCAB), [], []
        state = watermark.state([keys[row] for row in rows], payloads=payloads)
        draw = watermark.draw if backend == "torch" else jax.jit(watermark.draw)
        for step, last in enumerate(contexts):
            tokens, at = array(np.array(last, np.int32)[:, None]), step if backend == "torch" else jnp.int32(step)
            sample = sampling.OrdinaryDraw(prng_of.key_from_seed(9), at, array(rows.astype(np.int32)))
            state, chosen = draw(state, array(logits), tokens, array(np.ones(len(rows), np.int32)), at, sample)
            drawn.append(np.asarray(chosen).tolist())
            ordinary.append(np.asarray(sample(array(logits))).tolist())
        found[backend] = drawn, ordinary
    assert found["flax"] == found["torch"]
    return found["flax"]


def test_kgw_without_a_bias_is_no_watermark():
    watermark = torch_logits_processor.Watermark({"scheme": "kgw", "delta": 0.0}, vocab_size=VOCAB)
    model = torch_transformer.build(MODEL, PARAMS)
    generator = torch_sample.Generator(
        model, eos_id=None, sampling=torch_sample.SamplingParams(temperature=1.0), processors=[watermark]
    )
    states = [watermark.state([Key(1), Key(2), Key(3)])]
    tokens = generator(PROMPTS, max_new_tokens=NEW, seed=5, processor_states=states).tokens
    np.testing.assert_array_equal(tokens, plain())


def test_schemes_of_one_batch_chain():
    kgw = torch_logits_processor.Watermark({"scheme": "kgw", "delta": 6.0}, vocab_size=VOCAB)
    gumbel = torch_logits_processor.Watermark(SCHEMES["gumbel"], vocab_size=VOCAB)
    synthid = torch_logits_processor.Watermark(SCHEMES["synthid"], vocab_size=VOCAB)
    model = torch_transformer.build(MODEL, PARAMS)
    settings = torch_sample.SamplingParams(temperature=1.0)
    generator = torch_sample.Generator(model, eos_id=None, sampling=settings, processors=[kgw, gumbel, synthid])
    states = [w.state([key if i == row else None for row in range(3)]) for i, (w, key) in
              enumerate([(kgw, KEYS[0]), (gumbel, Key(4)), (synthid, KEYS[2])])]  # fmt: skip
    tokens = generator(PROMPTS, max_new_tokens=NEW, seed=5, processor_states=states).tokens
    np.testing.assert_array_equal(tokens[0], generate("torch", "kgw left")[0])
    np.testing.assert_array_equal(tokens[2], generate("torch", "synthid")[2])
    assert (tokens[1] != plain()[1]).any()


def test_filters_hold_for_marked_tokens():
    build, sampling, marks = BACKENDS["flax"]
    model = build.build(MODEL, PARAMS)
    for name in ("gumbel", "synthid", "dip"):
        watermark = marks.Watermark(SCHEMES[name], vocab_size=VOCAB)
        generator = sampling.Generator(
            model, eos_id=None, sampling=sampling.SamplingParams(temperature=0.7, top_k=1), processors=[watermark]
        )
        states = [watermark.state(KEYS)]
        tokens = generator(PROMPTS, max_new_tokens=4, seed=5, processor_states=states).tokens
        greedy = sampling.Generator(model, eos_id=None, sampling=sampling.SamplingParams())
        np.testing.assert_array_equal(tokens, greedy(PROMPTS, max_new_tokens=4, seed=5).tokens)


def test_no_key_is_a_constant_of_a_program():
    watermark = logits_processor.Watermark("kgw", vocab_size=VOCAB)
    low, high = Key(0x1234567887654321).halves
    state = watermark.state([Key(0x1234567887654321)])
    context = (jnp.zeros((1, 4), jnp.int32), jnp.array([2]), jnp.int32(0))
    text = jax.jit(watermark.apply).lower(state, jnp.zeros((1, VOCAB)), *context).as_text()
    assert str(low) not in text and str(high) not in text


@pytest.mark.parametrize("marks", [logits_processor, torch_logits_processor])
def test_bad_input_is_named(marks):
    watermark = marks.Watermark({"scheme": "kgw", "payload_bits": 3}, vocab_size=VOCAB)
    with pytest.raises(ValueError, match=r"payloads=\[8\] for 1 rows, wanted one a row in \[0, 8\)"):
        watermark.state([Key(1)], payloads=[8])
    with pytest.raises(ValueError, match=r"processor_states=\[watermark.state\(keys\)\]"):
        watermark.init(4)
    with pytest.raises(ValueError, match="wanted at least one row"):
        watermark.state([])
    with pytest.raises(ValueError, match="kgw_markllm: wanted the tables"):
        marks.Watermark("kgw_markllm", vocab_size=VOCAB)
    with pytest.raises(ValueError, match="tables of 150 tokens for a model of 151"):
        marks.Watermark("kgw_markllm", vocab_size=151, green_lists=Lists("time", 1))
    with pytest.raises(ValueError, match="gamma=0.005 of 150 tokens is a list of none, .* at least 0.00667"):
        marks.Watermark({"scheme": "unigram", "gamma": 0.005}, vocab_size=VOCAB)
    with pytest.raises(ValueError, match="'gumbell' is unknown, the nearest is gumbel"):
        marks.Watermark("gumbell", vocab_size=VOCAB)


def test_torch_tensors_on_the_cpu_are_what_states_hold():
    state = torch_logits_processor.Watermark("unigram", vocab_size=VOCAB).state([Key(1), None], batch_size=4)
    assert {name: tuple(x.shape) for name, x in state.items()} == {"marked": (4,), "keys": (4, 4), "green": (4, VOCAB)}
    assert all(isinstance(x, torch.Tensor) for x in state.values()) and state["marked"].tolist() == [True] + [False] * 3
