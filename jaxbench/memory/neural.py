"""Titans' neural memory as a layer, in Flax NNX. Twin: torch_ref/memory/neural.py.

x gives queries, keys and values (projection, depthwise causal convolution, SiLU; q and k of length 1) and the gates
eta, theta and alpha per token and head. chunk.py writes and reads chunk by chunk. Read-outs are normalised, gated and
projected. Chunks count a row's own tokens, so padding and other rows of the batch change nothing; the state carries an
unfinished chunk from call to call. Source: Behrouz et al. 2024, arXiv:2501.00663, sections 3.1, 3.2 and 4.4.
Axis letters: as in chunk.py; C slots of a chunk, Q channels of the convolutions (q, k, v), K their taps, J = K - 1, P
persistent tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import NamedTuple

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
    """Recurrent state of rows' memories, of constant size; kernels are [B N I O], gains [B N H]."""

    weights: Weights
    momentum: Weights
    anchor: Weights  # weights A at the start of the current chunk, where its gradients are taken
    count: Int[Array, " B"]  # tokens of the current chunk read so far
    tail: Float[Array, "B J Q"]  # last inputs of the convolutions

    @property
    def penalised(self) -> tuple[Float[Array, "..."], ...]:
        """Arrays whose mean squares are added to the loss of parity cases (target.py), so that gradients reach them."""
        return (*self.weights.kernels, *self.momentum.kernels)


def _norms(gain: Float[Array, "B N H"] | nnx.Param | None) -> str:
    return "without residual norm" if gain is None else "with residual norm"


class Projections(NamedTuple):
    """Projections of a call's tokens; the fields of Tokens are [B T N ...], not yet cut into chunks."""

    tokens: Tokens
    gate: Float[Array, "B T I"] | None  # output gate; None = no gate
    tail: Float[Array, "B J Q"]  # last inputs of the convolutions


class Conv(nnx.Module):
    """Depthwise causal convolution over tokens."""

    def __init__(self, size: int, features: int, *, dtype: str):
        self.kernel = nnx.Param(jnp.zeros((size, features), dtype))

    def __call__(self, x: Float[Array, "B S I"]) -> Float[Array, "B T I"]:
        """Convolve x, whose first size - 1 tokens precede the first output: S = T + size - 1."""
        size = self.kernel.shape[0]
        length = x.shape[1] - size + 1
        return sum(self.kernel[i][None, None, :] * x[:, i : i + length] for i in range(size))


class Kernel(nnx.Module):
    """Initial kernel of one layer of the memory network, for each head."""

    def __init__(self, num_heads: int, shape: tuple[int, int], *, dtype: str):
        self.kernel = nnx.Param(jnp.zeros((num_heads, *shape), dtype))


class Network(nnx.Module):
    """Initial weights M_0 of the memory network, which are learned by the outer training."""

    def __init__(self, num_heads: int, widths: tuple[int, ...], *, residual_norm: bool, dtype: str):
        self.layers = nnx.List([Kernel(num_heads, pair, dtype=dtype) for pair in zip(widths, widths[1:])])
        self.gain = nnx.Param(jnp.zeros((num_heads, widths[-1]), dtype)) if residual_norm else None

    def weights(self, batch_size: int) -> Weights:
        """Initial weights [B N ...], the same for every row, in at least float32."""

        def expanded(x: Float[Array, "N ..."]) -> Float[Array, "B N ..."]:
            wide = jnp.promote_types(x.dtype, jnp.float32)
            return jnp.broadcast_to(x.astype(wide)[None], (batch_size, *x.shape))

        kernels = tuple(expanded(layer.kernel[...]) for layer in self.layers)
        return Weights(kernels, None if self.gain is None else expanded(self.gain[...]))


class NeuralMemory(nnx.Module):
    """Titans' neural memory: a network whose weights are trained on what it reads, in training and at inference."""

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
        self.num_heads, self.head_dim, self.d_model = c.num_heads, c.head_dim, c.d_model
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
        """Write each token into the memory and read it out (Titans, eq. 13 to 16): outputs, and the state after them.

        Args:
          x: the residual stream, normalised.
          state: the state after earlier tokens; None = only the persistent tokens were read.
          is_token: False = padding, whose outputs are zeros and which writes nothing; None = no padding.
          learn: False = read only, the weights do not change.
          within_chunk: True = the caller knows that no row crosses the end of its chunk, which saves computing one.

        Raises:
          ValueError: x or is_token has another shape, or the state is for another model or batch size.
        """
        if x.ndim != 3 or x.shape[2] != self.d_model:
            raise ValueError(f"memory: x is {tuple(x.shape)}, wanted (rows, tokens, d_model={self.d_model})")
        if state is not None:
            self._check(state, len(x))
        if x.shape[1] == 0:
            return x.astype(self.dtype), self.init_state(len(x)) if state is None else state
        learn = learn and self.theta is not None
        if learn and state is None and is_token is None and not within_chunk:
            return self._write_and_read_from_start(x)
        state = self.init_state(len(x)) if state is None else state
        tokens, num_tokens = layout.left_align(x, is_token)
        projected = self._project(tokens, state.tail, num_tokens)
        if learn:
            read_out, state = self._write_and_read_aligned(
                projected.tokens, state, num_tokens, within_chunk or x.shape[1] == 1
            )
        else:
            read_out = self._read_only(projected.tokens.query, state)
        out = self._output(read_out, projected.gate)
        return layout.restore_padding(out, is_token), state._replace(tail=projected.tail)

    def init_state(self, batch_size: int) -> NeuralState:
        """State of rows that have read only the persistent tokens."""
        state = self._blank(batch_size)
        if self.persistent is None:
            return state
        return self._write_and_read_unpadded(self._persistent(batch_size), state)[1]

    def reset(self, state: NeuralState, is_reset: Bool[Array, " B"]) -> NeuralState:
        """Reset some rows of a state to the initial state."""
        return layout.reset_rows(state, is_reset, self.init_state)

    def _blank(self, batch_size: int) -> NeuralState:
        weights = self.memory.weights(batch_size)
        momentum = layout.tree_map(jnp.zeros_like, weights)
        tail = jnp.zeros(self._tail_shape(batch_size), self.dtype)
        return NeuralState(weights, momentum, weights, jnp.zeros((batch_size,), jnp.int32), tail)

    def _tail_shape(self, batch_size: int) -> tuple[int, int, int]:
        return (batch_size, self.conv_size - 1, self.num_streams * self.num_heads * self.head_dim)

    def _persistent(self, batch_size: int) -> Float[Array, "B P D"]:
        return jnp.broadcast_to(self.persistent[...][None], (batch_size, *self.persistent.shape))

    def _merge_heads(self, state: NeuralState) -> tuple[Weights, ...]:
        """Weights, momentum and anchor with rows and heads merged, [E ...]."""
        return tuple(layout.tree_map(layout.merge_heads, each) for each in state[:3])

    def _split_heads(self, *trees: Weights) -> tuple[Weights, ...]:
        """Undo `_merge_heads`."""
        return tuple(layout.tree_map(lambda x: layout.split_heads(x, self.num_heads), each) for each in trees)

    def _check(self, state: NeuralState, batch_size: int) -> None:
        wanted = [(batch_size, *layer.kernel.shape) for layer in self.memory.layers]
        given = [kernel.shape for kernel in state.weights.kernels]
        gain, wanted_gain = state.weights.gain, self.memory.gain
        if given != wanted or (gain is None) != (wanted_gain is None):
            raise ValueError(
                f"memory: the state's kernels are {given}, {_norms(gain)}, wanted {wanted} (rows, heads, in, out), "
                f"{_norms(wanted_gain)}"
            )
        tail = self._tail_shape(batch_size)
        if state.tail.shape != tail:
            raise ValueError(
                f"memory: the state's tail is {state.tail.shape}, wanted {tail} (rows, taps - 1, channels)"
            )

    def _write_and_read_from_start(self, x: Float[Array, "B T D"]) -> tuple[Float[Array, "B T D"], NeuralState]:
        """Write and read sequences from their start, after the persistent tokens."""
        state = self._blank(len(x))
        if self.persistent is None:
            return self._write_and_read_unpadded(x, state)
        out, state = self._write_and_read_unpadded(jnp.concatenate([self._persistent(len(x)), x], axis=1), state)
        return out[:, self.persistent.shape[0] :], state

    def _write_and_read_unpadded(
        self, x: Float[Array, "B T D"], state: NeuralState
    ) -> tuple[Float[Array, "B T D"], NeuralState]:
        """Write and read rows without padding from a blank state; the last chunk may be shorter."""
        batch_size, length, _ = x.shape
        size = self.chunk_size
        projected = self._project(x, state.tail, None)
        tokens = layout.tree_map(layout.heads_first, projected.tokens)
        weights, momentum, _ = self._merge_heads(state)

        def step(carry: tuple, inputs: tuple) -> tuple[tuple, Float[Array, "E C H"]]:
            (weights, momentum), (tokens, coeffs) = carry, inputs
            output, weights, momentum = self._write_and_read_chunk(weights, weights, momentum, tokens, coeffs)
            return (weights, momentum), output

        carry, parts, whole = (weights, momentum), [], length // size * size
        if whole:
            chunks = layout.tree_map(lambda x: layout.split_chunks(x[:, :whole], size), tokens)
            carry, outputs = layout.scan_chunks(step, carry, (chunks, self._coefficients(chunks)))
            parts.append(layout.join_chunks(outputs))
        anchor = carry[0]
        if whole < length:
            rest = layout.tree_map(lambda x: x[:, whole:], tokens)
            carry, output = layout.rematerialised(step, carry, (rest, None))
            parts.append(output)
        read_out = layout.tokens_first(jnp.concatenate(parts, axis=1), self.num_heads)
        count = jnp.full((batch_size,), length - whole, jnp.int32)
        state = NeuralState(*self._split_heads(*carry, anchor), count, projected.tail)
        return self._output(read_out, projected.gate), state

    def _write_and_read_chunk(
        self, anchor: Weights, weights: Weights, momentum: Weights, tokens: Tokens, coeffs: chunk.Coefficients | None
    ) -> tuple[Float[Array, "E C H"], Weights, Weights]:
        """Write and read a chunk, as chunk.learn; without the eta gate, momentum stays zero."""
        output, weights, moved = chunk.learn(anchor, weights, momentum, tokens, self.rule, coeffs)
        return output, weights, momentum if self.eta is None else moved

    def _coefficients(self, chunks: Tokens) -> chunk.Coefficients:
        """Coefficients of all chunks at once, [L E ...]: they depend only on the gates."""
        coeffs = chunk.coefficients(layout.tree_map(layout.merge_heads, chunks), read=self.rule.read)
        return layout.tree_map(lambda x: x.reshape(*chunks.theta.shape[:2], *x.shape[1:]), coeffs)

    def _write_and_read_aligned(
        self, tokens: Tokens, state: NeuralState, num_tokens: Int[Array, " B"], within_chunk: bool
    ) -> tuple[Float[Array, "B T N H"], NeuralState]:
        """Write and read the first num_tokens of each row from any state.

        A row may begin inside a chunk: its tokens are shifted by state.count slots, so that chunks of all rows align.
        """
        length = tokens.theta.shape[1]
        # Tokens that do not cross the end of a chunk, such as a single one, may be anywhere in theirs.
        size = length if within_chunk else self.chunk_size
        num_chunks = 1 if within_chunk else -(-(length + size - 1) // size)
        offset = jnp.zeros_like(state.count) if within_chunk else state.count
        source = jnp.arange(num_chunks * size)[None, :] - offset[:, None]
        is_token = (source >= 0) & (source < num_tokens[:, None])
        source = jnp.clip(source, 0, length - 1)
        tokens = layout.tree_map(lambda x: layout.gathered(x, source), tokens)
        is_head_token = jnp.broadcast_to(is_token[:, :, None], (*is_token.shape, self.num_heads))
        tokens = layout.tree_map(layout.heads_first, tokens._replace(is_token=is_head_token))
        chunks = layout.tree_map(lambda x: layout.split_chunks(x, size), tokens)
        is_begun = jnp.any(chunks.is_token, axis=2) & (jnp.arange(num_chunks)[:, None] > 0)

        def step(carry: tuple, inputs: tuple) -> tuple[tuple, Float[Array, "E C H"]]:
            (weights, momentum, anchor), (tokens, is_begun, coeffs) = carry, inputs
            anchor = layout.select_rows(is_begun, weights, anchor)
            output, weights, momentum = self._write_and_read_chunk(anchor, weights, momentum, tokens, coeffs)
            return (weights, momentum, anchor), output

        inputs = (chunks, is_begun, self._coefficients(chunks))
        carry, outputs = layout.scan_chunks(step, self._merge_heads(state), inputs)
        read_out = layout.tokens_first(layout.join_chunks(outputs), self.num_heads)
        weights, momentum, anchor = self._split_heads(*carry)
        count = (state.count + num_tokens.astype(jnp.int32)) % self.chunk_size
        anchor = layout.select_rows(count == 0, weights, anchor)
        read_out = layout.gathered(read_out, jnp.arange(length)[None, :] + offset[:, None])
        return read_out, NeuralState(weights, momentum, anchor, count, state.tail)

    def _read_only(self, query: Float[Array, "B T N H"], state: NeuralState) -> Float[Array, "B T N H"]:
        """Read out the state's weights; nothing is written."""
        weights = state.anchor if self.rule.read == "chunk" else state.weights
        read_out = chunk.recall(layout.tree_map(layout.merge_heads, weights), layout.heads_first(query), self.rule)
        return layout.tokens_first(read_out, self.num_heads)

    def _project(
        self, x: Float[Array, "B T D"], tail: Float[Array, "B J Q"], num_tokens: Int[Array, " B"] | None
    ) -> Projections:
        """Queries, keys, values and gates of a row's first num_tokens, None = all (Titans, eq. 11, section 4.4).

        tail: last inputs of the convolutions before this call.
        """
        wide = jnp.promote_types(x.dtype, jnp.float32)
        projections, convs = (self.q_proj, self.k_proj, self.v_proj), (self.q_conv, self.k_conv, self.v_conv)
        streams, tails, n = [], [], self.num_streams
        for projection, conv, before in zip(projections[:n], convs[:n], jnp.split(tail, n, axis=-1), strict=True):
            stream, last = self._convolve(conv, projection(x), before, num_tokens)
            stream = chunk.activate("silu", stream) if self.has_silu else stream
            streams.append(stream.astype(wide).reshape(*x.shape[:2], self.num_heads, self.head_dim))
            tails.append(last)
        *queries_keys, value = streams if n > 1 else (*streams, None)
        if self.qk_norm:
            queries_keys = [x * lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + QK_EPS) for x in queries_keys]
        query, key = queries_keys if n > 1 else (*queries_keys, None)
        theta = None if self.theta is None else self.max_theta * jax.nn.sigmoid(self.theta(x).astype(wide))
        log_eta = None if self.eta is None else jax.nn.log_sigmoid(self.eta(x).astype(wide))
        log_keep = None if self.alpha is None else jax.nn.log_sigmoid(-self.alpha(x).astype(wide))
        gate = None if self.g_proj is None else chunk.activate("silu", self.g_proj(x))
        tokens = Tokens(query, key, value, theta, log_eta, log_keep, None)
        return Projections(tokens, gate, jnp.concatenate(tails, axis=-1))

    def _convolve(
        self, conv: Conv | None, x: Float[Array, "B T I"], before: Float[Array, "B J I"],
        num_tokens: Int[Array, " B"] | None,
    ) -> tuple[Float[Array, "B T I"], Float[Array, "B J I"]]:  # fmt: skip
        """Convolve a projection after the K - 1 inputs before it; also return the last K - 1 for the next call."""
        if conv is None:
            return x, before
        inputs, length = jnp.concatenate([before.astype(x.dtype), x], axis=1), x.shape[1]
        if num_tokens is None:
            return conv(inputs), inputs[:, length:]
        return conv(inputs), layout.gathered(inputs, num_tokens[:, None] + jnp.arange(before.shape[1])[None, :])

    def _output(self, read_out: Float[Array, "B T N H"], gate: Float[Array, "B T I"] | None) -> Float[Array, "B T D"]:
        """Output projection of the heads' read-outs, normalised and gated first if there is a gate."""
        flat = read_out.astype(self.dtype).reshape(*read_out.shape[:2], -1)
        if gate is not None:
            normal = self.out_norm(flat.reshape(len(flat), -1, self.head_dim))
            flat = normal.reshape(flat.shape) * gate
        return self.o_proj(flat)


def build(config: NeuralMemoryConfig, params: Mapping[str, np.ndarray], *, dtype: str = "float32") -> NeuralMemory:
    """Build the memory of a configuration from parameters by name, cast to dtype.

    Raises:
      ValueError: a parameter is missing, unused or misshapen; all names are listed.
    """
    return nn.load_params(NeuralMemory(config, dtype=dtype), params)
