"""Filters of logits and the draw behind them: against numpy, and what XLA makes of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from jaxbench import sample
from torch_ref import sample as torch_sample

VOCAB = 601  # more than NUM_CANDIDATES, so that top-p's fallback can run


def kept_by_definition(logits, temperature, top_k, top_p, min_p):
    scaled = logits.astype(np.float64) / temperature
    kept = np.ones(scaled.shape, bool)
    if top_k:
        kept &= scaled >= np.sort(scaled)[-top_k]
    probabilities = np.where(kept, np.exp(scaled - scaled.max()), 0)
    probabilities /= probabilities.sum()
    order = np.argsort(-probabilities)
    before = np.cumsum(probabilities[order]) - probabilities[order]
    nucleus = np.zeros_like(kept)
    nucleus[order[before < top_p]] = True
    kept &= nucleus
    return kept & (probabilities >= min_p * probabilities.max())


@given(st.integers(0, 10_000), st.sampled_from([(0.7, 0, 0.9, 0.0), (2.0, 50, 0.8, 0.01), (30.0, 0, 0.97, 0.0)]))
def test_filters_keep_what_their_definition_keeps(seed, settings):
    logits = np.random.default_rng(seed).standard_normal(VOCAB).astype(np.float32) * 4
    sampling = sample.SamplingParams(*settings)
    expected = kept_by_definition(logits, *settings)
    in_jax = np.isfinite(np.asarray(FILTERS[settings](logits[None]))[0])
    in_torch = torch.isfinite(torch_sample.filter_logits(torch.tensor(logits[None]), sampling))[0].numpy()
    # the nucleus' edge is decided by sums in float32: one token may fall to the other side of it
    assert (in_jax != expected).sum() <= 1
    assert (in_torch != expected).sum() <= 1


FILTERS = {
    settings: jax.jit(lambda logits, s=settings: sample.filter_logits(logits, sample.SamplingParams(*s)))
    for settings in [(0.7, 0, 0.9, 0.0), (2.0, 50, 0.8, 0.01), (30.0, 0, 0.97, 0.0)]
}


@pytest.mark.parametrize("top_p", [0.3, 0.9, 0.999])
def test_a_nucleus_wider_than_the_candidates_is_found_without_a_sort(top_p):
    """Values of both signs, equal ones, tokens that a processor forbade; a flat row beside a peaked one."""
    random = np.random.default_rng(0)
    logits = np.round(random.standard_normal((3, 3001)), 2).astype(np.float32)
    logits[1] *= 0.01
    logits[2, 40:] = -np.inf
    sampling = sample.SamplingParams(temperature=1.0, top_p=top_p)
    found = np.isfinite(np.asarray(jax.jit(lambda x: sample.filter_logits(x, sampling))(logits)))
    for row, kept in zip(logits.astype(np.float64), found, strict=True):
        probabilities = np.exp(row - row.max()) / np.exp(row - row.max()).sum()
        values = np.unique(row)
        mass = np.array([probabilities[row >= value].sum() for value in values])
        least = values[mass >= top_p].max()
        near = np.abs(mass - top_p) < 1e-5  # decided by rounding
        wrong = kept != (row >= least)
        assert np.isin(row[wrong], values[near]).all()


@pytest.mark.parametrize("settings", [{"top_k": 2}, {"top_p": 0.5}], ids=["top_k", "top_p"])
def test_tokens_as_probable_as_the_least_that_is_kept_stay_too(settings):
    logits = np.array([[2.0, 1.0, 0.0, 1.0, 1.0]], np.float32)  # 0.46 for the first, 0.17 for each of the equals
    sampling = sample.SamplingParams(temperature=1.0, **settings)
    for filtered in (
        sample.filter_logits(jnp.asarray(logits), sampling),
        torch_sample.filter_logits(torch.tensor(logits), sampling),
    ):
        assert np.isfinite(np.asarray(filtered))[0].tolist() == [True, True, False, True, True]


@pytest.mark.parametrize("vocab", [100, VOCAB])
def test_a_top_p_that_float32_rounds_to_0_keeps_the_most_probable_token(vocab):
    logits = np.random.default_rng(0).standard_normal((2, vocab)).astype(np.float32)
    sampling = sample.SamplingParams(temperature=1.0, top_p=1e-50)
    in_jax = np.isfinite(np.asarray(sample.filter_logits(jnp.asarray(logits), sampling)))
    in_torch = torch.isfinite(torch_sample.filter_logits(torch.tensor(logits), sampling)).numpy()
    wanted = logits == logits.max(axis=1, keepdims=True)
    assert (in_jax == wanted).all() and (in_torch == wanted).all()


def test_a_rows_nucleus_does_not_depend_on_rows_whose_nucleus_is_wider():
    """Sums of the candidates and of the whole vocabulary round differently near a top_p close to 1."""
    sampling = sample.SamplingParams(temperature=1.0, top_p=0.999999)
    in_jax = jax.jit(lambda x: sample.filter_logits(x, sampling))
    for seed in range(10):
        logits = np.random.default_rng(seed).standard_normal((4, VOCAB)).astype(np.float32) * 8
        beside_flat = np.concatenate([logits[:3], 0.01 * logits[3:]])
        for kept in (in_jax, lambda x: torch_sample.filter_logits(torch.tensor(x), sampling).numpy()):
            alone, beside = (np.isfinite(np.asarray(kept(x)))[:3] for x in (logits, beside_flat))
            assert (alone == beside).all()


def test_a_mass_that_rounded_sums_never_reach_keeps_every_token():
    logits = np.zeros((1, 3000), np.float32)
    filtered = sample.filter_logits(
        jnp.asarray(logits), sample.SamplingParams(temperature=1.0, top_p=float(1 - 2**-40))
    )
    assert np.isfinite(np.asarray(filtered)).all()


@pytest.mark.parametrize("settings", [{"top_k": 50}, {"top_p": 0.9}, {"top_k": 20, "top_p": 0.9, "min_p": 0.1}])
def test_filters_of_a_large_vocabulary_do_not_sort_it(settings):
    sampling = sample.SamplingParams(temperature=0.7, **settings)
    compiled = jax.jit(lambda x: sample.filter_logits(x, sampling)).lower(jnp.zeros((2, 49152))).compile()
    assert "top_k" in compiled.as_text() and " sort(" not in compiled.as_text()


def test_gumbel_draws_follow_the_softmax():
    logits = np.array([2.0, 1.0, 0.0, -1.0], np.float32)
    rows = 20_000
    tokens = jax.jit(
        lambda ids: sample.draw(
            jnp.tile(logits[None], (rows, 1)),
            sample.SamplingParams(temperature=1.0),
            key=jnp.array([1, 2], jnp.uint32),
            step=jnp.int32(0),
            row_ids=ids,
        )
    )(jnp.arange(rows))
    shares = np.bincount(np.asarray(tokens), minlength=4) / rows
    expected = np.exp(logits) / np.exp(logits).sum()
    assert np.abs(shares - expected).max() < 4 * np.sqrt(0.25 / rows)
