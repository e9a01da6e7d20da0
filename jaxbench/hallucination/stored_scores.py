"""Load chunk scores stored by other implementations, and evaluate ReDeEP's regression on them (S file).

In the published protocol, heads, layers, scales and weights are chosen on the responses they are judged on. `nested`
chooses them on responses to other sources: answers to the same source have more in common than a regression should
profit from.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from jaxbench.hallucination import metrics, score_regression
from jaxbench.hallucination.score_regression import Point, Units

Array = np.ndarray


def load(path: str | Path) -> Units:
    """Units of a file, .jsonl[.gz] or .parquet: rows with response, chunk_label, external {head: score}, parametric
    {layer: score}.

    The scores may be lists as well, [layer][head] and [layer], as `hallucination.py scores --level=chunk` writes them.
    A response without source_id is its own source.

    Raises:
      ValueError: the file is missing, cut short or has a bad row, or a response names two sources; the message names
        the line.
    """
    path, rows = Path(path), []
    if not path.is_file():
        raise ValueError(f"--scores={path} is no file")
    try:
        for place, line in _parquet_lines(path) if path.suffix == ".parquet" else _lines(path):
            rows.append(_row(line, place, rows[0] if rows else None))
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: cannot be read behind row {len(rows)} ({error}); is the file cut short?") from error
    if not rows:
        raise ValueError(f"--scores={path} holds no row")
    names, response = np.unique([row["response"] for row in rows], return_inverse=True)
    units = Units(
        np.array([list(row["external"].values()) for row in rows], np.float64),
        np.array([list(row["parametric"].values()) for row in rows], np.float64),
        np.array([row["chunk_label"] for row in rows], bool),
        response,
        _sources(rows, names, response),
    )
    if not 0 < score_regression.response_labels(units).sum() < response.max() + 1:
        raise ValueError(f"--scores={path}: chunk_label is {rows[0]['chunk_label']} throughout; wanted both classes")
    return units


def _lines(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the lines of a file that are not blank, each with where it is."""
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt", encoding="utf-8-sig") as file:
        yield from ((f"{path} line {number}", line) for number, line in enumerate(file, start=1) if line.strip())


def _parquet_lines(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the rows of a Parquet file as lines of JSON, each with where it is.

    Raises:
      ValueError: it is no Parquet file, is damaged, or has a column that is no JSON.
    """
    from jaxbench.hallucination.bulk import row_files

    for place, row in row_files.numbered(path, texts=(), taken={}):
        try:
            yield place, json.dumps(row)
        except TypeError as error:
            raise ValueError(f"{place} cannot be a line of JSON ({error})") from None


def source_id(value: Any, place: str) -> str | int:
    """Return a source's id, checked.

    Raises:
      ValueError: it is neither a text nor a whole number.
    """
    if not isinstance(value, str | int) or isinstance(value, bool):
        raise ValueError(f"{place}: source_id is {str(value)[:40]!r}, wanted a text or a whole number")
    return value


def _sources(rows: list[dict[str, Any]], names: Array, response: Array) -> Array | None:
    """Index of each row's source; None if no row names one.

    Raises:
      ValueError: rows of one response name two.
    """
    if all(row["source_id"] is None for row in rows):
        return None
    known: dict[int, Any] = {}
    for number, row in zip(response.tolist(), rows):
        if known.setdefault(number, row["source_id"]) != row["source_id"]:
            raise ValueError(
                f"{row['place']}: response {names[number]} has source_id {row['source_id']!r}, and "
                f"{known[number]!r} in a line before; wanted one"
            )
    numbers: dict[tuple[bool, Any], int] = {}
    keys = [(known[i] is None, i if known[i] is None else str(known[i])) for i in range(len(names))]
    return np.array([numbers.setdefault(key, len(numbers)) for key in keys])[response]


def _row(line: str, place: str, first: dict[str, Any] | None) -> dict[str, Any]:
    """Parse a line into a row, which must have the columns of the first one."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{place}: no JSON ({error}): {line[:60]!r}") from error
    if not isinstance(row, dict):
        raise ValueError(f"{place}: {line[:60]!r} is no object")
    for name in ("response", "chunk_label"):
        if not isinstance(row.get(name), int):
            raise ValueError(f"{place}: {name} is {row.get(name)!r}, wanted a whole number")
    if row["chunk_label"] not in (0, 1):
        raise ValueError(f"{place}: chunk_label is {row['chunk_label']}, wanted 0 or 1")
    for name in ("external", "parametric"):
        scores = row[name] = _by_name(row.get(name))
        if not isinstance(scores, dict) or not scores:
            raise ValueError(f"{place}: {name} is {str(scores)[:40]!r}, wanted scores by name, or lists of them")
        bad = next((key for key, value in scores.items() if not _is_number(value)), None)
        if bad is not None:
            raise ValueError(f"{place}: {name} {bad} is {scores[bad]!r}, wanted a finite number")
        if first is not None and list(scores) != list(first[name]):
            raise ValueError(f"{place}: {name} has other columns than the first row")
    given = row.get("source_id")
    return row | {"source_id": None if given is None else source_id(given, place), "place": place}


def _by_name(scores: Any) -> Any:
    """Turn lists of scores, as `hallucination.py scores` writes them, into dicts by "layer", or by "layer.head"."""
    if not isinstance(scores, list):
        return scores
    if all(isinstance(each, list) for each in scores):
        return {f"{layer}.{head}": value for layer, heads in enumerate(scores) for head, value in enumerate(heads)}
    return {str(layer): value for layer, value in enumerate(scores)}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and bool(np.isfinite(value))


def check_point(units: Units, point: Point) -> None:
    """Check that a point's weights are finite, and that it takes no more columns than there are, if there are several.

    Raises:
      ValueError: a weight is not finite, or there are several columns, but fewer than it takes.
    """
    for flag, weight in (("alpha", point.alpha), ("m", point.m)):
        if not np.isfinite(weight):  # nan passes a flag's bounds
            raise ValueError(f"--{flag}={weight}: wanted a finite number")
    for flag, wanted, columns in (
        ("top_n", point.top_n, units.external.shape[1]),
        ("top_k", point.top_k, units.parametric.shape[1]),
    ):
        if wanted > columns and columns > 1:
            raise ValueError(f"--{flag}={wanted}: the scores have {columns} columns")


def table(units: Units, point: Point, *, folds: int, repeats: int) -> list[tuple[str, float, float, str]]:
    """Rows of name, AUC and correlation of responses, and what they were chosen on.

    Raises:
      ValueError: there are too few columns or responses.
    """
    check_point(units, point)
    labels = score_regression.response_labels(units)
    _check_folds(units, labels, folds)
    what = "responses" if units.source is None else "sources"
    fitted = score_regression.fit(units, point)
    rows = [_judged("as published", labels, score_regression.response_scores(fitted, units), "the same responses")]
    best, _ = score_regression.search(units)
    scores = score_regression.response_scores(score_regression.fit(units, best), units)
    rows.append(_judged(f"best of the grid, {tuple(best)}", labels, scores, "the same responses"))
    for name, grid in (("as published, nested", _only(point)), ("best of the grid, nested", score_regression.GRID)):
        found = [nested(units, grid, folds=folds, seed=seed) for seed in range(repeats)]
        judged = [_judged(name, labels, scores, f"other {what}, {folds} folds, {repeats} shuffles") for scores in found]
        rows.append((name, *(float(np.mean([each[i] for each in judged])) for i in (1, 2)), judged[0][3]))
    return rows


def _check_folds(units: Units, labels: Array, folds: int) -> None:
    """Check that each class has at least twice as many responses as folds, or twice as many sources with one.

    Raises:
      ValueError: a class has fewer.
    """
    if units.source is None:
        if min(labels.sum(), (~labels).sum()) < 2 * folds:
            raise ValueError(
                f"--folds={folds}: {labels.sum()} of {len(labels)} responses are labelled; take fewer folds"
            )
        return
    source = source_of_responses(units)
    labelled, others = (len(np.unique(source[each])) for each in (labels, ~labels))
    if min(labelled, others) < 2 * folds:
        raise ValueError(
            f"--folds={folds}: of {source.max() + 1} sources {labelled} have a labelled response and {others} another; "
            "take fewer folds"
        )


def source_of_responses(units: Units) -> Array:
    """Index of each response's source [responses]; a response without one is its own."""
    numbers = np.arange(units.response.max() + 1)
    if units.source is not None:
        numbers[units.response] = units.source
    return numbers


def nested(units: Units, grid: dict[str, tuple], *, folds: int, seed: int = 0) -> Array:
    """Score each response by a regression that was searched and fitted without its source.

    Raises:
      ValueError: all responses outside a fold are of one class.
    """
    labels, source = score_regression.response_labels(units), source_of_responses(units)
    by_source = np.bincount(source, weights=labels) > 0
    dealt = np.zeros(len(by_source), np.int64)
    random = np.random.default_rng(seed)
    for group in (True, False):  # both classes in every fold, as far as sources are of one class
        rows = random.permutation(np.flatnonzero(by_source == group))
        dealt[rows] = np.arange(len(rows)) % folds
    fold, scores = dealt[source], np.zeros(len(labels))
    for i in range(folds):
        if not 0 < labels[fold != i].sum() < (fold != i).sum():
            raise ValueError(
                f"--folds={folds}: without fold {i + 1} {labels[fold != i].sum()} of {(fold != i).sum()} responses are "
                "labelled; wanted both classes"
            )
        inside = fold[units.response] == i
        train, test = _part(units, ~inside), _part(units, inside)
        best, _ = score_regression.search(train, grid)
        scores[fold == i] = score_regression.response_scores(score_regression.fit(train, best), test)
    return scores


def _part(units: Units, rows: Array) -> Units:
    """Select some units, with responses renumbered and without sources."""
    picked = Units(*(each[rows] for each in units[:4]))
    return picked._replace(response=np.unique(picked.response, return_inverse=True)[1])


def _only(point: Point) -> dict[str, tuple]:
    return {name: (value,) for name, value in point._asdict().items()}


def _judged(name: str, labels: Array, scores: Array, chosen: str) -> tuple[str, float, float, str]:
    return name, metrics.auc(labels, scores), metrics.correlation(labels, scores), chosen
