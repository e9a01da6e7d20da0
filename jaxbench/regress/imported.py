"""Runs of other tools as runs of the history: pytest-benchmark, github-action-benchmark, and jaxbench's comparisons.

Series of other tools have no metric of ours: a run carries the unit of each and which way is better. None of them
gates: they have no base beside them. (S file.)
"""

from __future__ import annotations

import datetime
import hashlib
import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from jaxbench.measure import records, verdicts
from jaxbench.regress.history import SCHEMA

SKIPPED = {records.RUN, records.LAUNCH_DONE, "digest", "parity"}
RATE = re.compile(r"(/s|/sec|per_s(econd)?)$|^ops|iter/sec", re.IGNORECASE)


def read_runs(path: Path, format: str) -> list[dict[str, Any]]:
    """Runs of a file.

    Raises:
      ValueError: it cannot be read, or is of another format.
    """
    try:
        found = list(FORMATS[format](path))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise ValueError(
            f"--input={path} is no file of {format} ({type(error).__name__}: {str(error).splitlines()[0][:200]})"
        ) from error
    if not found:
        raise ValueError(f"--input={path} holds no run of {format}")
    return found


def run_of(
    *, time_utc: str, host: str, commit: str, subject: str, suite: str, series: Mapping[str, list[float]],
    units: Mapping[str, tuple[str, bool]], note: str, device: str = "cpu", machine: Mapping[str, Any] = {}, **more: Any,
) -> dict[str, Any]:  # fmt: skip
    """A run's record without findings.

    Args:
      series: medians of its launches by name.
      units: unit, and whether higher is better, by name.
    """
    launches = max(map(len, series.values()), default=0)
    return {
        "schema": SCHEMA, "time_utc": _time(time_utc), "suite": {}, "suite_id": suite, "device": device, "host": host,
        "machine": {"cpu": "", "threads": 0, **machine}, "sides": {"head": {"commit": commit, "subject": subject}},
        "series": {
            name: {"head": {"median": verdicts.median(values), "launches": values}} for name, values in series.items()
        },
        "units": {name: list(unit) for name, unit in units.items()}, "launches": launches, "findings": [],
        "notes": [note], **more,
    }  # fmt: skip


def comparison(path: Path) -> Iterable[dict[str, Any]]:
    """Runs of a results.jsonl of `make compare`, one a run id."""
    rows: dict[str, list[records.Record]] = defaultdict(list)
    for record in records.read_lines(path):
        rows[record.run_id].append(record)
    about = path.with_name("environment.json")
    machine = json.loads(about.read_text(encoding="utf-8")) if about.is_file() else {}
    for run_id, found in rows.items():
        series: dict[str, dict[int, float]] = defaultdict(dict)
        units, parity = {}, []
        for record in found:
            if record.metric == "parity":
                parity.append({name: record.detail[name] for name in ("case", "backend", "passed", "gates")})
            if record.metric in SKIPPED or record.value is None or record.status != "ok":
                continue
            words = (record.arm, record.workload.label().replace(" ", "-"), record.metric)
            name = ".".join(word for word in words if word not in ("", "none"))
            series[name][record.launch] = record.value
            units[name] = (record.unit, _is_rate(record.unit))
        if series:
            last = max(found, key=lambda record: record.time_utc)
            yield run_of(
                time_utc=last.time_utc, host=last.host, commit=last.commit, subject=f"comparison {path.parent.name}",
                suite=last.config_id, series={name: list(each.values()) for name, each in series.items()}, units=units,
                note=f"imported from {path.parent.name}/{path.name}, run {run_id or 'without id'}", device=last.device,
                machine={name: machine[name] for name in ("cpu", "threads", "versions") if name in machine},
                parity=parity, suite_name="comparison", model_sha256=last.model_sha256,
            )  # fmt: skip


def pytest_benchmark(path: Path) -> Iterable[dict[str, Any]]:
    """The run of a JSON file of pytest-benchmark; seconds of a call."""
    found = json.loads(path.read_text(encoding="utf-8"))
    info, commit = found["machine_info"], found.get("commit_info") or {}
    cpu = (info.get("cpu") or {}).get("brand_raw", "")
    series = {each["fullname"]: _seconds(each["stats"]) for each in found["benchmarks"]}
    yield run_of(
        time_utc=found["datetime"], host=_hashed(info.get("node"), info.get("machine"), cpu),
        commit=str(commit.get("id") or "unknown")[:12], subject=path.name, suite="pytest-benchmark", series=series,
        units=dict.fromkeys(series, ("s", False)), note=f"imported from {path.name} of pytest-benchmark",
        machine={"cpu": cpu},
    )  # fmt: skip


def github_action_benchmark(path: Path) -> Iterable[dict[str, Any]]:
    """The runs of a data.js or JSON file of github-action-benchmark, one a commit and suite."""
    text = path.read_text(encoding="utf-8").strip()
    found = json.loads(re.sub(r"^window\.BENCHMARK_DATA\s*=\s*", "", text).rstrip(";"))
    for suite, entries in found["entries"].items():
        for entry in entries:
            bigger = entry.get("tool") == "customBiggerIsBetter"
            units = {each["name"]: each.get("unit", "") for each in entry["benches"]}
            units = {name: (unit, bigger or _is_rate(unit)) for name, unit in units.items()}
            commit = entry["commit"]
            yield run_of(
                time_utc=datetime.datetime.fromtimestamp(entry["date"] / 1e3, datetime.UTC).isoformat(),
                host=_hashed("github-action-benchmark", suite), commit=commit["id"][:12],
                subject=(commit.get("message") or " ").splitlines()[0][:120], suite=suite,
                series={each["name"]: [float(each["value"])] for each in entry["benches"]}, units=units,
                note=f"imported from {path.name} of github-action-benchmark, suite {suite}",
            )  # fmt: skip


FORMATS: dict[str, Callable[[Path], Iterable[dict[str, Any]]]] = {
    "comparison": comparison, "pytest-benchmark": pytest_benchmark, "github-action-benchmark": github_action_benchmark,
}  # fmt: skip


def _seconds(stats: Mapping[str, Any]) -> list[float]:
    """What stands for the launches of a benchmark: its samples, or where the file has none, their median."""
    return [float(value) for value in stats.get("data") or [stats["median"]]]


def _is_rate(unit: str) -> bool:
    return bool(RATE.search(unit))


def _hashed(*parts: object) -> str:
    return hashlib.sha256("\n".join(map(str, parts)).encode()).hexdigest()[:12]


def _time(text: str) -> str:
    """A time in UTC to the second; one without a zone is taken as UTC."""
    found = datetime.datetime.fromisoformat(text)
    found = found if found.tzinfo else found.replace(tzinfo=datetime.UTC)
    return found.astimezone(datetime.UTC).isoformat(timespec="seconds")
