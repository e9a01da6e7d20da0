"""Counter-based random numbers in JAX: the streams of jaxbench/philox.py, bit for bit. Twin: torch_ref/prng.py.

A `key` is the pair of uint32 halves of the seed, a traced value, so one compiled program serves every seed.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float, Int, UInt32

from jaxbench import philox


def key_from_seed(seed: int) -> UInt32[Array, "2"]:
    """Philox key of a seed: its low and high 32-bit halves.

    Raises:
      ValueError: seed is outside [0, 2**64).
    """
    return jnp.array(philox.split_seed(seed), dtype=jnp.uint32)


def _multiply_wide(constant: int, x: Array) -> tuple[Array, Array]:
    """High and low 32 bits of constant * x through one 64-bit product, with JAX's 64-bit types enabled for it."""
    with jax.enable_x64(True):
        product = lax.mul(lax.convert_element_type(x, jnp.uint64), lax.full_like(x, constant, jnp.uint64))
        high = lax.shift_right_logical(product, lax.full_like(product, 32))
        return lax.convert_element_type(high, jnp.uint32), lax.convert_element_type(product, jnp.uint32)


def _multiply_halves(constant: int, x: Array) -> tuple[Array, Array]:
    """High and low 32 bits of constant * x through 16-bit halves: a TPU has no 64-bit integers."""
    low_c, high_c = jnp.uint32(constant & 0xFFFF), jnp.uint32(constant >> 16)
    low_x, high_x = x & 0xFFFF, x >> 16
    middle = high_c * low_x + (low_c * low_x >> 16)
    carry = low_c * high_x + (middle & 0xFFFF)
    return high_c * high_x + (middle >> 16) + (carry >> 16), jnp.uint32(constant) * x


def philox4x32(counter: tuple[Array, ...], key: UInt32[Array, "2"] | tuple[Array, Array]) -> tuple[Array, ...]:
    """Philox 4x32-10: the four 32-bit words of each counter (four uint32 arrays) under a key; all broadcast."""
    return _traced_once(philox.ROUNDS)(counter, key)


@functools.cache
def _traced_once(num_rounds: int) -> Callable[..., tuple[Array, ...]]:
    """Return philox4x32 that Python traces once for a shape; at each layer's dropout it was half of all tracing."""

    @jax.jit
    def philox4x32(counter: tuple[Array, ...], key: Array | tuple[Array, Array]) -> tuple[Array, ...]:
        wide, halves = (functools.partial(_rounds, num_rounds, each) for each in (_multiply_wide, _multiply_halves))
        # On XLA:CPU, the halves' sixteen operations have a fifth of the speed of one 64-bit product (docs/xla_cpu.md).
        return lax.platform_dependent(*counter, key[0], key[1], tpu=halves, default=wide)

    return philox4x32


def _rounds(
    num_rounds: int, multiply: Callable, c0: Array, c1: Array, c2: Array, c3: Array, k0: Array, k1: Array
) -> tuple[Array, ...]:
    for _ in range(num_rounds):
        high0, low0 = multiply(philox.MULTIPLIERS[0], c0)
        high1, low1 = multiply(philox.MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = k0 + jnp.uint32(philox.WEYL[0]), k1 + jnp.uint32(philox.WEYL[1])
    return c0, c1, c2, c3


def words(
    key: UInt32[Array, "2"],
    *,
    step: Int[Array, ""] | int,
    site: UInt32[Array, ""] | int,
    rows: Int[Array, " B"],
    num_elements: int,
) -> UInt32[Array, "B E"]:
    """Random 32-bit words of elements 0..E-1 of each row, modulo 2**32; a block of four comes from one counter."""
    stacked = jnp.stack(lanes(key, step=step, site=site, rows=rows, num_elements=num_elements), axis=-1)
    return stacked.reshape(rows.shape[0], -1)[:, :num_elements]


def lanes(
    key: UInt32[Array, "2"],
    *,
    step: Int[Array, ""] | int,
    site: UInt32[Array, ""] | int,
    rows: Int[Array, " B"],
    num_elements: int,
) -> tuple[Array, ...]:
    """Random words (`words`) as four arrays [B ceil(E / 4)]: array j holds elements j, j + 4, j + 8, ..

    XLA:CPU computes a block four times if its words are interleaved in one fused loop, and once here.
    """
    blocks = jnp.arange(-(-num_elements // 4), dtype=jnp.uint32)[None, :]
    counter = (blocks, rows.astype(jnp.uint32)[:, None], *(jnp.full((1, 1), x, jnp.uint32) for x in (step, site)))
    return philox4x32(counter, key)


def exponential(words: UInt32[Array, "*shape"], *, dtype: str = "float32") -> Float[Array, "*shape"]:
    """Exponentials -log(uniform) of random words, finite and positive for every word.

    Above one half, log1p of the complement is used: both arguments are then exact in float32.
    """
    k = words >> 8
    half, scale = jnp.asarray(0.5, dtype), jnp.asarray(2.0**-24, dtype)
    is_low = k < 2**23
    low = (jnp.where(is_low, k, 0).astype(dtype) + half) * scale
    complement = (jnp.where(is_low, 0, 2**24 - 1 - k).astype(dtype) + half) * scale
    return jnp.where(is_low, -jnp.log(low), -jnp.log1p(-complement))


def keep_mask(words: UInt32[Array, "*shape"], rate: float) -> Bool[Array, "*shape"]:
    """Dropout mask, True where a value survives: uniform >= rate, compared as integers, so equal in every dtype."""
    return (words >> 8) >= jnp.uint32(max(0, math.ceil(rate * 2**24 - 0.5)))
