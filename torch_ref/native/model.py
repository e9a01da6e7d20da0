"""A decoder on packed weights in PyTorch: one operator for all blocks, for prompts and for tokens.

Twin: jaxbench/native/model.py.
"""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from jaxbench.config import Compute
from jaxbench.native import angles, library
from jaxbench.native.checkpoint import PackedCheckpoint, Settings, checked
from torch_ref.native import calls, paged
from torch_ref.transformer import Transformer

PART_ROWS = 256  # tokens of a block call: more do not fit the caches of a core, and wait for nothing

class PackedLinear(torch.nn.Module):
    """Affine map of the last axis by a packed matrix."""

    def __init__(self, weights: library.Packed, bias: np.ndarray | None, settings: Settings):
        super().__init__()
        self.register_buffer("data", torch.from_numpy(weights.data))
        self.register_buffer("bias", None if bias is None else torch.tensor(bias, dtype=torch.float32))
        self.format, self.inputs, self.outputs = weights.format, weights.inputs, weights.outputs
        self.settings = settings

    @property
    def weights(self) -> calls.PackedWeights:
        """The matrix as calls take it."""
        return calls.PackedWeights(self.data, self.format, self.inputs, self.outputs)

    def forward(self, x: Float[Tensor, "*rows I"]) -> Float[Tensor, "*rows O"]:
        """x @ kernel (+ bias)."""
        return calls.linear(x, self.weights, self.bias, self.settings)


class PackedEmbed(torch.nn.Module):
    """Embedding from a packed matrix, and logits by its transpose."""

    def __init__(self, weights: library.Packed, scale: float, settings: Settings):
        super().__init__()
        self.register_buffer("data", torch.from_numpy(weights.data))
        self.format, self.inputs, self.outputs = weights.format, weights.inputs, weights.outputs
        self.scale, self.settings = scale, settings

    @property
    def weights(self) -> calls.PackedWeights:
        """The matrix as calls take it."""
        return calls.PackedWeights(self.data, self.format, self.inputs, self.outputs)

    def forward(self, tokens: Int[Tensor, "B T"]) -> Float[Tensor, "B T D"]:
        """Embedding of each token."""
        rows = calls.embed(tokens, self.weights)
        return rows if self.scale == 1.0 else rows * self.scale

    def attend(self, x: Float[Tensor, "*rows D"]) -> Float[Tensor, "*rows V"]:
        """Logits of hidden states."""
        return calls.linear(x, self.weights, None, self.settings)


class NativeTransformer(torch.nn.Module):
    """A decoder whose decode steps are native calls; what a Generator takes."""

    torch_compile = ""

    def __init__(self, model: Transformer, checkpoint: PackedCheckpoint, cache_dtype: str, settings: Settings):
        super().__init__()
        self.model, self.settings = model, settings
        self.configs = tuple(checkpoint.config.at_layer(i) for i in range(checkpoint.config.num_layers))
        self.dtype, self.cache_dtype = "float32", cache_dtype
        self.max_seq_len, self.vocab_size = model.max_seq_len, checkpoint.config.vocab_size
        for name, table in zip(("angles", "local_angles"), angles.tables(checkpoint.config), strict=True):
            self.register_buffer(name, None if table is None else torch.from_numpy(table))
        self._steps: tuple | None = None  # the cache's keys, and what is prepared for it

    def features(
        self,
        tokens: Int[Tensor, "B T"],
        positions: Int[Tensor, "B T"] | None,
        *,
        cache: paged.PagedCache | None = None,
        slot: Tensor | int | None = None,
    ) -> tuple[Float[Tensor, "B T D"], paged.PagedCache]:
        """Hidden states after the final norm, and the cache with the tokens' keys and values at their positions.

        slot is not read: a token's place in the pages is its position. Without a cache one is made for T positions;
        without positions they are 0, 1, ... in every row.
        """
        if positions is None:
            positions = torch.arange(tokens.shape[1], dtype=torch.int32).expand(*tokens.shape)
        if cache is None:
            cache = paged.empty(self.configs[0], *tokens.shape, self.cache_dtype)
        if self._steps is None or self._steps[0] is not cache.keys:
            layers = [block_weights(layer) for layer in self.model.layers]
            is_local = [layer.attention.is_local for layer in self.model.layers]
            self._steps = (cache.keys, calls.prepare(layers, self.configs, cache, is_local, self.settings))
        return run(self.model, self._steps[1], (self.angles, self.local_angles), tokens, positions, cache)

    def logits(self, hidden: Float[Tensor, "B T D"]) -> Float[Tensor, "B T V"]:
        """Logits of hidden states."""
        return self.model.logits(hidden)


def run(model, steps, tables, tokens, positions, cache) -> tuple[Tensor, paged.PagedCache]:
    """Hidden states [B T D] of tokens, and the cache, written in place; tables: angles.tables as tensors."""
    part = max(1, PART_ROWS // tokens.shape[0])
    parts = zip(tokens.split(part, dim=1), positions.split(part, dim=1), strict=True)
    hidden = [run_part(model, steps, tables, *each, cache)[0] for each in parts]
    return hidden[0] if len(hidden) == 1 else torch.cat(hidden, dim=1), cache


def run_part(model, steps, tables, tokens, positions, cache) -> tuple[Tensor, paged.PagedCache]:
    """The same for tokens that are few enough for one call a block."""
    x = model.embed(tokens)
    if model.position is not None:
        x = x + model.position(torch.clamp(positions, min=0))
    rows, half = positions.reshape(-1), steps.calls[0].head_dim // 2
    at = [None if table is None else table[torch.clamp(rows, min=0)] for table in tables]
    pairs = [each if each is None else (each[:, :half].contiguous(), each[:, half:].contiguous()) for each in at]
    table = cache.table if tokens.shape[1] == 1 else cache.table.repeat_interleave(tokens.shape[1], dim=0)
    out, final = calls.block(x.reshape(-1, x.shape[2]), rows, pairs[0], steps, table, pairs[1]), model.final_norm
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
    )


def build(
    checkpoint: PackedCheckpoint, *, cache_dtype: str = "float32", activations: str = "float32", threads: int = 0
) -> NativeTransformer:
    """Decoder on a packed checkpoint, as jaxbench.native.model.build."""
    config, settings = checkpoint.config, checked(checkpoint, cache_dtype, activations, threads)
    calls.register()
    with torch.device("meta"):
        model = Transformer(config, Compute())
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
    for path, value in checkpoint.vectors.items():
        module = model.get_submodule(path.rpartition(".")[0])
        if not isinstance(module, PackedLinear):
            tensor = torch.tensor(value, dtype=torch.float32)
            setattr(module, path.rpartition(".")[2], torch.nn.Parameter(tensor, requires_grad=False))
    return NativeTransformer(model.eval(), checkpoint, cache_dtype, settings).eval()
