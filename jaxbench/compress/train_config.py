"""Training configuration of a compressor: its shape, its rows, the optimiser (S file)."""

from __future__ import annotations

from typing import Any, Literal

import pydantic

from jaxbench import config
from jaxbench.compress.config import CompressorConfig, is_trained
from jaxbench.compress.rows import RowsConfig
from jaxbench.lora.config import LoraConfig
from jaxbench.training import schedules
from jaxbench.training.step_config import OptimizerConfig, StepConfig

# Settings that rows of texts, and of questions, do not use, each with the value that disables it.
TEXTS_LACK: dict[str, Any] = {"in_clear": 0.0}
QUESTIONS_LACK: dict[str, Any] = {"reconstruct": 0.0, "readable": 0, "dropout": 0.0, "short": 0.0, "sampled": 1}
KIND_OF = {"rows": "texts", "questions.rows": "questions"}


class QuestionsConfig(config.Base):
    """Settings of training on questions over passages."""

    share: float = pydantic.Field(default=1.0, gt=0, le=1)  # of steps; below 1, the others use texts
    rows: RowsConfig = RowsConfig(num_targets=32, clear=48, dropout=0.0)


class TrainingConfig(config.Base):
    """Settings of a compressor's training."""

    model: str | None = None  # the decoder; None = the default model
    start: str | None = (
        None  # weights of an earlier run of this shape, except chunk, prefix and adapters; None = the decoder's
    )
    trained: Literal["all", "adapters"] = "all"  # adapters: only those of `lora`; encoder and connector are frozen
    num_layers: int = pydantic.Field(default=12, ge=1)  # of the encoder
    chunk: int = pydantic.Field(default=256, ge=2)  # tokens encoded together; short chunks are learned sooner (lab log)
    prefix: int = pydantic.Field(default=1, ge=1)  # vectors of a tag; several help a frozen decoder
    lora: LoraConfig | None = None  # adapters of the decoder
    rows: RowsConfig = RowsConfig()  # of texts
    questions: QuestionsConfig | None = None  # None = only texts
    distilled: int = pydantic.Field(default=0, ge=0, le=4096)  # teacher's tokens per target; 0 = no teacher
    steps: int = pydantic.Field(default=1000, ge=1)
    learning_rate: float = pydantic.Field(default=2e-4, gt=0)  # peak
    schedule: schedules.ScheduleConfig = schedules.ScheduleConfig(warmup_steps=30)
    fast: float = pydantic.Field(default=5.0, gt=0)  # learning rate of all but the encoder's layers / learning_rate
    weight_decay: float = pydantic.Field(default=0.1, ge=0)
    precision: Literal["float32", "bfloat16"] = "bfloat16"  # of products
    accumulation: int = pydantic.Field(default=1, ge=1)  # micro-batches of a step's rows
    held_out_every: int = pydantic.Field(default=100, ge=1)  # steps; checkpoints are saved at the same time
    held_out_ratio: int = 8
    held_out_batches: int = pydantic.Field(default=4, ge=2)  # every second one is read back
    seed: int = pydantic.Field(default=0, ge=0, lt=2**63)

    @pydantic.model_validator(mode="after")
    def _check(self) -> TrainingConfig:
        for place, rows in self._rows().items():
            if rows.batch % self.accumulation:
                raise ValueError(f"{place}.batch={rows.batch} is not a multiple of accumulation={self.accumulation}")
        self._check_ignored()
        if self.trained == "adapters" and self.lora is None:
            raise ValueError(f"trained={self.trained} with lora={self.lora}: nothing would learn; give lora a rank")
        schedules.learning_rate(
            self.schedule, 0, peak=self.learning_rate, steps=self.steps
        )  # raises if it is longer than the run
        return self

    def shape(self, decoder: config.TransformerConfig) -> CompressorConfig:
        """Shape of the compressor of a decoder.

        Raises:
          ValueError: the decoder cannot have one, or held_out_ratio is not among its ratios.
        """
        own = {name: getattr(self, name) for name in ("num_layers", "chunk", "prefix", "lora")}
        shape = CompressorConfig(decoder=decoder, **own)
        shape.check_ratio(self.held_out_ratio)
        for place, rows in self._rows().items():
            shares = rows.weights
            if shares is not None and not (
                len(shares) == len(shape.ratios) and min(shares) >= 0 and abs(sum(shares) - 1) < 1e-6
            ):
                raise ValueError(f"{place}.weights={list(shares)}; wanted {len(shape.ratios)} shares that add up to 1")
        return shape

    def _check_ignored(self) -> None:
        """Refuse settings that rows of their kind do not use."""
        for place, rows in self._rows().items():
            for name, silent in (TEXTS_LACK if place == "rows" else QUESTIONS_LACK).items():
                value, default = getattr(rows, name), RowsConfig.model_fields[name].default
                if value not in (default, silent):
                    raise ValueError(f"{place}.{name}={value}: not of rows of {KIND_OF[place]}; leave it out")
        if self.distilled and self.questions is not None and self.questions.share == 1:
            raise ValueError(
                f"distilled={self.distilled} with questions.share={self.questions.share}: nothing is continued, and a "
                "teacher says continuations"
            )

    def _rows(self) -> dict[str, RowsConfig]:
        """Settings of the rows of each kind, by field name."""
        return {"rows": self.rows} | ({} if self.questions is None else {"questions.rows": self.questions.rows})

    def step_config(self) -> StepConfig:
        """Settings of one optimiser step."""
        optimizer = CompressorOptimizer(weight_decay=self.weight_decay, fast=self.fast, trained=self.trained)
        return StepConfig(
            precision=self.precision, optimizer=optimizer, accumulation=self.accumulation, kernels="xla",
            nonfinite="skip",
        )  # fmt: skip


class CompressorOptimizer(OptimizerConfig):
    """An optimiser that freezes the decoder's own parameters and has a higher rate for newly initialised ones."""

    fast: float = pydantic.Field(default=5.0, gt=0)  # learning rate of new parameters / that of copies of the decoder's

    def is_trained(self, name: str) -> bool:
        """True for parameters that training changes, by dotted name."""
        return super().is_trained(name) if self.trained == "adapters" else is_trained(name)

    def rate_ratio(self, name: str) -> float:
        """Learning rate of the parameter of this dotted name over that of the encoder's layers."""
        is_new = name.startswith(("connector.", "local.", "tags.", "encoder.slots.")) or ".lora_" in name
        return self.fast if is_new else 1.0
