"""Study what a memory gains: decoders of one window, with and without memory, on long-context tasks (S file).

Every arm is trained on a task at several learning rates and seeds, and evaluated in rows up to 16 times as long.
Accuracy is binned by the distance between a question and its fact, in windows; for a text, bits per byte by the number
of bytes before. An arm's learning rate is selected on held-out rows of the training length; reported figures come from
other rows.

A finished run is one line of a file in the workdir: an interrupted command resumes after the last line, and several
commands with different parts (1/2, 2/2) fill one workdir together.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import pydantic
from jaxtyping import Int, Shaped
from pydantic import Field

from jaxbench import config, initial, store
from jaxbench.config import Base, TransformerConfig
from jaxbench.measure import verdicts
from jaxbench.memory import decoder_config
from jaxbench.memory.decoder_config import DecoderMemory
from jaxbench.memory.study import text_task
from jaxbench.memory.study.fields import Length, Rate, Seed, Several
from jaxbench.memory.study.tasks import TaskConfig
from jaxbench.memory.study.text_task import TextConfig

TOLERANCE = 0.05  # largest relative difference in parameters between an arm and the first
RECORDS = "runs-*.jsonl"
AnyTask = Annotated[TaskConfig | TextConfig, Field(discriminator="task")]


class Decoder(Base):
    """Shape shared by the arms' decoders; their window is Arms.window."""

    d_model: int = Field(default=64, gt=0)
    num_layers: int = Field(default=2, gt=0)
    num_heads: int = Field(default=2, gt=0)
    head_dim: int = Field(default=32, gt=0)
    initial_std: float = Field(default=0.02, gt=0)  # of kernels and embeddings; 0.02 is for widths of about 1,000


class Arm(Base):
    """One decoder: its memory, and its feed-forward width, which compensates for the memory's parameters."""

    d_ff: int = Field(gt=0)
    memory: DecoderMemory | None = None
    window: int | None = Field(default=None, gt=0)  # overrides Arms.window
    learning_rates: Several[Rate] | None = None  # overrides Arms.learning_rates
    seeds: Several[Seed] | None = None  # overrides Arms.seeds
    against: str | None = None  # its rival: the arm that it is compared with; None = the first


class Arms(Base):
    """Decoders, tasks and training of the study: configs/memory/arms.yaml."""

    window: int = Field(gt=0)  # tokens that a layer attends to, in every arm that does not set its own window
    decoder: Decoder = Decoder()
    arms: dict[str, Arm] = Field(min_length=1)
    tasks: dict[str, AnyTask] = Field(min_length=1)  # name of a row -> task at the training length
    learning_rates: Several[Rate] = (1e-3, 3e-3, 1e-2)  # peaks for AdamW, cosine decay to a tenth
    seeds: Several[Seed] = (0, 1, 2)
    steps: int = Field(default=1000, ge=1)
    task_steps: dict[str, int] = {}  # overrides steps, by task
    batch_size: int = Field(default=32, ge=1)  # rows per step
    warmup_steps: int = Field(default=50, ge=0)
    clip_norm: float = Field(default=1.0, gt=0)
    weight_decay: float = Field(default=0.1, ge=0)
    factors: Several[Length] = (1, 2, 4, 8, 16)  # evaluation lengths, in training lengths
    test_rows: int = Field(default=128, ge=8)  # at each factor

    @pydantic.model_validator(mode="after")
    def _check(self) -> Arms:
        for name, arm in self.arms.items():
            wanted = arm.window or self.window
            if arm.memory is not None and arm.memory.window not in (None, wanted):
                raise ValueError(f"arms: window of {name} is {arm.memory.window}, and window={wanted}")
            if arm.against is not None and (arm.against == name or arm.against not in self.arms):
                raise ValueError(f"arms: {name} is against {arm.against}, wanted another of {', '.join(self.arms)}")
        for name, steps in self.task_steps.items():
            if name not in self.tasks or steps < 1:
                raise ValueError(
                    f"arms: task_steps has {name}: {steps}, wanted a task of {', '.join(self.tasks)} and at least 1"
                )
        smallest = min(task.vocab_size for task in self.tasks.values())
        sizes = {name: self.num_params(name, smallest) for name in self.arms}
        for name, size in sizes.items():
            for other in (next(iter(sizes)), self.rival(name)):
                if abs(size / sizes[other] - 1) > TOLERANCE:
                    raise ValueError(
                        f"arms: {name} has {size} parameters, {other} has {sizes[other]}: more than {TOLERANCE:.0%} "
                        "apart; change its d_ff"
                    )
        return self

    def model(self, arm: str, vocab_size: int) -> TransformerConfig:
        """Shape of an arm's decoder."""
        longest = max(task.length for task in self.tasks.values()) * max(self.factors)
        sizes = self.decoder.model_dump(exclude={"initial_std"}) | {"num_kv_heads": self.decoder.num_heads}
        plain = TransformerConfig(
            vocab_size=vocab_size, max_seq_len=longest, sliding_window=self.arms[arm].window or self.window,
            tie_embeddings=True, d_ff=self.arms[arm].d_ff, **sizes,
        )  # fmt: skip
        return decoder_config.with_memory(plain, self.arms[arm].memory)

    def rival(self, arm: str) -> str:
        """Name of the arm that this arm is compared with."""
        return self.arms[arm].against or next(iter(self.arms))

    def steps_of(self, task: str) -> int:
        """Training steps on a task."""
        return self.task_steps.get(task, self.steps)

    def num_params(self, arm: str, vocab_size: int) -> int:
        """Number of an arm's parameters."""
        return initial.num_parameters(self.model(arm, vocab_size))


class Run(NamedTuple):
    """One training run."""

    task: str
    arm: str
    learning_rate: float
    seed: int


def runs(settings: Arms) -> list[Run]:
    """List every run, seed by seed, so that an unfinished table consists of whole seeds."""
    planned = []
    for seed in dict.fromkeys((*settings.seeds, *(seed for arm in settings.arms.values() for seed in arm.seeds or ()))):
        for task in settings.tasks:
            for name, arm in settings.arms.items():
                if seed not in (arm.seeds or settings.seeds):
                    continue
                rates = arm.learning_rates or settings.learning_rates
                planned += [Run(task, name, rate, seed) for rate in rates]
    return planned


def config_id(settings: Arms) -> str:
    """Hash of the settings that decide a run's result; more seeds, rates, arms or tasks keep finished runs."""
    excluded = ("seeds", "learning_rates", "arms", "tasks", "steps", "task_steps")  # in a run's own identity
    return config.config_id(settings, exclude=excluded)


def identity(settings: Arms, run: Run) -> dict[str, Any]:
    """Identity that a run's record must hold: everything that decides the run's result."""
    arm, task = settings.arms[run.arm], settings.tasks[run.task]
    place = {"path"} if isinstance(task, TextConfig) else set()  # a text is the same wherever its file is
    return {
        "config": config_id(settings),
        "run": [run.task, run.arm, run.learning_rate, run.seed],
        "arm": arm.model_dump(mode="json", exclude={"learning_rates", "seeds", "against"}),
        "task": task.model_dump(mode="json", exclude=place) | ({"sha256": text_task.sha256(task)} if place else {}),
        "steps": settings.steps_of(run.task),
    }


def known(settings: Arms, workdir: str | Path) -> dict[Run, dict[str, Any]]:
    """Read a folder's finished runs, by run; a truncated last line and runs of other settings are left out.

    Raises:
      ValueError: another line of its files is not a record of a run.
    """
    wanted = {run: identity(settings, run) for run in runs(settings)}
    finished: dict[Run, dict[str, Any]] = {}
    for path in sorted(Path(workdir).glob(RECORDS)):
        for run, record in _records(path):
            if wanted.get(run) == record["identity"]:
                finished[run] = record
    return finished


def _records(path: Path) -> Iterator[tuple[Run, dict[str, Any]]]:
    """Yield the runs of a file and their records; an unterminated last line was cut short and is skipped."""
    for place, line in enumerate(store.rows(path), 1):
        try:
            record = json.loads(line)
            run = Run(*record["identity"]["run"])
            is_whole = isinstance(hash(run), int) and {"held_out", "factors"} <= set(record)
        except (ValueError, KeyError, TypeError):
            is_whole = False
        if not is_whole:
            raise ValueError(f"arms: {path} line {place} is no record of a run; remove it, or name another --workdir")
        yield run, record


# Distances


def edges(window: int, longest: int) -> list[int]:
    """Upper edges of the distance bins, in tokens: one window, two, four, ... up to `longest`."""
    upper = [window]
    while upper[-1] < longest:
        upper.append(2 * upper[-1])
    return upper


class Measure(NamedTuple):
    """Metric of a task, and its names in records."""

    name: str
    total: str  # name of its sum in a cell
    mean: str  # name of its mean in a record
    is_lower_better: bool


RIGHT = Measure("accuracy", "right", "token", False)
BITS = Measure("bits per byte", "bits", "bits_per_byte", True)


def measure(task: AnyTask) -> Measure:
    """Metric of a task: accuracy, or bits per byte for a text."""
    return BITS if isinstance(task, TextConfig) else RIGHT


def counted(
    scores: Shaped[np.ndarray, " N"], distance: Int[np.ndarray, " N"], window: int, longest: int, total: str
) -> list[dict[str, Any]]:
    """Bin scores by distance: number of questions and sum of scores in each non-empty bin.

    Args:
      scores: of the questions only.
      distance: tokens between question and fact.
      window: upper edge of the first bin, in tokens.
      longest: largest distance, in tokens.
      total: name of the sum.
    """
    cells, low = [], 0
    for high in edges(window, longest):
        inside = (distance > low) & (distance <= high)
        if inside.any():
            cells.append({"over": low, "to": high, "asked": int(inside.sum()), total: scores[inside].sum().item()})
        low = high
    return cells


# The summary


def summarise(settings: Arms, records: dict[Run, dict[str, Any]]) -> list[dict[str, Any]]:
    """Summary by distance: a row per (task, arm, factor, bin), the mean over seeds at the arm's best rate.

    `difference` is the mean difference from the arm's rival over the `pairs` of runs with the same seed; None: no pair.
    """
    return _rows(settings, records, _cells, ("over", "to"))


def by_length(settings: Arms, records: dict[Run, dict[str, Any]]) -> list[dict[str, Any]]:
    """Summary by length: a row per (task, arm, factor), the mean over all distances and over seeds at the best rate."""
    return _rows(settings, records, _overall, ())


def _rows(
    settings: Arms,
    records: dict[Run, dict[str, Any]],
    means: Callable[[dict[str, Any], Measure], dict[tuple, float]],
    names: tuple[str, ...],
) -> list[dict[str, Any]]:
    """A row per (task, arm, factor) and key of `means`, a run's means at a factor by key; names: fields of the key."""
    rows = []
    for about, finished, rivals in _finished(settings, records):
        metric = measure(settings.tasks[about["task"]])
        for factor in settings.factors:
            own, other = (
                [{} if record is None else means(record["factors"][str(factor)], metric) for record in each]
                for each in (finished, rivals)
            )
            for key in sorted(set().union(*own)):
                row = about | {"factor": factor} | dict(zip(names, key, strict=True))
                rows.append(row | _mean([run.get(key) for run in own], [run.get(key) for run in other], metric))
    return rows


def _finished(
    settings: Arms, records: dict[Run, dict[str, Any]]
) -> Iterator[tuple[dict[str, Any], list[dict[str, Any]], list[dict[str, Any] | None]]]:
    """Yield for each (task, arm) with runs the fields of its rows, its records at its best rate, and its rival's.

    Both lists are in the order of the arm's seeds; None where the rival has no run with a seed.
    """
    for name, task in settings.tasks.items():
        best = {arm: best_rate(settings, records, name, arm) for arm in settings.arms}
        for arm, rate in best.items():
            if rate is not None:
                rival = settings.rival(arm)
                seeds = sorted(run.seed for run in records if run[:3] == (name, arm, rate))
                about = {"task": name, "arm": arm, "learning_rate": rate, "seeds": len(seeds), "rival": rival}
                finished = [records[Run(name, arm, rate, seed)] for seed in seeds]
                rivals = [records.get(Run(name, rival, best[rival], seed)) for seed in seeds]
                yield about | {"measure": measure(task).name, "chance": chance(task)}, finished, rivals


def chance(task: AnyTask) -> float | None:
    """Chance level of a task's accuracy; None where bits are measured."""
    return None if isinstance(task, TextConfig) else task.chance


def best_rate(settings: Arms, records: dict[Run, dict[str, Any]], task: str, arm: str) -> float | None:
    """Select the learning rate with the best mean on held-out rows, the lower at a tie; None: no run.

    A run whose score is not finite (null in a record) is worse than any other.
    """
    scores: dict[float, list[float]] = {}
    for run, record in records.items():
        if (run.task, run.arm) == (task, arm):
            score = record["held_out"]
            scores.setdefault(run.learning_rate, []).append(_number(score))
    sign = -1.0 if measure(settings.tasks[task]).is_lower_better else 1.0
    means = {rate: sign * float(np.mean(scores[rate])) for rate in sorted(scores)}
    return max(means, key=lambda rate: means[rate] if math.isfinite(means[rate]) else -math.inf, default=None)


def _cells(scores: dict[str, Any], metric: Measure) -> dict[tuple[int, int], float]:
    """Means by distance bin (over, to)."""
    return {(cell["over"], cell["to"]): _number(cell[metric.total]) / cell["asked"] for cell in scores["cells"]}


def _overall(scores: dict[str, Any], metric: Measure) -> dict[tuple[()], float]:
    return {(): _number(scores[metric.mean])}


def _number(value: float | None) -> float:
    """Return a record's number, or NaN for null."""
    return math.nan if value is None else value


def _mean(values: Sequence[float | None], others: Sequence[float | None], metric: Measure) -> dict[str, float | None]:
    """Mean over runs and mean paired difference from the rival's runs, with 95 % t-intervals; None = unknown.

    No metric is below 0 and no accuracy above 1, so intervals of means are clipped there.
    """
    mean, low, high = _interval([value for value in values if value is not None])
    if low is not None:
        low, high = max(low, 0.0), high if metric.is_lower_better else min(high, 1.0)
    both = [own - other for own, other in zip(values, others, strict=True) if own is not None and other is not None]
    names = ("difference", "difference_low", "difference_high")
    row = {"mean": mean, "low": low, "high": high, "pairs": len(both)}
    return row | dict(zip(names, _interval(both), strict=True))


def _interval(values: Sequence[float]) -> tuple[float | None, float | None, float | None]:
    """Mean and 95 % t-interval (mean, low, high); one value has no interval, and no values have no mean.

    If a value is not finite, the mean is NaN.
    """
    if not values:
        return None, None, None
    if not np.isfinite(values).all():
        return math.nan, None, None
    interval = verdicts.t_interval(values)
    return (interval.mean, interval.low, interval.high) if len(values) > 1 else (interval.mean, None, None)
