"""A decoder on packed weights in Flax NNX: one native call per block, for prompts and for tokens.

Twins: torch_ref/native/model.py, jaxbench/eqx/native/model.py. Its arrays are in one tree (run.DecoderWeights), not in
one module per matrix: creating 576 modules takes longer than reading the file.
"""

from __future__ import annotations

from flax import nnx
from jax import Array
from jaxtyping import Float, Int

from jaxbench import libtpu
from jaxbench.native import calls, paged, run
from jaxbench.native.checkpoint import PackedCheckpoint, Settings, checked


class NativeTransformer(nnx.Module):
    """A decoder whose decode steps are native calls, for use in a Generator."""

    draw = staticmethod(calls.draw)

    def __init__(self, checkpoint: PackedCheckpoint, cache_dtype: str, settings: Settings):
        config = checkpoint.config
        self.weights, self.settings = nnx.data(run.device_weights(checkpoint)), settings
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
    """Build a decoder on a packed checkpoint.

    Args:
      cache_dtype: of keys and values: float32, bfloat16 or int8 (one scale per position and head).
      activations: float32; int8 (one scale per 32) with integer weights, bfloat16 with bfloat16 weights: less exact,
        faster for prompts and batches.
      threads: at most this many, 0 = all that XLA has; the result does not depend on it.

    Raises:
      ValueError: a setting is unknown, or layers are of a workload's own kind.
      NotAvailable: the kernels are not available here.
    """
    libtpu.leave_out_if_absent()
    settings = checked(checkpoint, cache_dtype, activations, threads)
    calls.register()
    return NativeTransformer(checkpoint, cache_dtype, settings)
