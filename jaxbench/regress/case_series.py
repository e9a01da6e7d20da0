"""Which series a case can have, by its workload: naming any other in a suite would have no effect (S file)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxbench.regress.metrics import METRICS, OF_PROGRAMS

START = "start.import_s"  # of a launch, not of a case
NO_RATE = ("quality", "answers", "parity")  # workloads without tokens/s
RATES = ("tokens_per_s", "energy_j_per_token")
OF_TOKENS = ("first_token_s", "token_p50_s", "token_p90_s", "token_p99_s", "end_to_end_s")
OF_WORKLOADS: Mapping[str, tuple[str, ...]] = {  # metrics that only some workloads have
    "generation": OF_TOKENS, "native": OF_TOKENS, "serving": OF_TOKENS, "quality": ("bits_per_byte",),
    "answers": ("answer_nll",), "detection": ("detection_rate",), "parity": ("parity_error",),
    "compression": ("tokens_per_vector", "read_back_rate", "retention", "answer_nll"),
}  # fmt: skip
OF_SOME = {*RATES, *OF_TOKENS, *(metric for own in OF_WORKLOADS.values() for metric in own)}
PROGRAMS: Mapping[str, tuple[str, ...]] = {  # the compiled programs that a case's `prepare` names
    "generation": ("prefill", "decode"), "native": ("prefill", "decode"), "training": ("step",), "memory": ("step",),
    "quality": ("forward",), "answers": ("forward",),
}  # fmt: skip


def check(series: str, cases: Mapping[str, Any], *, key: str) -> None:
    """Check that the suite's cases can have a series.

    Args:
      cases: by name.
      key: of the suite that names the series, for messages.

    Raises:
      ValueError: there is no such case or metric, or the case does not have this metric or program.
    """
    name, *program, metric = series.split(".") if "." in series else (series, "")
    if series == START:
        return
    if name not in cases:
        raise ValueError(f"suite: {key}; wanted CASE.METRIC, cases {', '.join(cases)}")
    if metric not in METRICS or len(program) > 1:
        raise ValueError(f"suite: {key}; wanted {name}.METRIC, metrics {', '.join(METRICS)}")
    if bool(program) != (metric in OF_PROGRAMS):
        form = f"{name}.PROGRAM.{metric}, a compiled program's" if not program else f"{name}.{metric}, the case's"
        raise ValueError(f"suite: {key}; wanted {form}")
    if metric == "import_s":
        raise ValueError(f"suite: {key}; wanted {START}, once a launch")
    workload = cases[name].workload
    known = PROGRAMS.get(workload, ())
    if program and program[0] not in known:
        wanted = f"wanted one of {', '.join(known)}" if known else "it compiles none that is counted"
        raise ValueError(f"suite: {key}: workload {workload} has no program {program[0]}; {wanted}")
    if metric in OF_SOME and metric not in _own(cases[name]):
        said = {"tokens_per_s": "tokens/s"}.get(metric, metric)
        raise ValueError(f"suite: {key}: workload {workload} has no {said}; wanted another metric")


def _own(case: Any) -> tuple[str, ...]:
    """Return the metrics that a case has and some others do not."""
    if case.workload == "detection" and not case.marked:
        return RATES
    if case.workload == "compression" and not case.read:
        return (*RATES, "tokens_per_vector")
    return OF_WORKLOADS.get(case.workload, ()) + (() if case.workload in NO_RATE else RATES)
