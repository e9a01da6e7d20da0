"""DiP in JAX: probability moved to the end of a keyed order. Twin: torch_ref/watermark/device/dip.py."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Int, UInt32

from jaxbench import philox
from jaxbench.watermark import prf
from jaxbench.watermark.device.contract import KeyedStep, State
from jaxbench.watermark.device.marks import ReweightingMark
from jaxbench.watermark.schemes.dip import FEISTEL_ROUNDS, MIX_MULTIPLIERS, order_bits


class Mark(ReweightingMark):
    """DiP on a device."""

    def reweighted(self, state: State, keyed: KeyedStep, logits: Float[Array, "B V"]) -> Float[Array, "B V"]:
        """Logarithm of the reweighted distribution."""
        p = jax.nn.softmax(logits, axis=-1)
        keys = round_keys((keyed.key[0][:, 0], keyed.key[1][:, 0]), keyed.seeds)
        return jnp.log(_moved(p, keys, self.scheme.alpha))

    def text_words(self, key: prf.Halves, text: prf.Text) -> tuple[prf.Words, prf.Seeds]:
        """Return the words and seeds of the tokens of texts."""
        seeds = prf.text_seeds(self.scheme.context, key, text.tokens)
        return token_words(key, seeds, text.tokens, vocab_size=self.vocab_size), seeds


def token_words(
    key: prf.Halves, seeds: UInt32[Array, "*shape 2"], tokens: Int[Array, "*shape"], *, vocab_size: int
) -> UInt32[Array, "*shape"]:
    """Each token's place in the order of its seed, in the top bits of a word."""
    bits = order_bits(vocab_size)
    return permute(tokens.astype(jnp.uint32), round_keys(key, seeds), bits) << (32 - bits)


def _moved(p: Float[Array, "B V"], keys: UInt32[Array, "B 8"], alpha: float) -> Float[Array, "B V"]:
    """schemes.dip.reweight of each row, in the order that the round keys give.

    A token gets p if it lies after the place where the cumulative mass of the order passes alpha, and p once more
    after the place where it passes 1 - alpha. Both places are found bit by bit: one sum per bit is cheaper than sorting
    the tokens.
    """
    bits = order_bits(p.shape[1])
    places = permute(jnp.arange(p.shape[1], dtype=jnp.uint32)[None, :], keys[:, None, :], bits)

    def mass_before(place: UInt32[Array, "B 1"]) -> Float[Array, "B 1"]:
        return jnp.sum(jnp.where(places < place, p, 0), axis=-1, keepdims=True)

    def kept(threshold: float) -> Float[Array, "B V"]:
        def bit(i: Array, place: Array) -> Array:
            further = place | (jnp.uint32(1) << (bits - 1 - i).astype(jnp.uint32))
            return jnp.where(mass_before(further) <= threshold, further, place)

        place = lax.fori_loop(0, bits, bit, jnp.zeros((p.shape[0], 1), jnp.uint32))
        part = jnp.clip(mass_before(place) + p - threshold, 0, p)
        return jnp.where(places > place, p, jnp.where(places == place, part, 0))

    return kept(alpha) + kept(1 - alpha)


# The keyed order


def round_keys(key: prf.Halves, seeds: UInt32[Array, "*shape 2"]) -> UInt32[Array, "*shape 8"]:
    """Round keys of each seed: two Philox blocks."""
    site = philox.site_id("watermark/dip")
    blocks = [prf.random_blocks((i, seeds[..., 0], seeds[..., 1], site), key) for i in range(2)]
    return jnp.stack(jnp.broadcast_arrays(*blocks[0], *blocks[1]), axis=-1)


def mix(x: UInt32[Array, "*shape"]) -> UInt32[Array, "*shape"]:
    """32-bit finaliser of MurmurHash3 (Appleby 2011), a bijection."""
    x = (x ^ (x >> 16)) * jnp.uint32(MIX_MULTIPLIERS[0])
    x = (x ^ (x >> 13)) * jnp.uint32(MIX_MULTIPLIERS[1])
    return x ^ (x >> 16)


def permute(values: Array, keys: UInt32[Array, "*shape 8"], bits: int) -> UInt32[Array, "*shape"]:
    """Permute values in [0, 2**bits) by the Feistel network with these round keys."""
    half, mask = bits // 2, 2 ** (bits // 2) - 1
    left, right = values >> half, values & mask
    for i in range(FEISTEL_ROUNDS):
        left, right = right, left ^ (mix(right ^ keys[..., i]) >> (32 - half))
    return (left << half) | right
