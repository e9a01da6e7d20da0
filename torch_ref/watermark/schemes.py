"""Watermarks as logit processors of sample.Generator. Twin: jaxbench/watermark/schemes.py.

One processor serves a batch in which every row has a key of its own, or none. Keys enter by
`Watermark.state`. Schemes of one batch chain: a processor each, and each row marked in
one of them. Source of the mathematics: definition.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float, Int, Int64
from torch import Tensor

from jaxbench import philox
from jaxbench.watermark import config, definition, states
from jaxbench.watermark.keys import Key
from torch_ref import prng
from torch_ref.sample import OrdinaryDraw
from torch_ref.watermark import prf

HISTORY = 1024  # contexts of a row that are remembered
ROUTE_SITE = philox.site_id("watermark/route")
State = dict[str, Tensor]


class Watermark:
    """A logit processor that marks text with one scheme.

    Attributes:
      draws: True where it replaces the draw of tokens (gumbel, synthid, dip).
      shared: the bit table of kgw_markllm and kgw_transformers.
    """

    def __init__(self, scheme: Any, *, vocab_size: int, tables: Any = None, device: str = "cpu"):
        """Prepare a scheme (a name, a mapping or a configuration) for logits of vocab_size tokens.

        Raises:
          ValueError: the scheme is unknown or detection only, or its tables (tables.Tables) are missing or of another
            vocabulary.
        """
        self.scheme, self.vocab_size = config.parse_scheme(scheme), vocab_size
        self.draws, self._tables, self._device = config.draws(self.scheme), tables, device
        states.check_generation(self.scheme, vocab_size, tables)
        if self._is_tabled:
            arrays = {"bits": tables.bits(), "values": tables.values, "rows": tables.rows}
            self.shared = {name: torch.tensor(array, device=device) for name, array in arrays.items()}

    def state(
        self,
        keys: Sequence[Key | None],
        *,
        payloads: Sequence[int] | None = None,
        seed: int = 0,
        row_ids: Sequence[int] | None = None,
        batch_size: int = 0,
    ) -> State:
        """Return the state of a batch before its first token: arrays with a row for each key, None = not marked.

        Args:
          payloads: the message of each row, 0 <= payload < 2**payload_bits.
          seed, row_ids: of the ordinary randomness that chooses between the two keys of a dual-key scheme.
          batch_size: fill up with unmarked rows to this many.

        Raises:
          ValueError: there is no row, or a payload does not fit the scheme.
        """
        keys = [*keys, *[None] * (batch_size - len(keys))]
        options = {"vocab_size": self.vocab_size, "payloads": payloads, "seed": seed, "row_ids": row_ids}
        arrays = states.generation_state(self.scheme, keys, **options)
        state = {name: self._tensor(array) for name, array in arrays.items()}
        if self._is_self:
            state["own"] = prf.own_lanes(prf.halves(state["keys"][:, :2], 2), num_elements=self.vocab_size)
        if self._remembers:
            state["used"] = torch.zeros((len(keys), HISTORY, 2), dtype=torch.int64, device=self._device)
        return state

    def _tensor(self, array: Any) -> Tensor:
        is_word = array.dtype.kind == "u"
        return torch.from_numpy(array.astype("int64") if is_word else array).to(self._device)

    def init(self, batch_size: int) -> State:
        """Raise: a batch has no keys of its own.

        Raises:
          ValueError: always; pass states.
        """
        raise ValueError(
            f"watermark {self.scheme.scheme}: {batch_size} rows have no keys; pass "
            "processor_states=[watermark.state(keys)] to the generator"
        )

    def apply(
        self, state: Any, logits: Float[Tensor, "B V"], tokens: Int[Tensor, "B W"], length: Int[Tensor, " B"], step: int
    ) -> tuple[State, Float[Tensor, "B V"]]:
        """Return the state and the logits with their green tokens raised; a scheme that draws changes nothing here."""
        if self.draws:
            return state, logits
        shared, state = state if self._is_tabled else (None, state)
        bias = self.scheme.bias if self.scheme.scheme == "kgw_transformers" else self.scheme.delta
        is_active = self._is_active(state, length)
        if self.scheme.scheme == "unigram":
            is_green = state["green"] & is_active[:, None]
        elif self._is_tabled:
            is_green = self._listed(shared, tokens, length) & is_active[:, None]
        else:
            is_green = self._kgw_green(state, tokens, length, step, is_active)
        return state, logits + is_green.to(logits.dtype) * bias

    def draw(
        self,
        state: State,
        logits: Float[Tensor, "B V"],
        tokens: Int[Tensor, "B W"],
        length: Int[Tensor, " B"],
        step: int,
        sample: OrdinaryDraw,
    ) -> tuple[State, Int[Tensor, " B"]]:
        """Return the next state and the tokens of rows with a key, -1 for others and for steps that mark no row.

        Where some rows are marked and some have nothing to be marked with (a known context, a text too short), the
        latter get their ordinary token from the same draw: a second one would double what the watermark costs.

        Args:
          logits: after temperature and filters.
        """
        state, seeds, is_active = self._admit(state, tokens, length, step)

        if not is_active.any():
            return state, torch.full_like(length, -1)
        if self.scheme.scheme == "gumbel":
            stream = self._stream(state, seeds, step)
            stream = stream if self._is_vllm else stream.where(is_active, sample)
            drawn = torch.argmax(logits + self._noise(stream, logits.dtype), dim=-1)
        else:
            drawn = sample(torch.where(is_active[:, None], self._reweighted(state, seeds, logits), logits))
        return state, torch.where(is_active if self._is_vllm else state["marked"], drawn, -1)

    def reweight(
        self, state: Any, logits: Float[Tensor, "B V"], tokens: Int[Tensor, "B W"], length: Int[Tensor, " B"], step: int
    ) -> tuple[State, Float[Tensor, "B V"]]:
        """Return the next state and logits whose ordinary draw is marked: `apply` and `draw` for other decoding loops.

        Where the draw itself is keyed (gumbel), all tokens but the drawn one are -inf.
        """
        if not self.draws:
            return self.apply(state, logits, tokens, length, step)
        state, seeds, is_active = self._admit(state, tokens, length, step)
        if self.scheme.scheme == "gumbel":
            drawn = torch.argmax(logits + self._noise(self._stream(state, seeds, step), logits.dtype), dim=-1)
            changed = torch.full_like(logits, -torch.inf).scatter_(1, drawn[:, None], 0.0)
        else:
            changed = self._reweighted(state, seeds, logits)
        return state, torch.where(is_active[:, None], changed, logits)

    @property
    def _is_tabled(self) -> bool:
        return self.scheme.scheme in ("kgw_markllm", "kgw_transformers")

    @property
    def _is_self(self) -> bool:
        return self.scheme.scheme == "kgw" and self.scheme.context.kind == "self"

    @property
    def _is_vllm(self) -> bool:
        return self.scheme.scheme == "gumbel" and self.scheme.prf == "vllm"

    @property
    def _remembers(self) -> bool:
        return self.scheme.scheme in ("synthid", "dip") or (self.scheme.scheme == "gumbel" and self.scheme.deduplicate)

    def _is_active(self, state: State, length: Int[Tensor, " B"]) -> Bool[Tensor, " B"]:
        return state["marked"] & (length >= config.context_length(self.scheme))

    def _contexts(self, width: int, tokens: Tensor, length: Tensor, step: int) -> Int[Tensor, "B n"]:
        """Return the last `width` tokens of each row; for vLLM's function -1 in place of the prompt's."""
        places = length[:, None] + torch.arange(-width, 0, device=length.device)[None, :]
        contexts = torch.gather(tokens, 1, torch.clamp(places, min=0)).to(torch.int64)
        if self._is_vllm:
            contexts = torch.where(places >= (length - step)[:, None], contexts, -1)
        return contexts

    def _kgw_green(self, state, tokens, length, step, is_active) -> Bool[Tensor, "B V"]:
        """Return the green tokens of rows that are marked here."""
        if not is_active.any():
            return torch.zeros((tokens.shape[0], self.vocab_size), dtype=torch.bool, device=tokens.device)
        site, size = definition.site_of(self.scheme), {"num_elements": self.vocab_size}
        rule, key = self.scheme.context, prf.halves(state["keys"][:, :2], 2)
        contexts = self._contexts(rule.length, tokens, length, step)
        if self._is_self and "payload" in state:
            words = self._self_words(state, contexts, key)
        elif self._is_self:
            words = prf.self_lanes(key, contexts, state["own"], site=site, **size)
        else:
            seeds = prf.seeds_after(rule, (key[0][:, 0], key[1][:, 0]), contexts, None)
            words = prf.lanes(key, seeds, site=site, **size)
        threshold = definition.green_threshold(self.scheme.gamma)
        green = prf.interleave([word < threshold for word in words], self.vocab_size) & is_active[:, None]
        return green if self._is_self or "payload" not in state else _shift(green, state["payload"])

    def _self_words(self, state: State, contexts: Tensor, key: prf.Halves) -> prf.Lanes:
        """Return the words of all candidates under the rule `self` with payloads, in lanes."""
        candidates = torch.arange(4 * -(-self.vocab_size // 4), device=contexts.device)[None, :]
        seeds = prf.self_seeds(contexts[:, None, :], candidates, key)
        options = {"vocab_size": self.vocab_size, "payload": state["payload"][:, None]}
        words = prf.token_words(self.scheme, key, seeds, candidates, **options)
        return tuple(torch.movedim(words.reshape(words.shape[0], -1, 4), 2, 0))

    def _listed(self, shared: State, tokens: Tensor, length: Tensor) -> Bool[Tensor, "B V"]:
        """Return the green list that the context of each row selects from the bit table."""
        tables = self._tables
        contexts = shared["values"][self._contexts(tables.width, tokens, length, 0)]
        if tables.combine == "skip":
            combined = contexts[:, -tables.lag]
        elif tables.combine == "min":
            combined = torch.amin(contexts, dim=1)
        else:
            combined = contexts[:, 0]
            for i in range(1, tables.width):
                other = contexts[:, i]
                product = combined * other if tables.combine == "time" else combined + other
                combined = product % self.vocab_size
        packed = shared["bits"][shared["rows"][combined]]
        green = (packed[:, :, None] >> torch.arange(8, dtype=torch.uint8, device=packed.device)[None, None, :]) & 1
        return green.reshape(packed.shape[0], -1)[:, : self.vocab_size] != 0

    def _admit(self, state, tokens, length, step) -> tuple[State, Int64[Tensor, "B S"], Bool[Tensor, " B"]]:
        """Return the state that knows this context, its seed, and which rows are drawn with their key."""
        rule, key = self.scheme.context, self._key(state, step)
        contexts, pair = self._contexts(rule.width, tokens, length, step), (key[0][:, 0], key[1][:, 0])
        is_active = self._is_active(state, length)
        if self._is_vllm:
            seeds = prf.vllm_state(contexts, pair)
        else:
            seeds = prf.seeds_after(rule, pair, contexts, None)
        if not self._remembers:
            return state, seeds, is_active
        # What is remembered is the context's seed under the first key, whichever key this step uses.
        name = seeds[:, :2] if self._alpha == 0 else prf.seeds_after(rule, self._first(state), contexts, None)
        slots = torch.arange(HISTORY, device=length.device)[None, :]
        is_known = (state["used"] == name[:, None, :]).all(dim=-1) & (slots < step)
        is_active = is_active & ~is_known.any(dim=1)
        entry = torch.where(is_active[:, None], name, 0)[:, None, :]
        used = torch.where((slots == step % HISTORY)[..., None], entry, state["used"])
        return state | {"used": used}, seeds, is_active

    @property
    def _alpha(self) -> float:
        return getattr(self.scheme, "dual_key_alpha", 0.0)

    def _first(self, state: State) -> prf.Halves:
        return state["keys"][:, 0], state["keys"][:, 1]

    def _key(self, state: State, step: int) -> prf.Halves:
        """Return the key [B 1] of each row at this step: with two keys, the second in a share alpha of the steps."""
        keys = state["keys"]
        if self._alpha == 0:
            return keys[:, :1], keys[:, 1:2]
        low, high, row = state["route"].T
        counter = (torch.zeros_like(row), row, torch.full_like(row, step), torch.full_like(row, ROUTE_SITE))
        word = prng.philox4x32(counter, (low, high))[0]
        use_second = (word < min(int(self._alpha * 2**32), philox.MASK32))[:, None]
        return torch.where(use_second, keys[:, 2:3], keys[:, :1]), torch.where(use_second, keys[:, 3:], keys[:, 1:2])

    def _stream(self, state: State, seeds: Tensor, step: int) -> prf.Stream:
        """Return where each row's keyed words come from."""
        site = torch.full((seeds.shape[0], 1), definition.site_of(self.scheme), device=seeds.device)
        return prf.Stream(self._key(state, step), seeds, site, state.get("payload"))

    def _noise(self, stream: prf.Stream, dtype: torch.dtype) -> Float[Tensor, "B V"]:
        """Return the keyed Gumbel noise -log(-log u) of every token."""
        name, size = str(dtype).removeprefix("torch."), {"num_elements": self.vocab_size}
        if self._is_vllm:
            words = prf.vllm_lanes(stream.seeds, stream.key, **size)
            return prf.interleave([-torch.log(_vllm_exponential(w, dtype)) for w in words], self.vocab_size)
        words = prf.lanes(stream.key, stream.seeds, site=stream.site, **size)
        noise = prf.interleave([-torch.log(prng.exponential(w, dtype=name)) for w in words], self.vocab_size)
        return noise if stream.payload is None else _shift(noise, stream.payload)

    def _reweighted(self, state: State, seeds: Tensor, logits: Float[Tensor, "B V"]) -> Float[Tensor, "B V"]:
        """Return the logarithm of the reweighted distribution (synthid, dip)."""
        key = prf.halves(state["keys"][:, :2], 2)
        if self.scheme.scheme == "dip":
            p = torch.softmax(logits, dim=-1)
            return torch.log(_dip(p, prf.round_keys((key[0][:, 0], key[1][:, 0]), seeds), self.scheme.alpha))
        candidates, site = self.scheme.candidates, definition.site_of(self.scheme)
        if candidates is not None and candidates < self.vocab_size:
            return self._played_by_head(key, seeds, logits, candidates)
        words = prf.lanes(key, seeds, site=site, num_elements=self.vocab_size)
        return _play(logits, prf.interleave(words, self.vocab_size), self.scheme.depth)

    def _played_by_head(
        self, key: prf.Halves, seeds: Tensor, logits: Float[Tensor, "B V"], candidates: int
    ) -> Float[Tensor, "B V"]:
        """Return the logits after a tournament among the tokens of definition.head."""
        size, rows = definition.HEAD_BLOCK, torch.arange(logits.shape[0], device=logits.device)[:, None]
        padded = torch.nn.functional.pad(logits, (0, -self.vocab_size % size), value=-torch.inf)
        blocks = padded.reshape(logits.shape[0], -1, size)
        order = torch.sort(blocks.amax(dim=-1), dim=-1, descending=True, stable=True).indices
        chosen = order[:, : candidates // size]
        words = prf.block_words(key, seeds, chosen, size=size, site=definition.site_of(self.scheme))
        found = _play(blocks[rows, chosen].reshape(logits.shape[0], -1), words, self.scheme.depth)
        changed = blocks.clone()
        changed[rows, chosen] = found.reshape(logits.shape[0], -1, size)
        return changed.reshape(logits.shape[0], -1)[:, : self.vocab_size]


def _shift(values: Tensor, payload: Int[Tensor, " B"]) -> Tensor:
    """Return values [B V] with token v taking the place of token (v + payload) mod V."""
    places = torch.arange(values.shape[1], device=values.device)[None, :] + payload[:, None]
    return torch.gather(values, 1, places % values.shape[1])


def _vllm_exponential(words: Int64[Tensor, "*shape"], dtype: torch.dtype) -> Float[Tensor, "*shape"]:
    """Return -log u of vLLM's uniform u = ((w >> 8) + 1) / (2**24 + 1), by log1p of the complement above one half."""
    k, scale = (words >> 8) + 1, torch.tensor(2.0**24 + 1.0, dtype=dtype, device=words.device)
    is_low = k < 2**23
    low = torch.where(is_low, k, 1).to(dtype) / scale
    complement = torch.where(is_low, 0, 2**24 + 1 - k).to(dtype) / scale
    return torch.where(is_low, -torch.log(low), -torch.log1p(-complement))


def _play(logits: Float[Tensor, "B C"], words: Int64[Tensor, "B C"], depth: int) -> Float[Tensor, "B C"]:
    """Return logits after the tournament among them; their logsumexp stays."""
    p = torch.softmax(logits, dim=-1)
    return logits + torch.log(torch.where(p > 0, _tournament(p, words, depth) / torch.where(p > 0, p, 1), 1))


def _tournament(p: Float[Tensor, "B V"], words: Int64[Tensor, "B V"], depth: int) -> Float[Tensor, "B V"]:
    """Return definition.tournament of each row."""
    for i in range(depth):
        g = (words >> i & 1).to(p.dtype)
        p = p * (1 + g - torch.clamp((g * p).sum(dim=-1, keepdim=True), max=1))
    return p


def _dip(p: Float[Tensor, "B V"], keys: Int64[Tensor, "B 8"], alpha: float) -> Float[Tensor, "B V"]:
    """Return definition.reweight of each row, in the order that the round keys give.

    A token keeps p from the place on where the mass of the order passes alpha, and gets p again where it passes
    1 - alpha. The two places are found bit by bit: a sum a bit is cheaper than to put the tokens in order.
    """
    bits = definition.order_bits(p.shape[1])
    places = prf.permute(torch.arange(p.shape[1], device=p.device)[None, :], keys[:, None, :], bits)

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
