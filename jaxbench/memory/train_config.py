"""Configuration of a training run of a decoder with memory, the schema of configs/ltm/*.yaml (S file)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pydantic

from jaxbench.config import TransformerConfig
from jaxbench.memory import folder as own_folder
from jaxbench.memory.decoder_config import PARAMETERS, DecoderMemory, MemoryTransformerConfig, with_memory
from jaxbench.training.step_config import OptimizerConfig, StepConfig
from jaxbench.training.train_config import TrainConfig


class MemoryOptimizerConfig(OptimizerConfig):
    """An optimiser that may train only a decoder's memory."""

    # memory: only the memory's parameters are trained
    trained: Literal["all", "adapters", "memory"] = "all"

    def is_trained(self, name: str) -> bool:
        """True where the parameter of this dotted name is trained."""
        return re.fullmatch(PARAMETERS, name) is not None if self.trained == "memory" else super().is_trained(name)


class MemoryStepConfig(StepConfig):
    """One optimiser step of a decoder that may have memory."""

    optimizer: MemoryOptimizerConfig = MemoryOptimizerConfig()


class MemoryTrainConfig(TrainConfig):
    """One training run of a decoder that may have memory; without one, like any training run."""

    step: MemoryStepConfig = MemoryStepConfig()
    memory: DecoderMemory | None = None  # memory layers of the decoder

    @pydantic.model_validator(mode="after")
    def _check_trained(self) -> MemoryTrainConfig:
        trained = self.step.optimizer.trained
        if trained == "memory" and self.memory is None:
            raise ValueError(f"step.optimizer.trained={trained}, but memory is null: there would be nothing to train")
        if self.memory is not None and self.lora is not None:
            raise ValueError(f"lora: adapters do not go with memory.kind={self.memory.kind}; leave memory or lora out")
        if self.memory is not None and not self.data.document_mask:
            raise ValueError(
                f"data.document_mask=false does not go with memory.kind={self.memory.kind}, which needs it"
            )
        return self

    @pydantic.model_validator(mode="after")
    def _check_attention(self) -> MemoryTrainConfig:
        """Refuse settings of the decoder's attention if memory has taken its place in every layer."""
        memory, num_layers = self.memory, self.model.num_layers
        if memory is None or memory.insert or (memory.layers is not None and len(memory.layers) < num_layers):
            return self
        why = f"memory.kind={memory.kind} takes the place of attention in all {num_layers} layers"
        if self.implementation != "dense":
            raise ValueError(f"implementation={self.implementation} does nothing: {why}; wanted dense")
        if self.fused_projections and not self.model.is_gated:
            raise ValueError(
                f"fused_projections={self.fused_projections} does nothing: {why}, and model.activation="
                f"{self.model.activation} has no gate; wanted false"
            )
        return self

    def decoder(self, vocab_size: int | None) -> TransformerConfig:
        """Decoder that the run trains, its memory layers included; see TrainConfig.decoder."""
        return with_memory(super().decoder(vocab_size), self.memory)

    def export(self, folder: Path, model: TransformerConfig, params: Mapping[str, np.ndarray], tokenizer: Any) -> None:
        """Write the trained decoder; one with memory in jaxbench's own format (folder.py)."""
        if isinstance(model, MemoryTransformerConfig):
            own_folder.save(folder, model, params, tokenizer=tokenizer)
        else:
            super().export(folder, model, params, tokenizer)

    def identity(self) -> dict[str, Any]:
        """Settings that stay the same when a run is resumed; without a memory those of a TrainConfig."""
        content = super().identity()
        if self.memory is None:
            del content["memory"]
            return content
        content["step"]["optimizer"]["trained"] = self.step.optimizer.trained
        del content["memory"]["max_documents"]  # rows of fewer documents mean the same: more steps may read other rows
        if (bank := content["memory"].get("bank")) is not None:
            bank.pop("memory_slots")  # a bank may grow or shrink between starts: no parameter depends on its slots
        return content
