"""Evaluate a reader whose upper blocks are tuned to labelled tokens, alone and in the detector (S file).

    python -m jaxbench.hallucination.study.tuned --data=FOLDER --workdir=out/hallucination

Run `hallucination.py features` in the same workdir first. The sources of each outer fold are judged as in `evaluate`,
by the detector that `fit --tuned` makes of the other sources; the control is the one that `fit` makes. After an
interruption, it resumes with the unfinished fold.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from absl import flags
from safetensors.numpy import load_file
from scipy import special

from jaxbench import cli, outputs, process_environment, terminal, worker_pool
from jaxbench.hallucination import (
    detector,
    extract,
    linear,
    metrics,
    ragtruth,
    reader_settings,
    reader_table,
    token_scoring,
)  # fmt: skip
from jaxbench.hallucination.study import evaluate, rows, table
from jaxbench.hallucination.study.rows import BASELINE, Row, Scored

VALUES = flags.FLAGS
Array = np.ndarray
CONTROL, TUNED, ALONE = "the detector", "the detector with the tuned reader", "the tuned reader alone"


class Fold(NamedTuple):
    """An outer fold's responses by index: all others (train), and those that are judged (test)."""

    train: Array
    test: Array


class FoldWorker:
    """A worker that tunes the reader for an outer fold and stores its scores of responses it was not tuned to."""

    def __init__(self, lower: Any, data: ragtruth.Data, labels: detector.Labels):
        """lower: tuned_sources.Lower."""
        self._lower, self._data, self._labels = lower, data, labels

    def __call__(self, work: tuple[Path, Fold]) -> Path:
        """Write an outer fold's file: log-odds of tokens by the response's index."""
        from jaxbench.hallucination import tuned_sources

        path, fold = work
        parts = tuned_sources.split(self._labels, fold.train)
        heard, others = tuned_sources.tune(self._lower, self._data, self._labels, parts, fold.test, bar=_silent)
        found = dict(zip(heard.rows.tolist(), heard.logits)) | others
        outputs.save_tensors(path, {str(number): each for number, each in found.items()})
        return path


def _silent(total: int) -> Any:
    return contextlib.nullcontext(lambda count: None)


class Judge:
    """The scores of the three rows, computed once per fold."""

    def __init__(self, folder: Path, shape: Any):
        """shape: the tuned reader's TunedConfig."""
        self._folder, self._shape = folder, shape
        self._kept: dict[bytes, Mapping[str, Scored]] = {}

    def row(self, name: str) -> Row:
        """Return one of the rows."""

        def score(made: table.Table, train: Array, test: Array) -> Scored:
            key = train.tobytes() + test.tobytes()
            if key not in self._kept:
                self._kept[key] = self._scores(made, Fold(train, test))
            return self._kept[key][name]

        return Row(name, "fitted", score)

    def _scores(self, made: table.Table, fold: Fold) -> Mapping[str, Scored]:
        from jaxbench.hallucination import token_training, tuned_sources

        train, test = fold
        parts = tuned_sources.split(made.labels, train)
        said = read(self._folder, fold)
        inputs, labels = made.inputs.take(train), made.labels.take(train, made.inputs)
        places = np.searchsorted(train, parts.weigh)
        heard = detector.Heard(self._shape, {}, places, [said[i] for i in parts.weigh])
        fitted = token_training.fit_detector(inputs, labels, tuned=heard)
        given = made.inputs.take(test)._replace(tuned=tuple(said[i] for i in test))
        found = {}
        for name, judge in ((CONTROL, fitted._replace(tuned=None)), (TUNED, fitted)):
            verdicts = detector.judge(judge, given)
            found[name] = Scored(verdicts.probability, rows.spans_of(made, test, judge, verdicts.tokens))
        return found | {ALONE: alone(made, parts.weigh, test, said)}


def alone(made: table.Table, weigh: Array, test: Array, said: Mapping[int, Array]) -> Scored:
    """Score by the tuned reader alone: a regression on its four columns, fitted on `weigh`; with its spans."""
    columns = [token_scoring.of_responses([said[i] for i in of]) for of in (weigh, test)]
    fitted = linear.fit(columns[0], made.labels.response[weigh], strength=detector.TUNED_STRENGTH)
    of_weigh = [[each[i] for i in weigh] for each in (made.inputs.tokens, made.labels.tokens, said)]
    limit = token_scoring.threshold(*of_weigh)
    spans = [
        token_scoring.spans(made.inputs.tokens[i].offsets, special.expit(said[i]), limit, made.texts[i]) for i in test
    ]
    return Scored(fitted.logit(columns[1]), spans)


def gained(made: table.Table, settings: evaluate.Evaluation, better: Row, worse: Row) -> dict[str, list[float]]:
    """Paired differences of each AUC between two rows (better - worse), with intervals by source."""
    judged = evaluate.judged(made, settings)
    one, other = (
        evaluate.measures(made, judged, evaluate.out_of_fold(made, row, settings)[0].scores) for row in (better, worse)
    )
    wanted = [lambda at, name=name: one[name](at) - other[name](at) for name in evaluate.MEASURES]
    source = made.labels.source[judged]
    found = metrics.bootstrap(wanted, source, draws=settings.draws, seed=settings.seed)
    return {name: list(each) for name, each in zip(evaluate.MEASURES, found)}


def kept(folder: Path, lower: Any, data_sha256: str) -> Path:
    """Path of the folder of finished folds, named by all that decides them but the fold; lower: tuned_sources.Lower."""
    identity = [lower.tuning.model_dump(), lower.model_sha256, lower.settings.identity(), lower.code, data_sha256]
    return folder / hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:12]


def fold_path(folder: Path, fold: Fold) -> Path:
    """Path of an outer fold's file, named by its train and test responses."""
    numbers = json.dumps([part.tolist() for part in fold])
    return folder / f"fold-{hashlib.sha256(numbers.encode()).hexdigest()[:12]}.safetensors"


def read(folder: Path, fold: Fold) -> dict[int, Array]:
    """Read the token log-odds that an outer fold's tuned reader gives to the responses it was not tuned to."""
    return {int(name): each for name, each in load_file(fold_path(folder, fold)).items()}


def outer_folds(made: table.Table, settings: evaluate.Evaluation) -> list[Fold]:
    """The folds of `evaluate`."""
    judged = evaluate.judged(made, settings)
    number = linear.folds(made.labels.source[judged], settings.folds, seed=settings.seed)
    tests = [judged[number == i] for i in range(settings.folds)]
    return [
        Fold(np.flatnonzero(~np.isin(made.labels.source, made.labels.source[test])), np.sort(test)) for test in tests
    ]


def main() -> int:
    """Tune, and judge; return the exit code."""
    data, workdir = ragtruth.load(VALUES.data), cli.workdir("out/hallucination")
    ragtruth.check_labels(data, VALUES.data)
    process_environment.ensure("cpu")
    from jaxbench.hallucination import tuned_sources, tuning
    from jaxbench.pretrained import weights

    reading, settings = cli.load_config(reader_settings.ReaderSettings), evaluate.Evaluation()
    lower = tuned_sources.Lower.of(workdir / "tuned", reading, tuning.Tuning())
    features = extract.Store(workdir / "features", reading, lower.model_sha256)
    with terminal.progress(len(data.responses)) as advance:
        made = table.make(data, features, progress=lambda: advance(1))
    tuned_sources.read(lower, data, processes=VALUES.processes, bar=terminal.progress)
    folder = kept(workdir / "tuned", lower, ragtruth.sha256(VALUES.data))
    cli.keep(f"finished folds are in {folder}; the same command goes on")
    todo = [(fold_path(folder, fold), fold) for fold in outer_folds(made, settings)]
    todo = [each for each in todo if not each[0].exists()]
    worker, processes = FoldWorker(lower, data, made.labels), min(VALUES.processes, max(len(todo), 1))
    with terminal.progress(len(todo)) as advance:
        for _ in worker_pool.results(worker, todo, processes=processes):
            advance(1)
    judge = Judge(folder, lower.tuning.tuned(weights.read_config(reading.model)))
    single, control, tuned = map(judge.row, (ALONE, CONTROL, TUNED))
    baseline = next(row for row in rows.ROWS if row.name == BASELINE)
    with reader_table.status() as say:
        found = evaluate.run(made, settings, rows=(baseline, single, control, tuned), say=say)
    gain = gained(made, settings, tuned, control)
    outputs.write_json(workdir / "tuned.json", {"tuning": lower.tuning.model_dump(), "gain": gain, "rows": found})
    terminal.console().print(reader_table.of_rows(found))
    shown = (f"{name} {value:+.3f} [{low:+.3f}, {high:+.3f}]" for name, (value, low, high) in gain.items())
    print(f"the tuned reader over the control: {', '.join(shown)}")
    print(f"written: {workdir / 'tuned.json'}")
    return cli.EXIT_OK


if __name__ == "__main__":
    cli.define_config("configs/hallucination/reader.yaml")
    cli.define_workdir("out/hallucination")
    flags.DEFINE_string("data", None, "folder with sources.jsonl[.gz] and responses*.jsonl[.gz]", required=True)
    flags.DEFINE_integer("processes", 2, "of one thread each", lower_bound=1)
    cli.run(main, about=__doc__)
