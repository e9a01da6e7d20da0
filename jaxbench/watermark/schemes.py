"""Watermarks as logit processors of sample.Generator. Twin: torch_ref/watermark/schemes.py.

One processor serves a batch in which every row has a key of its own, or none. Keys enter the compiled programs as
arguments (`Watermark.state`), never as constants. Schemes of one batch chain: a processor each, and each row marked in
one of them. Source of the mathematics: definition.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float, Int, UInt32

from jaxbench import philox, prng
from jaxbench.sample import OrdinaryDraw, largest_sum
from jaxbench.watermark import config, definition, prf, states
from jaxbench.watermark.keys import Key

HISTORY = 1024  # contexts of a row that are remembered
ROUTE_SITE = philox.site_id("watermark/route")
LAYERS = 5  # of a tournament, computed from one stored distribution
State = dict[str, Array]


class Watermark:
    """A logit processor that marks text with one scheme.

    Attributes:
      draws: True where it replaces the draw of tokens (gumbel, synthid, dip).
      shared: the bit table of kgw_markllm and kgw_transformers.
    """

    def __init__(self, scheme: Any, *, vocab_size: int, tables: Any = None):
        """Prepare a scheme (a name, a mapping or a configuration) for logits of vocab_size tokens.

        Raises:
          ValueError: the scheme is unknown or detection only, or its tables (tables.Tables) are missing or of another
            vocabulary.
        """
        self.scheme, self.vocab_size = config.parse_scheme(scheme), vocab_size
        self.draws, self._tables = config.draws(self.scheme), tables
        states.check_generation(self.scheme, vocab_size, tables)
        if self._is_tabled:
            self.shared = {"bits": jnp.asarray(tables.bits()), "values": jnp.asarray(tables.values, jnp.int32)}
            self.shared["rows"] = jnp.asarray(tables.rows, jnp.int32)

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
        state = {name: jnp.asarray(array) for name, array in arrays.items()}
        if self._is_self:
            state["own"] = prf.own_lanes(prf.halves(state["keys"][:, :2], 2), num_elements=self.vocab_size)
        if self._remembers:
            state["used"] = jnp.zeros((len(keys), HISTORY, 2), jnp.uint32)
        return state

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
        self, state: Any, logits: Float[Array, "B V"], tokens: Int[Array, "B W"], length: Int[Array, " B"], step: Array
    ) -> tuple[State, Float[Array, "B V"]]:
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
        return state, logits + is_green.astype(logits.dtype) * jnp.asarray(bias, logits.dtype)

    def draw(
        self,
        state: State,
        logits: Float[Array, "B V"],
        tokens: Int[Array, "B W"],
        length: Int[Array, " B"],
        step: Array,
        sample: OrdinaryDraw,
    ) -> tuple[State, Int[Array, " B"]]:
        """Return the next state and the tokens of rows with a key, -1 for others and for steps that mark no row.

        Where some rows are marked and some have nothing to be marked with (a known context, a text too short), the
        latter get their ordinary token from the same draw: a second one would double what the watermark costs.

        Args:
          logits: after temperature and filters.
        """
        state, seeds, is_active = self._admit(state, tokens, length, step)
        is_gumbel = self.scheme.scheme == "gumbel"
        if is_gumbel:
            # Outside of the branch: what a branch is given is stored, and not chosen anew at every block.
            stream = self._stream(state, seeds, step)
            stream = stream if self._is_vllm else stream.where(is_active, sample)

        def marked() -> Array:
            if is_gumbel:
                return largest_sum(logits, self._noise(stream, str(logits.dtype)))
            changed = jnp.where(is_active[:, None], self._reweighted(state, seeds, logits), logits)
            return sample(changed).astype(jnp.int32)

        drawn = lax.cond(jnp.any(is_active), marked, lambda: jnp.full(logits.shape[:1], -1, jnp.int32))
        return state, jnp.where(is_active if self._is_vllm else state["marked"], drawn, -1)

    def reweight(
        self, state: Any, logits: Float[Array, "B V"], tokens: Int[Array, "B W"], length: Int[Array, " B"], step: Array
    ) -> tuple[State, Float[Array, "B V"]]:
        """Return the next state and logits whose ordinary draw is marked: `apply` and `draw` for other decoding loops.

        Where the draw itself is keyed (gumbel), all tokens but the drawn one are -inf.
        """
        if not self.draws:
            return self.apply(state, logits, tokens, length, step)
        state, seeds, is_active = self._admit(state, tokens, length, step)
        if self.scheme.scheme == "gumbel":
            drawn = largest_sum(logits, self._noise(self._stream(state, seeds, step), str(logits.dtype)))
            changed = jnp.where(jnp.arange(logits.shape[1])[None, :] == drawn[:, None], 0.0, -jnp.inf)
        else:
            changed = self._reweighted(state, seeds, logits)
        return state, jnp.where(is_active[:, None], changed, logits)

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

    def _is_active(self, state: State, length: Int[Array, " B"]) -> Bool[Array, " B"]:
        return state["marked"] & (length >= config.context_length(self.scheme))

    def _contexts(self, width: int, tokens: Array, length: Array, step: Array) -> Int[Array, "B n"]:
        """Return the last `width` tokens of each row; for vLLM's function -1 in place of the prompt's."""
        places = length[:, None] + jnp.arange(-width, 0)[None, :]
        contexts = jnp.take_along_axis(tokens, jnp.maximum(places, 0), axis=1)
        if self._is_vllm:
            contexts = jnp.where(places >= (length - step)[:, None], contexts, -1)
        return contexts

    def _kgw_green(self, state, tokens, length, step, is_active) -> Bool[Array, "B V"]:
        """Return the green tokens of rows that are marked here."""
        site, threshold = definition.site_of(self.scheme), jnp.uint32(definition.green_threshold(self.scheme.gamma))
        size = {"num_elements": self.vocab_size}
        rule, key = self.scheme.context, prf.halves(state["keys"][:, :2], 2)
        contexts = self._contexts(rule.length, tokens, length, step)

        def bits() -> Array:
            if self._is_self and "payload" in state:
                words = self._self_words(state, contexts, key)
            elif self._is_self:
                words = prf.self_lanes(key, contexts, state["own"], site=site, **size)
            else:
                seeds = prf.seeds_after(rule, (key[0][:, 0], key[1][:, 0]), contexts, None)
                words = prf.lanes(key, seeds, site=site, **size)
            green = ((word < threshold).astype(jnp.uint32) << j for j, word in enumerate(words))
            return jnp.where(is_active[:, None], sum(green), 0).astype(jnp.uint8)

        # The branch's result is stored: fused into the sum with the logits, every block would be computed four times.
        shape = (tokens.shape[0], -(-self.vocab_size // 4))
        packed = lax.cond(jnp.any(is_active), bits, lambda: jnp.zeros(shape, jnp.uint8))
        green = (packed[:, :, None] >> jnp.arange(4, dtype=jnp.uint8)[None, None, :]) & 1
        green = green.reshape(shape[0], -1)[:, : self.vocab_size] != 0
        return green if self._is_self or "payload" not in state else _shift(green, state["payload"])

    def _self_words(self, state: State, contexts: Array, key: prf.Halves) -> prf.Lanes:
        """Return the words of all candidates under the rule `self` with payloads, in lanes."""
        candidates = jnp.arange(4 * -(-self.vocab_size // 4), dtype=jnp.uint32)[None, :]
        seeds = prf.self_seeds(contexts[:, None, :], candidates, key)
        options = {"vocab_size": self.vocab_size, "payload": state["payload"][:, None]}
        words = prf.token_words(self.scheme, key, seeds, candidates, **options)
        return tuple(jnp.moveaxis(words.reshape(words.shape[0], -1, 4), 2, 0))

    def _listed(self, shared: State, tokens: Array, length: Array) -> Bool[Array, "B V"]:
        """Return the green list that the context of each row selects from the bit table."""
        tables = self._tables
        contexts = shared["values"][self._contexts(tables.width, tokens, length, jnp.int32(0))]
        if tables.combine == "skip":
            combined = contexts[:, -tables.lag]
        elif tables.combine == "min":
            combined = jnp.min(contexts, axis=1)
        else:
            combined = contexts[:, 0].astype(jnp.uint32)
            for i in range(1, tables.width):
                other = contexts[:, i].astype(jnp.uint32)
                product = combined * other if tables.combine == "time" else combined + other
                combined = product % self.vocab_size
        packed = shared["bits"][shared["rows"][combined]]
        green = (packed[:, :, None] >> jnp.arange(8, dtype=jnp.uint8)[None, None, :]) & 1
        return green.reshape(packed.shape[0], -1)[:, : self.vocab_size] != 0

    def _admit(self, state, tokens, length, step) -> tuple[State, UInt32[Array, "B S"], Bool[Array, " B"]]:
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
        is_known = jnp.all(state["used"] == name[:, None, :], axis=-1) & (jnp.arange(HISTORY)[None, :] < step)
        is_active &= ~jnp.any(is_known, axis=1)
        entry = jnp.where(is_active[:, None], name, 0)[:, None, :]
        used = lax.dynamic_update_slice_in_dim(state["used"], entry, step % HISTORY, axis=1)
        return state | {"used": used}, seeds, is_active

    @property
    def _alpha(self) -> float:
        return getattr(self.scheme, "dual_key_alpha", 0.0)

    def _first(self, state: State) -> prf.Halves:
        return state["keys"][:, 0], state["keys"][:, 1]

    def _key(self, state: State, step: Array) -> prf.Halves:
        """Return the key [B 1] of each row at this step: with two keys, the second in a share alpha of the steps."""
        keys = state["keys"]
        if self._alpha == 0:
            return keys[:, :1], keys[:, 1:2]
        low, high, row = state["route"].T
        counter = (jnp.zeros_like(row), row, jnp.full_like(row, step), jnp.full_like(row, ROUTE_SITE))
        word = prng.philox4x32(counter, (low, high))[0]
        use_second = (word < jnp.uint32(min(int(self._alpha * 2**32), philox.MASK32)))[:, None]
        return jnp.where(use_second, keys[:, 2:3], keys[:, :1]), jnp.where(use_second, keys[:, 3:], keys[:, 1:2])

    def _stream(self, state: State, seeds: Array, step: Array) -> prf.Stream:
        """Return where each row's keyed words come from."""
        site = jnp.full((seeds.shape[0], 1), definition.site_of(self.scheme), jnp.uint32)
        return prf.Stream(self._key(state, step), seeds, site, state.get("payload"))

    def _noise(self, stream: prf.Stream, dtype: str) -> prf.Lanes:
        """Return the keyed Gumbel noise -log(-log u) of every token, in lanes."""
        size = {"num_elements": self.vocab_size}
        if self._is_vllm:
            words = prf.vllm_lanes(stream.seeds, stream.key, **size)
            return tuple(-jnp.log(_vllm_exponential(w, dtype)) for w in words)
        words = prf.lanes(stream.key, stream.seeds, site=stream.site, **size)
        noise = tuple(-jnp.log(prng.exponential(w, dtype=dtype)) for w in words)
        if stream.payload is None:
            return noise
        shifted = _shift(prf.interleave(noise, self.vocab_size), stream.payload)
        shifted = jnp.pad(shifted, ((0, 0), (0, -self.vocab_size % 4)))
        return tuple(shifted[:, j::4] for j in range(4))

    def _reweighted(self, state: State, seeds: Array, logits: Float[Array, "B V"]) -> Float[Array, "B V"]:
        """Return the logarithm of the reweighted distribution (synthid, dip)."""
        key = prf.halves(state["keys"][:, :2], 2)
        if self.scheme.scheme == "dip":
            p = jax.nn.softmax(logits, axis=-1)
            return jnp.log(_dip(p, prf.round_keys((key[0][:, 0], key[1][:, 0]), seeds), self.scheme.alpha))
        candidates, site = self.scheme.candidates, definition.site_of(self.scheme)
        if candidates is not None and candidates < self.vocab_size:
            return self._played_by_head(key, seeds, logits, candidates)
        words = _stored(state, lambda: prf.lanes(key, seeds, site=site, num_elements=self.vocab_size))
        return _play(logits, prf.interleave(words, self.vocab_size), self.scheme.depth)

    def _played_by_head(
        self, key: prf.Halves, seeds: Array, logits: Float[Array, "B V"], candidates: int
    ) -> Float[Array, "B V"]:
        """Return the logits after a tournament among the tokens of definition.head."""
        size, rows = definition.HEAD_BLOCK, jnp.arange(logits.shape[0])[:, None]
        padded = jnp.pad(logits, ((0, 0), (0, -self.vocab_size % size)), constant_values=-jnp.inf)
        blocks = padded.reshape(logits.shape[0], -1, size)
        chosen = lax.top_k(jnp.max(blocks, axis=-1), candidates // size)[1]
        words = prf.block_words(key, seeds, chosen, size=size, site=definition.site_of(self.scheme))
        found = _play(blocks[rows, chosen].reshape(logits.shape[0], -1), words, self.scheme.depth)
        changed = blocks.at[rows, chosen].set(found.reshape(logits.shape[0], -1, size), unique_indices=True)
        return changed.reshape(logits.shape[0], -1)[:, : self.vocab_size]


def _stored(state: State, compute: Callable) -> Any:
    """Return what `compute` returns, kept from being fused into what reads it: a branch's result is stored."""
    empty = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(compute))
    return lax.cond(jnp.any(state["marked"]), compute, lambda: empty)


def _shift(values: Array, payload: Int[Array, " B"]) -> Array:
    """Return values [B V] with token v taking the place of token (v + payload) mod V."""
    doubled = jnp.concatenate([values, values], axis=1)
    return jax.vmap(lambda row, start: lax.dynamic_slice(row, (start,), values.shape[1:]))(doubled, payload)


def _vllm_exponential(words: UInt32[Array, "*shape"], dtype: str) -> Float[Array, "*shape"]:
    """Return -log u of vLLM's uniform u = ((w >> 8) + 1) / (2**24 + 1), by log1p of the complement above one half."""
    k, scale = (words >> 8) + 1, jnp.asarray(2.0**24 + 1.0, "float64" if dtype == "float64" else "float32")
    is_low = k < 2**23
    low = jnp.where(is_low, k, 1).astype(dtype) / scale
    complement = jnp.where(is_low, 0, 2**24 + 1 - k).astype(dtype) / scale
    return jnp.where(is_low, -jnp.log(low), -jnp.log1p(-complement))


def _play(logits: Float[Array, "B C"], words: UInt32[Array, "B C"], depth: int) -> Float[Array, "B C"]:
    """Return logits after the tournament among them; their logsumexp stays."""
    p = jax.nn.softmax(logits, axis=-1)
    return logits + jnp.log(jnp.where(p > 0, _tournament(p, words, depth) / jnp.where(p > 0, p, 1), 1))


def _tournament(p: Float[Array, "B V"], words: UInt32[Array, "B V"], depth: int) -> Float[Array, "B V"]:
    """Return definition.tournament of each row."""

    def layers(p: Array, bits: Array, count: int) -> Array:
        for i in range(count):
            is_one = (bits >> i) & 1 != 0
            # Stored before it is added up: XLA:CPU adds vectors in a sum alone, single numbers in one fused with more.
            share = jnp.minimum(jnp.sum(jnp.where(is_one, p, 0), axis=-1, keepdims=True), 1)
            p = p * jnp.where(is_one, 2 - share, 1 - share)
        return p

    whole = depth // LAYERS * LAYERS
    p = lax.fori_loop(0, depth // LAYERS, lambda i, p: layers(p, words >> (LAYERS * i).astype(jnp.uint32), LAYERS), p)
    return layers(p, words >> whole, depth - whole) if depth > whole else p


def _dip(p: Float[Array, "B V"], keys: UInt32[Array, "B 8"], alpha: float) -> Float[Array, "B V"]:
    """Return definition.reweight of each row, in the order that the round keys give.

    A token keeps p from the place on where the mass of the order passes alpha, and gets p again where it passes
    1 - alpha. The two places are found bit by bit: a sum a bit is cheaper than to put the tokens in order.
    """
    bits = definition.order_bits(p.shape[1])
    places = prf.permute(jnp.arange(p.shape[1], dtype=jnp.uint32)[None, :], keys[:, None, :], bits)

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
