"""A packed decoder's arrays and its pass through the native blocks. Twin: jaxbench/native/run.py."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from jaxbench.config import TransformerConfig
from jaxbench.native import angles, library
from jaxbench.native.checkpoint import PackedCheckpoint, Settings
from torch_ref import functional
from torch_ref.native import calls, paged

PART_ROWS = 512  # tokens per block call


class DecoderWeights(NamedTuple):
    """A packed decoder as tensors."""

    embed: calls.PackedWeights
    head: calls.PackedWeights | None  # None = the embedding
    position: Float[Tensor, "S D"] | None  # learned positions
    final_norm: tuple[Float[Tensor, " D"], Float[Tensor, " D"] | None]  # scale and bias
    layers: tuple[calls.BlockWeights, ...]
    tables: tuple[Float[Tensor, "S h"] | None, Float[Tensor, "S h"] | None]  # angles.tables


def device_weights(checkpoint: PackedCheckpoint) -> DecoderWeights:
    """Make tensors of a checkpoint's arrays, which share their memory."""
    config = checkpoint.config
    matrices = {
        name: calls.PackedWeights(torch.from_numpy(matrix.data), *matrix[1:])
        for name, matrix in checkpoint.matrices.items()
    }
    vectors = {name: torch.from_numpy(np.require(v, requirements="CW")) for name, v in checkpoint.vectors.items()}
    return DecoderWeights(
        matrices["embed"],
        matrices.get("head"),
        vectors.get("position.embedding"),
        (vectors["final_norm.scale"], vectors.get("final_norm.bias")),
        tuple(_block_weights(f"layers.{i}", matrices, vectors) for i in range(config.num_layers)),
        tuple(None if table is None else torch.from_numpy(table) for table in angles.tables(config)),
    )


def _block_weights(layer: str, matrices: dict, vectors: dict) -> calls.BlockWeights:
    """Collect a layer's arrays in the order of the block call."""
    norms = [f"{layer}.{name}" for name in library.NORMS[:4]]
    norms += [f"{layer}.attention.{name}" for name in library.NORMS[4:]]
    linears = [f"{layer}.{'attention' if i < 4 else 'mlp'}.{name}" for i, name in enumerate(library.MATRICES)]
    found = [matrices.get(name) for name in linears]
    return calls.BlockWeights(
        tuple((vectors.get(f"{name}.scale"), vectors.get(f"{name}.bias")) for name in norms),
        tuple(None if each is None else each.data for each in found),
        tuple(vectors.get(f"{name}.bias") for name in linears),
        tuple("float32" if each is None else each.format for each in found),
    )


def run(
    weights: DecoderWeights,
    configs: Sequence[TransformerConfig],
    tokens: Int[Tensor, "B T"],
    positions: Int[Tensor, "B T"],
    cache: paged.PagedCache,
    settings: Settings,
    vectors: Float[Tensor, "M D"] | None = None,
) -> tuple[Float[Tensor, "B T D"], paged.PagedCache]:
    """Hidden states of tokens after the final norm, and the cache, written in place; configs: of each layer; vectors:
    embeddings of tokens past the vocabulary.
    """
    part = max(1, PART_ROWS // tokens.shape[0])
    parts = zip(tokens.split(part, dim=1), positions.split(part, dim=1), strict=True)
    hidden = [run_part(weights, configs, *each, cache, settings, vectors)[0] for each in parts]
    return hidden[0] if len(hidden) == 1 else torch.cat(hidden, dim=1), cache


def run_part(
    weights: DecoderWeights,
    configs: Sequence[TransformerConfig],
    tokens: Int[Tensor, "B T"],
    positions: Int[Tensor, "B T"],
    cache: paged.PagedCache,
    settings: Settings,
    vectors: Float[Tensor, "M D"] | None = None,
) -> tuple[Float[Tensor, "B T D"], paged.PagedCache]:
    """Compute the same for tokens that fit in one call per block."""
    embed = functools.partial(_embed, weights=weights.embed, scale=configs[0].embedding_scale)
    x = functional.with_vectors(embed, tokens, vectors, size=configs[0].vocab_size)
    if weights.position is not None:
        x = x + weights.position[torch.clamp(positions, min=0)]
    rows, half = positions.reshape(-1), configs[0].head_dim // 2
    at = [None if table is None else table[torch.clamp(rows, min=0)] for table in weights.tables]
    pairs = [each if each is None else (each[:, :half].contiguous(), each[:, half:].contiguous()) for each in at]
    table = cache.table if tokens.shape[1] == 1 else cache.table.repeat_interleave(tokens.shape[1], dim=0)
    arguments = (x.reshape(-1, x.shape[2]), rows, *pairs, weights.layers, cache[:4], table, configs, settings)
    out, _ = calls.blocks(*arguments)
    return calls.norm(out, *weights.final_norm, eps=configs[0].norm_eps).reshape(x.shape), cache


def _embed(tokens: Int[Tensor, "B T"], weights: calls.PackedWeights, scale: float) -> Float[Tensor, "B T D"]:
    rows = calls.embed(tokens, weights)
    return rows if scale == 1.0 else rows * scale


def logits(
    weights: DecoderWeights, config: TransformerConfig, hidden: Float[Tensor, "B T D"], settings: Settings
) -> Float[Tensor, "B T V"]:
    """Logits of hidden states, from the head or the tied embedding."""
    out = calls.linear(hidden, weights.embed if weights.head is None else weights.head, None, settings)
    return out if config.logit_softcap is None else functional.softcap(out, cap=config.logit_softcap)
