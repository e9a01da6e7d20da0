"""The random streams: Random123's known answers, and equal bits in numpy, JAX and PyTorch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from jaxbench import philox, prng
from torch_ref import prng as torch_prng

ONES = 0xFFFFFFFF
# Random123 1.14, tests/kat_vectors, "philox4x32 10": counter, key, words.
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ONES, ONES, ONES, ONES), (ONES, ONES), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]
COUNT, ROWS = 13, 3


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_philox_gives_random123s_known_answers_on_every_backend(counter, key, expected):
    in_numpy = philox.philox4x32(counter, key)
    in_jax = prng.philox4x32(tuple(jnp.uint32(c) for c in counter), jnp.array(key, jnp.uint32))
    in_torch = torch_prng.philox4x32(tuple(torch.tensor(c) for c in counter), torch.tensor(key))
    for words in (in_numpy, in_jax, in_torch):
        assert tuple(int(word) for word in words) == expected


def test_philox_is_traced_once_for_a_shape_and_anew_for_another_number_of_rounds(monkeypatch):
    counter, key = tuple(jnp.full(3, i, jnp.uint32) for i in range(4)), jnp.zeros(2, jnp.uint32)
    traced, rounds = [], prng._rounds
    monkeypatch.setattr(prng, "_rounds", lambda *args: traced.append(args[0]) or rounds(*args))
    prng._traced_once.cache_clear()
    wanted = [np.asarray(word) for word in prng.philox4x32(counter, key)]
    jax.jit(lambda c, k: prng.philox4x32(prng.philox4x32(c, k), k)).lower(counter, key)
    assert traced == [10, 10]  # by 64-bit products and by halves, for three calls
    monkeypatch.setattr(philox, "ROUNDS", 9)
    assert not np.array_equal(prng.philox4x32(counter, key)[0], wanted[0]) and traced[2:] == [9, 9]
    monkeypatch.undo()
    np.testing.assert_array_equal(prng.philox4x32(counter, key), wanted)


@jax.jit
def jax_words(key, step, site):
    return prng.words(key, step=step, site=site, rows=jnp.arange(ROWS), num_elements=COUNT)


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**31 - 1), st.text(max_size=12))
def test_words_are_bit_equal_in_numpy_jax_and_torch(seed, step, site):
    expected = philox.words(seed, step=step, site=site, rows=np.arange(ROWS), num_elements=COUNT)
    site_id = philox.site_id(site)
    in_jax = jax_words(prng.key_from_seed(seed), jnp.int32(step), jnp.uint32(site_id))
    key = torch_prng.key_from_seed(seed)
    in_torch = torch_prng.words(key, step=step, site=site_id, rows=torch.arange(ROWS), num_elements=COUNT)
    np.testing.assert_array_equal(np.asarray(in_jax), expected)
    np.testing.assert_array_equal(in_torch.numpy(), expected)


def test_rows_count_modulo_2_to_the_32_in_numpy_jax_and_torch():
    rows, how = np.array([-1, -(2**31), ONES, 2**31, 2**32 + 5, 5]), {"step": 3, "num_elements": COUNT}
    site_id = philox.site_id("sample")
    in_numpy = philox.words(7, site="sample", rows=rows, **how)
    in_torch = torch_prng.words(torch_prng.key_from_seed(7), site=site_id, rows=torch.from_numpy(rows), **how)
    in_jax = prng.words(prng.key_from_seed(7), site=site_id, rows=jnp.array(rows.astype(np.int32)), **how)
    np.testing.assert_array_equal(in_torch.numpy(), in_numpy)
    np.testing.assert_array_equal(np.asarray(in_jax), in_numpy)
    np.testing.assert_array_equal(in_numpy[[0, 1, 4]], in_numpy[[2, 3, 5]])


def test_a_rows_words_do_not_depend_on_the_rows_beside_it():
    together = philox.words(7, step=3, site="sample", rows=np.array([0, 5]), num_elements=COUNT)
    alone = philox.words(7, step=3, site="sample", rows=np.array([5]), num_elements=COUNT)
    np.testing.assert_array_equal(together[1], alone[0])


def test_exponentials_stay_finite_at_both_ends():
    ends = np.array([0, 0xFF, 2**31 - 1, 2**31, ONES - 0x100, ONES], np.uint32)
    exact = philox.uniform(ends)
    assert exact.min() == 2.0**-25 and exact.max() == 1 - 2.0**-25
    in_torch = torch.tensor(ends.astype(np.int64))
    for exponentials in (prng.exponential(jnp.asarray(ends)), torch_prng.exponential(in_torch)):
        np.testing.assert_allclose(np.asarray(exponentials), -np.log(exact), rtol=1e-6)


@given(st.floats(0, 0.99))
def test_dropout_keeps_the_words_whose_uniform_reaches_the_rate(rate):
    words = philox.words(1, step=0, site="dropout", rows=np.arange(1), num_elements=64)[0]
    expected = philox.uniform(words) >= rate
    np.testing.assert_array_equal(np.asarray(prng.keep_mask(jnp.asarray(words), rate)), expected)
    in_torch = torch_prng.keep_mask(torch.tensor(words.astype(np.int64)), rate)
    np.testing.assert_array_equal(in_torch.numpy(), expected)


@pytest.mark.parametrize("make_key", [prng.key_from_seed, torch_prng.key_from_seed])
def test_a_seed_outside_64_bits_is_named(make_key):
    with pytest.raises(ValueError, match="seed=-1 is outside"):
        make_key(-1)


@pytest.mark.parametrize("make_key", [prng.key_from_seed, torch_prng.key_from_seed])
@pytest.mark.parametrize("seed", [1.5, "7", None])
def test_a_seed_that_is_no_whole_number_is_named(make_key, seed):
    with pytest.raises(ValueError, match=f"seed={seed!r}, wanted a whole number"):
        make_key(seed)
    np.testing.assert_array_equal(np.asarray(make_key(np.int64(7))), [7, 0])


@pytest.mark.parametrize("count", [0, 1, 5, 6, 7, 13, 25, 36])
def test_normals_drawn_in_parts_are_bit_for_bit_those_of_one_part(count, monkeypatch):
    how = {"step": 3, "site": "weights"}
    whole = philox.normal(2**40 + 7, **how, num_elements=count)
    monkeypatch.setattr(philox, "PART", 6)
    np.testing.assert_array_equal(philox.normal(2**40 + 7, **how, num_elements=count), whole)
    words = philox.words(2**40 + 7, **how, rows=np.zeros(1), num_elements=2 * count)
    radius, angle = philox.uniform(words).reshape(count, 2).T
    np.testing.assert_array_equal(whole, np.sqrt(-2.0 * np.log(radius)) * np.cos(2.0 * np.pi * angle))


def test_normals_have_the_moments_of_a_standard_normal():
    values = philox.normal(0, step=0, site="weights", num_elements=100_000)
    assert abs(values.mean()) < 0.01 and abs(values.std() - 1) < 0.01
    assert abs((values**4).mean() - 3) < 0.1
