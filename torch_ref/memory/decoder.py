"""Memory layers of the decoder, in PyTorch. Twin: jaxbench/memory/decoder.py.

A block with memory (blocks.py) replaces a layer's attention, or a memory is inserted in parallel to the attention,
with a gate that starts at 0. Padding changes no memory; each document of a row has its own memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from jaxbench.config import Compute, TransformerConfig
from jaxbench.extension import Extension
from jaxbench.memory import bank_config
from jaxbench.memory.decoder_config import DecoderMemory, MemoryTransformerConfig
from jaxbench.training import precision
from jaxbench.training.step_config import StepConfig
from torch_ref import transformer
from torch_ref.attention import Context
from torch_ref.memory import blocks, layout
from torch_ref.memory.bank import BankState
from torch_ref.memory.blocks import BlockState
from torch_ref.training import optimizer_step


class LayerMemory(NamedTuple):
    """State and loss of one layer's memory after a call."""

    state: BlockState | None  # None after rows that may hold several documents
    loss: Float[Tensor, ""]  # of a bank's compression, in this call


class MemoryLayer(transformer.Block):
    """Residual block whose attention is replaced by a block with memory, or has a memory in parallel."""

    def __init__(self, config: MemoryTransformerConfig, compute: Compute):
        super().__init__(config, compute)
        memory = config.memory
        if not memory.insert:
            del self.attention
        self.block = blocks.Block(config.block(), dtype=compute.dtype)
        gate = torch.zeros(config.d_model, dtype=getattr(torch, compute.dtype)) if memory.insert else None
        self.gate = None if gate is None else torch.nn.Parameter(gate)
        self.max_documents, self.learn = memory.max_documents, memory.learn
        self.auxiliary_weight = memory.loss_weight if memory.bank is not None else 0.0

    def _mix(
        self, x: Float[Tensor, "B T D"], context: Context, cached: tuple | None
    ) -> tuple[Float[Tensor, "B T D"], tuple[Tensor | None, Tensor | None, LayerMemory]]:
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
        return attention_out + self.gate * memory_out, (*entries, memory)

    def recall(
        self, x: Float[Tensor, "B T D"], context: Context, state: BlockState | None
    ) -> tuple[Float[Tensor, "B T D"], LayerMemory]:
        """Compute the memory output of a call's tokens, and the memory after them.

        Documents beyond the first max_documents of a row have no memory: their outputs are zeros.
        """
        is_token, num_documents = context.spans.query_positions >= 0, self.max_documents
        if context.spans.query_segments is None or state is not None:
            memory_out, state, loss = self.block(x, state, is_token=is_token, learn=self.learn)
            return memory_out, LayerMemory(state, loss)
        document = documents(context.spans.query_segments, is_token)
        rows = document[:, None, :] == torch.arange(num_documents, device=x.device)[None, :, None]
        spread = x[:, None].expand(-1, num_documents, -1, -1).reshape(-1, *x.shape[1:])
        memory_out, state, loss = self.block(spread, is_token=rows.reshape(-1, x.shape[1]), learn=self.learn)
        memory_out = memory_out.reshape(len(x), num_documents, *x.shape[1:]).sum(dim=1)
        return memory_out, LayerMemory(state if num_documents == 1 else None, loss)


def documents(segments: Int[Tensor, "B T"], is_token: Bool[Tensor, "B T"]) -> Int[Tensor, "B T"]:
    """Index of each token's document in its row, from 0; -1 for padding, which does not split a document."""
    ordered = layout.gathered(segments, torch.argsort((~is_token).to(torch.int32), dim=1, stable=True))
    is_next = torch.nn.functional.pad(ordered[:, 1:] != ordered[:, :-1], (1, 0))
    place = (torch.cumsum(is_token, dim=1) - 1).clamp(min=0)
    return torch.where(is_token, layout.gathered(torch.cumsum(is_next, dim=1), place), -1)


def make_layer(config: MemoryTransformerConfig, index: int, compute: Compute) -> transformer.Block:
    """Make a layer of a decoder, with memory if the configuration gives it one."""
    return (MemoryLayer if config.has_memory(index) else transformer.Block)(config, compute)


def build(config: TransformerConfig, params: Mapping[str, np.ndarray], **compute: Any) -> transformer.Transformer:
    """Build a decoder with its configuration's memory layers; arguments and errors: transformer.build."""
    return transformer.build(config, params, make_layer=make_layer if config.layer_kind else None, **compute)


@torch.no_grad()
def bank_states(params: Any, batch: Any, *, graph: Any, step_config: StepConfig) -> dict[int, BankState]:
    """States of a decoder's banks after a batch's rows, by layer; each row is read as one document.

    params is the model, graph is unused.
    """
    is_token = batch.positions >= 0
    positions = torch.where(is_token, torch.cumsum(is_token, dim=1) - 1, -1).to(torch.int32)
    with optimizer_step.cast_to_compute(params, precision.POLICIES[step_config.precision]):
        _, cache = params.features(batch.tokens, positions)
    states = {i: layer.state.memory for i, layer in enumerate(cache.memory) if layer is not None}
    return {i: state for i, state in states.items() if isinstance(state, BankState)}


def extension(memory: DecoderMemory | None) -> Extension:
    """Return what a decoder with this memory adds to the core's programs; nothing if memory is None."""
    if memory is None:
        return Extension()
    watched = {} if memory.bank is None else {"watch": bank_states, "scalars": bank_config.scalars}
    return Extension(make_layer=make_layer, **watched)
