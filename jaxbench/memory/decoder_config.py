"""Shape of a decoder with memory layers, their parameters and initial values (S file)."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import pydantic
from jaxtyping import Int
from pydantic import Field

from jaxbench.config import Base, TransformerConfig
from jaxbench.memory import block_config
from jaxbench.memory.bank_config import BankConfig
from jaxbench.memory.block_config import BlockConfig
from jaxbench.memory.config import NeuralMemoryConfig

PARAMETERS = r"layers\.\d+\.(block\..*|gate)"  # names of a decoder's memory parameters


class DecoderMemory(Base):
    """Which layers of a decoder have memory, and what kind."""

    kind: Literal["mac", "mag", "mal", "lmm", "bank"]  # of block; without insert, it replaces the layer's attention
    layers: tuple[int, ...] | None = None  # which layers, from 0; None = all
    insert: bool = False  # lmm in parallel to the layer's attention, with a gate that starts at 0: identity
    window: int | None = Field(default=None, gt=0)  # tokens that the block's attention sees, not for lmm; mac: segment
    num_persistent: int = Field(default=0, ge=0)  # learned tokens that it always sees; not for lmm
    neural: NeuralMemoryConfig | None = None  # for mac, mag, mal, lmm
    bank: BankConfig | None = None  # for bank; lmm takes either
    max_documents: int = Field(default=1, ge=1)  # per row; each has its own memory and costs as much as a row
    loss_weight: float = Field(default=1.0, ge=0)  # of the loss that trains a bank's compression
    learn: bool = True  # False: neural memories learn only neural.num_persistent tokens; a bank is still written


class MemoryTransformerConfig(TransformerConfig):
    """Shape of a decoder with memory layers."""

    memory: DecoderMemory

    @pydantic.model_validator(mode="after")
    def _check_memory(self) -> MemoryTransformerConfig:
        m = self.memory
        if not self.is_causal:
            raise ValueError(f"memory: is_causal={self.is_causal}; wanted true, memories are read in order")
        wrong = [i for i in m.layers or () if not 0 <= i < self.num_layers]
        if wrong or m.layers == () or len(set(m.layers or ())) != len(m.layers or ()):
            raise ValueError(
                f"memory: layers={list(m.layers)} must be different layers from 0 to {self.num_layers - 1}"
            )
        if m.insert and m.kind != "lmm":
            raise ValueError(f"memory: insert=true keeps the layer's attention, so kind must be lmm, got {m.kind}")
        if m.window is None and m.kind != "lmm":
            raise ValueError(f"memory: window is missing, kind={m.kind} has an attention of its own")
        if self.qk_norm and m.kind != "lmm":
            raise ValueError(
                f"memory: kind={m.kind} has an attention of its own, which does not normalise queries and keys; with "
                "qk_norm=true use kind=lmm, or set qk_norm=false"
            )
        if m.kind != "lmm":
            self._check_attention()
        self._check_parts()
        self.block()
        return self

    def _check_attention(self) -> None:
        """Refuse settings of the decoder's attention that the block's own attention does not have."""
        names = ("use_bias", "qkv_bias", "attention_softcap", "global_every")
        others: dict[str, Any] = {name: getattr(self, name) for name in names if getattr(self, name)}
        if self.query_scale != 1.0:
            others["query_scale"] = self.query_scale  # of yarn, or of query_pre_attn_scalar
        if self.rope_scaling is not None:
            others["rope_scaling"] = self.rope_scaling.kind
        if self.position != "rotary":
            others["position"] = self.position
        if others:
            raise ValueError(
                f"memory: kind={self.memory.kind} has an attention of its own, which has no {others}; use kind=lmm"
            )

    def _check_parts(self) -> None:
        """Refuse settings of parts that the memory does not have."""
        m = self.memory
        if m.kind == "lmm" and (m.window is not None or m.num_persistent):
            raise ValueError(
                f"memory: kind=lmm has no attention of its own: wanted window=null and num_persistent=0 (a neural "
                f"memory's learned tokens are neural.num_persistent), got {m.window} and {m.num_persistent}"
            )
        if m.bank is None and m.loss_weight != 1.0:
            raise ValueError(f"memory: loss_weight={m.loss_weight} is of a bank's compression, and bank is unset")

    def has_memory(self, index: int) -> bool:
        """True if the layer of this index has memory."""
        return self.memory.layers is None or index in self.memory.layers

    def block(self) -> BlockConfig:
        """Shape of every memory layer's block."""
        sizes = ("d_model", "num_heads", "num_kv_heads", "head_dim", "rope_theta", "norm_eps")
        own = {name: getattr(self.memory, name) for name in ("kind", "num_persistent", "neural", "bank")}
        return BlockConfig(**{name: getattr(self, name) for name in sizes}, **own, window=self.memory.window or 1)

    @property
    def layer_kind(self) -> str:
        """Kind of the memory layers."""
        return self.memory.kind

    def layer_counts(self) -> dict[int, int]:
        """Number of layers with and without memory, each by the index of one of them."""
        if (chosen := self.memory.layers) is None:
            return {0: self.num_layers}
        counts = {chosen[0]: len(chosen)}
        if others := self.num_layers - len(chosen):
            counts[next(i for i in range(self.num_layers) if i not in chosen)] = others
        return counts

    def num_keys(self, index: int, seq_len: int) -> int:
        """Number of keys that the last token attends to; a block's attention has the memory's window, lmm has none.

        Persistent tokens are not counted.
        """
        if self.memory.insert or not self.has_memory(index):
            return super().num_keys(index, seq_len)
        return min(seq_len, self.memory.window or 0)

    def layer_shapes(self, index: int, plain: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        """Parameter shapes of a layer; in a memory layer without insert, the block's replace the attention's."""
        if not self.has_memory(index):
            return plain
        kept = {n: shape for n, shape in plain.items() if self.memory.insert or not n.startswith("attention.")}
        block = {f"block.{name}": shape for name, shape in block_config.parameter_shapes(self.block()).items()}
        return kept | block | ({"gate": (self.d_model,)} if self.memory.insert else {})

    def own_params(self, seed: int, *, distinct: bool, std: float) -> dict[str, np.ndarray]:
        """Initial values of the memories, each layer's drawn from its own seed.

        An inserted memory starts with a gate of 0: the decoder computes what it did without it.
        """
        params: dict[str, np.ndarray] = {}
        for i in filter(self.has_memory, range(self.num_layers)):
            own = (seed + 1 + i) % 2**64
            values = block_config.initial_params(self.block(), own, distinct=distinct, std=std)
            params |= {f"layers.{i}.block.{name}": value for name, value in values.items()}
            if self.memory.insert:
                random = np.random.default_rng((seed, i))
                params[f"layers.{i}.gate"] = (0.1 if distinct else 0.0) * random.standard_normal(self.d_model)
        return params

    def check_documents(self, segments: Int[np.ndarray, "B T"]) -> None:
        """Check that rows [B T] of segment ids, 0 = padding, have no more documents than the memory reads.

        Raises:
          ValueError: a row has more.
        """
        num_documents = segments.max(axis=1) - np.where(segments > 0, segments, segments.max()).min(axis=1) + 1
        if num_documents.max() > self.memory.max_documents:
            row = int(num_documents.argmax())
            raise ValueError(
                f"memory: row {row} holds {num_documents[row]} documents, and memory.max_documents="
                f"{self.memory.max_documents} of a row have memory; raise it, or shorten data.seq_len"
            )


def with_memory(model: TransformerConfig, memory: DecoderMemory | None) -> TransformerConfig:
    """Return a decoder's shape with memory layers, or unchanged if memory is None.

    Raises:
      ValueError: the memory does not fit the decoder.
    """
    if memory is None:
        return model
    try:
        return MemoryTransformerConfig(**model.model_dump(), memory=memory)
    except pydantic.ValidationError as error:
        problems = [problem["msg"].removeprefix("Value error, ") for problem in error.errors(include_url=False)]
        raise ValueError("; ".join(problems)) from error
