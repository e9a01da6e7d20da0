"""A decoder on packed weights in Equinox. Twin: jaxbench/native/model.py, whose way through the blocks it shares."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int

from jaxbench.config import Compute, TransformerConfig
from jaxbench.eqx.transformer import Transformer
from jaxbench.native import angles, calls, library, paged
from jaxbench.native.checkpoint import PackedCheckpoint, Settings, checked
from jaxbench.native.run import block_weights, run


class PackedLinear(eqx.Module):
    """Affine map of the last axis by a packed matrix."""

    data: Array
    bias: Array | None
    format: str = eqx.field(static=True)
    inputs: int = eqx.field(static=True)
    outputs: int = eqx.field(static=True)
    settings: Settings = eqx.field(static=True)

    def __init__(self, weights: library.Packed, bias: np.ndarray | None, settings: Settings):
        self.data = jnp.asarray(weights.data)
        self.bias = None if bias is None else jnp.asarray(bias, jnp.float32)
        self.format, self.inputs, self.outputs = weights.format, weights.inputs, weights.outputs
        self.settings = settings

    @property
    def weights(self) -> calls.PackedWeights:
        """The matrix as calls take it."""
        return calls.PackedWeights(self.data, self.format, self.inputs, self.outputs)

    def __call__(self, x: Float[Array, "*rows I"]) -> Float[Array, "*rows O"]:
        """x @ kernel (+ bias)."""
        return calls.linear(x, self.weights, self.bias, self.settings)


class PackedEmbed(eqx.Module):
    """Embedding from a packed matrix, and logits by its transpose."""

    data: Array
    format: str = eqx.field(static=True)
    inputs: int = eqx.field(static=True)
    outputs: int = eqx.field(static=True)
    scale: float = eqx.field(static=True)
    settings: Settings = eqx.field(static=True)

    def __init__(self, weights: library.Packed, scale: float, settings: Settings):
        self.data = jnp.asarray(weights.data)
        self.format, self.inputs, self.outputs = weights.format, weights.inputs, weights.outputs
        self.scale, self.settings = scale, settings

    @property
    def weights(self) -> calls.PackedWeights:
        """The matrix as calls take it."""
        return calls.PackedWeights(self.data, self.format, self.inputs, self.outputs)

    def __call__(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        """Embedding of each token."""
        rows = calls.embed(tokens, self.weights)
        return rows if self.scale == 1.0 else rows * jnp.asarray(self.scale, rows.dtype)

    def attend(self, x: Float[Array, "*rows D"]) -> Float[Array, "*rows V"]:
        """Logits of hidden states."""
        return calls.linear(x, self.weights, None, self.settings)


class NativeTransformer(eqx.Module):
    """A decoder whose decode steps are native calls; what a Generator takes."""

    draw = staticmethod(calls.draw)

    model: Transformer
    settings: Settings = eqx.field(static=True)
    configs: tuple[TransformerConfig, ...] = eqx.field(static=True)
    dtype: str = eqx.field(static=True)
    cache_dtype: str = eqx.field(static=True)
    max_seq_len: int = eqx.field(static=True)
    vocab_size: int = eqx.field(static=True)
    angles: Array | None
    local_angles: Array | None

    def __init__(self, model: Transformer, checkpoint: PackedCheckpoint, cache_dtype: str, settings: Settings):
        self.model, self.settings = model, settings
        self.configs = tuple(checkpoint.config.at_layer(i) for i in range(checkpoint.config.num_layers))
        self.dtype, self.cache_dtype = "float32", cache_dtype
        self.max_seq_len, self.vocab_size = model.max_seq_len, checkpoint.config.vocab_size
        self.angles, self.local_angles = (
            None if table is None else jnp.asarray(table) for table in angles.tables(checkpoint.config)
        )

    def features(
        self,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        *,
        cache: paged.PagedCache | None = None,
        slot: Int[Array, ""] | int | None = None,
    ) -> tuple[Float[Array, "B T D"], paged.PagedCache]:
        """Hidden states after the final norm, and the cache with the tokens' keys and values at their positions.

        slot is not read: a token's place in the pages is its position. Without a cache one is made for T positions.
        """
        if cache is None:
            cache = paged.empty(self.configs[0], *tokens.shape, self.cache_dtype)
        layers, tables = tuple(map(block_weights, self.model.layers)), (self.angles, self.local_angles)
        return run(self.model, layers, self.configs, tables, tokens, positions, cache, self.settings)

    def logits(self, hidden: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """Logits of hidden states."""
        return self.model.logits(hidden)


def build(
    checkpoint: PackedCheckpoint, *, cache_dtype: str = "float32", activations: str = "float32", threads: int = 0
) -> NativeTransformer:
    """Decoder on a packed checkpoint, as jaxbench.native.model.build."""
    config, settings = checkpoint.config, checked(checkpoint, cache_dtype, activations, threads)
    calls.register()
    model = eqx.filter_eval_shape(lambda: Transformer(config, Compute()))
    new = {("embed",): PackedEmbed(checkpoint.matrices["embed"], config.embedding_scale, settings)}
    for name, packed in checkpoint.matrices.items():
        if name != "embed":
            new[tuple(name.split("."))] = PackedLinear(packed, checkpoint.vectors.get(f"{name}.bias"), settings)
    for name, value in checkpoint.vectors.items():
        if name.rpartition(".")[0] not in checkpoint.matrices:
            new[tuple(name.split("."))] = jnp.asarray(value, jnp.float32)
    model = eqx.tree_at(_places(list(new)), model, list(new.values()), is_leaf=lambda x: x is None)
    return NativeTransformer(model, checkpoint, cache_dtype, settings)


def _places(paths: list[tuple[str, ...]]) -> Callable[[Any], list]:
    """What eqx.tree_at replaces: the parts of a model at these paths."""

    def find(model: Any) -> list:
        found = []
        for path in paths:
            part = model
            for name in path:
                part = part[int(name)] if name.isdigit() else getattr(part, name)
            found.append(part)
        return found

    return find
