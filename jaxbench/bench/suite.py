"""Settings of a comparison: the suite read from `configs/suites/*.yaml` (S file: neither JAX nor PyTorch)."""

from __future__ import annotations

from typing import Literal

import pydantic

from jaxbench import config
from jaxbench.bench.arms import arm_table
from jaxbench.bench.arms.arm_table import ARMS
from jaxbench.config import Base
from jaxbench.measure.records import Workload

RUN_ARMS = arm_table.names("has_run_step")  # arms that support train.form=run
Arm = Literal[(*ARMS, *(name + arm_table.AGAIN for name in ARMS))]
Dtype = Literal["float32", "bfloat16"]
Batch = pydantic.PositiveInt
GemmSize = tuple[pydantic.PositiveInt, pydantic.PositiveInt, pydantic.PositiveInt]  # (M, K, N)
Topology = str  # e.g. v5e:2x2; checked by bench/tpu.py against its table before anything runs


class PrefillGrid(Base):
    """Prefill: whole prompts through the model, only the last position's logits."""

    dtypes: tuple[Dtype, ...] = ("float32", "bfloat16")
    batches: tuple[Batch, ...] = (1,)
    prompt_tokens: tuple[pydantic.PositiveInt, ...] = (512,)


class DecodeGrid(Base):
    """Decode: greedy generation of a fixed number of tokens; the rate is over the steps after the first token."""

    dtypes: tuple[Dtype, ...] = ("float32", "bfloat16")
    batches: tuple[Batch, ...] = (1, 8)
    prompt_tokens: tuple[pydantic.PositiveInt, ...] = (64,)
    new_tokens: int = pydantic.Field(default=32, ge=2)  # tokens generated per row, the end of sequence ignored
    latency: bool = False  # also generate one token at a time and record the seconds of each, for percentiles


class TrainStep(Base):
    """One AdamW step of a shallow model, the suite's model cut to `num_layers` layers to save time and memory.

    Two forms: "plain" is AdamW alone, with weights and moments in dtype. "run" is the step of experiments/train.py:
    weights and moments in float32, products in dtype, gradients clipped (bench/arms/twin_arm.py); it also reports MFU.
    """

    enabled: bool = True
    num_layers: int = pydantic.Field(default=4, gt=0)  # the model's first layers, its embedding and final norm
    form: Literal["plain", "run"] = "plain"
    dtype: Dtype | tuple[Dtype, ...] = "float32"  # one, or several in turn
    batch: Batch = 2
    seq_len: int = pydantic.Field(default=128, gt=1)  # tokens
    accumulation: int = pydantic.Field(default=1, ge=1)  # micro-batches per step; form run
    implementation: Literal["dense", "blocked", "fused"] = "dense"  # of attention; form run
    document_mask: bool = True  # False: rows without a document mask (DataConfig.document_mask); form run
    kernels: Literal["auto", "native", "xla"] = "auto"  # of the JAX arms' products (StepConfig.kernels); form run
    learning_rate: float = pydantic.Field(default=1e-4, gt=0)
    # seconds that a visit's steps take, as a process's first steps are slow; None = rounds.sample_s
    sample_s: float | None = pydantic.Field(default=None, ge=0)

    @pydantic.model_validator(mode="after")
    def _check(self) -> TrainStep:
        of_runs = {"accumulation": 1, "implementation": "dense", "document_mask": True, "kernels": "auto"}
        changed = [
            f"train.{name}={getattr(self, name)}" for name, kept in of_runs.items() if getattr(self, name) != kept
        ]
        if self.form == "plain" and changed:
            raise ValueError(f"suite: {', '.join(changed)}: train.form=run is needed, got {self.form}")
        if not self.dtype:
            raise ValueError(f"suite: train.dtype={list(self.dtype)} names none; train.enabled=false leaves it out")
        if self.batch % self.accumulation:
            raise ValueError(f"suite: train.batch={self.batch} is not a multiple of accumulation={self.accumulation}")
        return self


class Rounds(Base):
    """How often a launch repeats each measurement. Each arm's workers live for one launch."""

    launches: int = pydantic.Field(default=8, gt=0, le=10_000)  # sets of fresh processes: the unit of replication
    fewer: dict[Arm, pydantic.PositiveInt] = {}  # arm -> number of launches, if it takes part only in the first ones
    rounds: int = pydantic.Field(default=2, gt=0)  # visits of each arm per launch; every other round runs in reverse
    competing: int = pydantic.Field(default=0, ge=0, le=256)  # processes that each keep a core busy while arms measure
    sample_s: float = pydantic.Field(default=0.4, ge=0)  # seconds that a visit's samples take; at least one sample
    warmup: int = pydantic.Field(default=1, ge=0)  # unrecorded runs before the first round
    budget_s: float = pydantic.Field(default=570, gt=0)  # no launch starts that would exceed it
    # limit of one request to a worker, such as a compile; epoll counts milliseconds in 31 bits
    worker_timeout_s: float = pydantic.Field(default=300, gt=0, lt=2**31 / 1e3)


class Verdicts(Base):
    """How ratios become verdicts."""

    baseline: Arm = "torch_eager"
    confidence: float = pydantic.Field(default=0.95, gt=0.5, lt=1)  # of each interval, and of all verdicts together
    margin: float = pydantic.Field(default=0.0, ge=0, lt=1)  # relative difference that does not count, 0.05 = 5 %
    control_drift: float = pydantic.Field(default=0.25, gt=0)  # largest relative change of the control loop's time


class Roofline(Base):
    """The machine's limits, measured in the same run: read bandwidth and matmul rate."""

    enabled: bool = True
    read_bytes: int = pydantic.Field(default=512 * 2**20, ge=4)  # size of the float32 array that is summed
    in_rounds: bool = False  # also read before each decode visit: decode's shares are of the median of these
    gemm_sizes: tuple[GemmSize, ...] = ((512, 576, 1536), (512, 1536, 576), (1024, 1024, 1024))
    dtypes: tuple[Dtype, ...] = ("float32", "bfloat16")
    repeats: int = pydantic.Field(default=5, gt=0)


class TpuRun(Base):
    """The step of a training configuration, compiled ahead of time for one slice (training/tpu_train.py)."""

    config: str  # file, such as configs/lm/tpu_1b.yaml; a relative path starts at the repository
    topology: Topology
    set: tuple[str, ...] = ()  # overrides of its keys: parallel.mesh.stage=4

    def name(self) -> str:
        """Its name in a result file: slice, configuration, overrides."""
        return " ".join([self.topology, self.config, *self.set])


class Tpu(Base):
    """The same programs compiled ahead of time for named TPU topologies, no TPU needed."""

    topologies: tuple[Topology, ...] = ("v5e:2x2",)
    dtype: Dtype = "bfloat16"
    prefill_tokens: int = pydantic.Field(default=512, gt=0)
    decode_batch: Batch = 8
    train_batch: Batch = 8
    train_tokens: int = pydantic.Field(default=512, gt=0)
    runs: tuple[TpuRun, ...] = ()  # steps of training runs, each on its own mesh


class Suite(Base):
    """A comparison: one model, arms, workloads, and how often."""

    # default, a GGUF file, a Hugging Face folder or a hub id; with random weights: tiny (for tests), or the decoder of
    # a training configuration (configs/lm/*.yaml)
    model: str = "default"
    data: str | None = None  # text for prompts and the train step; None = the pinned default text
    arms: tuple[Arm, ...] = tuple(name for name, row in ARMS.items() if not (row.has_own_weights or row.is_extra))
    prefill: PrefillGrid = PrefillGrid()
    decode: DecodeGrid = DecodeGrid()
    train: TrainStep = TrainStep()
    rounds: Rounds = Rounds()
    verdicts: Verdicts = Verdicts()
    roofline: Roofline = Roofline()
    # arms whose model is proven equal to PyTorch's in float64
    parity: tuple[Literal[arm_table.names("is_judged")], ...] = ("flax",)
    tpu: Tpu = Tpu()
    seed: int = pydantic.Field(default=0, ge=0)  # picks the prompts
    threads: int = pydantic.Field(default=0, ge=0)  # threads of every arm; 0 = all cores of this process

    @pydantic.model_validator(mode="after")
    def _check(self) -> Suite:
        if not self.arms:
            raise ValueError(f"suite: arms={list(self.arms)} is empty, name at least one of {', '.join(ARMS)}")
        if len(set(self.arms)) != len(self.arms):
            raise ValueError(f"suite: arms={list(self.arms)} names an arm twice")
        if not (self.workloads() or self.roofline.enabled or self.parity or self.tpu.topologies or self.tpu.runs):
            dtypes = [list(grid.dtypes) for grid in (self.prefill, self.decode)]
            raise ValueError(f"suite: nothing to measure: dtypes of prefill and decode are {dtypes}, every part is off")
        others = [arm for arm in self.arms if arm.removesuffix(arm_table.AGAIN) not in RUN_ARMS]
        if self.train.enabled and self.train.form == "run" and others:
            raise ValueError(f"suite: train.form=run with arms {others}, which have none; has {', '.join(RUN_ARMS)}")
        if self.verdicts.baseline not in self.arms:
            raise ValueError(
                f"suite: verdicts.baseline={self.verdicts.baseline} is not among arms={list(self.arms)}, so there is "
                f"nothing to compare with; add it, or pass --set=verdicts.baseline={self.arms[0]}"
            )
        return self

    def workloads(self) -> list[Workload]:
        """Return the inference workloads, grouped by dtype so that weights load once per dtype, then the train step."""
        return [workload for dtype in self.dtypes() for workload in self.inference(dtype)] + self.train_workloads()

    def sample_s(self, kind: str) -> float:
        """Seconds that a visit's samples take for workloads of this kind."""
        own = self.train.sample_s if kind == "train" else None
        return self.rounds.sample_s if own is None else own

    def dtypes(self) -> list[str]:
        """Dtypes of inference, float32 first."""
        used = {*self.prefill.dtypes, *self.decode.dtypes}
        return [dtype for dtype in ("float32", "bfloat16") if dtype in used]

    def inference(self, dtype: str) -> list[Workload]:
        """Prefill and decode workloads of one dtype."""
        grids = (("prefill", self.prefill, 0), ("decode", self.decode, self.decode.new_tokens))
        return [
            Workload(kind=kind, dtype=dtype, batch=batch, prompt_tokens=tokens, new_tokens=new_tokens)
            for kind, grid, new_tokens in grids
            if dtype in grid.dtypes
            for tokens in grid.prompt_tokens
            for batch in grid.batches
        ]

    def train_workloads(self) -> list[Workload]:
        """Train step in each of its dtypes."""
        if not self.train.enabled:
            return []
        step = self.train
        dtypes = (step.dtype,) if isinstance(step.dtype, str) else step.dtype
        return [
            Workload(kind="train", dtype=dtype, batch=step.batch, prompt_tokens=step.seq_len)
            for dtype in dict.fromkeys(dtypes)
        ]

    def check_context(self, max_seq_len: int) -> None:
        """Raise ValueError if a workload does not fit the model's trained context."""
        for workload in self.workloads():
            length = workload.prompt_tokens + workload.new_tokens
            if length > max_seq_len:
                raise ValueError(
                    f"suite: {workload.label()} takes {length} positions, the model's context is {max_seq_len}; "
                    "lower prompt_tokens or new_tokens"
                )


def config_id(suite: Suite, *, model_sha256: str, text_sha256: str) -> str:
    """Return a stable id of what is measured: 12 hex digits.

    Equal for two runs whose results may be compared. It covers the settings of a launch, and the sha256 of model and
    text. It leaves out the numbers of launches and rounds, the budget, the worker timeout, the set of arms, `parity`,
    `tpu` and `verdicts`.
    """
    exclude = ["model", "data", "arms", "parity", "tpu", "verdicts"]
    exclude += [f"rounds.{name}" for name in ("launches", "rounds", "budget_s", "fewer", "worker_timeout_s")]
    return config.config_id(suite, exclude=exclude, extra={"model_sha256": model_sha256, "text_sha256": text_sha256})
