"""Titans' neural memory as a layer, in PyTorch. Twin: jaxbench/memory/neural.py.

How it works, its source and axis letters: see the twin's module docstring.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from jaxbench.memory.config import NeuralMemoryConfig, gate_names
from torch_ref import nn
from torch_ref.memory import chunk, layout
from torch_ref.memory.chunk import Rule, Tokens, Weights

QK_EPS = 1e-6  # added to a squared length, as in flash-linear-attention's l2norm


class NeuralState(NamedTuple):
    """Recurrent state of rows' memories, of constant size; kernels are [B N I O], gains [B N H]."""

    weights: Weights
    momentum: Weights
    anchor: Weights  # weights A at the start of the current chunk, where its gradients are taken
    count: Int[Tensor, " B"]  # tokens of the current chunk read so far
    tail: Float[Tensor, "B J Q"]  # last inputs of the convolutions

    @property
    def penalised(self) -> tuple[Float[Tensor, "..."], ...]:
        """Arrays whose mean squares are added to the loss of parity cases (target.py), so that gradients reach them."""
        return (*self.weights.kernels, *self.momentum.kernels)


def _norms(gain: Float[Tensor, "B N H"] | torch.nn.Parameter | None) -> str:
    return "without residual norm" if gain is None else "with residual norm"


class Projections(NamedTuple):
    """Projections of a call's tokens; the fields of Tokens are [B T N ...], not yet cut into chunks."""

    tokens: Tokens
    gate: Float[Tensor, "B T I"] | None  # output gate; None = no gate
    tail: Float[Tensor, "B J Q"]  # last inputs of the convolutions


class Conv(torch.nn.Module):
    """Depthwise causal convolution over tokens."""

    def __init__(self, size: int, features: int, *, dtype: str):
        super().__init__()
        self.kernel = _zeros(size, features, dtype=dtype)

    def forward(self, x: Float[Tensor, "B S I"]) -> Float[Tensor, "B T I"]:
        """Convolve x, whose first size - 1 tokens precede the first output: S = T + size - 1."""
        size = self.kernel.shape[0]
        length = x.shape[1] - size + 1
        return sum(self.kernel[i] * x[:, i : i + length] for i in range(size))


class Kernel(torch.nn.Module):
    """Initial kernel of one layer of the memory network, for each head."""

    def __init__(self, num_heads: int, shape: tuple[int, int], *, dtype: str):
        super().__init__()
        self.kernel = _zeros(num_heads, *shape, dtype=dtype)


class Network(torch.nn.Module):
    """Initial weights M_0 of the memory network, which are learned by the outer training."""

    def __init__(self, num_heads: int, widths: tuple[int, ...], *, residual_norm: bool, dtype: str):
        super().__init__()
        self.layers = torch.nn.ModuleList([Kernel(num_heads, pair, dtype=dtype) for pair in zip(widths, widths[1:])])
        self.gain = _zeros(num_heads, widths[-1], dtype=dtype) if residual_norm else None

    def weights(self, batch_size: int) -> Weights:
        """Initial weights [B N ...], the same for every row, in at least float32."""

        def expanded(x: Float[Tensor, "N ..."]) -> Float[Tensor, "B N ..."]:
            return x.to(torch.promote_types(x.dtype, torch.float32)).expand(batch_size, *x.shape)

        kernels = tuple(expanded(layer.kernel) for layer in self.layers)
        return Weights(kernels, None if self.gain is None else expanded(self.gain))


class NeuralMemory(torch.nn.Module):
    """Titans' neural memory: a network whose weights are trained on what it reads, in training and at inference."""

    def __init__(self, config: NeuralMemoryConfig, *, dtype: str):
        super().__init__()
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
        self.persistent = _zeros(c.num_persistent, c.d_model, dtype=dtype) if c.num_persistent else None
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

    def forward(
        self,
        x: Float[Tensor, "B T D"],
        state: NeuralState | None = None,
        *,
        is_token: Bool[Tensor, "B T"] | None = None,
        learn: bool = True,
        within_chunk: bool = False,
    ) -> tuple[Float[Tensor, "B T D"], NeuralState]:
        """Write each token into the memory and read it out (Titans, eq. 13 to 16): outputs, and the state after them.

        Arguments, results and errors are the twin's.
        """
        if x.ndim != 3 or x.shape[2] != self.d_model:
            raise ValueError(f"memory: x is {tuple(x.shape)}, wanted (rows, tokens, d_model={self.d_model})")
        if state is not None:
            self._check(state, len(x))
        if x.shape[1] == 0:
            return x.to(self.o_proj.kernel.dtype), self.init_state(len(x)) if state is None else state
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

    def reset(self, state: NeuralState, is_reset: Bool[Tensor, " B"]) -> NeuralState:
        """Reset some rows of a state to the initial state."""
        return layout.reset_rows(state, is_reset, self.init_state)

    def _blank(self, batch_size: int) -> NeuralState:
        weights = self.memory.weights(batch_size)
        momentum = layout.tree_map(torch.zeros_like, weights)
        like = self.o_proj.kernel
        tail = like.new_zeros(self._tail_shape(batch_size))
        count = torch.zeros((batch_size,), dtype=torch.int32, device=like.device)
        return NeuralState(weights, momentum, weights, count, tail)

    def _tail_shape(self, batch_size: int) -> tuple[int, int, int]:
        return (batch_size, self.conv_size - 1, self.num_streams * self.num_heads * self.head_dim)

    def _persistent(self, batch_size: int) -> Float[Tensor, "B P D"]:
        return self.persistent.expand(batch_size, *self.persistent.shape)

    def _merge_heads(self, state: NeuralState) -> tuple[Weights, ...]:
        """Weights, momentum and anchor with rows and heads merged, [E ...]."""
        return tuple(layout.tree_map(layout.merge_heads, each) for each in state[:3])

    def _split_heads(self, *trees: Weights) -> tuple[Weights, ...]:
        """Undo `_merge_heads`."""
        return tuple(layout.tree_map(lambda x: layout.split_heads(x, self.num_heads), each) for each in trees)

    def _check(self, state: NeuralState, batch_size: int) -> None:
        wanted = [(batch_size, *layer.kernel.shape) for layer in self.memory.layers]
        given = [tuple(kernel.shape) for kernel in state.weights.kernels]
        gain, wanted_gain = state.weights.gain, self.memory.gain
        if given != wanted or (gain is None) != (wanted_gain is None):
            raise ValueError(
                f"memory: the state's kernels are {given}, {_norms(gain)}, wanted {wanted} (rows, heads, in, out), "
                f"{_norms(wanted_gain)}"
            )
        tail = self._tail_shape(batch_size)
        if tuple(state.tail.shape) != tail:
            raise ValueError(
                f"memory: the state's tail is {tuple(state.tail.shape)}, wanted {tail} (rows, taps - 1, channels)"
            )

    def _write_and_read_from_start(self, x: Float[Tensor, "B T D"]) -> tuple[Float[Tensor, "B T D"], NeuralState]:
        """Write and read sequences from their start, after the persistent tokens."""
        state = self._blank(len(x))
        if self.persistent is None:
            return self._write_and_read_unpadded(x, state)
        out, state = self._write_and_read_unpadded(torch.cat([self._persistent(len(x)), x], dim=1), state)
        return out[:, self.persistent.shape[0] :], state

    def _write_and_read_unpadded(
        self, x: Float[Tensor, "B T D"], state: NeuralState
    ) -> tuple[Float[Tensor, "B T D"], NeuralState]:
        """Write and read rows without padding from a blank state; the last chunk may be shorter."""
        batch_size, length, _ = x.shape
        size = self.chunk_size
        projected = self._project(x, state.tail, None)
        tokens = layout.tree_map(layout.heads_first, projected.tokens)
        weights, momentum, _ = self._merge_heads(state)

        def step(carry: tuple, inputs: tuple) -> tuple[tuple, Float[Tensor, "E C H"]]:
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
        read_out = layout.tokens_first(torch.cat(parts, dim=1), self.num_heads)
        count = torch.full((batch_size,), length - whole, dtype=torch.int32, device=x.device)
        state = NeuralState(*self._split_heads(*carry, anchor), count, projected.tail)
        return self._output(read_out, projected.gate), state

    def _write_and_read_chunk(
        self, anchor: Weights, weights: Weights, momentum: Weights, tokens: Tokens, coeffs: chunk.Coefficients | None
    ) -> tuple[Float[Tensor, "E C H"], Weights, Weights]:
        """Write and read a chunk, as chunk.learn; without the eta gate, momentum stays zero."""
        output, weights, moved = chunk.learn(anchor, weights, momentum, tokens, self.rule, coeffs)
        return output, weights, momentum if self.eta is None else moved

    def _coefficients(self, chunks: Tokens) -> chunk.Coefficients:
        """Coefficients of all chunks at once, [L E ...]: they depend only on the gates."""
        coeffs = chunk.coefficients(layout.tree_map(layout.merge_heads, chunks), read=self.rule.read)
        return layout.tree_map(lambda x: x.reshape(*chunks.theta.shape[:2], *x.shape[1:]), coeffs)

    def _write_and_read_aligned(
        self, tokens: Tokens, state: NeuralState, num_tokens: Int[Tensor, " B"], within_chunk: bool
    ) -> tuple[Float[Tensor, "B T N H"], NeuralState]:
        """Write and read the first num_tokens of each row from any state.

        A row may begin inside a chunk: its tokens are shifted by state.count slots, so that chunks of all rows align.
        """
        length = tokens.theta.shape[1]
        # Tokens that do not cross the end of a chunk, such as a single one, may be anywhere in theirs.
        size = length if within_chunk else self.chunk_size
        num_chunks = 1 if within_chunk else -(-(length + size - 1) // size)
        offset = torch.zeros_like(state.count) if within_chunk else state.count
        source = torch.arange(num_chunks * size, device=num_tokens.device)[None, :] - offset[:, None]
        is_token = (source >= 0) & (source < num_tokens[:, None])
        source = source.clamp(0, length - 1)
        tokens = layout.tree_map(lambda x: layout.gathered(x, source), tokens)
        is_head_token = is_token[:, :, None].expand(*is_token.shape, self.num_heads)
        tokens = layout.tree_map(layout.heads_first, tokens._replace(is_token=is_head_token))
        chunks = layout.tree_map(lambda x: layout.split_chunks(x, size), tokens)
        is_begun = chunks.is_token.any(dim=2) & (torch.arange(num_chunks, device=num_tokens.device)[:, None] > 0)

        def step(carry: tuple, inputs: tuple) -> tuple[tuple, Float[Tensor, "E C H"]]:
            (weights, momentum, anchor), (tokens, is_begun, coeffs) = carry, inputs
            anchor = layout.select_rows(is_begun, weights, anchor)
            output, weights, momentum = self._write_and_read_chunk(anchor, weights, momentum, tokens, coeffs)
            return (weights, momentum, anchor), output

        inputs = (chunks, is_begun, self._coefficients(chunks))
        carry, outputs = layout.scan_chunks(step, self._merge_heads(state), inputs)
        read_out = layout.tokens_first(layout.join_chunks(outputs), self.num_heads)
        weights, momentum, anchor = self._split_heads(*carry)
        count = (state.count + num_tokens.to(torch.int32)) % self.chunk_size
        anchor = layout.select_rows(count == 0, weights, anchor)
        read_out = layout.gathered(read_out, torch.arange(length, device=num_tokens.device)[None, :] + offset[:, None])
        return read_out, NeuralState(weights, momentum, anchor, count, state.tail)

    def _read_only(self, query: Float[Tensor, "B T N H"], state: NeuralState) -> Float[Tensor, "B T N H"]:
        """Read out the state's weights; nothing is written."""
        weights = state.anchor if self.rule.read == "chunk" else state.weights
        read_out = chunk.recall(layout.tree_map(layout.merge_heads, weights), layout.heads_first(query), self.rule)
        return layout.tokens_first(read_out, self.num_heads)

    def _project(
        self, x: Float[Tensor, "B T D"], tail: Float[Tensor, "B J Q"], num_tokens: Int[Tensor, " B"] | None
    ) -> Projections:
        """Queries, keys, values and gates of a row's first num_tokens, None = all (Titans, eq. 11, section 4.4).

        tail: last inputs of the convolutions before this call.
        """
        wide = torch.promote_types(x.dtype, torch.float32)
        projections, convs = (self.q_proj, self.k_proj, self.v_proj), (self.q_conv, self.k_conv, self.v_conv)
        streams, tails, n = [], [], self.num_streams
        for projection, conv, before in zip(projections[:n], convs[:n], tail.chunk(n, dim=-1), strict=True):
            stream, last = self._convolve(conv, projection(x), before, num_tokens)
            stream = chunk.activate("silu", stream) if self.has_silu else stream
            streams.append(stream.to(wide).reshape(*x.shape[:2], self.num_heads, self.head_dim))
            tails.append(last)
        *queries_keys, value = streams if n > 1 else (*streams, None)
        if self.qk_norm:
            queries_keys = [x * torch.rsqrt(torch.sum(x * x, dim=-1, keepdim=True) + QK_EPS) for x in queries_keys]
        query, key = queries_keys if n > 1 else (*queries_keys, None)
        theta = None if self.theta is None else self.max_theta * torch.sigmoid(self.theta(x).to(wide))
        log_eta = None if self.eta is None else F.logsigmoid(self.eta(x).to(wide))
        log_keep = None if self.alpha is None else F.logsigmoid(-self.alpha(x).to(wide))
        gate = None if self.g_proj is None else chunk.activate("silu", self.g_proj(x))
        tokens = Tokens(query, key, value, theta, log_eta, log_keep, None)
        return Projections(tokens, gate, torch.cat(tails, dim=-1))

    def _convolve(
        self, conv: Conv | None, x: Float[Tensor, "B T I"], before: Float[Tensor, "B J I"],
        num_tokens: Int[Tensor, " B"] | None,
    ) -> tuple[Float[Tensor, "B T I"], Float[Tensor, "B J I"]]:  # fmt: skip
        """Convolve a projection after the K - 1 inputs before it; also return the last K - 1 for the next call."""
        if conv is None:
            return x, before
        inputs, length = torch.cat([before.to(x.dtype), x], dim=1), x.shape[1]
        if num_tokens is None:
            return conv(inputs), inputs[:, length:]
        return conv(inputs), layout.gathered(
            inputs, num_tokens[:, None] + torch.arange(before.shape[1], device=num_tokens.device)[None, :]
        )

    def _output(
        self, read_out: Float[Tensor, "B T N H"], gate: Float[Tensor, "B T I"] | None
    ) -> Float[Tensor, "B T D"]:
        """Output projection of the heads' read-outs, normalised and gated first if there is a gate."""
        flat = read_out.to(self.o_proj.kernel.dtype).reshape(*read_out.shape[:2], -1)
        if gate is not None:
            normal = self.out_norm(flat.reshape(len(flat), -1, self.head_dim))
            flat = normal.reshape(flat.shape) * gate
        return self.o_proj(flat)


def _zeros(*shape: int, dtype: str) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.zeros(shape, dtype=getattr(torch, dtype)))


def build(
    config: NeuralMemoryConfig, params: Mapping[str, np.ndarray], *, dtype: str = "float32", device: str = "cpu"
) -> NeuralMemory:
    """Build the memory of a configuration from parameters by name, cast to dtype.

    Arguments, results and errors are the twin's.
    """
    with torch.device("meta"):
        model = NeuralMemory(config, dtype=dtype)
    return nn.load_params(model, params, device=device)
