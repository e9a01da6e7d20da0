"""Schema of the benchmark suites in configs/benchmarks/*.yaml (S file)."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from typing import Annotated, Literal

import pydantic

from jaxbench.config import Base, config_id
from jaxbench.regress import case_series, metrics
from jaxbench.regress.limits import Limit
from jaxbench.regress.metrics import METRICS, Margin

Dtype = Literal["float32", "bfloat16"]
Count = pydantic.PositiveInt


class Case(Base):
    """Fields that all kinds of cases have."""

    name: str = pydantic.Field(pattern=r"^[a-z0-9][a-z0-9_-]*$", max_length=60)  # prefix of its series: name.metric


class Generation(Case):
    """Greedy generation from prompts by the default generator: first-token time, later tokens, seconds of each."""

    workload: Literal["generation"]
    dtype: Dtype = "float32"
    batch: Count = 1
    prompt_tokens: Count = 64
    new_tokens: int = pydantic.Field(default=32, ge=2)
    watermark: str | None = None  # scheme that marks the tokens; None = unmarked


class Native(Case):
    """The same with the native CPU kernels; the case fails where they are not available."""

    workload: Literal["native"]
    weights: Literal["float32", "int8", "q8_0", "q4_0"] = "q8_0"  # format in which the matrices are packed
    activations: Literal["float32", "int8"] = "float32"  # the other operand of the matrix products
    batch: Count = 1
    prompt_tokens: Count = 64
    new_tokens: int = pydantic.Field(default=32, ge=2)

    @pydantic.model_validator(mode="after")
    def _check(self) -> Native:
        if self.activations == "int8" and self.weights == "float32":
            raise ValueError(
                f"activations={self.activations} go with weights of integers, weights={self.weights}; wanted int8, "
                "q8_0 or q4_0"
            )
        return self


class Training(Case):
    """One AdamW step of the model's first layers."""

    workload: Literal["training"]
    dtype: Dtype = "float32"
    batch: Count = 2
    seq_len: int = pydantic.Field(default=128, ge=2)
    num_layers: Count = 4


class Memory(Case):
    """One AdamW step of as many layers of the model's shape, with a neural memory in each, from random values."""

    workload: Literal["memory"]
    kind: Literal["mac", "mag", "mal", "lmm"] = "mag"  # as context, gate, layer; lmm: parallel to the attention
    dtype: Dtype = "float32"
    batch: Count = 1
    seq_len: int = pydantic.Field(default=64, ge=2)
    num_layers: Count = 1
    chunk: Count = 16  # tokens per chunk of the memory, and window of the attention


class Tokenizing(Case):
    """Tokenisation of text."""

    workload: Literal["tokenizing"]
    characters: Count = 100_000


class Detection(Case):
    """A watermark's scores and p-values for texts, and the share of marked texts that it finds."""

    workload: Literal["detection"]
    scheme: str = "kgw"
    batch: Count = 32
    tokens: int = pydantic.Field(default=200, ge=16)
    marked: int = pydantic.Field(default=0, ge=0, le=1024)  # texts that carry the watermark; 0 = no detection_rate
    marked_tokens: int = pydantic.Field(default=24, ge=2, le=1024)  # tokens of each: so few that some are missed
    false_alarms: float = pydantic.Field(default=1e-5, gt=0, lt=1)  # p-value up to which a text counts as found


class Compression(Case):
    """Compression of a text into vectors by the shipped compressor, and what a decoder reads from vectors.

    Only with the default model.
    """

    workload: Literal["compression"]
    ratio: Count = 8
    tokens: Count = 1000
    batch: int = pydantic.Field(default=1, ge=1, le=256)  # chunks of 256 tokens that are compressed at once
    read: int = pydantic.Field(default=0, ge=0, le=64)  # windows that are read back; 0 = nothing is read
    read_tokens: int = pydantic.Field(default=192, ge=16, le=1024)  # of each


class Quality(Case):
    """The model's bits per byte on the default text's first windows."""

    workload: Literal["quality"]
    # What bits are divided by. It is part of the series' identity: older runs divided by the first token's bytes too.
    bytes_of: Literal["predicted tokens"] = "predicted tokens"
    dtype: Dtype = "float32"
    windows: Count = 4
    seq_len: int = pydantic.Field(default=256, ge=2)


class Answers(Case):
    """The model's negative log-likelihood of correct answers to questions about the default text."""

    workload: Literal["answers"]
    dtype: Dtype = "float32"


class Hallucination(Case):
    """Features of an answer given its context, as the hallucination lab's detectors read them."""

    workload: Literal["hallucination"]
    dtype: Dtype = "bfloat16"  # the lab's own default
    context_tokens: int = pydantic.Field(default=256, ge=16)
    answer_tokens: int = pydantic.Field(default=32, ge=4)


class Serving(Case):
    """Requests that arrive together, answered by the server's engine without HTTP."""

    workload: Literal["serving"]
    kernels: Literal["native", "xla"] = "native"
    requests: int = pydantic.Field(default=4, ge=1, le=256)
    prompt_tokens: Count = 64
    new_tokens: int = pydantic.Field(default=16, ge=2)
    batch_tokens: Count = 64  # at most, per step

    @pydantic.model_validator(mode="after")
    def _check(self) -> Serving:
        if self.batch_tokens < self.requests + 2:
            raise ValueError(
                f"batch_tokens={self.batch_tokens}; wanted {self.requests + 2} at least: a token of each of requests="
                f"{self.requests}, and two of a prompt"
            )
        return self


class Parity(Case):
    """Largest float64 error between JAX and PyTorch in one row of the parity table; needs torch, not the model.

    Put it last in a suite: PyTorch stays in the process, and later cases would be charged for its memory.
    """

    workload: Literal["parity"]
    row: str = "transformer/llama-grouped"  # id in parity/cases.py
    gradients: bool = False  # compare gradients of outputs and parameters too

    @pydantic.model_validator(mode="after")
    def _check(self) -> Parity:
        from jaxbench.parity import cases

        row = cases.find(self.row)
        if row.exact is not None or row.device is not None:
            what = f"is for {row.device} alone" if row.exact is None else "compares bits and counts, no float64 tensors"
            raise ValueError(f"row={self.row} {what}; wanted a row of a model, such as transformer/llama-grouped")
        return self


AnyCase = Annotated[
    Generation | Native | Training | Memory | Tokenizing | Detection | Compression | Quality | Answers | Hallucination
    | Serving | Parity,
    pydantic.Field(discriminator="workload"),
]  # fmt: skip


class Requires(Base):
    """Requirements on the machine; a run is refused, with what is missing, if they are not met."""

    device: Literal["cpu", "gpu", "tpu"] = "cpu"
    memory_bytes: int = pydantic.Field(default=2**31, ge=0)
    # Time limit for the launches of a run, in seconds. A look that would exceed it, extrapolated from the launches so
    # far, is skipped, and its series stay undecided. The first look is always taken. None = no limit.
    time_s: float | None = pydantic.Field(default=None, gt=0)


class Suite(Base):
    """Cases, how often they are repeated, and what counts as a regression."""

    model: str = "default"  # default, tiny (random weights), or a folder or GGUF file
    cases: tuple[AnyCase, ...] = pydantic.Field(min_length=1)
    # Numbers of launches (a fresh process of base and of head each) after which the run may end. Alpha is split over
    # the looks (Bonferroni), so that looking early adds no false alarms.
    looks: tuple[Count, ...] = (3, 5, 10)
    rounds: Count = 2  # visits of each process per case and launch: base head head base
    sample_s: float = pydantic.Field(default=0.3, ge=0)  # seconds of sampling per visit; at least one sample
    warmup: int = pydantic.Field(default=1, ge=0)
    alpha: float = pydantic.Field(default=0.05, gt=0, lt=0.5)  # of any false verdict in a run
    # Fresh launches that must confirm a critical verdict; 0 = none, else 2 at least.
    confirm: int = pydantic.Field(default=5, ge=0)
    primary: tuple[str, ...] = ()  # series that the looks wait for, case.metric; () = tokens_per_s of every case
    margins: dict[str, Margin] = {}  # by series, metric or kind; the first of these applies
    limits: dict[str, Limit] = {}  # by series: bounds of its median, with or without a base
    timeout_s: float = pydantic.Field(default=300, gt=0, lt=2**31 / 1e3)  # per request to a worker
    threads: int | None = pydantic.Field(default=None, ge=1)  # None = all cores that may be used
    requires: Requires = Requires()
    reports: tuple[Literal["html", "md", "csv", "xml", "json"], ...] = ("html", "md", "csv", "xml", "json")

    @pydantic.model_validator(mode="after")
    def _check(self) -> Suite:
        names, cases = [case.name for case in self.cases], {case.name: case for case in self.cases}
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"suite: cases.name={twice[0]} is there twice; a series needs a name of its own")
        if list(self.looks) != sorted(set(self.looks)) or min(self.looks) < 2:
            raise ValueError(f"suite: looks={list(self.looks)}; wanted numbers of launches that rise, 2 at least")
        if self.confirm == 1:  # the interval of one launch is infinite
            raise ValueError(f"suite: confirm={self.confirm} launch confirms nothing; wanted 2 at least, or 0 for none")
        for series in self.primary:
            case, _, metric = series.partition(".")
            if case not in names or metric not in METRICS:
                raise ValueError(
                    f"suite: primary={series}; wanted CASE.METRIC, cases {', '.join(names)}, metrics "
                    f"{', '.join(METRICS)}"
                )
            case_series.check(series, cases, key=f"primary={series}")
            _check_judged(metric, key=f"primary={series}")
        for key in self.margins:
            if "." in key:
                case_series.check(key, cases, key=f"margins.{key}")
            elif key not in METRICS and key not in metrics.MARGINS:
                raise ValueError(
                    f"suite: margins.{key}; wanted CASE.METRIC, a metric ({', '.join(METRICS)}) or a kind "
                    f"({', '.join(metrics.MARGINS)})"
                )
            _check_judged(key.rpartition(".")[2], key=f"margins.{key}")
            self._check_direction(key)
        for series in self.limits:
            case_series.check(series, cases, key=f"limits.{series}")
        return self

    def _check_direction(self, key: str) -> None:
        """Check the direction that a margin states.

        Raises:
          ValueError: the metric's direction is the other one, or the margin is for a kind, which has both.
        """
        said, metric = self.margins[key].direction, METRICS.get(key.rpartition(".")[2])
        own = None if metric is None else "higher" if metric.higher_is_better else "lower"
        if said not in (None, own):
            wanted = f"{own} is better" if own else "a kind has metrics of both directions; leave it out"
            raise ValueError(f"suite: margins.{key}.direction={said}: {wanted}")

    def margin(self, series: str) -> Margin:
        """Return a series' margin: the suite's for the series or metric, else the metric's own, else its kind's."""
        metric = series.rpartition(".")[2]
        for key in (series, metric):
            if key in self.margins:
                return self.margins[key]
        if metric in metrics.OWN_MARGINS:
            return metrics.OWN_MARGINS[metric]
        kind = metrics.metric_of(series).kind
        return self.margins.get(kind, metrics.MARGINS[kind])

    @property
    def id(self) -> str:
        """Id of what is measured and how it is judged against a base; limits, judged afterwards, do not change it."""
        return config_id(self, exclude=("limits",))

    def only(self, patterns: Sequence[str]) -> Suite:
        """Return the suite with only the cases whose name or workload matches a pattern, by shell wildcards.

        Primary series, margins and limits of the other cases are dropped too.

        Raises:
          ValueError: a pattern matches no case.
        """
        kept: set[str] = set()
        for pattern in patterns or [""]:
            found = {
                case.name for case in self.cases
                if any(fnmatch.fnmatchcase(word, pattern) for word in (case.name, case.workload))
            }  # fmt: skip
            if not found:
                known = ", ".join(f"{case.name} ({case.workload})" for case in self.cases)
                raise ValueError(f"--cases: {pattern!r} matches no case; wanted names or workloads of {known}")
            kept |= found
        lost = {case.name for case in self.cases} - kept
        changes = {"cases": tuple(case for case in self.cases if case.name in kept)}
        changes["primary"] = tuple(name for name in self.primary if name.partition(".")[0] in kept)
        for name in ("margins", "limits"):
            of_series = getattr(self, name)
            changes[name] = {
                key: of_series[key] for key in of_series if "." not in key or key.partition(".")[0] not in lost
            }
        return self.model_copy(update=changes)

    def primaries(self) -> tuple[str, ...]:
        """Return the series that the looks wait for."""
        rates = tuple(f"{case.name}.tokens_per_s" for case in self.cases if case.workload not in case_series.NO_RATE)
        return self.primary or rates


def _check_judged(name: str, *, key: str) -> None:
    """Check that a metric or kind is judged, not only shown.

    Raises:
      ValueError: it is only shown.
    """
    if name == "noted" or (name in METRICS and METRICS[name].kind == "noted"):
        raise ValueError(f"suite: {key} is shown and not judged; leave it out, or set a limit")
