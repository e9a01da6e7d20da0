"""A decoder's way through the native blocks. Twin: jaxbench/native/run.py."""

from __future__ import annotations

import torch
from torch import Tensor

from jaxbench.native import library
from torch_ref.native import calls, paged

PART_ROWS = 512  # tokens of a block call


def run(model, layers, configs, tables, tokens, positions, cache, settings) -> tuple[Tensor, paged.PagedCache]:
    """Hidden states [B T D] of tokens, and the cache, written in place; tables: angles.tables as tensors."""
    part = max(1, PART_ROWS // tokens.shape[0])
    parts = zip(tokens.split(part, dim=1), positions.split(part, dim=1), strict=True)
    hidden = [run_part(model, layers, configs, tables, *each, cache, settings)[0] for each in parts]
    return hidden[0] if len(hidden) == 1 else torch.cat(hidden, dim=1), cache


def run_part(model, layers, configs, tables, tokens, positions, cache, settings) -> tuple[Tensor, paged.PagedCache]:
    """The same for tokens that are few enough for one call a block."""
    x = model.embed(tokens)
    if model.position is not None:
        x = x + model.position(torch.clamp(positions, min=0))
    rows, half = positions.reshape(-1), configs[0].head_dim // 2
    at = [None if table is None else table[torch.clamp(rows, min=0)] for table in tables]
    pairs = [each if each is None else (each[:, :half].contiguous(), each[:, half:].contiguous()) for each in at]
    table = cache.table if tokens.shape[1] == 1 else cache.table.repeat_interleave(tokens.shape[1], dim=0)
    final = model.final_norm
    out, _ = calls.blocks(x.reshape(-1, x.shape[2]), rows, *pairs, layers, cache[:4], table, configs, settings)
    return calls.norm(out, final.scale, getattr(final, "bias", None), eps=final.eps).reshape(x.shape), cache


def block_weights(layer) -> calls.BlockWeights:
    """A layer's arrays in the order of the block call."""
    attention, mlp = layer.attention, layer.mlp
    norms = (layer.attention_norm, layer.mlp_norm, layer.attention_post_norm, layer.mlp_post_norm)
    pairs = [(getattr(norm, "scale", None), getattr(norm, "bias", None)) for norm in norms]
    pairs += [(getattr(norm, "scale", None), None) for norm in (attention.q_norm, attention.k_norm)]
    linears = [getattr(attention, name) for name in library.MATRICES[:4]]
    linears += [getattr(mlp, name) for name in library.MATRICES[4:]]
    return calls.BlockWeights(
        tuple(pairs),
        tuple(None if each is None else each.data for each in linears),
        tuple(None if each is None else each.bias for each in linears),
        tuple("float32" if each is None else each.format for each in linears),
        attention.is_local,
    )
