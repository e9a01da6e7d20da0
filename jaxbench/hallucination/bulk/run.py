"""Judge every row of a file, in one process or many, resumable; write verdicts, sentences and a page (S file).

Consecutive rows with the same context and question form a group, whose prompt is read once. Group boundaries depend on
the input alone, so that any run, interrupted or not, reads the same groups and reaches the same verdicts. Finished
groups are lines of a part file, in input order; the outputs are made from it and the input when all are done.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxbench import outputs, ray_pool, worker_pool
from jaxbench.hallucination import lengths, portable
from jaxbench.hallucination.bulk import page, row_files, verdict_files
from jaxbench.hallucination.detect import HallucinationDetector

GROUP_ROWS = 16  # of a group, at most: what a killed process repeats
FORMAT = 2  # of the part file
ENGINES = {"local": worker_pool.results, "ray": ray_pool.results}


class Group(NamedTuple):
    """Consecutive rows with the same context and question."""

    number: int  # from 0
    first_row: int  # from 1
    context: str
    question: str
    responses: tuple[str, ...]


class Outputs(NamedTuple):
    """Output files of a run; fields are named as their flags."""

    output: Path  # verdicts, one per row: .jsonl or .parquet
    sentences: Path | None = None  # likewise, one line per sentence
    page: Path | None = None  # .html

    @classmethod
    def of(cls, **paths: str | None) -> Outputs:
        """Make Outputs from the values of the flags."""
        return cls(**{name: Path(path) for name, path in paths.items() if path is not None})

    def __str__(self) -> str:
        return " and ".join(str(path) for path in self if path is not None)


def check(
    source: str, detector: str | Sequence[str], wanted: Outputs, *, overwrite: bool = False, package: str = "jaxbench",
    device: str = "cpu",
) -> tuple[Path, int]:  # fmt: skip
    """Check a run before it starts; return the path of its part file and the number of rows.

    detector: a file, several files that vote, or a folder of `export`. The part file is named by the current input and
    detector, so that no other run's lines are resumed; also by package and device, which round differently.

    Raises:
      ValueError: the input is bad, or an output exists, is an input, is named twice or has an unknown suffix.
    """
    # an exported detector's bundle.json has the checksums of all files in its folder
    named = [detector] if isinstance(detector, str) else [*detector]
    if len(named) == 1 and Path(named[0]).is_dir():
        named = [str(Path(named[0]) / portable.ABOUT)]
    inputs = (source, *named)
    for path, flag in zip(inputs, ("--input", *["--detector"] * len(named))):
        if not Path(path).is_file():
            is_member = flag == "--detector" and len(named) > 1 and Path(path).is_dir()
            said = f"is a folder; each of {len(named)} detectors that vote is a file of `fit`" if is_member else ""
            raise ValueError(f"{flag}={path} {said or 'is no file'}")
    identity = [FORMAT, GROUP_ROWS, *([str(Path(path).resolve()), *_state(path)] for path in inputs)]
    identity += [each for each in (package, device) if each not in ("jaxbench", "cpu")]
    name = hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:12]
    part = wanted.output.with_name(f"{wanted.output.name}.{name}.part")
    paths = {name: path for name, path in wanted._asdict().items() if path is not None}
    check_free(wanted, part, inputs, overwrite=overwrite)
    if len({path.resolve() for path in paths.values()}) < len(paths):
        raise ValueError(f"--output={wanted.output}: --{' and --'.join(list(paths)[1:])} must be other files")
    if wanted.page is not None and wanted.page.suffix != ".html":
        raise ValueError(f"--page={wanted.page} has an unknown suffix, wanted .html")
    kinds = {row_files.kind_of(path, flag=f"--{name}") for name, path in paths.items() if name != "page"}
    return part, row_files.check(source, kinds)


def check_free(wanted: Outputs, part: Path, inputs: Sequence[str] = (), *, overwrite: bool = False) -> None:
    """Check that the outputs may be written.

    Raises:
      ValueError: one exists, is an input or cannot be written at its path.
    """
    for name, path in wanted._asdict().items():
        if path is not None:
            is_own = name != "output" and _is_written_behind(path, part)
            outputs.check_file(path, inputs, overwrite=overwrite or is_own, flag=f"--{name}")


def _is_written_behind(path: Path, part: Path) -> bool:
    """True if a run that was stopped between its outputs wrote the file: it is no older than the run's part file.

    --output is written last. An older file is the user's.
    """
    return path.exists() and part.exists() and path.stat().st_mtime_ns >= part.stat().st_mtime_ns


def groups(source: str | Path) -> Iterator[Group]:
    """Yield the groups of a file's rows, in order."""
    asked = itertools.groupby(row_files.rows(source, row_files.TEXTS), lambda row: (row["context"], row["question"]))
    number, first = 0, 1
    for prompt, rows in asked:
        while responses := tuple(row["response"] for row in itertools.islice(rows, GROUP_ROWS)):
            yield Group(number, first, *prompt, responses)
            number, first = number + 1, first + len(responses)


def detect(
    detector: HallucinationDetector,
    source: str | Path,
    part: Path,
    *,
    processes: int = 1,
    results: Callable[..., Iterable[Any]] = worker_pool.results,
) -> Iterator[list[dict[str, Any]]]:
    """Judge each group that is missing from the part file; return an iterator of verdicts by group, in order.

    results: one of ENGINES; unused with one process of this machine, which reads with all threads and devices.

    Raises:
      ValueError: a row cannot be judged; it is named, and before the first verdict if its length is the reason; or the
        file changed meanwhile, so that verdicts are not of the rows that they would be written beside.
    """
    check_lengths(detector, source)
    return _detected(detector, source, part, processes=processes, results=results)


def check_lengths(detector: HallucinationDetector, source: str | Path) -> None:
    """Check that every row of a file fits the reader's window, before the first verdict.

    Raises:
      ValueError: a row does not fit; it is named.
    """
    names = ("question", "response")
    rows = ((place, row["question"], row["response"]) for place, row in row_files.numbered(source, names, names))
    tokenizer, window = detector.limits
    lengths.check_all(rows, tokenizer, window=window, style=detector.settings.style)


def _detected(
    detector: HallucinationDetector, source: str | Path, part: Path, *, processes: int, results: Callable[..., Any]
) -> Iterator[list[dict[str, Any]]]:
    """Yield what `detect` returns."""
    part.parent.mkdir(parents=True, exist_ok=True)
    before, done = _state(source), _whole_lines(part)
    work = itertools.islice(groups(source), done, None)
    if results is worker_pool.results and processes == 1:
        found = _judged_here(detector, work)
    else:
        found = results(functools.partial(judged, detector), work, processes=processes)
    waiting: dict[int, list[dict[str, Any]]] = {}  # finished groups after one that is not
    try:
        with open(part, "a", encoding="utf-8") as file:
            for number, verdicts in found:
                waiting[number] = verdicts
                while done in waiting:
                    file.write(json.dumps(waiting[done], ensure_ascii=False) + "\n")
                    file.flush()
                    done += 1
                    yield waiting.pop(done - 1)
        if Path(source).is_file() and _state(source) != before:
            done = 0
            raise ValueError(f"--input={source} changed while it was judged; its verdicts are dropped, run it again")
    finally:
        if not done:  # nothing to resume from
            part.unlink(missing_ok=True)


def _state(path: str | Path) -> tuple[int, int]:
    """Size and time of a file, which change with its content."""
    stat = Path(path).stat()
    return stat.st_size, stat.st_mtime_ns


def _judged_here(detector: HallucinationDetector, work: Iterator[Group]) -> Iterator[tuple[int, list[dict[str, Any]]]]:
    """Judge groups on all devices of this process; load no model if no group is left."""
    for first in work:
        workers = [functools.partial(judged, each) for each in detector.by_device()]
        yield from worker_pool.by_threads(workers, itertools.chain((first,), work))


def judged(detector: HallucinationDetector, group: Group) -> tuple[int, list[dict[str, Any]]]:
    """Judge a group; return its number, and its verdicts as dicts for JSON.

    Raises:
      ValueError: its rows cannot be judged; they are named.
    """
    try:
        found = detector.detect_group(group.context, group.question, group.responses)
    except ValueError as error:
        last = group.first_row + len(group.responses) - 1
        place = f"row {last}" if last == group.first_row else f"one of rows {group.first_row} to {last}"
        raise ValueError(f"{place}: {error}") from None
    return group.number, [verdict.to_dict() for verdict in found]


def verdicts(part: Path) -> Iterator[dict[str, Any]]:
    """Yield the verdicts of a part file."""
    with open(part, encoding="utf-8") as file:
        for line in file:
            yield from json.loads(line)


def finish(
    source: str | Path, part: Path, wanted: Outputs, detector: HallucinationDetector, *, overwrite: bool = False
) -> int:
    """Write the outputs from a complete part file, then delete it; return how many verdicts are hallucinated.

    Raises:
      ValueError: something has appeared at an output's path.
    """
    check_free(wanted, part, overwrite=overwrite)
    total = flagged = 0
    for verdict in verdicts(part):
        total, flagged = total + 1, flagged + verdict["is_hallucinated"]
    if wanted.page is not None:
        fitted = detector.saved.detector
        about = page.About(Path(source).name, total, flagged, fitted.threshold, fitted.part_threshold)
        page.write(wanted.page, zip(row_files.rows(source, row_files.SHOWN), verdicts(part), strict=True), about)
    if wanted.sentences is not None:
        verdict_files.write_sentences(wanted.sentences, source, verdicts(part))
    verdict_files.write(wanted.output, source, verdicts(part))  # last: if it exists, the run is complete
    part.unlink()
    return flagged


def _whole_lines(part: Path) -> int:
    """Return the number of whole lines of a file; cut off the part of a line that a killed run left."""
    count = end = 0
    if part.is_file():
        with open(part, "r+b") as file:
            for line in file:
                if line.endswith(b"\n"):
                    count, end = count + 1, end + len(line)
            if end < file.seek(0, os.SEEK_END):  # only then: truncating makes the file newer than outputs made from it
                file.truncate(end)
    return count
