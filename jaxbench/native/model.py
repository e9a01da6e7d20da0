"""A decoder on packed weights in Flax NNX: prompts by its ordinary layers, tokens by one native call a block.

Twins: torch_ref/native/model.py, jaxbench/eqx/native.py. The layers are those of transformer.py; where they have a Linear
or an Embed, they have PackedLinear and PackedEmbed here, so that every family's prompt is computed by the code that
parity proves. A decode step takes the same arrays through src/block.h.
"""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Float, Int

from jaxbench import functional
from jaxbench.config import Compute
from jaxbench.native import calls, library, paged
from jaxbench.native.checkpoint import PackedCheckpoint, Settings, checked
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

    def __init__(self, model: Transformer, checkpoint: PackedCheckpoint, cache_dtype: str, settings: Settings):
        self.model, self.settings = model, settings
        self.configs = tuple(checkpoint.config.at_layer(i) for i in range(checkpoint.config.num_layers))
        self.dtype, self.cache_dtype = "float32", cache_dtype
        self.max_seq_len, self.vocab_size = model.max_seq_len, checkpoint.config.vocab_size

    def features(
        self,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        *,
        cache: paged.PagedCache | None = None,
        slot: Int[Array, ""] | int | None = None,
    ) -> tuple[Float[Array, "B T D"], paged.PagedCache | paged.PrefillCache]:
        """Hidden states after the final norm, and the cache; with one, of one token a row at its position.

        slot is not read: a token's place in the pages is its position.
        """
        if cache is None:
            hidden, kv = self.model.features(tokens, positions)
            return hidden, paged.PrefillCache(kv, self.configs[0].num_kv_heads)
        hidden, cache = decode_step(self.model, self.configs, tokens, positions, cache, self.settings)
        return hidden, cache

    def logits(self, hidden: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """Logits of hidden states."""
        return self.model.logits(hidden)


def decode_step(model, configs, tokens, positions, cache, settings) -> tuple[Array, paged.PagedCache]:
    """Hidden states [B 1 D] of one token a row, and the cache with it; of Flax's and of Equinox's models."""
    x = model.embed(tokens)
    if model.position is not None:
        x = x + model.position(jnp.maximum(positions, 0))
    angles, local_angles = (
        None if frequencies is None else functional.rotary_angles(positions, frequencies, dtype="float32")
        for frequencies in (model.frequencies, model.local_frequencies)
    )
    x, arrays = x[:, 0], ([], [], [], [])
    for i, (layer, config) in enumerate(zip(model.layers, configs, strict=True)):
        used = local_angles if layer.attention.is_local else angles
        used = None if used is None else (used[0][:, 0], used[1][:, 0])
        cached = (cache.keys[i], cache.values[i], cache.key_scales[i], cache.value_scales[i])
        x, cached = calls.block(x, positions[:, 0], used, block_weights(layer), cached, cache.table, config, settings)
        for kind, array in zip(arrays, cached, strict=True):
            kind.append(array)
    return model.final_norm(x[:, None]), paged.PagedCache(*map(tuple, arrays), cache.table)


def block_weights(layer) -> calls.BlockWeights:
    """A layer's arrays in the order of the block call."""
    attention, mlp, none = layer.attention, layer.mlp, jnp.zeros((0,), jnp.float32)

    def array(module, name: str) -> Array:
        value = getattr(module, name, None)
        return none if value is None else value[...]

    norms = []
    for norm in (layer.attention_norm, layer.mlp_norm, layer.attention_post_norm, layer.mlp_post_norm):
        norms += [array(norm, "scale"), array(norm, "bias")]
    norms += [array(norm, "scale") for norm in (attention.q_norm, attention.k_norm)]
    linears = [getattr(attention, name) for name in library.MATRICES[:4]]
    linears += [getattr(mlp, name) for name in library.MATRICES[4:]]
    return calls.BlockWeights(
        tuple(norms),
        tuple(jnp.zeros((0,), jnp.uint8) if each is None else each.data[...] for each in linears),
        tuple(array(each, "bias") for each in linears),
        tuple("float32" if each is None else each.format for each in linears),
    )


def build(
    checkpoint: PackedCheckpoint, *, cache_dtype: str = "float32", activations: str = "float32", threads: int = 0
) -> NativeTransformer:
    """Decoder on a packed checkpoint.

    Args:
      cache_dtype: of keys and values: float32, bfloat16 or int8 (a scale a position and head).
      activations: float32, or int8 (a scale for 32 of them): less exact, faster for prompts and batches.
      threads: at most this many, 0 = all that XLA has; the result does not depend on it.

    Raises:
      ValueError: a setting is unknown, or layers are of a workload's own kind.
      NotAvailable: the kernels cannot be had here.
    """
    config, settings = checkpoint.config, checked(checkpoint.config, cache_dtype, activations, threads)
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
