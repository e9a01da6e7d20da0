"""A decoder on packed weights in Equinox. Twin: jaxbench/native/model.py; same arrays and calls."""

from __future__ import annotations

import equinox as eqx
from jax import Array
from jaxtyping import Float, Int

from jaxbench import libtpu
from jaxbench.config import TransformerConfig
from jaxbench.native import calls, paged, run
from jaxbench.native.checkpoint import PackedCheckpoint, Settings, checked


class NativeTransformer(eqx.Module):
    """A decoder whose decode steps are native calls, for use in a Generator."""

    draw = staticmethod(calls.draw)

    weights: run.DecoderWeights
    settings: Settings = eqx.field(static=True)
    configs: tuple[TransformerConfig, ...] = eqx.field(static=True)
    dtype: str = eqx.field(static=True)
    cache_dtype: str = eqx.field(static=True)
    max_seq_len: int = eqx.field(static=True)
    vocab_size: int = eqx.field(static=True)

    def __init__(self, checkpoint: PackedCheckpoint, cache_dtype: str, settings: Settings):
        config = checkpoint.config
        self.weights, self.settings = run.device_weights(checkpoint), settings
        self.configs = tuple(config.at_layer(i) for i in range(config.num_layers))
        self.dtype, self.cache_dtype = "float32", cache_dtype
        self.max_seq_len, self.vocab_size = config.max_seq_len, config.vocab_size

    def features(
        self,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        *,
        cache: paged.PagedCache | None = None,
        slot: Int[Array, ""] | int | None = None,
        vectors: Float[Array, "M D"] | None = None,
    ) -> tuple[Float[Array, "B T D"], paged.PagedCache]:
        """Hidden states after the final norm, and the cache with the tokens' keys and values at their positions.

        slot is not used: a token's slot in the pages follows from its position. Without a cache, one is made for T
        positions. vectors: embeddings of tokens past the vocabulary.
        Positions from max_seq_len on have NaN.
        """
        if cache is None:
            cache = paged.empty(self.configs[0], *tokens.shape, self.cache_dtype)
        return run.run(self.weights, self.configs, tokens, positions, cache, self.settings, vectors)

    def logits(self, hidden: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """Logits of hidden states."""
        return run.logits(self.weights, self.configs[0], hidden, self.settings)


def build(
    checkpoint: PackedCheckpoint, *, cache_dtype: str = "float32", activations: str = "float32", threads: int = 0
) -> NativeTransformer:
    """Build a decoder on a packed checkpoint, like jaxbench.native.model.build."""
    libtpu.leave_out_if_absent()
    settings = checked(checkpoint, cache_dtype, activations, threads)
    calls.register()
    return NativeTransformer(checkpoint, cache_dtype, settings)
