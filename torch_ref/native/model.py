"""A decoder on packed weights in PyTorch: one operator for all blocks, for prompts and for tokens.

Twin: jaxbench/native/model.py.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from jaxbench.native.checkpoint import PackedCheckpoint, Settings, checked
from torch_ref.native import calls, paged, run


class NativeTransformer(torch.nn.Module):
    """A decoder whose decode steps are native calls, for use in a Generator."""

    draw = staticmethod(calls.draw)

    torch_compile = ""

    def __init__(self, checkpoint: PackedCheckpoint, cache_dtype: str, settings: Settings):
        super().__init__()
        config = checkpoint.config
        self.weights, self.settings = run.device_weights(checkpoint), settings
        self.register_buffer("embedding", self.weights.embed.data)  # shows the model's device
        self.configs = tuple(config.at_layer(i) for i in range(config.num_layers))
        self.dtype, self.cache_dtype = "float32", cache_dtype
        self.max_seq_len, self.vocab_size = config.max_seq_len, config.vocab_size

    def features(
        self,
        tokens: Int[Tensor, "B T"],
        positions: Int[Tensor, "B T"] | None,
        *,
        cache: paged.PagedCache | None = None,
        slot: Tensor | int | None = None,
        vectors: Float[Tensor, "M D"] | None = None,
    ) -> tuple[Float[Tensor, "B T D"], paged.PagedCache]:
        """Hidden states after the final norm, and the cache with the tokens' keys and values at their positions.

        slot is not used: a token's slot in the pages follows from its position. Without a cache, one is made for T
        positions; without positions they are 0, 1, ... in every row. vectors: embeddings of tokens past the vocabulary.
        Positions from max_seq_len on are an IndexError.
        """
        if positions is None:
            positions = torch.arange(tokens.shape[1], dtype=torch.int32).expand(*tokens.shape)
        if cache is None:
            cache = paged.empty(self.configs[0], *tokens.shape, self.cache_dtype)
        return run.run(self.weights, self.configs, tokens, positions, cache, self.settings, vectors)

    def logits(self, hidden: Float[Tensor, "B T D"]) -> Float[Tensor, "B T V"]:
        """Logits of hidden states."""
        return run.logits(self.weights, self.configs[0], hidden, self.settings)


def build(
    checkpoint: PackedCheckpoint, *, cache_dtype: str = "float32", activations: str = "float32", threads: int = 0
) -> NativeTransformer:
    """Build a decoder on a packed checkpoint, like jaxbench.native.model.build."""
    settings = checked(checkpoint, cache_dtype, activations, threads)
    calls.register()
    return NativeTransformer(checkpoint, cache_dtype, settings).eval()
