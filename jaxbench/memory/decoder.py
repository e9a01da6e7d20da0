"""Memory layers of the decoder, in Flax NNX. Twin: torch_ref/memory/decoder.py.

A block with memory (blocks.py) replaces a layer's attention, or a memory is inserted in parallel to the attention,
with a gate that starts at 0. Padding changes no memory; each document of a row has its own memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jaxtyping import Bool, Float, Int

from jaxbench import parameters, transformer
from jaxbench.attention import Context
from jaxbench.config import Compute, TransformerConfig
from jaxbench.extension import Extension
from jaxbench.memory import bank_config, blocks, layout, placement
from jaxbench.memory.bank import BankState
from jaxbench.memory.blocks import BlockState
from jaxbench.memory.decoder_config import DecoderMemory, MemoryTransformerConfig
from jaxbench.training import optimizer_step, precision
from jaxbench.training.step_config import StepConfig


class LayerMemory(NamedTuple):
    """State and loss of one layer's memory after a call."""

    state: BlockState | None  # None after rows that may hold several documents
    loss: Float[Array, ""]  # of a bank's compression, in this call


class MemoryLayer(transformer.Block):
    """Residual block whose attention is replaced by a block with memory, or has a memory in parallel."""

    def __init__(self, config: MemoryTransformerConfig, compute: Compute):
        super().__init__(config, compute)
        memory = config.memory
        if not memory.insert:
            del self.attention
        self.block = blocks.Block(config.block(), dtype=compute.dtype)
        self.gate = nnx.Param(jnp.zeros((config.d_model,), compute.dtype)) if memory.insert else None
        self.max_documents, self.learn = memory.max_documents, memory.learn
        self.auxiliary_weight = memory.loss_weight if memory.bank is not None else 0.0

    def _mix(
        self, x: Float[Array, "B T D"], context: Context, cached: tuple | None
    ) -> tuple[Float[Array, "B T D"], tuple[Array | None, Array | None, LayerMemory]]:
        """Compute the memory's output, gated and added to attention's with insert; also the layer's cache entries."""
        state = None if cached is None else cached[2].state
        if cached is not None and state is None:
            raise ValueError(
                f"memory: the cache is behind rows of up to max_documents={self.max_documents} documents, which leave "
                "no state to go on from; read one document a row first"
            )
        memory_out, memory = self.recall(x, context, state)
        if self.gate is None:
            return memory_out, (None, None, memory)
        attention_out, entries = self.attention(x, context, None if cached is None else cached[:2])
        return attention_out + self.gate[...][None, None, :] * memory_out, (*entries, memory)

    def recall(
        self, x: Float[Array, "B T D"], context: Context, state: BlockState | None
    ) -> tuple[Float[Array, "B T D"], LayerMemory]:
        """Compute the memory output of a call's tokens, and the memory after them.

        Documents beyond the first max_documents of a row have no memory: their outputs are zeros.
        """
        is_token, num_documents = context.spans.query_positions >= 0, self.max_documents
        if context.spans.query_segments is None or state is not None:
            memory_out, state, loss = self.block(x, state, is_token=is_token, learn=self.learn)
            return memory_out, LayerMemory(state, loss)
        document = documents(context.spans.query_segments, is_token)
        rows = document[:, None, :] == jnp.arange(num_documents)[None, :, None]
        spread = jnp.broadcast_to(x[:, None], (len(x), num_documents, *x.shape[1:])).reshape(-1, *x.shape[1:])
        memory_out, state, loss = self.block(spread, is_token=rows.reshape(-1, x.shape[1]), learn=self.learn)
        memory_out = jnp.sum(memory_out.reshape(len(x), num_documents, *x.shape[1:]), axis=1)
        return memory_out, LayerMemory(state if num_documents == 1 else None, loss)


def documents(segments: Int[Array, "B T"], is_token: Bool[Array, "B T"]) -> Int[Array, "B T"]:
    """Index of each token's document in its row, from 0; -1 for padding, which does not split a document."""
    ordered = layout.gathered(segments, jnp.argsort(~is_token, axis=1, stable=True))
    is_next = jnp.pad(ordered[:, 1:] != ordered[:, :-1], ((0, 0), (1, 0)))
    place = jnp.maximum(jnp.cumsum(is_token, axis=1) - 1, 0)
    return jnp.where(is_token, layout.gathered(jnp.cumsum(is_next, axis=1), place), -1)


def make_layer(config: MemoryTransformerConfig, index: int, compute: Compute) -> transformer.Block:
    """Make a layer of a decoder, with memory if the configuration gives it one."""
    return (MemoryLayer if config.has_memory(index) else transformer.Block)(config, compute)


def build(config: TransformerConfig, params: Mapping[str, np.ndarray], **compute: Any) -> transformer.Transformer:
    """Build a decoder with its configuration's memory layers; arguments and errors: transformer.build."""
    return transformer.build(config, params, make_layer=make_layer if config.layer_kind else None, **compute)


def bank_states(
    params: Mapping[str, Array], batch: Any, *, graph: Any, step_config: StepConfig
) -> dict[int, BankState]:
    """States of a decoder's banks after a batch's rows, by layer; each row is read as one document."""
    model = parameters.merge(graph, optimizer_step.cast_to_compute(params, precision.POLICIES[step_config.precision]))
    is_token = batch.positions >= 0
    positions = jnp.where(is_token, jnp.cumsum(is_token, axis=1) - 1, -1).astype(jnp.int32)
    _, cache = model.features(batch.tokens, positions)
    states = {i: layer.state.memory for i, layer in enumerate(cache.memory) if layer is not None}
    return {i: state for i, state in states.items() if isinstance(state, BankState)}


def extension(memory: DecoderMemory | None) -> Extension:
    """Return what a decoder with this memory adds to the core's programs; nothing if memory is None."""
    if memory is None:
        return Extension()
    watched = {} if memory.bank is None else {"watch": bank_states, "scalars": bank_config.scalars}
    return Extension(make_layer=make_layer, add_rules=placement.with_memory, **watched)
