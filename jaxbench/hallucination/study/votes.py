"""Is a vote of detectors better than the best of them? On stored chunk scores, over held-out responses (S file).

    python -m jaxbench.hallucination.study.votes --scores=FILE --output=out/votes.json

Members are the three methods of `fit --method` that see these scores. In each of four turns they are fitted to half of
the sources; a quarter, the development responses, chooses the votes' weights and thresholds and the best member; the
last quarter is judged. So every response is judged once in a shuffle, by detectors and choices that did not see its
source. Scores of a shuffle's turns are pooled, as `evaluate` pools its folds'.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from absl import flags

from jaxbench import cli, outputs, terminal
from jaxbench.hallucination import detector as detectors
from jaxbench.hallucination import linear, methods, metrics, reader_table, score_regression, stored_scores, voting
from jaxbench.hallucination.detector import Inputs, Labels
from jaxbench.hallucination.score_regression import Units

VALUES = flags.FLAGS
Array = np.ndarray
TURNS = 4  # quarters of the sources
BEST = "best member"  # by AUC on the development responses, its threshold chosen there


class Judged(NamedTuple):
    """What one detector or vote says of all responses of a shuffle."""

    scores: Array  # [responses]
    flags: Array  # [responses] bool


def as_inputs(units: Units) -> tuple[Inputs, Labels]:
    """Return stored scores as a detector's inputs: chunks are its sentences, their means are of responses."""
    columns = {name: getattr(units, name) for name in methods.FAMILIES}
    order = np.argsort(units.response, kind="stable")
    parts = {name: values[order] for name, values in columns.items()}
    means = lambda values: np.stack([score_regression.by_response(each, units.response) for each in values.T], axis=1)
    whole = {name: means(values) for name, values in columns.items()}
    label = score_regression.response_labels(units).astype(bool)
    source = stored_scores.source_of_responses(units)
    return Inputs(whole, parts, units.response[order]), Labels(label, units.label[order].astype(bool), source)


def shuffle(inputs: Inputs, labels: Labels, *, seed: int, fits: dict[str, Callable[..., Any]]) -> dict[str, Judged]:
    """Judge every response once by each member, by the member that is best on the development responses, and by votes.

    fits: name of a member -> fits a detector to inputs and labels.

    Raises:
      ValueError: there are too few sources, or one class is missing in a part of them.
    """
    fold = linear.folds(labels.source, TURNS, seed=seed)
    names = (*fits, BEST, *(f"vote: {rule}" for rule in voting.RULES))
    found = {name: Judged(np.zeros(len(fold)), np.zeros(len(fold), bool)) for name in names}
    for turn in range(TURNS):
        test, development = fold == turn, fold == (turn + 1) % TURNS
        fit, choose, judge = (np.flatnonzero(each) for each in (~test & ~development, development, test))
        mine = inputs.take(fit), labels.take(fit, inputs)
        members = [one(*mine) for one in fits.values()]
        given = inputs.take(choose), labels.take(choose, inputs)
        heard = [detectors.judge(member, inputs.take(judge)) for member in members]
        for rule in voting.RULES:
            vote = voting.fit(members, tuple(fits), *given, rule=rule)
            said = voting.combine(vote, heard).probability
            _set(found[f"vote: {rule}"], judge, said, vote.threshold)
        for number, name in enumerate(fits):
            _set(found[name], judge, heard[number].probability, voting.compared_threshold(vote, number))
        _set(found[BEST], judge, heard[vote.best].probability, voting.compared_threshold(vote, vote.best))
    return found


def _set(judged: Judged, rows: Array, scores: Array, threshold: float) -> None:
    judged.scores[rows], judged.flags[rows] = scores, scores >= threshold


def figures(labels: Labels, shuffles: list[dict[str, Judged]], *, draws: int, seed: int = 0) -> dict[str, dict]:
    """Return AUC and F1 of every name, means over shuffles, and gains over the best member; intervals over sources."""
    y, found = labels.response, {}
    measures: dict[str, Callable[[Judged, Array], float]] = {
        "auc": lambda judged, at: metrics.auc(y[at], judged.scores[at]),
        "f1": lambda judged, at: metrics.f1(y[at], judged.flags[at])[0],
    }

    def mean(name: str, of: Callable[[Judged, Array], float], at: Array) -> float:
        return float(np.mean([of(each[name], at) for each in shuffles]))

    def gain(name: str, of: Callable[[Judged, Array], float], at: Array) -> float:
        return mean(name, of, at) - mean(BEST, of, at)

    for name in shuffles[0]:
        wanted = {measure: functools.partial(mean, name, of) for measure, of in measures.items()}
        if name != BEST:
            wanted |= {f"{measure}_gain": functools.partial(gain, name, of) for measure, of in measures.items()}
        intervals = metrics.bootstrap([*wanted.values()], labels.source, draws=draws, seed=seed)
        found[name] = dict(zip(wanted, map(list, intervals), strict=True))
    return found


def main() -> int:
    """Judge members and votes on a file of stored chunk scores, and write the figures."""
    output = outputs.check_file(Path(VALUES.output), [VALUES.scores], overwrite=VALUES.overwrite)
    inputs, labels = as_inputs(stored_scores.load(VALUES.scores))
    fits = {
        method: lambda *given, method=method: methods.fit(*given, method=method)
        for method in methods.METHODS
    }  # fmt: skip
    done = []
    with terminal.progress(VALUES.shuffles) as advance:
        for seed in range(VALUES.shuffles):
            done.append(shuffle(inputs, labels, seed=seed, fits=fits))
            advance(1)
    found = figures(labels, done, draws=VALUES.draws)
    counts = {"responses": len(labels.response), "labelled": int(labels.response.sum()), "shuffles": VALUES.shuffles}
    outputs.write_json(output, {"scores": Path(VALUES.scores).name, "draws": VALUES.draws, **counts, "rows": found})
    names = ("", "AUC", "over the best member", "F1", "over the best member")
    measures = ("auc", "auc_gain", "f1", "f1_gain")
    shown = [
        (name, *(_shown(row.get(each), each.endswith("gain")) for each in measures)) for name, row in found.items()
    ]
    terminal.console().print(reader_table.plain(names, shown))
    print(f"written: {output}")
    return cli.EXIT_OK


def _shown(interval: list[float] | None, is_signed: bool) -> str:
    if interval is None:
        return ""
    sign = "+" if is_signed else ""
    value, low, high = (f"{each:{sign}.3f}" for each in interval)
    return f"{value} [{low}, {high}]"


if __name__ == "__main__":
    about = "chunk scores: .jsonl[.gz] or .parquet, as of `hallucination.py scores --level=chunk`"
    flags.DEFINE_string("scores", None, about, required=True)
    flags.DEFINE_string("output", "out/votes.json", "figures: a .json file")
    flags.DEFINE_bool("overwrite", False, "replace the output")
    flags.DEFINE_integer("shuffles", 5, "of the sources", lower_bound=1)
    flags.DEFINE_integer("draws", 1000, "of the bootstrap by source", lower_bound=100)
    cli.run(main, about=__doc__)
