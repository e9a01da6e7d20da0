"""What the drawing schemes do to distributions: Gumbel's expected score, unbiased reweighting, agreement with numpy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import special, stats

from jaxbench.sample import OrdinaryDraw
from jaxbench.watermark import config, logits_processor, reference
from jaxbench.watermark.device import marks
from jaxbench.watermark.keys import Key
from jaxbench.watermark.schemes import dip, synthid
from tests.watermark import vocabulary
from torch_ref.watermark import logits_processor as torch_logits_processor

VOCAB, ROWS = 6, 8192
# One row a context: no rule looks at the same four tokens twice.
CONTEXTS = np.stack([np.arange(ROWS) // 97**i % 97 for i in range(4)], axis=-1).astype(np.int32)


@functools.cache
def drawing(prf):
    watermark = logits_processor.Watermark({"scheme": "gumbel", "prf": prf}, vocab_size=VOCAB)
    length = jnp.full((ROWS,), 4)

    sample = OrdinaryDraw(jnp.zeros(2, jnp.uint32), jnp.int32(4), jnp.arange(ROWS))

    def draw(keys, logits):
        state = {"marked": jnp.ones(ROWS, bool), "keys": jnp.tile(keys[None], (ROWS, 1))}
        state["used"] = jnp.zeros((ROWS, marks.HISTORY, 2), jnp.uint32)
        logits = jnp.tile(logits[None], (ROWS, 1))
        return watermark.draw(state, logits, jnp.asarray(CONTEXTS), length, jnp.int32(4), sample)[1]

    return jax.jit(draw)


@pytest.mark.parametrize("prf", ["jaxbench", "vllm"])
@settings(max_examples=8)
@given(seed=st.integers(0, 10**6))
def test_gumbels_mean_score_of_a_token_is_the_harmonic_number_of_one_over_its_probability(prf, seed):
    random = np.random.default_rng(seed)
    logits, key = random.standard_normal(VOCAB).astype(np.float32) * 1.5, Key(seed)
    tokens = np.asarray(drawing(prf)(jnp.array(key.halves * 2, jnp.uint32), jnp.asarray(logits)))
    texts = np.concatenate([CONTEXTS, tokens[:, None]], axis=1)
    scheme = config.parse_scheme({"scheme": "gumbel", "prf": prf})
    words = reference.evidence(scheme, key, texts, np.full(ROWS, 5), vocab_size=97).words[:, 4]
    uniforms = scheme.shade(words)
    scores, p = -np.log1p(-uniforms), special.softmax(logits.astype(np.float64))
    assert stats.chisquare(np.bincount(tokens, minlength=VOCAB), p * ROWS).pvalue > 1e-5
    for token in np.flatnonzero(p > 0.01):
        own = scores[tokens == token]
        expected = special.digamma(1 / p[token] + 1) + np.euler_gamma  # H(1/p)
        assert abs(own.mean() - expected) < 5 * own.std(ddof=1) / np.sqrt(len(own))


@pytest.mark.parametrize("scheme", [{"scheme": "synthid"}, {"scheme": "synthid", "depth": 3}, {"scheme": "dip"}])
@settings(max_examples=5)
@given(seed=st.integers(0, 10**6))
def test_the_mean_distribution_over_keys_is_the_models_own(scheme, seed):
    random = np.random.default_rng(seed)
    watermark = torch_logits_processor.Watermark(scheme, vocab_size=VOCAB)
    keys = torch.from_numpy(random.integers(0, 2**32, (ROWS, 4)))
    state = {"marked": torch.ones(ROWS, dtype=torch.bool), "keys": keys}
    state["used"] = torch.zeros((ROWS, marks.HISTORY, 2), dtype=torch.int64)
    logits = torch.from_numpy(random.standard_normal(VOCAB) * 1.5).expand(ROWS, -1)
    given = (torch.ones((ROWS, 4), dtype=torch.int64), torch.full((ROWS,), 4), 0)
    marked = torch.softmax(watermark.reweight(state, logits, *given)[1], dim=-1).numpy()
    p = torch.softmax(logits[0], dim=-1).numpy()
    spread, frequent = marked.std(axis=0, ddof=1), p > 0.01
    assert (spread[frequent] > 0.05 * p[frequent]).all()  # each key changes much
    assert (np.abs(marked.mean(axis=0) - p)[frequent] < 5 * spread[frequent] / np.sqrt(ROWS)).all()


REWEIGHTING = {
    "synthid": {"scheme": "synthid", "candidates": None},
    "head": {"scheme": "synthid", "candidates": 32},
    "dip": {"scheme": "dip"},
}


@pytest.mark.parametrize("scheme", REWEIGHTING)
@settings(max_examples=10)
@given(seed=st.integers(0, 10**6), value=st.integers(0, 2**64 - 1))
def test_both_backends_reweight_as_the_definition_does(scheme, seed, value):
    random, size = np.random.default_rng(seed), 75
    scheme, context = config.parse_scheme(REWEIGHTING[scheme]), random.integers(0, size, (2, 4))
    logits = random.standard_normal((2, size)).astype(np.float32) * 3
    p = special.softmax(logits.astype(np.float64), axis=-1)
    words = vocabulary.words(scheme, Key(value), context, vocab_size=size)
    if scheme.scheme == "dip":
        expected = dip.reweight(p, words, alpha=scheme.alpha)
    else:
        expected = synthid.tournament(p, words, depth=scheme.depth)
        if scheme.candidates == 32:
            is_head = synthid.head(logits, candidates=32)
            mass = np.where(is_head, p, 0).sum(axis=-1, keepdims=True)
            played = synthid.tournament(np.where(is_head, p, 0) / mass, words, depth=scheme.depth)
            expected = np.where(is_head, mass * played, p)
    for module, array in ((logits_processor, jnp.asarray), (torch_logits_processor, torch.from_numpy)):
        watermark = module.Watermark(scheme, vocab_size=size)
        given = (array(logits), array(context), array(np.full(2, 4)), 0)
        changed = reweighting(module, scheme)(watermark.state([Key(value)] * 2), *given)[1]
        np.testing.assert_allclose(special.softmax(np.asarray(changed), axis=-1), expected, atol=2e-6)


@functools.cache
def reweighting(module, scheme):
    watermark = module.Watermark(scheme, vocab_size=75)
    return jax.jit(watermark.reweight) if module is logits_processor else watermark.reweight


def test_the_head_is_the_likeliest_blocks_of_32_and_the_lower_of_two_equal_ones():
    logits = np.zeros((2, 75))
    logits[0, [20, 70]], logits[1, 70] = 1.0, -np.inf
    found = synthid.head(logits, candidates=64)
    np.testing.assert_array_equal(np.flatnonzero(found[0]), [*range(32), *range(64, 75)])
    np.testing.assert_array_equal(np.flatnonzero(found[1]), range(64))
    for module, array in ((logits_processor, jnp.asarray), (torch_logits_processor, torch.from_numpy)):
        scheme = config.parse_scheme({"scheme": "synthid", "candidates": 64})
        watermark = module.Watermark(scheme, vocab_size=75)
        given = (array(logits.astype(np.float32)), array(np.ones((2, 4), np.int64)), array(np.full(2, 4)), 0)
        changed = np.asarray(watermark.reweight(watermark.state([Key(5)] * 2), *given)[1])
        np.testing.assert_array_equal((changed != logits).any(axis=0), found.any(axis=0))


@given(st.integers(0, 10**6), st.floats(0, 0.5))
def test_reweighting_keeps_the_mass_and_empties_the_front_of_the_order(seed, alpha):
    random = np.random.default_rng(seed)
    p, positions = random.dirichlet(np.ones(9)), random.permutation(9)
    moved = dip.reweight(p[None], positions[None], alpha=alpha)[0]
    assert abs(moved.sum() - 1) < 1e-12 and (moved >= 0).all() and (moved <= 2 * p + 1e-12).all()
    order = np.argsort(positions)
    front = np.cumsum(p[order]) <= alpha
    assert moved[order][front].sum() < 1e-12


@given(st.integers(0, 10**6), st.integers(1, 30))
def test_a_tournament_keeps_the_mass_and_moves_it_to_ones(seed, depth):
    random = np.random.default_rng(seed)
    p, words = random.dirichlet(np.ones(9)), random.integers(0, 2**32, 9, dtype=np.uint32)
    moved = synthid.tournament(p[None], words[None], depth=depth)[0]
    first = words & 1 == 1
    assert abs(moved.sum() - 1) < 1e-9 and (moved >= 0).all()
    one = synthid.tournament(p[None], words[None], depth=1)[0]
    share = p[first].sum()
    np.testing.assert_allclose(one, np.where(first, p * (2 - share), p * (1 - share)))
