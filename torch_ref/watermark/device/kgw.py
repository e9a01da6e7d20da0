"""KGW in PyTorch: a bias on green logits, whose words lie below a threshold. Twin: jaxbench/watermark/device/kgw.py."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Int, Int64
from torch import Tensor

from jaxbench import philox
from jaxbench.watermark import reference
from jaxbench.watermark.device.contract import Position, State, active_rows, first_key
from jaxbench.watermark.reference import SELF_SITE
from jaxbench.watermark.schemes import green_count
from torch_ref.watermark import prf
from torch_ref.watermark.device import marks


class Mark(marks.Mark):
    """KGW on a device."""

    def first_state(self, state: State) -> State:
        """Return the state; under the rule `self` with the words P(v, v), which depend only on the key."""
        if self.scheme.context.kind != "self":
            return state
        return state | {"own": own_lanes(first_key(state), num_elements=self.vocab_size)}

    def green_tokens(self, state: State, at: Position) -> Bool[Tensor, "B V"]:
        """Return the green tokens, given their contexts, of rows marked at this step; none in other rows."""
        is_active = active_rows(self.scheme, state, at)
        if not is_active.any():
            return torch.zeros((at.tokens.shape[0], self.vocab_size), dtype=torch.bool, device=at.tokens.device)
        rule, key = self.scheme.context, first_key(state)
        contexts = marks.last_tokens(at, rule.length)
        if rule.kind == "self":
            words = self._candidate_lanes(state, contexts, key)
        else:
            seeds = prf.seeds_after(rule, (key[0][:, 0], key[1][:, 0]), contexts, None)
            words = prf.lanes(key, seeds, site=reference.site_of(self.scheme), num_elements=self.vocab_size)
        threshold = green_count.threshold(self.scheme.gamma)
        green = prf.interleave([word < threshold for word in words], self.vocab_size) & is_active[:, None]
        if rule.kind == "self" or "payload" not in state:
            return green
        return prf.shift(green, state["payload"])

    def _candidate_lanes(self, state: State, contexts: Int[Tensor, "B n"], key: prf.Halves) -> prf.Lanes:
        """Return the words of all candidates under the rule `self`, in lanes."""
        if "payload" not in state:
            site = reference.site_of(self.scheme)
            return self_lanes(key, contexts, state["own"], site=site, num_elements=self.vocab_size)
        candidates = torch.arange(4 * -(-self.vocab_size // 4), device=contexts.device)[None, :]
        seeds = prf.self_seeds(contexts[:, None, :], candidates, key)
        options = {"vocab_size": self.vocab_size, "payload": state["payload"][:, None]}
        words = prf.token_words(self.scheme, key, seeds, candidates, **options)
        return tuple(torch.movedim(words.reshape(words.shape[0], -1, 4), 2, 0))


def self_lanes(
    key: prf.Halves, contexts: Int[Tensor, "B n"], own: Int64[Tensor, "B 4 C"], *, site: int, num_elements: int
) -> prf.Lanes:
    """Return the words of all candidates under the rule `self`, in lanes; own[:, j] is lane j of P(v, v)."""
    blocks, least = prf.block_numbers(num_elements, device=key[0].device), [own[:, j] for j in range(4)]
    for i in range(contexts.shape[1]):
        pairs = prf.random_blocks((blocks, contexts[:, i : i + 1].to(torch.int64) & philox.MASK32, 0, SELF_SITE), key)
        least = [torch.minimum(one, other) for one, other in zip(least, pairs)]
    words = (prf.random_blocks((blocks, least[j], 0, site), key)[j] for j in range(4))
    return tuple(words)


def own_lanes(key: prf.Halves, *, num_elements: int) -> Int64[Tensor, "B 4 C"]:
    """Return P(v, v) of all tokens v in lanes: the part of self_lanes that does not depend on the context."""
    tokens = torch.arange(4 * -(-num_elements // 4), device=key[0].device)[None, :]
    return prf.pair_words(tokens, tokens, key).reshape(-1, tokens.shape[1] // 4, 4).swapaxes(1, 2)
