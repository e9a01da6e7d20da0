"""Penalties of both twins: by hand, and as the server computes them from a row's lists of tokens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from jaxbench import penalties
from jaxbench.prompts import SamplingParams
from jaxbench.serve import sampler
from jaxbench.serve.request import Sampling
from tests.three_backends import make
from torch_ref import penalties as torch_penalties

ROWS, WIDTH, VOCAB = 3, 8, 11
ALL = SamplingParams(repetition_penalty=1.3, frequency_penalty=0.7, presence_penalty=-0.4)


def test_repetition_penalty_touches_only_tokens_in_the_context():
    logits = np.array([[2.0, -2.0, 3.0, -3.0]], np.float32)
    tokens, lengths = np.array([[0, 1, 3, 3]], np.int32), np.array([2], np.int32)
    expected = np.array([[1.0, -4.0, 3.0, -3.0]])
    arguments = (jnp.asarray(logits), jnp.asarray(tokens), jnp.asarray(lengths))
    in_jax = penalties.penalize_repetition(*arguments, penalty=2.0)
    in_torch = torch_penalties.penalize_repetition(*map(torch.tensor, (logits, tokens, lengths)), penalty=2.0)
    np.testing.assert_array_equal(np.asarray(in_jax), expected)
    np.testing.assert_array_equal(in_torch.numpy(), expected)


def test_frequency_counts_the_answer_and_not_the_prompt():
    logits, tokens = np.zeros((1, 5), np.float32), np.array([[4, 4, 2, 2, 3, 0]], np.int32)  # prompt 4 4, slot 5 unused
    arrays = (logits, tokens, np.array([2], np.int32), np.array([5], np.int32))
    how = {"frequency": 0.5, "presence": 0.25}
    expected = np.array([[0.0, 0.0, -1.25, -0.75, 0.0]], np.float32)
    np.testing.assert_array_equal(penalties.penalize_frequency(*map(jnp.asarray, arrays), **how), expected)
    np.testing.assert_array_equal(torch_penalties.penalize_frequency(*map(torch.tensor, arrays), **how), expected)


@given(
    tokens=st.lists(st.lists(st.integers(0, VOCAB), min_size=WIDTH, max_size=WIDTH), min_size=ROWS, max_size=ROWS),
    lengths=st.lists(st.integers(3, WIDTH), min_size=ROWS, max_size=ROWS),
    step=st.integers(0, 2),
    penalty=st.sampled_from([0.5, 1.3]),
    frequency=st.sampled_from([-2.0, 0.0, 0.7]),
    presence=st.sampled_from([-0.4, 0.0, 2.0]),
    bias=st.sampled_from([(), ((3, -100.0),), ((0, 2.5), (VOCAB - 1, -1.5))]),
)
def test_both_twins_penalize_as_the_server_does(tokens, lengths, step, penalty, frequency, presence, bias):
    """A token VOCAB stands for a vector of the prompt; it has no logit."""
    how = {"repetition_penalty": penalty, "frequency_penalty": frequency, "presence_penalty": presence}
    served = Sampling(**how, logit_bias=dict(bias))
    how["logit_bias"] = bias
    logits = np.random.default_rng(0).standard_normal((ROWS, VOCAB)).astype(np.float32)
    rows = [row[:length] for row, length in zip(tokens, lengths, strict=True)]
    answers = [[token % VOCAB for token in row[len(row) - step :]] for row in rows]
    tokens = [
        row[: length - step] + answer + row[length:]
        for row, length, answer in zip(tokens, lengths, answers, strict=True)
    ]
    expected = [
        sampler.penalized(logits[i], served, [t for t in row[:length] if t < VOCAB], answers[i])
        for i, (row, length) in enumerate(zip(tokens, lengths, strict=True))
    ]
    tokens, lengths = np.array(tokens, np.int32), np.array(lengths, np.int32)
    run = jax.jit(penalties.penalize, static_argnames="sampling")
    in_jax = run(logits, tokens, lengths, step=step, sampling=SamplingParams(**how))
    arguments = map(torch.tensor, (logits, tokens, lengths))
    in_torch = torch_penalties.penalize(*arguments, step=step, sampling=SamplingParams(**how))
    np.testing.assert_allclose(in_jax, expected, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(in_torch, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("backend", ["flax", "torch"])
def test_a_generator_says_no_token_twice_where_the_penalties_forbid_it(backend):
    """Logits of this model differ by less than 2: a token said once is never the most probable one again."""
    plain = make(backend)([[1, 2, 3]], max_new_tokens=24, seed=0).tokens[0]
    found = make(backend, presence_penalty=2.0, frequency_penalty=2.0)([[1, 2, 3]], max_new_tokens=24, seed=0).tokens[0]
    assert len(set(plain.tolist())) < 24 == len(set(found.tolist()))


@pytest.mark.parametrize("backend", ["flax", "equinox", "torch"])
def test_a_bias_keeps_a_token_out_of_an_answer_or_brings_it_in(backend):
    said = make(backend)([[1, 2, 3]], max_new_tokens=4, seed=0).tokens[0]
    out = make(backend, logit_bias=tuple((int(token), -100.0) for token in set(said)))
    assert not set(out([[1, 2, 3]], max_new_tokens=4, seed=0).tokens[0]) & set(said)
    drawn = make(backend, temperature=1.0, logit_bias=((7, 100.0),))([[1, 2, 3]], max_new_tokens=4, seed=0)
    assert drawn.tokens.tolist() == [[7] * 4]


@pytest.mark.parametrize("backend", ["flax", "torch"])
def test_a_bias_that_cannot_be_followed_is_refused(backend):
    wrong = {"5 is nan": (5, float("nan")), "-1 is 1.0": (-1, 1.0), "1.5 is 1.0": (1.5, 1.0), "5 is 101": (5, 101)}
    wrong |= {"601, wanted ids below 601": (601, 1.0)}
    for said, pair in wrong.items():
        with pytest.raises(ValueError, match=f"sampling: logit_bias of token {said}"):
            make(backend, logit_bias=(pair,))
    with pytest.raises(ValueError, match=r"token 5 is 1\.0, wanted each id, a whole number from 0, once"):
        make(backend, logit_bias=((5, 1.0), (5, 2.0)))
