"""Chunk scores that other implementations stored, and what ReDeEP's regression makes of them (S file).

`legacy` is the published protocol: heads, layers, scales and weights are chosen on the responses they are judged on.
`nested` chooses them on other responses.
"""

from __future__ import annotations

import gzip
import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from jaxbench.hallucination import metrics, score_regression
from jaxbench.hallucination.score_regression import Point, Units

Array = np.ndarray


def load(path: str | Path) -> Units:
    """Units of a .jsonl[.gz] file: rows with response, chunk_label, external {head: score}, parametric {layer: score}.

    The scores may be lists as well, [layer][head] and [layer], as `hallucination.py scores --level=chunk` writes them.

    Raises:
      ValueError: the file is missing, cut short or has a bad row; the message names the line.
    """
    path, rows = Path(path), []
    if not path.is_file():
        raise ValueError(f"--scores={path} is no file")
    try:
        with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else open(path, encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    rows.append(_row(line, f"{path} line {number}", rows[0] if rows else None))
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: cannot be read behind row {len(rows)} ({error}); is the file cut short?") from error
    if not rows:
        raise ValueError(f"--scores={path} holds no row")
    _, response = np.unique([row["response"] for row in rows], return_inverse=True)
    units = Units(
        np.array([list(row["external"].values()) for row in rows], np.float64),
        np.array([list(row["parametric"].values()) for row in rows], np.float64),
        np.array([row["chunk_label"] for row in rows], bool),
        response,
    )
    if not 0 < score_regression.response_labels(units).sum() < response.max() + 1:
        raise ValueError(f"--scores={path}: chunk_label is {rows[0]['chunk_label']} throughout; wanted both classes")
    return units


def _row(line: str, place: str, first: dict[str, Any] | None) -> dict[str, Any]:
    """Row of a line, with the columns of the first one."""
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
    return row


def _by_name(scores: Any) -> Any:
    """Lists of scores, as `hallucination.py scores` writes them, by number: of layers, or "layer.head" of heads."""
    if not isinstance(scores, list):
        return scores
    if all(isinstance(each, list) for each in scores):
        return {f"{layer}.{head}": value for layer, heads in enumerate(scores) for head, value in enumerate(heads)}
    return {str(layer): value for layer, value in enumerate(scores)}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and bool(np.isfinite(value))


def check_point(units: Units, point: Point) -> None:
    """Check that a point's weights are finite, and that there are as many columns as it takes.

    Raises:
      ValueError: they are not, or there are fewer.
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
    if min(labels.sum(), (~labels).sum()) < 2 * folds:
        raise ValueError(f"--folds={folds}: {labels.sum()} of {len(labels)} responses are labelled; take fewer folds")
    fitted = score_regression.fit(units, point)
    rows = [_judged("as published", labels, score_regression.response_scores(fitted, units), "the same responses")]
    best, _ = score_regression.search(units)
    scores = score_regression.response_scores(score_regression.fit(units, best), units)
    rows.append(_judged(f"best of the grid, {tuple(best)}", labels, scores, "the same responses"))
    for name, grid in (("as published, nested", _only(point)), ("best of the grid, nested", score_regression.GRID)):
        found = [nested(units, grid, folds=folds, seed=seed) for seed in range(repeats)]
        judged = [
            _judged(name, labels, scores, f"other responses, {folds} folds, {repeats} shuffles") for scores in found
        ]
        rows.append((name, *(float(np.mean([each[i] for each in judged])) for i in (1, 2)), judged[0][3]))
    return rows


def nested(units: Units, grid: dict[str, tuple], *, folds: int, seed: int = 0) -> Array:
    """Scores of responses, each by a regression that was searched and fitted without it."""
    labels = score_regression.response_labels(units)
    fold = np.zeros(len(labels), np.int64)
    random = np.random.default_rng(seed)
    for group in (True, False):  # both classes in every fold
        rows = random.permutation(np.flatnonzero(labels == group))
        fold[rows] = np.arange(len(rows)) % folds
    scores = np.zeros(len(labels))
    for i in range(folds):
        inside = fold[units.response] == i
        train, test = _part(units, ~inside), _part(units, inside)
        best, _ = score_regression.search(train, grid)
        scores[fold == i] = score_regression.response_scores(score_regression.fit(train, best), test)
    return scores


def _part(units: Units, rows: Array) -> Units:
    """Some units, their responses counted anew."""
    picked = Units(*(each[rows] for each in units))
    return picked._replace(response=np.unique(picked.response, return_inverse=True)[1])


def _only(point: Point) -> dict[str, tuple]:
    return {name: (value,) for name, value in point._asdict().items()}


def _judged(name: str, labels: Array, scores: Array, chosen: str) -> tuple[str, float, float, str]:
    return name, metrics.auc(labels, scores), metrics.correlation(labels, scores), chosen
