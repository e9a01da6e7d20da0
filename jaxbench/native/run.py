"""A decoder's way through the native blocks, of Flax's and of Equinox's models: functions on arrays.

Twin: torch_ref/native/run.py.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax

from jaxbench.native import calls, library, paged

PART_ROWS = 512  # tokens of a block call at most


def run(model, layers, configs, tables, tokens, positions, cache, settings) -> tuple[Array, paged.PagedCache]:
    """Hidden states [B T D] of tokens, and the cache with them; of Flax's and of Equinox's models.

    layers: block_weights of each; tables: angles.tables on the device.

    The tokens of a call are the rows of its blocks, so that a token's result is the same bits in any prompt part and
    batch; long prompts go through in parts.
    """
    batch, length = tokens.shape
    parts = -(-length // max(1, PART_ROWS // batch))
    if parts == 1:
        return run_part(model, layers, configs, tables, tokens, positions, cache, settings)
    part = -(-length // parts)  # equal parts: 832 tokens are 2 of 416, not 512 and 512 of which 192 are padding
    short = ((0, 0), (0, parts * part - length))
    tokens, positions = jnp.pad(tokens, short), jnp.pad(positions, short, constant_values=-1)

    def step(i, carry):
        hidden, cache = carry
        here = (lax.dynamic_slice_in_dim(x, i * part, part, axis=1) for x in (tokens, positions))
        out, cache = run_part(model, layers, configs, tables, *here, cache, settings)
        return lax.dynamic_update_slice_in_dim(hidden, out, i * part, axis=1), cache

    hidden = jnp.zeros((batch, parts * part, configs[0].d_model), jnp.float32)
    hidden, cache = lax.fori_loop(0, parts, step, (hidden, cache))
    return hidden[:, :length], cache


def run_part(model, layers, configs, tables, tokens, positions, cache, settings) -> tuple[Array, paged.PagedCache]:
    """The same for tokens that are few enough for one call a block."""
    x = model.embed(tokens)
    if model.position is not None:
        x = x + model.position(jnp.maximum(positions, 0))
    rows, half = positions.reshape(-1), configs[0].head_dim // 2
    at = [None if table is None else table[jnp.maximum(rows, 0)] for table in tables]
    pairs = [each if each is None else (each[:, :half], each[:, half:]) for each in at]
    table = jnp.repeat(cache.table, tokens.shape[1], axis=0)
    out, arrays = calls.blocks(x.reshape(-1, x.shape[2]), rows, *pairs, layers, cache[:4], table, configs, settings)
    final, bias = model.final_norm, getattr(model.final_norm, "bias", None)
    out = calls.norm(out, final.scale[...], None if bias is None else bias[...], eps=final.eps)
    return out.reshape(x.shape), paged.PagedCache(*arrays, cache.table)


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
        attention.is_local,
    )
