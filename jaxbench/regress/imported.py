"""Import runs of other tools and committed results into the history.

Formats: pytest-benchmark, github-action-benchmark, jaxbench's comparisons, and the figures in any folder of results.
Their series are not among our metrics: a run carries the unit of each and which direction is better. None of them
gates, because they have no base. (S file.)
"""

from __future__ import annotations

import csv
import datetime
import hashlib
import io
import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxbench.measure import records, verdicts
from jaxbench.regress import figure_names
from jaxbench.regress.run_file import SCHEMA, check_finite

SKIPPED = {records.RUN, records.LAUNCH_BEGUN, records.LAUNCH_DONE, records.LOOK, "digest", "parity"}
RATE = re.compile(r"(/s|/sec|/min|per_s(econd)?)$|^ops|iter/sec", re.IGNORECASE)
COSTS = {"s", "ms", "us", "ns", "bytes", "MB", "J/token"}  # units of which less is better; other figures do not say
HIGHER = {"train_mfu", "train_mfu_causal", "tokens"}  # a comparison's metrics; tokens: 1 = those of the baseline
MOST_LAUNCHES = 16  # longer lists are windows or questions, and give only their median


Unit = tuple[str, bool | None]  # and whether higher is better; None = the source does not say


class Figures(NamedTuple):
    """Content of one file of a committed result."""

    file: Path
    environment: Mapping[str, Any]  # empty if the file does not say where it comes from
    series: Mapping[str, list[float]]
    units: Mapping[str, Unit]


def read_runs(path: Path, format: str) -> list[dict[str, Any]]:
    """Read the runs of a file, or of a folder of figures.

    Raises:
      ValueError: it cannot be read, or is of another format.
    """
    try:
        found = list(FORMATS[format](path))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        said = (str(error).splitlines() or [""])[0][:200]
        raise ValueError(f"--input={path} is no file of {format} ({type(error).__name__}: {said})") from error
    if not found:
        raise ValueError(f"--input={path} holds no run of {format}")
    return found


def run_of(
    *, time_utc: str, host: str, commit: str, subject: str, suite: str, series: Mapping[str, list[float]],
    units: Mapping[str, Unit], note: str, device: str = "cpu", machine: Mapping[str, Any] = {}, **more: Any,
) -> dict[str, Any]:  # fmt: skip
    """Build a run's record without findings.

    Args:
      series: medians of its launches by name.
      units: unit, and whether higher is better (None: unknown), by name.
    """
    launches = max(map(len, series.values()), default=0)
    check_finite(series)
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
    """Yield the runs of a results.jsonl of `make compare`, one per run id."""
    rows: dict[str, list[records.Record]] = defaultdict(list)
    for record in records.RecordFile(path).read():
        rows[record.run_id].append(record)
    about = path.with_name("environment.json")
    machine = json.loads(about.read_text(encoding="utf-8")) if about.is_file() else {}
    for run_id, found in rows.items():
        series: dict[str, dict[int, float]] = defaultdict(dict)
        units, parity = {}, []
        several = len({record.config_id for record in found} - {""}) > 1  # each then gets separate series
        for record in found:
            if record.metric == "parity":
                parity.append({name: record.detail[name] for name in ("case", "backend", "passed", "gates")})
            if record.metric in SKIPPED or record.value is None or record.status != "ok":
                continue
            config = record.config_id if several else ""
            words = (config, record.arm, record.workload.label().replace(" ", "-"), record.metric)
            name = ".".join(word for word in words if word not in ("", "none"))
            series[name][record.launch] = record.value
            units[name] = (record.unit, True if record.metric in HIGHER else _direction(record.unit))
        if series:
            last = max(found, key=lambda record: record.time_utc)
            yield run_of(
                time_utc=last.time_utc, host=last.host or machine.get("host", ""), commit=last.commit,
                subject=f"comparison {path.parent.name}", suite=last.config_id,
                series={name: list(each.values()) for name, each in series.items()}, units=units,
                note=f"imported from {path.parent.name}/{path.name}, run {run_id or 'without id'}", device=last.device,
                machine={name: machine[name] for name in ("cpu", "threads", "versions") if name in machine},
                parity=parity, suite_name="comparison", model_sha256=last.model_sha256,
            )  # fmt: skip


def pytest_benchmark(path: Path) -> Iterable[dict[str, Any]]:
    """Yield the run of a JSON file of pytest-benchmark; values are seconds per call."""
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
    """Yield the runs of a data.js or JSON file of github-action-benchmark, one per commit and suite."""
    text = path.read_text(encoding="utf-8").strip()
    found = json.loads(re.sub(r"^window\.BENCHMARK_DATA\s*=\s*", "", text).rstrip(";"))
    for suite, entries in found["entries"].items():
        for entry in entries:
            names = [each["name"] for each in entry["benches"]]
            if twice := sorted({name for name in names if names.count(name) > 1}):
                raise ValueError(f"{suite}: {entry['commit']['id'][:12]} has two benchmarks of the name {twice[0]}")
            told = {"customBiggerIsBetter": True, "customSmallerIsBetter": False}.get(entry.get("tool"))
            units = {each["name"]: each.get("unit", "") for each in entry["benches"]}
            units = {name: (unit, _is_rate(unit) if told is None else told) for name, unit in units.items()}
            commit = entry["commit"]
            yield run_of(
                time_utc=datetime.datetime.fromtimestamp(entry["date"] / 1e3, datetime.UTC).isoformat(),
                host=_hashed("github-action-benchmark", suite), commit=commit["id"][:12],
                subject=(commit.get("message") or " ").splitlines()[0][:120], suite=suite,
                series={each["name"]: [float(each["value"])] for each in entry["benches"]}, units=units,
                note=f"imported from {path.name} of github-action-benchmark, suite {suite}",
            )  # fmt: skip


def figures(path: Path) -> Iterable[dict[str, Any]]:
    """Yield the runs of a committed result, a folder or one file: its comparisons, and one per commit and machine.

    A figure is a number in a JSON file, or in a CSV file if its folder has no JSON file with figures.
    """
    folder = path if path.is_dir() else path.parent
    files = [file for file in sorted(path.rglob("*")) if file.suffix in CONTENTS] if path.is_dir() else [path]
    parts, told = [], set()
    for file in sorted(files, key=lambda file: file.suffix == ".csv"):
        if compared := _compared(file):
            yield from compared
            told.add(file.parent)
        elif file.suffix != ".csv" or file.parent not in told:
            parts.append(_figures_of(file, folder))
            if parts[-1].series and file.suffix != ".csv":
                told.add(file.parent)
    speaks = {part.file.parent: part.environment for part in parts if part.file.stem == "environment"}
    groups: dict[tuple[str, str], list[Figures]] = defaultdict(list)
    for part in (part for part in parts if part.series):
        part = part._replace(environment=part.environment or speaks.get(part.file.parent, {}))
        groups[_word(part.environment.get("commit")), _word(part.environment.get("host"))].append(part)
    for (commit, host), group in groups.items():
        yield _run_of_figures(group, folder, commit, host)


FORMATS: dict[str, Callable[[Path], Iterable[dict[str, Any]]]] = {
    "comparison": comparison, "figures": figures, "pytest-benchmark": pytest_benchmark,
    "github-action-benchmark": github_action_benchmark,
}  # fmt: skip


def _compared(file: Path) -> list[dict[str, Any]]:
    """Return the runs of a file of a comparison's records; none for any other file."""
    if file.name != records.RESULTS_NAME:
        return []
    try:
        return list(comparison(file))
    except (ValueError, KeyError):  # other rows are read as figures; a damaged file is named there
        return []


def _figures_of(file: Path, folder: Path) -> Figures:
    """Read the figures of a file.

    Raises:
      ValueError: it is damaged, or of a kind that holds no figures.
    """
    if file.suffix not in CONTENTS:
        raise ValueError(f"{file.name} is no folder, and no file of {', '.join(CONTENTS)}")
    try:
        content = CONTENTS[file.suffix](file.read_text(encoding="utf-8"))
    except (ValueError, csv.Error) as error:
        raise ValueError(f"{file.relative_to(folder)} is damaged: {error}") from error
    rows = [row for row in content if isinstance(row, dict)] if isinstance(content, list) else []
    if file.stem == "environment" and isinstance(content, dict):
        return Figures(file, content, {}, {})
    stem = file.relative_to(folder).with_suffix("").parts
    series: dict[str, list[float]] = defaultdict(list)
    units = {}
    for keys, values, said in figure_names.leaves(content if isinstance(content, dict) else rows, stem):
        name, unit = ".".join(keys), said or figure_names.unit_of(keys[len(stem) :])
        series[name] += values
        units[name] = (unit, _direction(unit))
    few = {name: each if len(each) <= MOST_LAUNCHES else [verdicts.median(each)] for name, each in series.items()}
    return Figures(file, _environment(content), few, units)


def _run_of_figures(group: Sequence[Figures], folder: Path, commit: str, host: str) -> dict[str, Any]:
    """Build the run of the files of one commit and machine."""
    title = next(
        (part for part in folder.resolve().parts[::-1] if figure_names.DATE.match(part)), folder.resolve().name
    )
    newest = max(int(part.file.stat().st_mtime) for part in group)
    day = (
        title[:10]
        if figure_names.DATE.match(title)
        else datetime.datetime.fromtimestamp(newest, datetime.UTC).isoformat()
    )
    about, names = group[0].environment, ", ".join(str(part.file.relative_to(folder)) for part in group)
    return run_of(
        time_utc=day, host=host, commit=commit, subject=f"figures of {title}",
        suite=figure_names.DATE.sub("", title).strip("-") or "figures",
        series={name: values for part in group for name, values in part.series.items()},
        units={name: unit for part in group for name, unit in part.units.items()},
        note=f"imported from {title}: {names}", device="gpu" if about.get("nvidia_smi") else "cpu",
        machine={name: about[name] for name in ("cpu", "threads", "versions") if name in about},
    )  # fmt: skip


def _environment(content: Any) -> dict[str, Any]:
    """Return machine and commit of a file, as stated under `about`, `environment` or `machine`, in any nesting."""
    found: dict[str, Any] = {}
    for key in figure_names.ENVIRONMENT if isinstance(content, dict) else ():
        if isinstance(inner := content.get(key), dict):
            found |= inner | _environment(inner)
    return found


def _json_lines(text: str) -> list[Any]:
    """Parse a JSON-lines file.

    Raises:
      ValueError: a line is not JSON.
    """
    found = []
    for place, line in enumerate(text.split("\n"), start=1):
        try:
            found += [json.loads(line)] if line.strip() else []
        except ValueError as error:
            raise ValueError(f"line {place} is no JSON ({error})") from error
    return found


def _csv_rows(text: str) -> list[dict[str, Any]]:
    """Parse a CSV file into rows, with numbers where texts are numbers.

    Raises:
      ValueError: a row has more fields than the header.
    """
    found = []
    for place, row in enumerate(csv.DictReader(io.StringIO(text, newline="")), start=1):
        if None in row:
            raise ValueError(f"row {place} has more fields than the header: {row[None]}")
        found.append({key: _value(each) for key, each in row.items()})
    return found


def _value(text: str | None) -> Any:
    """Parse a field of a CSV file; None if it is empty."""
    for kind in (int, float):
        try:
            return kind(text or "")
        except ValueError:
            continue
    return text or None


CONTENTS: dict[str, Callable[[str], Any]] = {".json": json.loads, ".jsonl": _json_lines, ".csv": _csv_rows}


def _word(value: Any) -> str:
    """Return the first word of a result's value; "unknown" if it has none."""
    return next((word for word in str(value or "").split()[:1] if word != "-"), "unknown")


def _seconds(stats: Mapping[str, Any]) -> list[float]:
    """Return a benchmark's samples in place of launches, or their median if the file has no samples."""
    return [float(value) for value in stats.get("data") or [stats["median"]]]


def _is_rate(unit: str) -> bool:
    return bool(RATE.search(unit))


def _direction(unit: str) -> bool | None:
    """Return whether more of a unit is better; None where it depends on what is counted, such as a share."""
    return True if _is_rate(unit) else False if unit in COSTS else None


def _hashed(*parts: object) -> str:
    return hashlib.sha256("\n".join(map(str, parts)).encode()).hexdigest()[:12]


def _time(text: str) -> str:
    """Format a time in UTC to the second; one without a zone is taken as UTC."""
    found = datetime.datetime.fromisoformat(text)
    aware = found if found.tzinfo else found.replace(tzinfo=datetime.UTC)
    return aware.astimezone(datetime.UTC).isoformat(timespec="seconds")
