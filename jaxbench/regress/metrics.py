"""The metrics of a run: units, which direction is better, and how far a metric may move (S file).

Timed metrics vary between launches, so they are judged over launches. Exact ones are counted by the compiler or by us
and are the same in every launch: any change, however small, is a change of the code.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import pydantic

from jaxbench.config import Base

Kind = Literal["timed", "memory", "quality", "exact", "noted"]  # noted: shown but not judged
COUNTED = ("exact", "quality")  # kinds without noise


class Metric(NamedTuple):
    """One metric of a case."""

    unit: str
    higher_is_better: bool | None  # None: a figure of another tool, which does not say
    kind: Kind


class Margin(Base):
    """Relative worsening that is allowed: above `warning` it is a regression, above `critical` it gates."""

    warning: float = pydantic.Field(ge=0)
    critical: float = pydantic.Field(ge=0)
    # Which direction is better, only to document a suite: must agree with METRICS, which define it.
    direction: Literal["higher", "lower"] | None = None

    @pydantic.model_validator(mode="after")
    def _check(self) -> Margin:
        if self.critical < self.warning:
            raise ValueError(f"warning={self.warning} is above critical={self.critical}; wanted the other way round")
        return self


# The source document's defaults (speed 15 and 25 %, memory 20 and 50 %, quality 2 and 5 %).
MARGINS: dict[Kind, Margin] = {
    "timed": Margin(warning=0.15, critical=0.25),
    "memory": Margin(warning=0.20, critical=0.50),
    "quality": Margin(warning=0.02, critical=0.05),
    "exact": Margin(warning=0.0, critical=0.10),
    "noted": Margin(warning=0.0, critical=0.0),
}
# Metrics whose kind's margins do not fit; a suite may set others. The twins' float64 errors are 1e-16 to 1e-13, and
# another summation order multiplies one by a few; a single float32 operation raises it to 1e-8 (parity/distance.py), at
# least 1e5 times as much. So that bug is critical whatever the error was before, and a library's new order is not.
# Retention is a small difference of losses: 2 % of the answers' loss are 9 % of it with the shipped compressor.
OWN_MARGINS = {
    "parity_error": Margin(warning=9.0, critical=999.0), "retention": Margin(warning=0.10, critical=0.25),
}  # fmt: skip


def _timed(unit: str, *, higher: bool = False) -> Metric:
    return Metric(unit, higher, "timed")


METRICS = {
    "tokens_per_s": _timed("tokens/s", higher=True),
    "first_token_s": _timed("s"),
    "token_p50_s": _timed("s"),
    "token_p90_s": _timed("s"),
    "token_p99_s": _timed("s"),
    "end_to_end_s": _timed("s"),
    "import_s": _timed("s"),
    "load_s": _timed("s"),
    "trace_s": _timed("s"),
    "lower_s": _timed("s"),
    "compile_cold_s": Metric("s", False, "noted"),  # once per run: only the first launch compiles from scratch
    "compile_warm_s": _timed("s"),
    "energy_j_per_token": _timed("J"),
    "peak_memory_bytes": Metric("bytes", False, "memory"),
    # Peak since the process began, if this case raised it: devices cannot reset their peak. CPUs report none.
    "device_peak_bytes": Metric("bytes", False, "memory"),
    # CPU seconds of the process over (wall seconds times threads). Neither direction is better (a spin lock raises it,
    # a faster kernel lowers it), and other load on the machine lowers it: it explains a time and is not judged.
    "utilisation": Metric("share", True, "noted"),
    "bits_per_byte": Metric("bits", False, "quality"),
    "answer_nll": Metric("nats/token", False, "quality"),
    "detection_rate": Metric("share", True, "quality"),
    "read_back_rate": Metric("share", True, "quality"),
    "retention": Metric("share", True, "quality"),
    "parity_error": Metric("relative", False, "quality"),
    "tokens_per_vector": Metric("tokens", True, "exact"),
    "flops": Metric("FLOP", False, "exact"),
    "bytes_accessed": Metric("bytes", False, "exact"),
    "temp_bytes": Metric("bytes", False, "exact"),
    "argument_bytes": Metric("bytes", False, "exact"),
    "output_bytes": Metric("bytes", False, "exact"),
    "hlo_ops": Metric("count", False, "exact"),
    "collectives": Metric("count", False, "exact"),  # between devices
    "executables": Metric("count", False, "exact"),
    "recompilations": Metric("count", False, "exact"),
}
# Metrics of each compiled program, which a series names after its case: decode.prefill.flops
OF_PROGRAMS = ("flops", "bytes_accessed", "temp_bytes", "argument_bytes", "output_bytes", "hlo_ops", "collectives")


def metric_of(series: str) -> Metric:
    """Return the metric of a series `case.metric` or `case.program.metric`.

    Raises:
      ValueError: there is no such metric.
    """
    name = series.rpartition(".")[2]
    if name not in METRICS:
        raise ValueError(f"metric {name!r} of {series!r} is unknown; wanted one of {', '.join(METRICS)}")
    return METRICS[name]


def of_run(record: Mapping[str, Any], series: str) -> Metric:
    """Return the metric of a run's series; a run of another tool carries the metrics of its series itself."""
    if series in record.get("units", {}):
        unit, higher_is_better = record["units"][series]
        return Metric(unit, higher_is_better, "noted")
    return metric_of(series)


def worsening(head: float, base: float, *, higher_is_better: bool) -> float:
    """Return the relative worsening of head against base, at least -1: 0.2 = a fifth slower, or a fifth more.

    A halved rate is as bad as a doubled time: 1.0 in both cases. Infinite if base is 0 and head is not.
    """
    worse, better = (base, head) if higher_is_better else (head, base)
    if better == 0:
        return 0.0 if worse == 0 else float("inf")
    return worse / better - 1
