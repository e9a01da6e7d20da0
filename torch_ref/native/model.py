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
from torch_ref.native.run import block_weights, run
from torch_ref.transformer import Transformer


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

    draw = staticmethod(calls.draw)

    torch_compile = ""

    def __init__(self, model: Transformer, checkpoint: PackedCheckpoint, cache_dtype: str, settings: Settings):
        super().__init__()
        self.model, self.settings = model, settings
        self.configs = tuple(checkpoint.config.at_layer(i) for i in range(checkpoint.config.num_layers))
        self.dtype, self.cache_dtype = "float32", cache_dtype
        self.max_seq_len, self.vocab_size = model.max_seq_len, checkpoint.config.vocab_size
        for name, table in zip(("angles", "local_angles"), angles.tables(checkpoint.config), strict=True):
            self.register_buffer(name, None if table is None else torch.from_numpy(table))
        self._layers: tuple[calls.BlockWeights, ...] | None = None

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
        if self._layers is None:
            self._layers = tuple(map(block_weights, self.model.layers))
        tables = (self.angles, self.local_angles)
        return run(self.model, self._layers, self.configs, tables, tokens, positions, cache, self.settings)

    def logits(self, hidden: Float[Tensor, "B T D"]) -> Float[Tensor, "B T V"]:
        """Logits of hidden states."""
        return self.model.logits(hidden)


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
