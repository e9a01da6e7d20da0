"""DiP in PyTorch: probability moved to the end of a keyed order. Twin: jaxbench/watermark/device/dip.py."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int, Int64
from torch import Tensor

from jaxbench import philox
from jaxbench.watermark.device.contract import KeyedStep, State
from jaxbench.watermark.schemes.dip import FEISTEL_ROUNDS, MIX_MULTIPLIERS, order_bits
from torch_ref.watermark import prf
from torch_ref.watermark.device.marks import ReweightingMark


class Mark(ReweightingMark):
    """DiP on a device."""

    def reweighted(self, state: State, keyed: KeyedStep, logits: Float[Tensor, "B V"]) -> Float[Tensor, "B V"]:
        """Logarithm of the reweighted distribution."""
        p = torch.softmax(logits, dim=-1)
        keys = round_keys((keyed.key[0][:, 0], keyed.key[1][:, 0]), keyed.seeds)
        return torch.log(_moved(p, keys, self.scheme.alpha))

    def text_words(self, key: prf.Halves, text: prf.Text) -> tuple[prf.Words, prf.Seeds]:
        """Return the words and seeds of the tokens of texts."""
        seeds = prf.text_seeds(self.scheme.context, key, text.tokens)
        return token_words(key, seeds, text.tokens, vocab_size=self.vocab_size), seeds


def token_words(
    key: prf.Halves, seeds: Int64[Tensor, "*shape 2"], tokens: Int[Tensor, "*shape"], *, vocab_size: int
) -> Int64[Tensor, "*shape"]:
    """Each token's place in the order of its seed, in the top bits of a word."""
    bits = order_bits(vocab_size)
    return permute(tokens.to(torch.int64), round_keys(key, seeds), bits) << (32 - bits)


def _moved(p: Float[Tensor, "B V"], keys: Int64[Tensor, "B 8"], alpha: float) -> Float[Tensor, "B V"]:
    """schemes.dip.reweight of each row, in the order that the round keys give, as in the twin."""
    bits = order_bits(p.shape[1])
    places = permute(torch.arange(p.shape[1], device=p.device)[None, :], keys[:, None, :], bits)

    def mass_before(place: Int64[Tensor, "B 1"]) -> Float[Tensor, "B 1"]:
        return torch.where(places < place, p, 0).sum(dim=-1, keepdim=True)

    def kept(threshold: float) -> Float[Tensor, "B V"]:
        place = torch.zeros((p.shape[0], 1), dtype=torch.int64, device=p.device)
        for i in range(bits):
            further = place | 1 << (bits - 1 - i)
            place = torch.where(mass_before(further) <= threshold, further, place)
        part = torch.minimum(torch.clamp(mass_before(place) + p - threshold, min=0), p)
        return torch.where(places > place, p, torch.where(places == place, part, 0))

    return kept(alpha) + kept(1 - alpha)


# The keyed order


def round_keys(key: prf.Halves, seeds: Int64[Tensor, "*shape 2"]) -> Int64[Tensor, "*shape 8"]:
    """Round keys of each seed: two Philox blocks."""
    site = philox.site_id("watermark/dip")
    blocks = [prf.random_blocks((i, seeds[..., 0], seeds[..., 1], site), key) for i in range(2)]
    return torch.stack(torch.broadcast_tensors(*blocks[0], *blocks[1]), dim=-1)


def mix(x: Int64[Tensor, "*shape"]) -> Int64[Tensor, "*shape"]:
    """32-bit finaliser of MurmurHash3 (Appleby 2011), a bijection."""
    x = _product(x ^ (x >> 16), MIX_MULTIPLIERS[0])
    x = _product(x ^ (x >> 13), MIX_MULTIPLIERS[1])
    return x ^ (x >> 16)


def _product(x: Int64[Tensor, "*shape"], constant: int) -> Int64[Tensor, "*shape"]:
    """Return the low 32 bits of constant * x without overflowing signed 64 bits."""
    return (x * (constant & 0xFFFF) + ((x * (constant >> 16) & 0xFFFF) << 16)) & philox.MASK32


def permute(values: Tensor, keys: Int64[Tensor, "*shape 8"], bits: int) -> Int64[Tensor, "*shape"]:
    """Permute values in [0, 2**bits) by the Feistel network with these round keys."""
    half, mask = bits // 2, 2 ** (bits // 2) - 1
    left, right = values >> half, values & mask
    for i in range(FEISTEL_ROUNDS):
        left, right = right, left ^ (mix(right ^ keys[..., i]) >> (32 - half))
    return (left << half) | right
