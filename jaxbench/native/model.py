"""A decoder on packed weights in Flax NNX: one native call a block, for prompts and for tokens.

Twins: torch_ref/native/model.py, jaxbench/eqx/native/model.py. The layers are those of transformer.py, with
PackedLinear and PackedEmbed where they have a Linear or an Embed: `NativeTransformer.model` computes the same by
ordinary layers, which is what tests hold the blocks (src/block.h) to.
"""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Float, Int

from jaxbench.config import Compute
from jaxbench.native import angles, calls, library, paged
from jaxbench.native.checkpoint import PackedCheckpoint, Settings, checked
from jaxbench.native.run import block_weights, run
from jaxbench.transformer import Transformer


class PackedLinear(nnx.Module):
    """Affine map of the last axis by a packed matrix."""

    def __init__(self, weights: library.Packed, bias: Array | None, settings: Settings):
        self.data = nnx.Param(jnp.asarray(weights.data))
        self.bias = None if bias is None else nnx.Param(jnp.asarray(bias, jnp.float32))
        self.format, self.inputs, self.outputs = weights.format, weights.inputs, weights.outputs
        self.settings = settings

    @property
    def weights(self) -> calls.PackedWeights:
        """The matrix as calls take it."""
        return calls.PackedWeights(self.data[...], self.format, self.inputs, self.outputs)

    def __call__(self, x: Float[Array, "*rows I"]) -> Float[Array, "*rows O"]:
        """x @ kernel (+ bias)."""
        return calls.linear(x, self.weights, None if self.bias is None else self.bias[...], self.settings)


class PackedEmbed(nnx.Module):
    """Embedding from a packed matrix, and logits by its transpose."""

    def __init__(self, weights: library.Packed, scale: float, settings: Settings):
        self.data = nnx.Param(jnp.asarray(weights.data))
        self.format, self.inputs, self.outputs = weights.format, weights.inputs, weights.outputs
        self.scale, self.settings = scale, settings

    @property
    def weights(self) -> calls.PackedWeights:
        """The matrix as calls take it."""
        return calls.PackedWeights(self.data[...], self.format, self.inputs, self.outputs)

    def __call__(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        """Embedding of each token."""
        rows = calls.embed(tokens, self.weights)
        return rows if self.scale == 1.0 else rows * jnp.asarray(self.scale, rows.dtype)

    def attend(self, x: Float[Array, "*rows D"]) -> Float[Array, "*rows V"]:
        """Logits of hidden states."""
        return calls.linear(x, self.weights, None, self.settings)


class NativeTransformer(nnx.Module):
    """A decoder whose decode steps are native calls; what a Generator takes."""

    draw = staticmethod(calls.draw)

    def __init__(self, model: Transformer, checkpoint: PackedCheckpoint, cache_dtype: str, settings: Settings):
        self.model, self.settings = model, settings
        self.configs = tuple(checkpoint.config.at_layer(i) for i in range(checkpoint.config.num_layers))
        self.dtype, self.cache_dtype = "float32", cache_dtype
        self.max_seq_len, self.vocab_size = model.max_seq_len, checkpoint.config.vocab_size
        self.angles, self.local_angles = (
            None if table is None else nnx.Param(jnp.asarray(table)) for table in angles.tables(checkpoint.config)
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
        layers = tuple(map(block_weights, self.model.layers))
        tables = tuple(table and table[...] for table in (self.angles, self.local_angles))
        return run(self.model, layers, self.configs, tables, tokens, positions, cache, self.settings)

    def logits(self, hidden: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """Logits of hidden states."""
        return self.model.logits(hidden)


def build(
    checkpoint: PackedCheckpoint, *, cache_dtype: str = "float32", activations: str = "float32", threads: int = 0
) -> NativeTransformer:
    """Decoder on a packed checkpoint.

    Args:
      cache_dtype: of keys and values: float32, bfloat16 or int8 (a scale a position and head).
      activations: float32; int8 (a scale for 32 of them) with integer weights, bfloat16 with bfloat16 ones: less exact,
        faster for prompts and batches.
      threads: at most this many, 0 = all that XLA has; the result does not depend on it.

    Raises:
      ValueError: a setting is unknown, or layers are of a workload's own kind.
      NotAvailable: the kernels cannot be had here.
    """
    config, settings = checkpoint.config, checked(checkpoint, cache_dtype, activations, threads)
    calls.register()
    model = nnx.eval_shape(lambda: Transformer(config, Compute()))
    model.embed = PackedEmbed(checkpoint.matrices["embed"], config.embedding_scale, settings)
    if model.head is not None:
        model.head = PackedLinear(checkpoint.matrices["head"], None, settings)
    for i, layer in enumerate(model.layers):
        for part, names in (("attention", library.MATRICES[:4]), ("mlp", library.MATRICES[4:])):
            module = getattr(layer, part)
            for name in names:
                if getattr(module, name) is not None:
                    path = f"layers.{i}.{part}.{name}"
                    bias = checkpoint.vectors.get(f"{path}.bias")
                    setattr(module, name, PackedLinear(checkpoint.matrices[path], bias, settings))
    _load_vectors(model, checkpoint)
    return NativeTransformer(model, checkpoint, cache_dtype, settings)


def _load_vectors(model: Transformer, checkpoint: PackedCheckpoint) -> None:
    """Scales and biases of norms, and learned positions."""
    for path, value in checkpoint.vectors.items():
        *parents, name = path.split(".")
        module = model
        for parent in parents:
            module = module[int(parent)] if parent.isdigit() else getattr(module, parent)
        if not isinstance(module, PackedLinear):
            setattr(module, name, nnx.Param(jnp.asarray(value, jnp.float32)))
