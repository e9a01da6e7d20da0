"""Quality under a language model: perplexity, entropy, and divergence from the unmarked distribution.

Axis letters: B rows, T tokens, V vocabulary, C positions of one chunk of logits. No twin: an evaluation runs on one
backend.

A text's perplexity is exp of the mean of -log p over its tokens; tokens without any context are not scored.
`excess` is the mean of (-log p(token) - entropy), in nats. Its expectation is 0 for text drawn from the model itself: a
deviation from 0 shows that a scheme favours probable or improbable tokens; 0 alone proves nothing. The divergence of a
text is the mean over its positions of KL(marked || plain) of the two next-token distributions, in nats, for schemes
that change logits under a given key. A scheme that replaces the draw (Gumbel, SynthID, DiP) has no marked logits to
compare and is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array, lax
from jaxtyping import Float, Int

from jaxbench import prompts
from jaxbench.transformer import Transformer

CHUNK = 16  # positions whose logits are in memory at once: 8 rows of them over 49,152 tokens are 25 MB
LENGTH_MULTIPLE = 64  # texts are padded to multiples of this, so that few programs are compiled


class Scores(NamedTuple):
    """Means over the scored tokens of each text [N]; nan if none is scored."""

    nll: np.ndarray  # -log p, nats
    entropy: np.ndarray  # of the model's distribution, nats
    divergence: np.ndarray  # KL(marked || plain), nats; nan without a processor
    num_scored: np.ndarray

    @property
    def excess(self) -> np.ndarray:
        """The nll minus entropy: 0 in expectation for text that the model drew at temperature 1."""
        return self.nll - self.entropy


class Scorer:
    """Scores texts with one model, in batches of one size and few lengths."""

    def __init__(self, model: Transformer, *, batch_size: int = 8):
        """Keep the model's arrays.

        Raises:
          ValueError: batch_size is below 1.
        """
        if batch_size < 1:
            raise ValueError(f"quality: batch_size={batch_size}, wanted at least 1")
        self._graph, state = nnx.split(model)
        self._leaves, self._structure = jax.tree.flatten(state)
        self._max_seq_len, self._batch_size = model.max_seq_len, batch_size
        self._score = jax.jit(self._score_rows)
        self._diverge = jax.jit(self._diverge_rows, static_argnums=0)

    def __call__(
        self,
        token_ids: Sequence[Sequence[int]],
        *,
        prompt_lengths: Sequence[int] | None = None,
        processor: Any = None,
        states: Callable[[Sequence[int]], Any] | None = None,
        temperature: float = 1.0,
    ) -> Scores:
        """Score texts (token ids, prompt first), cut to the model's context; prompt tokens are only context.

        Args:
          processor: a logits processor with `apply`, to measure its divergence as well.
          states: states(rows) returns the processor's state for these texts.
          temperature: of the draw, for the divergence.

        Raises:
          ValueError: prompt_lengths do not fit, or temperature is not above 0.
        """
        starts = [0] * len(token_ids) if prompt_lengths is None else list(prompt_lengths)
        if len(starts) != len(token_ids) or temperature <= 0:
            raise ValueError(f"quality: {len(starts)} prompts for {len(token_ids)} texts, temperature={temperature}")
        order = sorted(range(len(token_ids)), key=lambda i: len(token_ids[i]))
        out = np.full((4, len(order)), np.nan)
        for begin in range(0, len(order), self._batch_size):
            rows = order[begin : begin + self._batch_size]
            tokens, lengths, first = self._pad([token_ids[i] for i in rows], [starts[i] for i in rows])
            sums = np.array(self._score(self._leaves, tokens, lengths, first), np.float64)
            if processor is not None:
                state = _fill(states(rows), len(rows), self._batch_size)
                shared = getattr(processor, "shared", None)
                arrays = (self._leaves, tokens, lengths, first, shared, state, np.float32(temperature))
                sums[2] = np.asarray(self._diverge(processor, *arrays), np.float64)
            out[:, rows] = sums[:, : len(rows)]
        count = out[3]
        means = [np.divide(part, count, out=np.full(len(order), np.nan), where=count > 0) for part in out[:3]]
        return Scores(means[0], means[1], means[2], count.astype(np.int64))

    def _pad(self, texts: list[Sequence[int]], starts: list[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        longest = min(max(map(len, texts), default=1), self._max_seq_len)
        width = min(-(-max(longest, 2) // LENGTH_MULTIPLE) * LENGTH_MULTIPLE, self._max_seq_len)
        tokens = np.zeros((self._batch_size, width), np.int32)
        lengths, first = np.ones(self._batch_size, np.int32), np.ones(self._batch_size, np.int32)
        for row, (ids, start) in enumerate(zip(texts, starts)):
            ids = list(ids)[:width]
            tokens[row, : len(ids)] = ids
            lengths[row], first[row] = len(ids), max(start, 1)
        return tokens, lengths, first

    def _hidden(self, leaves: list[Array], tokens: Array, lengths: Array) -> tuple[Transformer, Array]:
        model = nnx.merge(self._graph, jax.tree.unflatten(self._structure, leaves))
        index = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :]
        return model, model.features(tokens, jnp.where(index < lengths[:, None], index, -1))[0]

    def _score_rows(
        self, leaves: list[Array], tokens: Int[Array, "B T"], lengths: Int[Array, " B"], first: Int[Array, " B"]
    ) -> Float[Array, "4 B"]:
        """Return sums over scored tokens of -log p and entropy, nan for the divergence, and the number of tokens."""
        model, hidden = self._hidden(leaves, tokens, lengths)
        size = tokens.shape[1]
        padded = -(-size // CHUNK) * CHUNK
        hidden = jnp.pad(hidden, ((0, 0), (0, padded - size), (0, 0)))
        targets = jnp.pad(tokens[:, 1:], ((0, 0), (0, padded - size + 1)))
        is_scored = _is_scored(padded, lengths, first)
        chunks = (jnp.moveaxis(x.reshape(x.shape[0], -1, CHUNK, *x.shape[2:]), 1, 0) for x in (hidden, targets))

        def chunk(parts: tuple[Array, Array]) -> tuple[Array, Array]:
            logits = model.logits(parts[0])
            logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
            logs = jax.nn.log_softmax(logits, axis=-1)
            nll = -jnp.take_along_axis(logs, parts[1][:, :, None], axis=-1)[:, :, 0]
            return nll, -jnp.sum(jnp.exp(logs) * logs, axis=-1)

        nll, entropy = (jnp.moveaxis(x, 0, 1).reshape(tokens.shape[0], -1) for x in lax.map(chunk, tuple(chunks)))
        sums = [jnp.sum(jnp.where(is_scored, x, 0.0), axis=1) for x in (nll, entropy)]
        count = jnp.sum(is_scored, axis=1).astype(sums[0].dtype)
        return jnp.stack([*sums, jnp.full_like(count, jnp.nan), count])

    def _diverge_rows(
        self,
        processor: Any,
        leaves: list[Array],
        tokens: Int[Array, "B T"],
        lengths: Int[Array, " B"],
        first: Int[Array, " B"],
        shared: Any,
        state: Any,
        temperature: Float[Array, ""],
    ) -> Float[Array, " B"]:
        """Return the sum over scored positions of KL(marked || plain)."""
        model, hidden = self._hidden(leaves, tokens, lengths)
        is_scored = _is_scored(tokens.shape[1], lengths, first)

        def position(carry: tuple[Any, Array], t: Array) -> tuple[tuple[Any, Array], None]:
            state, total = carry
            logits = model.logits(lax.dynamic_slice_in_dim(hidden, t, 1, axis=1))[:, 0]
            logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
            length = jnp.full(tokens.shape[:1], t + 1, jnp.int32)
            given = state if shared is None else (shared, state)
            state, changed = processor.apply(given, logits, tokens, length, t)
            plain = jax.nn.log_softmax(logits / temperature, axis=-1)
            marked = jax.nn.log_softmax(changed / temperature, axis=-1)
            is_possible = marked > -jnp.inf  # a banned token adds nothing, but 0 * -inf would be nan
            divergence = jnp.sum(jnp.where(is_possible, jnp.exp(marked) * (marked - plain), 0.0), axis=-1)
            return (state, total + jnp.where(is_scored[:, t], divergence, 0.0)), None

        zeros = jnp.zeros(tokens.shape[0], jnp.promote_types(hidden.dtype, jnp.float32))
        return lax.scan(position, (state, zeros), jnp.arange(tokens.shape[1], dtype=jnp.int32))[0][1]


def _fill(state: Any, num_rows: int, batch_size: int) -> Any:
    return jax.tree.map(lambda x: prompts.fill_rows(np.asarray(x), num_rows, batch_size), state)


def _is_scored(size: int, lengths: Int[Array, " B"], first: Int[Array, " B"]) -> Array:
    """Return where the next token is scored [B T]: position t predicts token t + 1."""
    target = jnp.arange(1, size + 1)[None, :]
    return (target >= first[:, None]) & (target < lengths[:, None])
