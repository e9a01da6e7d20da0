"""The pseudo-random functions of JAX and PyTorch against the numpy reference, bit for bit."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxbench import philox
from jaxbench.watermark import config, prf, reference
from jaxbench.watermark.device import dip, gumbel, kgw
from jaxbench.watermark.keys import Key
from jaxbench.watermark.schemes import dip as in_numpy
from jaxbench.watermark.schemes import gumbel as numpy_gumbel
from torch_ref.watermark import prf as torch_prf
from torch_ref.watermark.device import dip as torch_dip
from torch_ref.watermark.device import gumbel as torch_gumbel
from torch_ref.watermark.device import kgw as torch_kgw

VOCAB, BATCH, TOKENS = 103, 2, 12  # not a multiple of four
KEYS = st.lists(st.integers(0, 2**64 - 1).map(Key), min_size=BATCH, max_size=BATCH)
TEXTS = st.lists(st.lists(st.integers(0, VOCAB - 1), min_size=TOKENS, max_size=TOKENS), min_size=BATCH, max_size=BATCH)
RULES = [(kind, width) for kind in ("left", "skip", "min", "self") for width in (1, 4, 5)]


def arrays(keys):
    return np.array([key.halves for key in keys], np.uint32)


def halves(key):
    """Return low and high word of each row's key, [B 1] each."""
    return key[:, :1], key[:, 1:]


def in_jax(function, *inputs):
    return np.asarray(function(*(jnp.asarray(x) for x in inputs)))


def in_torch(function, *inputs):
    wide = (x.astype(np.int64) if x.dtype == np.uint32 else x for x in inputs)
    return function(*(torch.from_numpy(x) for x in wide)).numpy()


@functools.cache
def jitted(name, *options):
    def of(module):
        if name == "seeds":
            rule = reference.ContextRule(kind=options[0], width=options[1])
            if module is prf:  # texts are columns there
                columns = lambda key, tokens: prf.text_seeds(rule, tuple(h.T for h in halves(key)), tokens.T)
                return lambda key, tokens: columns(key, tokens).swapaxes(0, 1)
            return lambda key, tokens: module.text_seeds(rule, halves(key), tokens)
        if name == "words":
            scheme = config.parse_scheme(options[0])
            if options[0] == "dip":
                words_of = (dip if module is prf else torch_dip).token_words
                return lambda key, seeds, tokens, payload: words_of(halves(key), seeds, tokens, vocab_size=VOCAB)
            return lambda key, seeds, tokens, payload: module.token_words(
                scheme, halves(key), seeds, tokens, vocab_size=VOCAB, payload=payload
            )
        if name == "vllm":
            mark = gumbel if module is prf else torch_gumbel
            return lambda key, contexts, tokens: mark.vllm_token_words(
                mark.vllm_state(contexts, halves(key)), tokens, halves(key)
            )
        if name == "order":
            order = dip if module is prf else torch_dip
            return lambda keys, values: order.permute(values, keys, options[0])
        assert name == "lanes"
        return lambda key, seeds: module.interleave(
            module.lanes(halves(key), seeds, site=77, num_elements=VOCAB), VOCAB
        )

    return jax.jit(of(prf)), of(torch_prf)


@pytest.mark.parametrize(("kind", "width"), RULES)
@settings(max_examples=12)
@given(keys=KEYS, tokens=TEXTS)
def test_context_seeds_are_equal_in_bits(kind, width, keys, tokens):
    tokens = np.array(tokens, np.int32)
    rule = reference.ContextRule(kind=kind, width=width)
    expected = reference.context_seeds(rule, keys, tokens)[:, rule.length :]
    one, other = jitted("seeds", kind, width)
    np.testing.assert_array_equal(in_jax(one, arrays(keys), tokens)[:, rule.length :], expected)
    np.testing.assert_array_equal(in_torch(other, arrays(keys), tokens)[:, rule.length :], expected)


@pytest.mark.parametrize("scheme", ["kgw", "gumbel", "synthid", "dip"])
@settings(max_examples=12)
@given(keys=KEYS, tokens=TEXTS, seed=st.integers(0, 10**6), payload=st.integers(0, VOCAB - 1))
def test_words_of_tokens_are_equal_in_bits(scheme, keys, tokens, seed, payload):
    tokens, payload = np.array(tokens, np.int32), np.array([[payload], [0]], np.int32)
    seeds = np.random.default_rng(seed).integers(0, 2**32, (BATCH, TOKENS, 2), dtype=np.uint32)
    pair = reference.halves(keys, 2)
    if scheme == "dip":
        expected = in_numpy.token_words(pair, seeds, tokens, vocab_size=VOCAB)
    else:
        expected = reference.token_words(
            config.parse_scheme(scheme), pair, seeds, tokens, vocab_size=VOCAB, payload=payload
        )
    one, other = jitted("words", scheme)
    np.testing.assert_array_equal(in_jax(one, arrays(keys), seeds, tokens, payload), expected)
    np.testing.assert_array_equal(in_torch(other, arrays(keys), seeds, tokens, payload), expected)


@given(keys=KEYS, seed=st.integers(0, 10**6))
def test_lanes_hold_the_words_of_the_whole_vocabulary(keys, seed):
    seeds = np.random.default_rng(seed).integers(0, 2**32, (BATCH, 2), dtype=np.uint32)
    pair, tokens = reference.halves(keys, 2), np.arange(VOCAB, dtype=np.uint32)[None]
    blocks = philox.philox4x32((tokens >> 2, seeds[:, :1], seeds[:, 1:], 77), pair)
    expected = np.take_along_axis(
        np.stack(blocks, -1), np.broadcast_to((tokens & 3)[..., None], (BATCH, VOCAB, 1)), -1
    )[..., 0]
    one, other = jitted("lanes")
    np.testing.assert_array_equal(in_jax(one, arrays(keys), seeds), expected)
    np.testing.assert_array_equal(in_torch(other, arrays(keys), seeds), expected)


@pytest.mark.parametrize("width", [1, 4, 6])
@settings(max_examples=12)
@given(keys=KEYS, tokens=TEXTS, seed=st.integers(0, 10**6))
def test_vllms_words_are_equal_in_bits(width, keys, tokens, seed):
    tokens = np.array(tokens, np.int32)
    contexts = np.random.default_rng(seed).integers(-1, VOCAB, (BATCH, TOKENS, width), dtype=np.int32)
    pair = reference.halves(keys, 2)
    expected = numpy_gumbel.vllm_token_words(numpy_gumbel.vllm_state(contexts, pair), tokens, pair)
    one, other = jitted("vllm", width)
    np.testing.assert_array_equal(in_jax(one, arrays(keys), contexts, tokens), expected)
    np.testing.assert_array_equal(in_torch(other, arrays(keys), contexts, tokens), expected)


@settings(max_examples=12)
@given(keys=KEYS, seed=st.integers(0, 10**6))
def test_the_keyed_order_is_equal_in_bits(keys, seed):
    seeds = np.random.default_rng(seed).integers(0, 2**32, (BATCH, 2), dtype=np.uint32)
    rounds = in_numpy.round_keys(reference.halves(keys, 1), seeds)
    values = np.broadcast_to(np.arange(2**8, dtype=np.uint32), (BATCH, 2**8))
    expected = in_numpy.permute(values, rounds[:, None], 8)
    one, other = jitted("order", 8)
    np.testing.assert_array_equal(in_jax(one, rounds[:, None], values), expected)
    np.testing.assert_array_equal(in_torch(other, rounds[:, None], values), expected)


@pytest.mark.parametrize(("module", "convert"), [(prf, jnp.asarray), (torch_prf, torch.from_numpy)])
def test_own_lanes_are_the_words_of_a_token_with_itself(module, convert):
    key = convert(np.array([[5, 6]], np.uint32 if module is prf else np.int64))
    mark = kgw if module is prf else torch_kgw
    lanes = np.asarray(mark.own_lanes(halves(key), num_elements=VOCAB))
    tokens = np.arange(104, dtype=np.uint32)
    expected = reference.pair_words(tokens, tokens, (np.uint32(5), np.uint32(6)))
    np.testing.assert_array_equal(lanes[0].T.reshape(-1), expected)
