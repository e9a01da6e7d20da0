"""SynthID in PyTorch: a tournament among the likeliest tokens. Twin: jaxbench/watermark/device/synthid.py."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from jaxbench.watermark import reference
from jaxbench.watermark.device.contract import KeyedStep, State
from jaxbench.watermark.schemes.synthid import HEAD_BLOCK
from torch_ref.watermark import prf
from torch_ref.watermark.device.marks import ReweightingMark


class Mark(ReweightingMark):
    """SynthID on a device."""

    def reweighted(self, state: State, keyed: KeyedStep, logits: Float[Tensor, "B V"]) -> Float[Tensor, "B V"]:
        """Logarithm of the distribution after the tournament, up to a constant in each row."""
        candidates, site = self.scheme.candidates, reference.site_of(self.scheme)
        if candidates is not None and candidates < self.vocab_size:
            return self._played_by_head(keyed, logits, candidates)
        words = prf.lanes(keyed.key, keyed.seeds, site=site, num_elements=self.vocab_size)
        return _play(logits, prf.interleave(words, self.vocab_size), self.scheme.depth)

    def _played_by_head(self, keyed: KeyedStep, logits: Float[Tensor, "B V"], candidates: int) -> Float[Tensor, "B V"]:
        """Return logits after a tournament among the tokens of schemes.synthid.head."""
        size, rows = HEAD_BLOCK, torch.arange(logits.shape[0], device=logits.device)[:, None]
        padded = torch.nn.functional.pad(logits, (0, -self.vocab_size % size), value=-torch.inf)
        blocks = padded.reshape(logits.shape[0], -1, size)
        order = torch.sort(blocks.amax(dim=-1), dim=-1, descending=True, stable=True).indices
        chosen = order[:, : candidates // size]
        words = block_words(keyed.key, keyed.seeds, chosen, size=size, site=reference.site_of(self.scheme))
        played = _play(blocks[rows, chosen].reshape(logits.shape[0], -1), words, self.scheme.depth)
        changed = blocks.clone()
        changed[rows, chosen] = played.reshape(logits.shape[0], -1, size)
        return changed.reshape(logits.shape[0], -1)[:, : self.vocab_size]


def block_words(
    key: prf.Halves, seeds: Int64[Tensor, "B 2"], blocks: Int64[Tensor, "B n"], *, size: int, site: int
) -> Int64[Tensor, "B C"]:
    """Return the words of tokens size * b .. size * b + size - 1 of each block b, in order; size is a multiple of 4."""
    counters = blocks[:, :, None] * (size // 4) + prf.block_numbers(size, device=blocks.device)[:, None, :]
    words = prf.random_blocks((counters.reshape(blocks.shape[0], -1), seeds[:, :1], seeds[:, 1:], site), key)
    return prf.interleave(words, blocks.shape[1] * size)


def _play(logits: Float[Tensor, "B C"], words: Int64[Tensor, "B C"], depth: int) -> Float[Tensor, "B C"]:
    """Return logits after a tournament among all of them; their logsumexp stays the same."""
    p = torch.softmax(logits, dim=-1)
    return logits + torch.log(torch.where(p > 0, _tournament(p, words, depth) / torch.where(p > 0, p, 1), 1))


def _tournament(p: Float[Tensor, "B V"], words: Int64[Tensor, "B V"], depth: int) -> Float[Tensor, "B V"]:
    """Compute schemes.synthid.tournament of each row."""
    for i in range(depth):
        g = (words >> i & 1).to(p.dtype)
        p = p * (1 + g - torch.clamp((g * p).sum(dim=-1, keepdim=True), max=1))
    return p
