"""MorphMark: the strength follows the green tokens' probability, both backends as in numpy, found at 200 tokens."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import special

from jaxbench.watermark import config, logits_processor, reference, significance
from jaxbench.watermark.keys import Key
from jaxbench.watermark.schemes import morphmark
from tests.watermark import vocabulary
from torch_ref.watermark import logits_processor as torch_logits_processor

VOCAB = 75
FORMS = [{"form": "linear", "k": 1.55}, {"form": "exp", "k": 1.3}, {"form": "log", "k": 2.15}]


def scheme_of(**fields):
    return config.parse_scheme({"scheme": "morphmark", **fields})


@pytest.mark.parametrize(("fields", "wanted"), list(zip(FORMS, (0.62, np.exp(0.52) - 1, np.log(1.86)))))
def test_the_strength_follows_the_green_probability_up_to_one(fields, wanted):
    r = morphmark.strength(np.array([0.1, 0.4, 1.0]), scheme_of(**fields))
    assert r[0] == 0 and r[1] == pytest.approx(wanted) and r[2] == 1


@given(st.integers(0, 10**6), st.sampled_from(FORMS))
def test_mass_moves_from_red_to_green_tokens_and_nothing_moves_below_p_0(seed, fields):
    random = np.random.default_rng(seed)
    p, is_green, scheme = random.dirichlet(np.ones(9)), random.random(9) < 0.5, scheme_of(**fields)
    moved = morphmark.reweight(p[None], is_green[None], scheme)[0]
    green = p[is_green].sum()
    r = float(morphmark.strength(green, scheme))
    assert moved.sum() == pytest.approx(1) and moved[is_green].sum() == pytest.approx(green + r * (1 - green))
    np.testing.assert_allclose(moved[~is_green], p[~is_green] * (1 - r), rtol=1e-12)
    assert green >= scheme.p_0 or (moved == p).all()


@functools.cache
def applied(backend, fields):
    marks = {"flax": logits_processor, "torch": torch_logits_processor}[backend]
    watermark = marks.Watermark(scheme_of(**dict(fields)), vocab_size=VOCAB)
    return watermark, jax.jit(watermark.apply) if backend == "flax" else watermark.apply


@pytest.mark.parametrize("kind", ["left", "self"])
@pytest.mark.parametrize("fields", FORMS, ids=lambda fields: fields["form"])
def test_both_backends_mark_a_distribution_as_numpy_does(fields, kind):
    random, context = np.random.default_rng(1), {"kind": kind, "width": 3}
    scheme, key = scheme_of(**fields, context=context), Key(7)
    contexts, logits = random.integers(0, VOCAB, (6, 3)), random.standard_normal((6, VOCAB)).astype(np.float32) * 3
    seen = contexts[:, 3 - scheme.context_length :]
    is_green = scheme.is_green(vocabulary.words(scheme, key, seen, vocab_size=VOCAB))
    wanted = morphmark.reweight(special.softmax(logits.astype(np.float64), axis=-1), is_green, scheme)
    for backend, array in (("flax", jnp.asarray), ("torch", torch.asarray)):
        watermark, apply = applied(backend, tuple({**fields, "context": scheme.context}.items()))
        state = watermark.state([key] * 5 + [None])
        step = jnp.int32(0) if backend == "flax" else 0
        length = array(np.full(6, 3, np.int32))
        _, changed = apply(state, array(logits), array(contexts.astype(np.int32)), length, step)
        np.testing.assert_allclose(special.softmax(np.asarray(changed), axis=-1)[:5], wanted[:5], atol=2e-6)
        np.testing.assert_array_equal(np.asarray(changed)[5], logits[5])


def test_marked_texts_of_200_tokens_are_found_and_others_are_not():
    scheme, random, rows = scheme_of(), np.random.default_rng(0), 24
    table = random.standard_normal((VOCAB, VOCAB)) * 2  # the next token's logits after each token
    texts = random.integers(0, VOCAB, (rows, 1))
    keys = [Key(i) if i % 2 else None for i in range(rows)]
    for _ in range(200):
        p = special.softmax(table[texts[:, -1]], axis=-1)
        words = vocabulary.words(scheme, [key or Key(0) for key in keys], texts[:, -1:], vocab_size=VOCAB)
        marked = morphmark.reweight(p, scheme.is_green(words), scheme)
        marked = np.where(np.array([key is not None for key in keys])[:, None], marked, p)
        drawn = (random.random((rows, 1)) > marked.cumsum(axis=-1)).sum(axis=-1)
        texts = np.column_stack([texts, np.minimum(drawn, VOCAB - 1)])
    tested = [key or Key(99) for key in keys]
    found = reference.evidence(scheme, tested, texts, np.full(rows, 201), vocab_size=VOCAB)
    p_values = significance.score(scheme, found, vocab_size=VOCAB).p_value
    assert (p_values[1::2] < 1e-5).all() and (p_values[0::2] > 1e-3).all()
