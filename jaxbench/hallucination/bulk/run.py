"""Verdicts on every row of a file: on one process or many, resumable, as a file, a file of sentences, a page (S file).

Neighbouring rows with one context and question are a group, whose prompt is read once. Where groups end depends on the
input alone, so that a run of any kind, stopped or not, reads the same groups and comes to the same verdicts. Finished
groups are lines of a part file in the input's order; the outputs are made of it and of the input when all are done.
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

GROUP_ROWS = 16  # of a group: what a killed process does again at most
FORMAT = 2  # of the part file
ENGINES = {"local": worker_pool.results, "ray": ray_pool.results}


class Group(NamedTuple):
    """Neighbouring rows with one context and question."""

    number: int  # from 0
    first_row: int  # from 1
    context: str
    question: str
    responses: tuple[str, ...]


class Outputs(NamedTuple):
    """What a run writes; the names are those of flags."""

    output: Path  # verdicts, one a row: .jsonl or .parquet
    sentences: Path | None = None  # likewise, one line a sentence
    page: Path | None = None  # .html

    @classmethod
    def of(cls, **paths: str | None) -> Outputs:
        """Outputs by the values of their flags."""
        return cls(**{name: Path(path) for name, path in paths.items() if path is not None})

    def __str__(self) -> str:
        return " and ".join(str(path) for path in self if path is not None)


def check(source: str, detector: str, wanted: Outputs, *, overwrite: bool = False) -> tuple[Path, int]:
    """Check a run before it starts; return where its finished groups are kept, and the number of rows.

    The part file is named by input and detector as they are now, so that no others' lines count.

    Raises:
      ValueError: the input is bad, or an output exists, is an input, is there twice or has an unknown suffix.
    """
    # an exported detector's bundle.json has the checksums of all that is in its folder
    inputs = (source, str(Path(detector) / portable.ABOUT) if Path(detector).is_dir() else detector)
    for path, flag in zip(inputs, ("--input", "--detector")):
        if not Path(path).is_file():
            raise ValueError(f"{flag}={path} is no file")
    stats = [(Path(path).resolve(), Path(path).stat()) for path in inputs]
    identity = [FORMAT, GROUP_ROWS, *([str(path), stat.st_size, stat.st_mtime_ns] for path, stat in stats)]
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
      ValueError: one exists, is an input or lies where nothing can be written.
    """
    for name, path in wanted._asdict().items():
        if path is not None:
            is_own = name != "output" and _is_written_behind(path, part)
            outputs.check_file(path, inputs, overwrite=overwrite or is_own, flag=f"--{name}")


def _is_written_behind(path: Path, part: Path) -> bool:
    """True where a run that was stopped between its outputs wrote a file: behind the last verdict of its part file.

    --output comes last. A file that was there before is the user's.
    """
    return path.exists() and part.exists() and path.stat().st_mtime_ns >= part.stat().st_mtime_ns


def groups(source: str | Path) -> Iterator[Group]:
    """Yield the groups of a file's rows."""
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
    """Verdicts on each group that the part file does not have yet, in order, as it gets them.

    results: one of ENGINES, not used with one process of this machine, which reads with all threads and devices.

    Raises:
      ValueError: a row cannot be judged; it is named, and before the first verdict where its length is the reason.
    """
    check_lengths(detector, source)
    return _detected(detector, source, part, processes=processes, results=results)


def check_lengths(detector: HallucinationDetector, source: str | Path) -> None:
    """Check that the reader's window takes every row of a file: later would be too late, as the input is one then.

    Raises:
      ValueError: it does not take one; it is named.
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
    done = _whole_lines(part)
    work = itertools.islice(groups(source), done, None)
    if results is worker_pool.results and processes == 1:
        found = _judged_here(detector, work)
    else:
        found = results(functools.partial(judged, detector), work, processes=processes)
    waiting: dict[int, list[dict[str, Any]]] = {}  # behind a group that is not finished
    try:
        with open(part, "a", encoding="utf-8") as file:
            for number, verdicts in found:
                waiting[number] = verdicts
                while done in waiting:
                    file.write(json.dumps(waiting[done], ensure_ascii=False) + "\n")
                    file.flush()
                    done += 1
                    yield waiting.pop(done - 1)
    finally:
        if not done:  # nothing to go on with
            part.unlink(missing_ok=True)


def _judged_here(detector: HallucinationDetector, work: Iterator[Group]) -> Iterator[tuple[int, list[dict[str, Any]]]]:
    """Groups judged by all devices of this process; no model is loaded where none is left."""
    for first in work:
        workers = [functools.partial(judged, each) for each in detector.by_device()]
        yield from worker_pool.by_threads(workers, itertools.chain((first,), work))


def judged(detector: HallucinationDetector, group: Group) -> tuple[int, list[dict[str, Any]]]:
    """A group's number and verdicts, as JSON has them.

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
    """Write what is wanted of a whole part file, which goes then; return how many verdicts are hallucinated.

    Raises:
      ValueError: something has appeared in an output's place.
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
    verdict_files.write(wanted.output, source, verdicts(part))  # last: where it is, the run is over
    part.unlink()
    return flagged


def _whole_lines(part: Path) -> int:
    """Number of whole lines of a file; what a killed run left of another is taken off."""
    count = end = 0
    if part.is_file():
        with open(part, "r+b") as file:
            for line in file:
                if line.endswith(b"\n"):
                    count, end = count + 1, end + len(line)
            if end < file.seek(0, os.SEEK_END):  # or the file would be newer than outputs that were made of it
                file.truncate(end)
    return count
