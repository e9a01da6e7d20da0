"""Gather what the pages show of a history, as plain values (S file).

Every run is read once. A series is one metric of one case on one machine and device; a change of the case or the model
starts a new series (run_file.work_of).
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxbench.measure import verdicts
from jaxbench.regress import advice, change_points, metrics, report
from jaxbench.regress.alerts import Alert, Book
from jaxbench.regress.history import History
from jaxbench.regress.run_file import read, work_of
from jaxbench.regress.site import primary
from jaxbench.regress.site.primary import Spread, Tile

MOST_NOTES, MOST_CHARACTERS = 5, 300  # notes of a run, and characters of a note, in a marker of the trends


class Run(NamedTuple):
    """A run as shown in lists."""

    id: str
    time_utc: str
    host: str
    cpu: str
    device: str
    head: str
    subject: str
    base: str  # "" = none
    suite: str
    launches: int
    num_series: int
    counts: dict[str, int]  # verdict -> number of series
    critical: int
    tag: str

    @property
    def group(self) -> tuple[str, str, str]:
        """Machine, device and suite: the overview shows the newest run of each group."""
        return (self.host, self.device, self.suite)


class Series(NamedTuple):
    """A series over the runs on one machine, and the name of its file."""

    file: str
    name: str
    host: str
    device: str
    work: str
    unit: str
    higher_is_better: bool | None
    num_points: int
    num_changes: int


class Content(NamedTuple):
    """Everything that the pages show."""

    runs: list[Run]  # newest first
    newest: list[tuple[Run, dict[str, Any]]]  # of each group: the run and its record
    tiles: dict[str, list[Tile]]  # id of a newest run -> its primary series
    spreads: dict[str, list[Spread]]  # the same keys -> how far launches differ
    notes: dict[str, dict[str, Any]]  # id of a run with a tag or notes -> these
    compared: list[str]  # ids of runs with findings, newest first
    series: list[Series]
    points: dict[str, dict[str, list[Any]]]  # file of a series -> columns
    records: dict[str, dict[str, Any]]  # id of a run with findings -> what its page shows
    alerts: list[Alert]  # newest first
    parity: list[dict[str, Any]]  # gates of the newest comparison of each machine
    qualified: list[dict[str, Any]]  # what `qualify` wrote
    damaged: dict[str, str]  # files that cannot be read


def gather(history: History) -> Content:
    """Read a history.

    Raises:
      ValueError: it contains no readable run.
    """
    runs, damaged, records, newest, notes = [], {}, {}, {}, {}
    points: dict[tuple[str, ...], list[tuple[Any, ...]]] = defaultdict(list)
    units: dict[tuple[str, ...], metrics.Metric] = {}
    parity: dict[str, dict[str, Any]] = {}
    for path in history.files():
        try:
            record = read(path)
            run = _run(path.stem, record)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            damaged[path.name] = str(error)
            continue
        runs.append(run)
        newest[run.group] = (run, record)
        if record["findings"]:
            records[run.id] = _shown(record)
        if run.tag or record.get("notes"):
            notes[run.id] = {"tag": run.tag, "notes": _short(record.get("notes", ()))}
        if record.get("parity"):
            parity[run.host] = {"run": run, "cases": record["parity"]}
        for name, sides in record["series"].items():
            if "head" in sides:
                key = (run.host, run.device, work_of(record, name), name)
                units[key] = metrics.of_run(record, name)
                points[key].append((run.time_utc, run.id, run.head, *_interval(sides["head"])))
    if not runs:
        raise ValueError(
            f"history: {history.folder} holds no run that can be read; `run` makes one, `import` brings some"
        )
    made = [_series(key, units[key], rows) for key, rows in points.items()]
    made.sort(key=lambda each: (-each[0].num_points, each[0].name, each[0].host))  # longest series first
    by_age = sorted(newest.values(), key=lambda each: each[0].time_utc, reverse=True)
    runs.sort(key=lambda run: (run.time_utc, run.id), reverse=True)
    return Content(
        runs, by_age, {run.id: primary.tiles(record) for run, record in by_age},
        {run.id: primary.spreads(record) for run, record in by_age}, notes,
        [run.id for run in runs if run.id in records], [each for each, _ in made],
        {each.file: columns for each, columns in made}, records, Book(history.folder).alerts()[::-1],
        list(parity.values()), history.qualifications(), damaged,
    )  # fmt: skip


def _run(id: str, record: Mapping[str, Any]) -> Run:
    sides, counts = record["sides"], Counter(each["verdict"] for each in record["findings"])
    return Run(
        id, record["time_utc"], record["host"], record["machine"].get("cpu", ""), record["device"],
        sides["head"]["commit"], sides["head"].get("subject", ""), sides.get("base", {}).get("commit", ""),
        advice.suite_name(record), record["launches"], len(record["series"]), dict(counts),
        sum(each["level"] == "critical" for each in record["findings"]), record.get("tag", ""),
    )  # fmt: skip


def _shown(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a page shows of a run against its base."""
    margins = record["suite"].get("margins", {})
    rows = []
    for each in report.findings_of(record):
        metric, margin = metrics.of_run(record, each.series), _margin(margins, each.series)
        rows.append([
            each.series, each.verdict, each.level, _finite(each.worse), _finite(each.low), _finite(each.high),
            report.number(each.base, metric.unit), report.number(each.head, metric.unit), report.interval(each),
            report.verdict(each), margin["warning"], margin["critical"],
        ])  # fmt: skip
    return {"rows": rows, "why": report.explanation(record), "notes": list(record["notes"]), "sides": record["sides"],
            "level": report.level(record)}  # fmt: skip


def _margin(margins: Mapping[str, Mapping[str, float]], series: str) -> Mapping[str, float]:
    """Return the margin as Suite.margin does, also for a suite with keys that are unknown here."""
    name, kind = series.rpartition(".")[2], metrics.metric_of(series).kind
    own = {key: margin.model_dump() for key, margin in metrics.OWN_MARGINS.items()}
    found = margins.get(series) or margins.get(name) or own.get(name) or margins.get(kind)
    return found or metrics.MARGINS[kind].model_dump()


def _short(notes: Sequence[object]) -> list[str]:
    """Shorten notes for a marker: few, and none long."""
    texts = [str(note) for note in notes]
    shown = [text if len(text) <= MOST_CHARACTERS else f"{text[:MOST_CHARACTERS]} ..." for text in texts[:MOST_NOTES]]
    return shown + [f"{len(texts) - MOST_NOTES} more"] * (len(texts) > MOST_NOTES)


def _finite(value: float) -> float | None:
    return value if abs(value) < 1e12 else None


def _interval(side: Mapping[str, Any]) -> tuple[float, float | None, float | None]:
    """Return the median of a run's launches and a 95 % interval of their geometric mean.

    The interval is None for too few launches, equal ones, and some that are not positive and finite.
    """
    launches = side.get("launches", ())
    if len(launches) < 3 or min(launches) <= 0 or max(launches) in (min(launches), math.inf):
        return side["median"], None, None
    _, low, high = verdicts.t_interval([math.log(value) for value in launches]).ratio()
    return side["median"], low, high


def _series(key: tuple[str, ...], metric: metrics.Metric, rows: Sequence[tuple[Any, ...]]) -> tuple[Series, dict]:
    """Build a series and its columns, oldest first."""
    host, device, work, name = key
    rows = sorted(rows)
    time, run, commit, median, low, high = (list(column) for column in zip(*rows))
    changes = [list(each) for each in change_points.change_points(median, counted=metric.kind == "exact")]
    file = hashlib.sha256(repr(key).encode()).hexdigest()[:12]
    columns = {
        "time": time,
        "run": run,
        "commit": commit,
        "median": median,
        "low": low,
        "high": high,
        "changes": changes,
    }
    made = Series(file, name, host, device, work, metric.unit, metric.higher_is_better, len(rows), len(changes))
    return made, columns
