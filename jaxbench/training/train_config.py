"""Configuration of a training run: the schema of configs/lm/*.yaml (S file: neither JAX nor PyTorch)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pydantic

from jaxbench.config import Base, Compute, TransformerConfig
from jaxbench.lora.config import LoraConfig, with_lora
from jaxbench.mesh import ParallelConfig
from jaxbench.pretrained import weights
from jaxbench.training import schedules
from jaxbench.training.schedules import ScheduleConfig
from jaxbench.training.step_config import StepConfig

MAY_CHANGE = ("steps", "evaluation", "checkpoints", "logging", "parallel")  # between one start of a run and the next


class DecoderConfig(TransformerConfig):
    """A decoder whose vocabulary may be left to the tokenizer."""

    vocab_size: int | None = pydantic.Field(default=None, gt=0)  # tokens; null = as many as the tokenizer has

    def resolved(self, vocab_size: int | None) -> TransformerConfig:
        """Return the decoder with the tokenizer's vocabulary size if the file leaves it open.

        Raises:
          ValueError: the vocabulary size is given nowhere, or it is smaller than the tokenizer's.
        """
        size = self.vocab_size or vocab_size
        if size is None:
            raise ValueError(
                f"model.vocab_size={self.vocab_size} leaves it to the tokenizer, and token ids come without one; say "
                "how many tokens there are: --set=model.vocab_size=N"
            )
        if vocab_size is not None and size < vocab_size:
            raise ValueError(f"model.vocab_size={self.vocab_size} does not hold the tokenizer's {vocab_size} tokens")
        return TransformerConfig(**(self.model_dump() | {"vocab_size": size}))


class DataConfig(Base):
    """The text and how it is cut into rows."""

    path: str | None = None  # .txt, .jsonl (.gz), .npy, .bin; null = the default text; --data takes precedence
    validation_path: str | None = None  # a separate text; null = the last part of `path`
    validation_fraction: float = pydantic.Field(default=0.1, gt=0, lt=1)  # of the tokens, without validation_path
    tokenizer: str = "byte"  # byte, character, default, a GGUF file, a Hugging Face folder or a hub id
    seq_len: int = pydantic.Field(gt=0)  # tokens a row
    # False: a token attends to everything before it in its row, including earlier documents, and its position counts
    # from the row's start, as in llm.c and nanoGPT; fused attention then reads no mask.
    document_mask: bool = True


class EvaluationConfig(Base):
    """Held-out evaluation."""

    every_steps: int = pydantic.Field(default=250, ge=1)  # and after the last step
    batches: int | None = pydantic.Field(default=None, ge=1)  # of held-out rows, the same each time; null = all
    patience: int | None = pydantic.Field(default=None, ge=1)  # evaluations without gain before the run stops early
    min_gain: float = pydantic.Field(default=0.0, ge=0)  # a gain must exceed this to count, nats per token


class CheckpointConfig(Base):
    """Which checkpoints of a run are kept."""

    every_steps: int = pydantic.Field(default=250, ge=1)  # and after the last step
    keep: int = pydantic.Field(default=2, ge=1)  # newest checkpoints; the best one stays too
    export: bool = True  # write a Hugging Face folder at the end


class LoggingConfig(Base):
    """What is shown and written during a run."""

    every_steps: int = pydantic.Field(default=20, ge=1)  # how often losses are fetched from the device
    peak_tflops: float | None = pydantic.Field(default=None, gt=0)  # of a device, for MFU; null = known, else measured


class TrainConfig(Base):
    """One training run; backend, device and workdir come from the command line."""

    model: DecoderConfig
    start: str | None = None  # parameters to start from: "default", a folder, GGUF file or hub id; null = random ones
    lora: LoraConfig | None = None  # adapters of the decoder; step.optimizer.trained=adapters trains only them
    data: DataConfig
    batch_size: int = pydantic.Field(gt=0)  # rows per step, over all devices and micro-batches
    steps: int = pydantic.Field(gt=0)
    learning_rate: float = pydantic.Field(gt=0)  # peak; if scaled, for a batch of base_batch
    learning_rate_scaling: Literal["none", "linear", "sqrt"] = "none"  # with batch_size / base_batch
    base_batch: int | None = pydantic.Field(default=None, gt=0)  # rows
    schedule: ScheduleConfig = ScheduleConfig()
    step: StepConfig = StepConfig()
    implementation: Literal["dense", "blocked", "fused"] = "dense"  # of attention
    block_size: int = pydantic.Field(default=128, gt=0)  # tokens; blocked attention
    scan_layers: bool = False  # JAX: one compiled layer body, for deep models
    # Query, key and value as one product, gate and up as another. The decoder gets `projection_groups`, the number of
    # interleaved parts of the kernels: as many as the mesh splits them into (mesh_plan.projection_groups).
    fused_projections: bool = False
    parallel: ParallelConfig | None = None  # mesh and sharding; null = one device
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoints: CheckpointConfig = CheckpointConfig()
    logging: LoggingConfig = LoggingConfig()
    seed: int = pydantic.Field(default=0, ge=0, lt=2**64)  # initial values, order of the data, dropout

    @pydantic.model_validator(mode="after")
    def _check(self) -> TrainConfig:
        if self.batch_size % self.step.accumulation:
            raise ValueError(
                f"batch_size={self.batch_size} is not a multiple of step.accumulation={self.step.accumulation}"
            )
        if not self.model.is_causal:
            raise ValueError(f"model.is_causal={self.model.is_causal}: tokens would see the targets; wanted true")
        if self.data.seq_len > self.model.max_seq_len:
            raise ValueError(f"data.seq_len={self.data.seq_len} is over model.max_seq_len={self.model.max_seq_len}")
        rate = {"peak": self.learning_rate, "steps": self.steps}
        schedules.learning_rate(self.schedule, 0, **rate)  # both raise where the settings do not fit each other
        scaling = {"batch": self.batch_size, "base_batch": self.base_batch}
        schedules.scaled_peak(self.learning_rate, self.learning_rate_scaling, **scaling)
        if self.learning_rate_scaling == "none" and self.base_batch is not None:
            raise ValueError(
                f"base_batch={self.base_batch} does nothing with learning_rate_scaling=none; wanted linear or sqrt, or "
                "no base_batch"
            )
        trained = self.step.optimizer.trained
        if (self.lora is None) == (trained == "adapters"):
            problem = "there would be nothing to train" if self.lora is None else "adapters are trained alone"
            lora = "null" if self.lora is None else "there"
            raise ValueError(
                f"step.optimizer.trained={trained} and lora is {lora}: {problem}; lora goes with trained=adapters"
            )
        if not self.data.document_mask and self.parallel is not None:
            raise ValueError(f"data.document_mask=false works on one device, got parallel.mesh={self.parallel.mesh}")
        if self.lora is not None and self.fused_projections:
            raise ValueError(
                f"lora: adapters need projections of their own, got fused_projections={self.fused_projections}"
            )
        if self.lora is not None and self.lora.dropout and self.parallel is not None:
            if self.parallel.gradient_type != "full":
                raise ValueError(
                    f"lora.dropout={self.lora.dropout} does not go with "
                    f"parallel.gradient_type={self.parallel.gradient_type}; use dropout 0, or gradient_type=full"
                )
        if self.lora is not None and self.step.hold_zeros:
            raise ValueError(
                f"step.hold_zeros={self.step.hold_zeros} does not go with lora: an adapter's B begins as zeros, which "
                "would be held; wanted false, what is not trained keeps its zeros"
            )
        self.decoder(self.model.vocab_size or 1)
        return self

    def decoder(self, vocab_size: int | None) -> TransformerConfig:
        """Return the decoder that the run trains, with the tokenizer's vocabulary size if the file leaves it open.

        Raises:
          ValueError: see DecoderConfig.resolved; or a workload's layers do not fit the decoder.
        """
        return with_lora(self.model.resolved(vocab_size), self.lora)

    def export(self, folder: Path, model: TransformerConfig, params: Mapping[str, np.ndarray], tokenizer: Any) -> None:
        """Write the trained decoder, without adapters, as a folder that other tools read.

        Raises:
          ValueError: no folder format represents such a decoder.
        """
        weights.save_checkpoint(folder, model, dict(params), tokenizer=tokenizer)

    @property
    def has_dropout(self) -> bool:
        """True if steps draw dropout masks."""
        return self.model.dropout > 0 or (self.lora is not None and self.lora.dropout > 0)

    def compute(self, dtype: str, projection_groups: int = 1) -> Compute:
        """How the decoder is computed; projection_groups is the number of parts of fused kernels, if fused."""
        groups = projection_groups if self.fused_projections else 0
        return Compute(dtype, self.implementation, self.block_size, self.scan_layers, groups)

    def identity(self) -> dict[str, Any]:
        """Settings that stay the same from one start of a run to the next, as JSON."""
        content = self.model_dump(mode="json", exclude=set(MAY_CHANGE))
        for name in ("path", "validation_path"):  # the texts themselves count, not their paths
            content["data"].pop(name)
        if self.data.document_mask:  # as in runs older than this option
            del content["data"]["document_mask"]
        if self.lora is None:  # as in runs older than adapters
            del content["lora"]
            content["step"]["optimizer"].pop("trained")
        content["model"].pop("is_causal")  # always true, and absent from older runs
        return content
