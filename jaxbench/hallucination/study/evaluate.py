"""Out-of-fold metrics of every row: folds by source, paired intervals by source (S file)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pydantic

from jaxbench import config
from jaxbench.hallucination import detector as detectors
from jaxbench.hallucination import linear, metrics
from jaxbench.hallucination.detector import Detector
from jaxbench.hallucination.study.rows import BASELINE, CURVE_KIND, ROWS, Row, Scored, Spans, spans_of
from jaxbench.hallucination.study.table import Table
from jaxbench.hallucination.voting import Ensemble, combine, compared_threshold
from jaxbench.measure import environment

Array = np.ndarray
MEASURES = ("pooled", "macro", "stratified")


class Evaluation(config.Base):
    """How detectors are evaluated."""

    folds: int = pydantic.Field(default=5, ge=2)  # of the judged sources
    seed: int = pydantic.Field(default=0, ge=0)  # of the folds
    draws: int = pydantic.Field(default=1000, ge=100)  # of the bootstrap by source
    train_split: str | None = "train"  # whose responses are always on the training side; None: all are judged
    generator: str = "llama-2-7b-chat"  # whose responses are also judged separately


def judged(table: Table, settings: Evaluation) -> Array:
    """Indices of the judged responses: all but those of the training split.

    Raises:
      ValueError: one class has none, or all responses are of the training split.
    """
    every = np.arange(len(table.split))
    rows = every if settings.train_split is None else every[table.split != settings.train_split]
    if not len(rows):
        raise ValueError(
            f"evaluate: all {len(every)} responses have split={settings.train_split!r}, and are only fitted to; give "
            "those that are to be judged another split, or none"
        )
    labels = table.labels.response[rows]
    if not 0 < labels.sum() < len(rows):
        raise ValueError(f"evaluate: {labels.sum()} of {len(rows)} judged responses are labelled; wanted both classes")
    return rows


def counts(table: Table, settings: Evaluation) -> dict[str, int]:
    """Numbers of judged responses, of their sources, and of labelled ones among them."""
    rows = judged(table, settings)
    sources = len(np.unique(table.labels.source[rows]))
    return {"responses": len(rows), "sources": sources, "labelled": int(table.labels.response[rows].sum())}


def out_of_fold(table: Table, row: Row, settings: Evaluation) -> tuple[Scored, Array]:
    """Score the judged responses by a row fitted without their sources; return the scores and the folds."""
    rows = judged(table, settings)
    fold = np.full(len(table.split), -1)
    fold[rows] = linear.folds(table.labels.source[rows], settings.folds, seed=settings.seed)
    scores, spans = np.zeros(len(fold)), [None] * len(fold)

    def judge_fold(number: int) -> tuple[Array, Scored]:
        test = np.flatnonzero(fold == number)
        held_out = np.isin(table.labels.source, table.labels.source[test])
        return test, row.judge(table, np.flatnonzero(~held_out), test)

    # Most of a fold's work is serial. The limit stands around the threads, as each fit in them sets and unsets its own
    with linear.one_blas_thread(), ThreadPoolExecutor(min(settings.folds, environment.usable_cores())) as pool:
        for test, found in pool.map(judge_fold, range(settings.folds)):
            scores[test] = found.scores
            for j, each in zip(test, found.spans or ()):
                spans[j] = each
    return Scored(scores[rows], None if found.spans is None else [spans[j] for j in rows]), fold[rows]


def flags(labels: Array, scores: Array, fold: Array) -> Array:
    """Flag responses by the threshold with the highest F1 on the scores of the other folds."""
    found = np.zeros(len(labels), bool)
    for i in np.unique(fold):
        mine = fold == i
        found[mine] = scores[mine] >= metrics.best_threshold(labels[~mine], scores[~mine])
    return found


def span_figures(table: Table, settings: Evaluation, spans: Sequence[Spans]) -> dict[str, list[float]]:
    """F1, precision and recall of marked characters over all judged responses, with intervals by source."""
    rows, counts = judged(table, settings), []
    for row, found in zip(rows, spans, strict=True):
        wanted, marked = np.zeros((2, len(table.texts[row])), bool)
        for mask, each in ((wanted, table.marks[row]), (marked, found)):
            for start, end in each:
                mask[start:end] = True
        counts.append([(wanted & marked).sum(), marked.sum(), wanted.sum()])
    counts = np.array(counts, np.float64)

    def share(*of: int) -> Callable[[Array], float]:
        return lambda at: float(len(of) * counts[at, 0].sum() / max(counts[at][:, of].sum(), 1.0))

    names = {"f1": (1, 2), "precision": (1,), "recall": (2,)}
    wanted = [share(*of) for of in names.values()]
    found = metrics.bootstrap(wanted, table.labels.source[rows], draws=settings.draws, seed=settings.seed)
    return {name: list(each) for name, each in zip(names, found)}


def measures(table: Table, rows: Array, scores: Array) -> dict[str, Callable[[Array], float]]:
    """AUC pooled, mean over tasks, and within cells of task and generator: functions of indices into `rows`."""
    labels = table.labels.response[rows]
    task, cell = (np.unique(each[rows], return_inverse=True)[1] for each in (table.task, table.cell))
    return {
        "pooled": lambda at: metrics.auc(labels[at], scores[at]),
        "macro": lambda at: metrics.macro_auc(labels[at], scores[at], task[at]),
        "stratified": lambda at: metrics.stratified_auc(labels[at], scores[at], cell[at]),
    }


def summary(
    table: Table, settings: Evaluation, scores: Array, flagged: Array, baseline: Array | None
) -> dict[str, Any]:
    """Metrics of one row's scores and flags; differences from the baseline are paired."""
    rows = judged(table, settings)
    labels, source = table.labels.response[rows], table.labels.source[rows]
    mine = measures(table, rows, scores)
    wanted = list(mine.values())
    if baseline is not None:
        other = measures(table, rows, baseline)
        wanted += [lambda at, name=name: mine[name](at) - other[name](at) for name in MEASURES]
    found = metrics.bootstrap(wanted, source, draws=settings.draws, seed=settings.seed)
    f1, precision, recall = metrics.f1(labels, flagged)
    is_probability = bool((scores >= 0).all() and (scores <= 1).all())
    one = np.flatnonzero(table.generator[rows] == settings.generator)
    return {
        **{name: list(each) for name, each in zip(MEASURES, found)},
        **{f"{name}_gain": list(each) for name, each in zip(MEASURES, found[3:])},
        "tasks": {task: metrics.auc(labels[at], scores[at]) for task, at in _by(table.task[rows]).items()},
        "average_precision": metrics.average_precision(labels, scores),
        "correlation": metrics.correlation(labels, scores),
        "f1_at_half": metrics.f1(labels, scores >= 0.5)[0] if is_probability else None,
        "brier": metrics.brier(labels, scores) if is_probability else None,
        "reliability": metrics.reliability(labels, scores) if is_probability else None,
        "f1": f1, "precision": precision, "recall": recall,
        "generator": {"responses": len(one)} | {name: mine[name](one) for name in MEASURES[:2]} if len(one) else None,
    }  # fmt: skip


def _by(keys: Array) -> dict[str, Array]:
    return {str(key): np.flatnonzero(keys == key) for key in np.unique(keys)}


def run(
    table: Table, settings: Evaluation, *, rows: Sequence[Row] = ROWS, say: Callable[[str], Any] = lambda name: None,
    left_out: dict[str, str] | None = None,
) -> dict[str, Mapping[str, Any]]:  # fmt: skip
    """Metrics of every row that the table has features for, by name; say is called with each name beforehand.

    left_out: gets the reason for each row of CURVE whose share of the sources is too small for a fit; None = an error.

    Raises:
      ValueError: a row cannot be fitted; it is named.
    """
    has_reader = "states" in table.inputs.whole
    scores: dict[str, tuple[Scored, Array]] = {}
    found: dict[str, Mapping[str, Any]] = {}
    labels = table.labels.response[judged(table, settings)]
    for row in sorted(rows, key=lambda row: row.name != BASELINE):  # first, as the others are compared with it
        if row.needs_reader and not has_reader:
            continue
        say(row.name)
        try:
            scores[row.name] = out_of_fold(table, row, settings)
        except ValueError as error:
            if row.kind == CURVE_KIND and left_out is not None:  # the other rows may have taken hours
                left_out[row.name] = str(error)
                continue
            raise ValueError(f"evaluate: {row.name}: {error}") from error
        baseline = scores[BASELINE][0].scores if BASELINE in scores and row.name != BASELINE else None
        said, fold = scores[row.name]
        flagged = flags(labels, said.scores, fold)
        found[row.name] = {"kind": row.kind} | summary(table, settings, said.scores, flagged, baseline)
        if said.spans is not None:
            found[row.name]["spans"] = span_figures(table, settings, said.spans)
    return {row.name: found[row.name] for row in rows if row.name in found}


def as_saved(table: Table, settings: Evaluation, fitted: Detector | Ensemble) -> dict[str, Mapping[str, Any]]:
    """Metrics of a saved detector, or of a saved vote and its members; nothing is chosen here."""
    return (voted if isinstance(fitted, Ensemble) else frozen)(table, settings, fitted)


def frozen(table: Table, settings: Evaluation, detector: Detector) -> dict[str, Mapping[str, Any]]:
    """Metrics of a fitted detector on responses that it has not seen: nothing is chosen here."""
    rows = judged(table, settings)
    said = detectors.judge(detector, table.inputs.take(rows))
    found = summary(table, settings, said.probability, said.probability >= detector.threshold, None)
    if detector.tokens:
        found["spans"] = span_figures(table, settings, spans_of(table, rows, detector, said.tokens))
    return {"the detector as saved": {"kind": "saved"} | found}


def voted(table: Table, settings: Evaluation, ensemble: Ensemble) -> dict[str, Mapping[str, Any]]:
    """Metrics of a vote and of each of its members, on responses that none has seen; the vote against its best member.

    The best member is that with the highest AUC on the vote's development responses. A hard vote without these has none
    that was chosen elsewhere: it is compared with the member that does best here, which favours the member.
    """
    rows = judged(table, settings)
    labels, inputs = table.labels.response[rows], table.inputs.take(rows)
    heard = [detectors.judge(member, inputs) for member in ensemble.members]
    said, best = combine(ensemble, heard), ensemble.best
    if best is None:
        best = int(np.argmax([metrics.auc(labels, each.probability) for each in heard]))
    baseline, flagged = heard[best].probability, said.probability >= ensemble.threshold
    found = summary(table, settings, said.probability, flagged, baseline)
    others = baseline >= compared_threshold(ensemble, best)
    gain = lambda at: metrics.f1(labels[at], flagged[at])[0] - metrics.f1(labels[at], others[at])[0]
    (interval,) = metrics.bootstrap([gain], table.labels.source[rows], draws=settings.draws, seed=settings.seed)
    versus = {
        "member": ensemble.names[best],
        "chosen_on": "these responses" if ensemble.best is None else "the development responses",
        "f1": metrics.f1(labels, others)[0],
        "f1_gain": list(interval),
    }
    name = f"vote of {len(heard)}: {ensemble.rule}"
    result: dict[str, Mapping[str, Any]] = {name: {"kind": "saved", "versus": versus} | found}
    if said.tokens:
        result[name] = result[name] | {
            "spans": span_figures(table, settings, spans_of(table, rows, ensemble, said.tokens))
        }
    for number, (member, mine) in enumerate(zip(ensemble.members, heard, strict=True)):
        alone = summary(table, settings, mine.probability, mine.probability >= member.threshold, None)
        more = {} if ensemble.aucs is None else {"development_auc": float(ensemble.aucs[number])}
        more |= {"weight": float(ensemble.weights[number])}
        if member.tokens:
            more["spans"] = span_figures(table, settings, spans_of(table, rows, member, mine.tokens))
        result[f"member {ensemble.names[number]}"] = {"kind": "member"} | more | alone
    return result
