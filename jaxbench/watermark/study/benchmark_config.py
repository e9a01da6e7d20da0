"""What the watermark benchmark measures, and the peers' configurations (S file)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from jaxbench.config import Base, TransformerConfig
from jaxbench.watermark.config import Count, Scheme
from jaxbench.watermark.study import benchmark_report

PEERS = ("transformers", "markllm")
MARKLLM_KGW = {
    "algorithm_name": "KGW",
    "gamma": 0.5,
    "delta": 2.0,
    "hash_key": 15485863,
    "prefix_length": 1,
    "z_threshold": 4.0,
    "f_scheme": "time",
    "window_scheme": "left",
}
MARKLLM_UNIGRAM = {"algorithm_name": "Unigram", "gamma": 0.5, "delta": 2.0, "hash_key": 15485863, "z_threshold": 4.0}
TRANSFORMERS_KGW = {"greenlist_ratio": 0.25, "bias": 2.0, "hashing_key": 15485863, "seeding_scheme": "lefthash"}


class _Schemes(Base):
    """Schemes that are measured."""

    schemes: tuple[Scheme, ...] = Field(min_length=1)

    @field_validator("schemes")
    @classmethod
    def _check(cls, schemes: tuple[Any, ...]) -> tuple[Any, ...]:
        names = [benchmark_report.label(scheme.model_dump(mode="json")) for scheme in schemes]
        twice = [name for name in names if names.count(name) > 1]
        if twice:  # records and tables identify a scheme by this name
            raise ValueError(f"benchmark: {twice.count(twice[0])} schemes are called {twice[0]!r}, wanted one in a run")
        return schemes


class Detection(_Schemes):
    """What to measure of detection."""

    engines: tuple[Literal["numpy", "jax", "torch"], ...] = Field(default=("numpy", "jax", "torch"), min_length=1)
    text_tokens: int = Field(default=200, ge=8, le=4096)  # tokens of each text
    texts: int = Field(default=2048, ge=1)  # texts per call for jaxbench's engines
    batch_sizes: tuple[Count, ...] = Field(default=(1, 64, 2048), min_length=1)  # texts per call, ids in, every scheme
    slow_peer_texts: int = Field(default=40, ge=1)  # texts for MarkLLM's KGW and transformers, tens per second
    fast_peer_texts: int = Field(default=1000, ge=1)  # texts for MarkLLM's Unigram
    identify_keys: int = Field(default=8, ge=1)  # keys of the multi-method case
    rounds: int = Field(default=2, ge=1)  # passes over all engines in a launch
    repeats: int = Field(default=3, ge=1)  # calls of a case in a pass


class Memory(_Schemes):
    """What to measure of the memory of detection: each case once, in a process of its own."""

    engines: tuple[Literal["numpy", "jax", "torch"], ...] = Field(default=("numpy", "jax", "torch"), min_length=1)
    text_tokens: int = Field(default=200, ge=8, le=4096)  # tokens of each text
    batch_sizes: tuple[Count, ...] = Field(default=(1, 64, 2048), min_length=1)  # texts of the call, for every scheme
    identify_keys: int = Field(default=8, ge=1)  # keys of the multi-method case


class Generation(_Schemes):
    """What to measure of generation."""

    batch_sizes: tuple[Count, ...] = Field(default=(1, 8), min_length=1)
    prompt_tokens: int = Field(default=32, ge=8)
    new_tokens: int = Field(default=48, ge=3)  # per decode call
    rounds: int = Field(default=10, ge=2)  # pairs of plain and marked decode calls
    loop_steps: int = Field(default=32, ge=2)  # steps of an isolated loop
    loop_rounds: int = Field(default=9, ge=2)  # pairs of plain and marked loops
    control: bool = True  # also measure plain versus plain, which shows the noise of the figures


class Throughput(_Schemes):
    """Whole calls of marked generation, prompt included, by scheme, length and batch, versus unmarked generation."""

    batch_sizes: tuple[Count, ...] = Field(default=(1, 8), min_length=1)
    prompt_tokens: int = Field(default=32, ge=8)
    new_tokens: tuple[Annotated[int, Field(ge=3)], ...] = Field(default=(64, 256), min_length=1)
    rounds: int = Field(default=3, ge=1)  # calls of each scheme, alternating


class Verdicts(Base):
    """How much text each side generates for both sides to detect."""

    texts: int = Field(default=4, ge=1)
    new_tokens: int = Field(default=100, ge=8)


class Benchmark(Base):
    """The benchmark of the watermark lab."""

    model: str = "default"  # the model whose tokenizer, vocabulary and decoder are used
    data: str | None = None  # source of texts and prompts; unset: the packaged prose
    launches: int = Field(default=3, ge=1)  # sets of fresh processes
    detection: Detection | None = None
    memory: Memory | None = None
    generation: Generation | None = None
    throughput: Throughput | None = None
    shape: TransformerConfig | None = None  # decode with random weights of this shape instead: for speed only
    verdicts: Verdicts | None = None

    @model_validator(mode="after")
    def _check_shape(self) -> Benchmark:
        others = [name for name in ("detection", "memory", "verdicts") if getattr(self, name) is not None]
        if self.shape is not None and others:
            raise ValueError(
                f"benchmark: shape is for speed of decoding alone; leave out {others[0]}, which scores texts"
            )
        return self
