"""Titans' neural memory as a layer, in Flax NNX. Twin: torch_ref/memory/neural.py.

Data's way: x -> q, k, v (projection, depthwise causal convolution, SiLU; q and k of length 1) and the gates eta, theta,
alpha of every token and head -> chunks, whose closed form is chunk.py's -> normalised, gated, projected. Chunks are
counted in a row's own tokens, so padding and batch neighbours change nothing, and a state carries a half-read chunk
from call to call. Source: Behrouz et al. 2024, arXiv:2501.00663, sections 3.1, 3.2 and 4.4. Axis letters: chunk.py's,
C = the convolutions' channels (q, k and v side by side), K = their taps.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array, lax
from jaxtyping import Bool, Float, Int

from jaxbench import nn
from jaxbench.memory import chunk, layout
from jaxbench.memory.chunk import Rule, Tokens, Weights
from jaxbench.memory.config import NeuralMemoryConfig, gate_names

QK_EPS = 1e-6  # added to a squared length, as in flash-linear-attention's l2norm


class NeuralState(NamedTuple):
    """What a row's memories know; its size does not depend on what was read. Kernels are [B N I O], gains [B N H]."""

    weights: Weights
    momentum: Weights
    anchor: Weights  # the weights where the current chunk began
    count: Int[Array, " B"]  # tokens of the current chunk that were read
    tail: Float[Array, "B K-1 C"]  # what the convolutions still look back on


def _norms(gain: Any) -> str:
    return "without residual norm" if gain is None else "with residual norm"


class Asked(NamedTuple):
    """What tokens ask of the memories, before it is cut into chunks: fields of Tokens are [B T N ...]."""

    tokens: Tokens
    gate: Float[Array, "B T I"] | None  # of the output
    tail: Float[Array, "B K-1 C"]


class Conv(nnx.Module):
    """Depthwise convolution over a token and those before it."""

    def __init__(self, size: int, features: int, *, dtype: str):
        self.kernel = nnx.Param(jnp.zeros((size, features), dtype))

    def __call__(self, x: Float[Array, "B S I"]) -> Float[Array, "B T I"]:
        """Return the convolution of x, whose first size - 1 tokens come before the first answer."""
        size = self.kernel.shape[0]
        length = x.shape[1] - size + 1
        return sum(self.kernel[i][None, None, :] * x[:, i : i + length] for i in range(size))


class Kernel(nnx.Module):
    """One layer of a memory network as it is before anything is read, for each head."""

    def __init__(self, num_heads: int, shape: tuple[int, int], *, dtype: str):
        self.kernel = nnx.Param(jnp.zeros((num_heads, *shape), dtype))


class Network(nnx.Module):
    """A memory network's first weights M_0."""

    def __init__(self, num_heads: int, widths: tuple[int, ...], *, residual_norm: bool, dtype: str):
        self.layers = nnx.List([Kernel(num_heads, pair, dtype=dtype) for pair in zip(widths, widths[1:])])
        self.gain = nnx.Param(jnp.zeros((num_heads, widths[-1]), dtype)) if residual_norm else None

    def weights(self, batch_size: int) -> Weights:
        """Return the weights [B N ...], the same for every row, in at least float32."""

        def spread(x: Array) -> Array:
            wide = jnp.promote_types(x.dtype, jnp.float32)
            return jnp.broadcast_to(x.astype(wide)[None], (batch_size, *x.shape))

        kernels = tuple(spread(layer.kernel[...]) for layer in self.layers)
        return Weights(kernels, None if self.gain is None else spread(self.gain[...]))


class NeuralMemory(nnx.Module):
    """A memory that goes on learning wherever it reads: training and inference are the same computation."""

    def __init__(self, config: NeuralMemoryConfig, *, dtype: str):
        c, width = config, config.num_heads * config.head_dim
        linear = functools.partial(nn.Linear, c.d_model, use_bias=False, dtype=dtype)
        self.q_proj = linear(width)
        self.k_proj, self.v_proj = (linear(width), linear(width)) if c.depth else (None, None)
        convolved = c.streams if c.conv_size > 1 else ""
        self.q_conv = Conv(c.conv_size, width, dtype=dtype) if "q" in convolved else None
        self.k_conv = Conv(c.conv_size, width, dtype=dtype) if "k" in convolved else None
        self.v_conv = Conv(c.conv_size, width, dtype=dtype) if "v" in convolved else None
        gate, gates = functools.partial(nn.Linear, c.d_model, c.num_heads, use_bias=True, dtype=dtype), gate_names(c)
        self.eta = gate() if "eta" in gates else None
        self.theta = gate() if "theta" in gates else None
        self.alpha = gate() if "alpha" in gates else None
        self.memory = Network(c.num_heads, c.widths, residual_norm=c.residual_norm, dtype=dtype)
        self.persistent = nnx.Param(jnp.zeros((c.num_persistent, c.d_model), dtype)) if c.num_persistent else None
        is_gated = c.output == "gated"
        self.out_norm = nn.RMSNorm(c.head_dim, eps=c.norm_eps, dtype=dtype) if is_gated else None
        self.g_proj = linear(width) if is_gated else None
        self.o_proj = nn.Linear(width, c.d_model, use_bias=False, dtype=dtype)
        self.num_heads, self.head_dim = c.num_heads, c.head_dim
        self.chunk_size, self.conv_size, self.num_streams = c.chunk_size, c.conv_size, len(c.streams)
        self.has_silu, self.qk_norm, self.max_theta = c.qkv_activation == "silu", c.qk_norm, c.max_theta
        scale = 1.0 if c.loss_reduction == "sum" else 1.0 / c.head_dim
        self.rule = Rule(c.activation, scale, c.read, c.max_update_norm, c.norm_eps)
        self.dtype = dtype

    def __call__(
        self,
        x: Float[Array, "B T D"],
        state: NeuralState | None = None,
        *,
        is_token: Bool[Array, "B T"] | None = None,
        learn: bool = True,
        within_chunk: bool = False,
    ) -> tuple[Float[Array, "B T D"], NeuralState]:
        """Read tokens: return the memory's answer to each, and the state behind the last one.

        Args:
          x: the stream, normalised.
          state: the state behind the tokens before; None = nothing was read but the persistent tokens.
          is_token: False = padding, which is answered with zeros and changes nothing; None = no padding.
          learn: False = the weights stay as they are, and answer from there.
          within_chunk: True = the caller knows that no row goes past the end of its chunk, which costs one chunk less.

        Raises:
          ValueError: the state is of another model or batch size.
        """
        if state is not None:
            self._check(state, len(x))
        learn = learn and self.theta is not None
        if learn and state is None and is_token is None and not within_chunk:
            return self._read_whole(x)
        state = self.init_state(len(x)) if state is None else state
        if is_token is None:
            is_token = jnp.ones(x.shape[:2], bool)
        # Tokens are moved to the left of their row, so that those before a token are its neighbours.
        order = jnp.argsort(~is_token, axis=1, stable=True)
        number = jnp.sum(is_token, axis=1)
        asked = self._ask(layout.gathered(x, order), state.tail, number)
        if learn:
            answer, state = self._learn(asked.tokens, state, number, within_chunk or x.shape[1] == 1)
        else:
            answer = self._recall(asked.tokens.query, state)
        out = self._answer(answer, asked.gate)
        out = layout.gathered(out, jnp.maximum(jnp.cumsum(is_token, axis=1) - 1, 0))
        out = jnp.where(is_token[:, :, None], out, jnp.zeros((), out.dtype))
        return out, state._replace(tail=asked.tail)

    def init_state(self, batch_size: int) -> NeuralState:
        """Return the state of rows that have read nothing but the persistent tokens."""
        state = self._blank(batch_size)
        if self.persistent is None:
            return state
        return self._run(self._persistent(batch_size), state)[1]

    def reset(self, state: NeuralState, is_reset: Bool[Array, " B"]) -> NeuralState:
        """Return the state with some rows as they are before anything is read."""
        blank = self.init_state(len(is_reset))
        return layout.tree_map(functools.partial(layout.chosen, is_reset), blank, state)

    def _blank(self, batch_size: int) -> NeuralState:
        weights = self.memory.weights(batch_size)
        momentum = layout.tree_map(jnp.zeros_like, weights)
        tail = jnp.zeros(self._tail_shape(batch_size), self.dtype)
        return NeuralState(weights, momentum, weights, jnp.zeros((batch_size,), jnp.int32), tail)

    def _tail_shape(self, batch_size: int) -> tuple[int, int, int]:
        return (batch_size, self.conv_size - 1, self.num_streams * self.num_heads * self.head_dim)

    def _persistent(self, batch_size: int) -> Array:
        return jnp.broadcast_to(self.persistent[...][None], (batch_size, *self.persistent.shape))

    def _by_memory(self, state: NeuralState) -> tuple[Weights, ...]:
        """Return weights, momentum and anchor with heads side by side."""
        return tuple(layout.tree_map(layout.merged, each) for each in state[:3])

    def _by_row(self, *trees: Weights) -> tuple[Weights, ...]:
        """Undo `_by_memory`."""
        return tuple(layout.tree_map(lambda x: layout.split(x, self.num_heads), each) for each in trees)

    def _check(self, state: NeuralState, batch_size: int) -> None:
        wanted = [(batch_size, *layer.kernel.shape) for layer in self.memory.layers]
        found = [kernel.shape for kernel in state.weights.kernels]
        gain, wanted_gain = state.weights.gain, self.memory.gain
        if found != wanted or (gain is None) != (wanted_gain is None):
            raise ValueError(
                f"memory: the state's kernels are {found}, {_norms(gain)}, wanted {wanted} (rows, heads, in, out), "
                f"{_norms(wanted_gain)}"
            )
        tail = self._tail_shape(batch_size)
        if state.tail.shape != tail:
            raise ValueError(
                f"memory: the state's tail is {state.tail.shape}, wanted {tail} (rows, taps - 1, channels)"
            )

    def _read_whole(self, x: Array) -> tuple[Array, NeuralState]:
        """Read sequences from their start, behind the persistent tokens."""
        state = self._blank(len(x))
        if self.persistent is None:
            return self._run(x, state)
        out, state = self._run(jnp.concatenate([self._persistent(len(x)), x], axis=1), state)
        return out[:, self.persistent.shape[0] :], state

    def _run(self, x: Array, state: NeuralState) -> tuple[Array, NeuralState]:
        """Read full rows from a blank state, whose chunks are where they lie in memory; the last may be shorter."""
        batch_size, length, _ = x.shape
        size = self.chunk_size
        asked = self._ask(x, state.tail, None)
        tokens = layout.tree_map(layout.by_memory, asked.tokens)
        weights, momentum, _ = self._by_memory(state)

        def read(carry: tuple, inputs: tuple) -> tuple[tuple, Array]:
            answer, *carry = chunk.learn(carry[0], *carry, inputs[0], self.rule, inputs[1])
            return tuple(carry), answer

        carry, parts, whole = (weights, momentum), [], length // size * size
        if whole:
            chunks = layout.tree_map(lambda x: layout.cut(x[:, :whole], size), tokens)
            carry, answers = layout.walk(read, carry, (chunks, self._coefficients(chunks)))
            parts.append(layout.joined(answers))
        anchor = carry[0]
        if whole < length:
            carry, answer = layout.rematerialised(read, carry, (layout.tree_map(lambda x: x[:, whole:], tokens), None))
            parts.append(answer)
        answer = layout.by_row(jnp.concatenate(parts, axis=1), self.num_heads)
        count = jnp.full((batch_size,), length - whole, jnp.int32)
        state = NeuralState(*self._by_row(*carry, anchor), count, asked.tail)
        return self._answer(answer, asked.gate), state

    def _coefficients(self, chunks: Tokens) -> chunk.Coefficients:
        """Return the coefficients of all chunks [L E ...]: they depend on the gates alone."""
        found = chunk.coefficients(layout.tree_map(layout.merged, chunks), read=self.rule.read)
        return layout.tree_map(lambda x: x.reshape(*chunks.theta.shape[:2], *x.shape[1:]), found)

    def _learn(
        self, tokens: Tokens, state: NeuralState, number: Array, within_chunk: bool
    ) -> tuple[Array, NeuralState]:
        """Read the first `number` tokens of each row from any state; every row's chunks begin where its own do."""
        length = tokens.theta.shape[1]
        # Tokens that do not cross the end of a chunk, such as a single one, may lie anywhere in theirs.
        size = length if within_chunk else self.chunk_size
        num_chunks = 1 if within_chunk else -(-(length + size - 1) // size)
        offset = jnp.zeros_like(state.count) if within_chunk else state.count
        source = jnp.arange(num_chunks * size)[None, :] - offset[:, None]
        is_token = (source >= 0) & (source < number[:, None])
        source = jnp.clip(source, 0, length - 1)
        tokens = layout.tree_map(lambda x: layout.gathered(x, source), tokens)
        spread = jnp.broadcast_to(is_token[:, :, None], (*is_token.shape, self.num_heads))
        tokens = layout.tree_map(layout.by_memory, tokens._replace(is_token=spread))
        chunks = layout.tree_map(lambda x: layout.cut(x, size), tokens)
        is_begun = jnp.any(chunks.is_token, axis=2) & (jnp.arange(num_chunks)[:, None] > 0)

        def read(carry: tuple, inputs: tuple) -> tuple[tuple, Array]:
            (weights, momentum, anchor), (tokens, is_begun, parts) = carry, inputs
            anchor = layout.tree_map(functools.partial(layout.chosen, is_begun), weights, anchor)
            answer, weights, momentum = chunk.learn(anchor, weights, momentum, tokens, self.rule, parts)
            return (weights, momentum, anchor), answer

        carry, answers = layout.walk(read, self._by_memory(state), (chunks, is_begun, self._coefficients(chunks)))
        answer = layout.by_row(layout.joined(answers), self.num_heads)
        weights, momentum, anchor = self._by_row(*carry)
        count = (state.count + number.astype(jnp.int32)) % self.chunk_size
        anchor = layout.tree_map(functools.partial(layout.chosen, count == 0), weights, anchor)
        answer = layout.gathered(answer, jnp.arange(length)[None, :] + offset[:, None])
        return answer, NeuralState(weights, momentum, anchor, count, state.tail)

    def _recall(self, query: Array, state: NeuralState) -> Array:
        """Return the answers of the weights as they are."""
        weights = state.anchor if self.rule.read == "chunk" else state.weights
        answer = chunk.recall(layout.tree_map(layout.merged, weights), layout.by_memory(query), self.rule)
        return layout.by_row(answer, self.num_heads)

    def _ask(self, x: Array, tail: Array, number: Array | None) -> Asked:
        """Return what tokens ask of the memories; `number` = tokens of each row, None = all of them."""
        wide = jnp.promote_types(x.dtype, jnp.float32)
        projections, convs = (self.q_proj, self.k_proj, self.v_proj), (self.q_conv, self.k_conv, self.v_conv)
        streams, tails, n = [], [], self.num_streams
        for projection, conv, before in zip(projections[:n], convs[:n], jnp.split(tail, n, axis=-1), strict=True):
            stream, rest = self._convolve(conv, projection(x), before, number)
            stream = chunk.activate("silu", stream) if self.has_silu else stream
            streams.append(stream.astype(wide).reshape(*x.shape[:2], self.num_heads, self.head_dim))
            tails.append(rest)
        *asked, value = streams if n > 1 else (*streams, None)
        if self.qk_norm:
            asked = [x * lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + QK_EPS) for x in asked]
        query, key = asked if n > 1 else (*asked, None)
        theta = None if self.theta is None else self.max_theta * jax.nn.sigmoid(self.theta(x).astype(wide))
        log_eta = None if self.eta is None else jax.nn.log_sigmoid(self.eta(x).astype(wide))
        log_keep = None if self.alpha is None else jax.nn.log_sigmoid(-self.alpha(x).astype(wide))
        gate = None if self.g_proj is None else chunk.activate("silu", self.g_proj(x))
        return Asked(Tokens(query, key, value, theta, log_eta, log_keep, None), gate, jnp.concatenate(tails, axis=-1))

    def _convolve(self, conv: Conv | None, x: Array, before: Array, number: Array | None) -> tuple[Array, Array]:
        """Return a projection convolved, and its last conv_size - 1 tokens for the call that follows."""
        if conv is None:
            return x, before
        inputs, length = jnp.concatenate([before.astype(x.dtype), x], axis=1), x.shape[1]
        if number is None:
            return conv(inputs), inputs[:, length:]
        return conv(inputs), layout.gathered(inputs, number[:, None] + jnp.arange(before.shape[1])[None, :])

    def _answer(self, answer: Array, gate: Array | None) -> Array:
        """Return the heads' answers [B T N H] as the stream's [B T D]."""
        flat = answer.astype(self.dtype).reshape(*answer.shape[:2], -1)
        if gate is not None:
            normal = self.out_norm(flat.reshape(len(flat), -1, self.head_dim))
            flat = normal.reshape(flat.shape) * gate
        return self.o_proj(flat)


# Training on a target, as the parity table does it


class Batch(NamedTuple):
    """One step's data."""

    x: Float[Array, "B T D"]
    target: Float[Array, "B T D"]
    is_token: Bool[Array, "B T"] | None  # None = no padding


def predict(model: NeuralMemory, batch: Batch, *, dropout: Any = None) -> tuple[Float[Array, "B T D"], NeuralState]:
    """Return the memory's answers to a batch and the state behind it; there is no dropout."""
    return model(batch.x.astype(model.dtype), is_token=batch.is_token)


def loss_of(output: tuple[Float[Array, "B T D"], NeuralState], batch: Batch) -> Float[Array, ""]:
    """Return the mean squared error at tokens plus the mean square of the last weights and momentum."""
    answer, state = output
    wide = jnp.promote_types(answer.dtype, jnp.float32)
    squares = jnp.mean(jnp.square(answer.astype(wide) - batch.target.astype(wide)), axis=-1)
    is_token = jnp.ones(squares.shape, bool) if batch.is_token is None else batch.is_token
    loss = jnp.sum(jnp.where(is_token, squares, jnp.zeros((), wide))) / jnp.sum(is_token).astype(wide)
    for kernel in (*state.weights.kernels, *state.momentum.kernels):
        loss = loss + jnp.mean(jnp.square(kernel)).astype(wide)
    return loss


def loss_fn(model: NeuralMemory, batch: Batch, *, dropout: Any = None) -> Float[Array, ""]:
    """Return the model's loss on a batch."""
    return loss_of(predict(model, batch, dropout=dropout), batch)


def build(config: NeuralMemoryConfig, params: Mapping[str, np.ndarray], *, dtype: str = "float32") -> NeuralMemory:
    """Return the memory of a configuration holding `params`, cast to dtype.

    Raises:
      ValueError: a parameter is missing, unused or misshapen; all names are listed.
    """
    return nn.load_params(NeuralMemory(config, dtype=dtype), params)
