"""A decoder on packed weights in Flax NNX: one native call a block, for prompts and for tokens.

Twins: torch_ref/native/model.py, jaxbench/eqx/native.py. The layers are those of transformer.py, with PackedLinear and
PackedEmbed where they have a Linear or an Embed: `NativeTransformer.model` computes the same by ordinary layers, which
is what tests hold the blocks (src/block.h) to.
"""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx
from jax import Array, lax
from jaxtyping import Float, Int

from jaxbench.config import Compute
from jaxbench.native import angles, calls, library, paged
from jaxbench.native.checkpoint import PackedCheckpoint, Settings, checked
from jaxbench.transformer import Transformer

PART_ROWS = 512  # tokens of a block call: more do not fit the caches of a core, and wait for nothing

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
        tables = tuple(table and table[...] for table in (self.angles, self.local_angles))
        return run(self.model, self.configs, tables, tokens, positions, cache, self.settings)

    def logits(self, hidden: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """Logits of hidden states."""
        return self.model.logits(hidden)


def run(model, configs, tables, tokens, positions, cache, settings) -> tuple[Array, paged.PagedCache]:
    """Hidden states [B T D] of tokens, and the cache with them; of Flax's and of Equinox's models.

    tables: angles.tables on the device.

    The tokens of a call are the rows of its blocks, so that a token's result is the same bits in any prompt part and
    batch; long prompts go through in parts.
    """
    batch, length = tokens.shape
    part = max(1, PART_ROWS // batch)
    if length <= part:
        return run_part(model, configs, tables, tokens, positions, cache, settings)
    parts = -(-length // part)
    short = ((0, 0), (0, parts * part - length))
    tokens, positions = jnp.pad(tokens, short), jnp.pad(positions, short, constant_values=-1)

    def step(i, carry):
        hidden, cache = carry
        here = (lax.dynamic_slice_in_dim(x, i * part, part, axis=1) for x in (tokens, positions))
        out, cache = run_part(model, configs, tables, *here, cache, settings)
        return lax.dynamic_update_slice_in_dim(hidden, out, i * part, axis=1), cache

    hidden = jnp.zeros((batch, parts * part, configs[0].d_model), jnp.float32)
    hidden, cache = lax.fori_loop(0, parts, step, (hidden, cache))
    return hidden[:, :length], cache


def run_part(model, configs, tables, tokens, positions, cache, settings) -> tuple[Array, paged.PagedCache]:
    """The same for tokens that are few enough for one call a block."""
    x = model.embed(tokens)
    if model.position is not None:
        x = x + model.position(jnp.maximum(positions, 0))
    rows, half = positions.reshape(-1), configs[0].head_dim // 2
    at = [None if table is None else table[jnp.maximum(rows, 0)] for table in tables]
    pairs = [each if each is None else (each[:, :half], each[:, half:]) for each in at]
    shape, x, arrays = x.shape, x.reshape(-1, x.shape[2]), ([], [], [], [])
    table = jnp.repeat(cache.table, tokens.shape[1], axis=0)
    for i, (layer, config) in enumerate(zip(model.layers, configs, strict=True)):
        used = pairs[1 if layer.attention.is_local else 0]
        cached = (cache.keys[i], cache.values[i], cache.key_scales[i], cache.value_scales[i])
        x, cached = calls.block(x, rows, used, block_weights(layer), cached, table, config, settings)
        for kind, array in zip(arrays, cached, strict=True):
            kind.append(array)
    final, bias = model.final_norm, getattr(model.final_norm, "bias", None)
    x = calls.norm(x, final.scale[...], None if bias is None else bias[...], eps=final.eps).reshape(shape)
    return x, paged.PagedCache(*map(tuple, arrays), cache.table)


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
