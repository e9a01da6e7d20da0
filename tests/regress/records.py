"""Records of runs that tests judge: one suite, findings as they are asked for."""

from __future__ import annotations

from typing import Any

from jaxbench.regress.judge import Finding
from jaxbench.regress.suite import Suite

SUITE = Suite(
    cases=[
        {"name": "decode", "workload": "generation"},
        {"name": "bits", "workload": "quality"},
    ]
)
RATE, LOAD, FLOPS, BITS = "decode.tokens_per_s", "decode.load_s", "decode.decode.flops", "bits.bits_per_byte"
BUSY = {"load_average": [7.0, 5.0, 4.0], "pressure": {"cpu": 0.6}}


def finding(series: str, verdict: str = "no change", level: str = "", worse: float = 0.0, **changes: Any) -> Finding:
    """Return a finding; timed ones have an interval around `worse`."""
    wide = 0.0 if series in (FLOPS, BITS) else 0.02
    values = {"low": worse - wide, "high": worse + wide, "base": 10.0, "head": 10.0 * (1 + worse), "num_pairs": 5}
    return Finding(series, verdict, level, worse, **(values | {"wanted_pairs": 0} | changes))


def quiet() -> list[Finding]:
    """Return findings of a run in which nothing moved."""
    return [finding(name) for name in (RATE, LOAD, FLOPS, BITS)]


def record(found: list[Finding], **changes: Any) -> dict[str, Any]:
    """Return a run's record beside a base; changes replace its keys."""
    series = {
        each.series: {
            "base": {"median": each.base, "launches": [each.base] * 3},
            "head": {"median": each.head, "launches": [0.9 * each.head, each.head, 1.1 * each.head]},
        }
        for each in found
    }
    return {
        "schema": 1, "time_utc": "2026-11-26T12:00:00+00:00", "host": "abc", "device": "cpu", "suite_id": "s1",
        "suite": SUITE.model_dump(mode="json"), "suite_name": "quick", "launches": 5, "confirmed": {}, "notes": [],
        "sides": {"head": {"commit": "c" * 12, "subject": "a"}, "base": {"commit": "b" * 12, "subject": "<b> | of"}},
        "series": series, "findings": [each._asdict() for each in found], "model_sha256": "",
        "machine": {"host": "abc", "cpu": "A", "threads": 2, "load_average": [1.9, 1.0, 1.0], "memory_bytes": 2**34,
                    "versions": {"jax": "0.10.2"}, "pressure": {"cpu": 0.01}, "malloc": {}},
        "qualified": {"real": [0, 30], "drawn": [2, 300], "power": {"1.1": [9, 10]}, "smallest": {RATE: 0.1}},
    } | changes  # fmt: skip
