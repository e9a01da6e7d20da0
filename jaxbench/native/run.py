"""A packed decoder's arrays and its pass through the native blocks, for Flax's and Equinox's models: functions on
arrays.

Twin: torch_ref/native/run.py.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Float, Int

from jaxbench import functional
from jaxbench.config import TransformerConfig
from jaxbench.native import angles, calls, library, paged
from jaxbench.native.checkpoint import PackedCheckpoint, Settings

PART_ROWS = 512  # most tokens per block call


class DecoderWeights(NamedTuple):
    """A packed decoder on the device."""

    embed: calls.PackedWeights
    head: calls.PackedWeights | None  # None = the embedding
    position: Float[Array, "S D"] | None  # learned positions
    final_norm: tuple[Float[Array, " D"], Float[Array, " D"] | None]  # scale and bias
    layers: tuple[calls.BlockWeights, ...]
    tables: tuple[Float[Array, "S h"] | None, Float[Array, "S h"] | None]  # angles.tables


def device_weights(checkpoint: PackedCheckpoint) -> DecoderWeights:
    """Put a checkpoint's arrays on the device; on CPUs matrices stay where they are."""
    config, matrices = checkpoint.config, checkpoint.matrices
    on_host = {name: matrix.data for name, matrix in matrices.items()} | checkpoint.vectors
    on_host[""] = np.zeros(0, np.float32)
    vectors = jax.device_put(on_host, may_alias=True)  # all in one call: one by one takes five times as long
    arrays = {name: calls.PackedWeights(vectors.pop(name), *matrix[1:]) for name, matrix in matrices.items()}
    return DecoderWeights(
        arrays["embed"],
        arrays.get("head"),
        vectors.get("position.embedding"),
        (vectors["final_norm.scale"], vectors.get("final_norm.bias")),
        tuple(_block_weights(f"layers.{i}", arrays, vectors) for i in range(config.num_layers)),
        jax.device_put(angles.tables(config)),
    )


def _block_weights(layer: str, matrices: dict, vectors: dict) -> calls.BlockWeights:
    """Collect a layer's arrays in the order of the block call."""
    norms = [f"{layer}.{name}.{part}" for name in library.NORMS[:4] for part in ("scale", "bias")]
    norms += [f"{layer}.attention.{name}.scale" for name in library.NORMS[4:]]
    linears = [f"{layer}.{'attention' if i < 4 else 'mlp'}.{name}" for i, name in enumerate(library.MATRICES)]
    found = [matrices.get(name) for name in linears]
    return calls.BlockWeights(
        tuple(vectors.get(name, vectors[""]) for name in norms),
        tuple(jnp.zeros(0, jnp.uint8) if each is None else each.data for each in found),
        tuple(vectors.get(f"{name}.bias", vectors[""]) for name in linears),
        tuple("float32" if each is None else each.format for each in found),
    )


def run(
    weights: DecoderWeights,
    configs: Sequence[TransformerConfig],
    tokens: Int[Array, "B T"],
    positions: Int[Array, "B T"],
    cache: paged.PagedCache,
    settings: Settings,
    vectors: Float[Array, "M D"] | None = None,
) -> tuple[Float[Array, "B T D"], paged.PagedCache]:
    """Hidden states of tokens after the final norm, and the cache with these tokens; configs: of each layer; vectors:
    embeddings of tokens past the vocabulary.

    The tokens of a call are the rows of its blocks, so that a token's result is bit-identical in any prompt part and
    batch; long prompts are processed in parts.
    """
    batch, length = tokens.shape
    parts = -(-length // max(1, PART_ROWS // batch))
    if parts == 1:
        return run_part(weights, configs, tokens, positions, cache, settings, vectors)
    part = -(-length // parts)  # equal parts: 832 tokens are 2 x 416, not 2 x 512 with 192 of padding
    short = ((0, 0), (0, parts * part - length))
    tokens, positions = jnp.pad(tokens, short), jnp.pad(positions, short, constant_values=-1)

    def step(i, carry):
        hidden, cache = carry
        here = (lax.dynamic_slice_in_dim(x, i * part, part, axis=1) for x in (tokens, positions))
        out, cache = run_part(weights, configs, *here, cache, settings, vectors)
        return lax.dynamic_update_slice_in_dim(hidden, out, i * part, axis=1), cache

    hidden = jnp.zeros((batch, parts * part, configs[0].d_model), jnp.float32)
    hidden, cache = lax.fori_loop(0, parts, step, (hidden, cache))
    return hidden[:, :length], cache


def run_part(
    weights: DecoderWeights,
    configs: Sequence[TransformerConfig],
    tokens: Int[Array, "B T"],
    positions: Int[Array, "B T"],
    cache: paged.PagedCache,
    settings: Settings,
    vectors: Float[Array, "M D"] | None = None,
) -> tuple[Float[Array, "B T D"], paged.PagedCache]:
    """Compute the same for tokens that fit in one call per block."""
    embed = functools.partial(_embed, weights=weights.embed, scale=configs[0].embedding_scale)
    x = functional.with_vectors(embed, tokens, vectors, size=configs[0].vocab_size)
    if weights.position is not None:
        x = x + _rows(weights.position, positions)
    rows, half = positions.reshape(-1), configs[0].head_dim // 2
    at = [None if table is None else _rows(table, rows) for table in weights.tables]
    pairs = [each if each is None else (each[:, :half], each[:, half:]) for each in at]
    table = jnp.repeat(cache.table, tokens.shape[1], axis=0)
    arguments = (x.reshape(-1, x.shape[2]), rows, *pairs, weights.layers, cache[:4], table, configs, settings)
    out, arrays = calls.blocks(*arguments)
    out = calls.norm(out, *weights.final_norm, eps=configs[0].norm_eps)
    return out.reshape(x.shape), paged.PagedCache(*arrays, cache.table)


def _rows(table: Float[Array, "S N"], positions: Int[Array, "*rows"]) -> Float[Array, "*rows N"]:
    """Rows of a table by position, NaN past its end, so that a text beyond max_seq_len is seen to be wrong."""
    return table.at[jnp.maximum(positions, 0)].get(mode="fill", fill_value=jnp.nan)


def _embed(tokens: Int[Array, "B T"], weights: calls.PackedWeights, scale: float) -> Float[Array, "B T D"]:
    rows = calls.embed(tokens, weights)
    return rows if scale == 1.0 else rows * jnp.float32(scale)


def logits(
    weights: DecoderWeights, config: TransformerConfig, hidden: Float[Array, "B T D"], settings: Settings
) -> Float[Array, "B T V"]:
    """Logits of hidden states, from the head or the tied embedding."""
    out = calls.linear(hidden, weights.embed if weights.head is None else weights.head, None, settings)
    return out if config.logit_softcap is None else functional.softcap(out, cap=config.logit_softcap)
