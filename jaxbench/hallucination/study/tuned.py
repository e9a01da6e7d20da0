"""What a reader is worth whose upper blocks are tuned to labelled tokens, alone and beside the detector (S file).

    python -m jaxbench.hallucination.study.tuned --data=FOLDER --workdir=out/hallucination

Stands on `hallucination.py features` in the same workdir. Sources of each outer fold are judged as `evaluate` judges
them. Of the others, one inner split: on three quarters the reader is tuned and the other members are fitted, on the
last quarter a regression weighs what these say. The control has the same split without the tuned reader. Killed, it
goes on with the fold that was not finished.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from absl import flags
from safetensors.numpy import load_file, save_file

from jaxbench import cli, config, outputs, process_environment, store, terminal, worker_pool
from jaxbench.hallucination import (
    detector,
    extract,
    group,
    linear,
    metrics,
    ragtruth,
    reader_settings,
    reader_table,
    token_scoring,
)  # fmt: skip
from jaxbench.hallucination.detector import READER
from jaxbench.hallucination.study import evaluate, rows, table
from jaxbench.hallucination.study.rows import BASELINE, Row, Scored
from jaxbench.hallucination.token_inputs import Training

VALUES = flags.FLAGS
Array = np.ndarray
INNER = 4  # one of so many parts weighs members, the others train them
WEIGHING = 0.1  # inverse regularisation of the regression that weighs
CONTROL, TUNED = "regressions and token classifier, one inner split", "the same, and the tuned reader"


class Split(NamedTuple):
    """Responses of an outer fold, by number."""

    train: Array  # members are fitted to these
    weigh: Array  # and weighed on these
    test: Array


def split(labels: detector.Labels, train: Array, test: Array) -> Split:
    """An outer fold's one inner split, by source."""
    fold = linear.folds(labels.source[train], INNER, seed=0)
    return Split(train[fold != 0], train[fold == 0], test)


class LowerWorker:
    """Reads what is below the tuned blocks, source by source; each process loads its model at the first."""

    def __init__(self, tuning: Any):
        self.tuning, self._loaded = tuning, None

    def __call__(self, work: tuple[Path, group.Group]) -> Path:
        """Write a source's file."""
        from jaxbench.hallucination import tuning
        from jaxbench.pretrained import tokenizer, weights

        path, mine = work
        if self._loaded is None:
            checkpoint = weights.load_checkpoint(None)
            made = tuning.LowerReader(checkpoint.config, checkpoint.params, self.tuning)
            self._loaded = made, tokenizer.load_tokenizer(None), checkpoint.config.max_seq_len
        made, text, window = self._loaded
        tuning.write(path, made.read(mine, text, window))
        return path


class FoldWorker:
    """Tunes the reader for an outer fold and keeps what it says of the responses it was not tuned to."""

    def __init__(self, sources: Mapping[Path, Sequence[int]], labels: Sequence[Array], tuning: Any):
        """sources: numbers of each file's responses, in its order; labels: of all responses' tokens."""
        self.sources, self.labels, self.tuning = sources, labels, tuning

    def __call__(self, work: tuple[Path, Split]) -> Path:
        """Write an outer fold's file: log-odds of tokens by the response's number."""
        from jaxbench.hallucination import tuned_inputs, tuning
        from jaxbench.pretrained import weights

        path, parts = work
        checkpoint, settings = weights.load_checkpoint(None), self.tuning
        tuned = tuned_inputs.TunedConfig(
            decoder=checkpoint.config, lora=settings.lora, first=settings.first, num_blocks=settings.num_blocks
        )
        rate = float(np.concatenate([self.labels[i] for i in parts.train]).mean())
        start = tuned_inputs.starting_params(tuned, checkpoint.params, seed=settings.seed, rate=rate)
        found = tuning.fit(tuned, start, self._rows(parts.train), self.labels, settings)
        others = self._rows(np.concatenate([parts.weigh, parts.test]))
        said = tuning.logits(tuned, {**start, **found}, others, self.labels, settings)
        with outputs.whole(path) as temporary:
            save_file({str(number): each for number, each in said.items()}, temporary)
        return path

    def _rows(self, wanted: Array) -> list[Any]:
        """Rows of the sources that responses belong to."""
        from jaxbench.hallucination import tuning

        kept = set(wanted.tolist())
        mine = [(path, numbers) for path, numbers in self.sources.items() if kept.issuperset(numbers)]
        return [row for path, numbers in mine for row in tuning.places(path, numbers, self.tuning)]


def weighed(folder: Path, with_tuned: bool, made: table.Table, train: Array, test: Array) -> Scored:
    """Regressions on responses and sentences, a token classifier and the tuned reader, weighed on the inner split."""
    from jaxbench.hallucination import token_training

    parts = split(made.labels, train, test)
    tokens, labels = made.inputs.tokens, made.labels
    classifier = token_training.fit(
        [tokens[i].columns for i in parts.train], [labels.tokens[i] for i in parts.train], Training()
    )
    columns = []
    for fitted_to, of in ((parts.train, parts.weigh), (train, test)):
        members = detector.fit(made.inputs.take(fitted_to), labels.take(fitted_to, made.inputs), members=READER)
        probability = detector.judge(members, made.inputs.take(of)).probability
        mine = [np.log(probability / (1 - probability))[:, None]]
        mine.append(token_scoring.of_responses(token_scoring.logits([classifier], [tokens[i] for i in of])))
        if with_tuned:
            said = read(folder, parts)
            mine.append(token_scoring.of_responses([said[i] for i in of]))
        columns.append(np.concatenate(mine, axis=1))
    return Scored(linear.fit(columns[0], labels.response[parts.weigh], strength=WEIGHING).logit(columns[1]))


def alone(folder: Path, made: table.Table, train: Array, test: Array) -> Scored:
    """The tuned reader by itself: its four numbers of a response, weighed on the inner split; and what it marks."""
    parts = split(made.labels, train, test)
    said = read(folder, parts)
    columns = [token_scoring.of_responses([said[i] for i in of]) for of in (parts.weigh, parts.test)]
    fitted = linear.fit(columns[0], made.labels.response[parts.weigh], strength=WEIGHING)
    of_weigh = [[each[i] for i in parts.weigh] for each in (made.inputs.tokens, made.labels.tokens, said)]
    limit = token_scoring.threshold(*of_weigh)
    spans = [
        token_scoring.spans(made.inputs.tokens[i].offsets, linear.sigmoid(said[i]), limit, made.texts[i]) for i in test
    ]
    return Scored(fitted.logit(columns[1]), spans)


def remembered(row: Row) -> Row:
    """The row, which computes what it says of a fold once."""
    kept: dict[bytes, Scored] = {}

    def score(made: table.Table, train: Array, test: Array) -> Scored:
        key = train.tobytes() + test.tobytes()
        if key not in kept:
            kept[key] = row.judge(made, train, test)
        return kept[key]

    return row._replace(score=score)


def gained(made: table.Table, settings: evaluate.Evaluation, better: Row, worse: Row) -> dict[str, list[float]]:
    """How much more one row has than another of each AUC: paired differences with intervals by source."""
    judged = evaluate.judged(made, settings)
    one, other = (
        evaluate.measures(made, judged, evaluate.out_of_fold(made, row, settings)[0].scores) for row in (better, worse)
    )
    wanted = [lambda at, name=name: one[name](at) - other[name](at) for name in evaluate.MEASURES]
    source = made.labels.source[judged]
    found = metrics.bootstrap(wanted, source, draws=settings.draws, seed=settings.seed)
    return {name: list(each) for name, each in zip(evaluate.MEASURES, found)}


def fold_path(folder: Path, parts: Split) -> Path:
    """File of an outer fold, named by what it was tuned to."""
    numbers = json.dumps([part.tolist() for part in parts])
    return folder / f"fold-{hashlib.sha256(numbers.encode()).hexdigest()[:12]}.safetensors"


def read(folder: Path, parts: Split) -> dict[int, Array]:
    """What the tuned reader of an outer fold says of the responses it was not tuned to."""
    return {int(name): each for name, each in load_file(fold_path(folder, parts)).items()}


def tune(data: ragtruth.Data, made: table.Table, settings: evaluate.Evaluation, folder: Path, tuning: Any) -> None:
    """Read what is below the tuned blocks, and tune the reader for every outer fold; what is there stays."""
    by_source: dict[str, list[int]] = {}
    for number, response in enumerate(data.responses):
        by_source.setdefault(response.source_id, []).append(number)
    files = {folder / "sources" / f"{name}.safetensors": numbers for name, numbers in by_source.items()}
    work = []
    for path, numbers in files.items():
        source = data.source(data.responses[numbers[0]])
        texts = tuple(data.responses[i].response for i in numbers)
        if not path.exists():
            work.append((path, group.Group(source.context, source.asked, texts, tuple(map(str, numbers)))))
    work.sort(key=lambda each: -len(each[1].context))
    with reader_table.progress(len(work)) as advance:
        for _ in worker_pool.results(LowerWorker(tuning), work, processes=VALUES.processes):
            advance(1)
    judged = evaluate.judged(made, settings)
    fold = linear.folds(made.labels.source[judged], settings.folds, seed=settings.seed)
    todo = []
    for i in range(settings.folds):
        test = judged[fold == i]
        train = np.flatnonzero(~np.isin(made.labels.source, made.labels.source[test]))
        parts = split(made.labels, train, test)
        if not fold_path(folder, parts).exists():
            todo.append((fold_path(folder, parts), parts))
    worker = FoldWorker(files, made.labels.tokens, tuning)
    with reader_table.progress(len(todo)) as advance:
        for _ in worker_pool.results(worker, todo, processes=min(VALUES.processes, max(len(todo), 1))):
            advance(1)


def main() -> int:
    """Tune, and judge; return the exit code."""
    data, workdir = ragtruth.load(VALUES.data), cli.workdir("out/hallucination")
    process_environment.ensure("cpu")
    from jaxbench.hallucination import tuning
    from jaxbench.pretrained import weights

    reading, settings = cli.load_config(reader_settings.ReaderSettings), evaluate.Evaluation()
    checksum = weights.checksum(None)
    features = extract.Store(workdir / "features", reading, checksum)
    with reader_table.progress(len(data.responses)) as advance:
        made = table.make(data, features, progress=lambda: advance(1))
    wanted = tuning.Tuning()
    folder = workdir / "tuned"
    store.claim(folder, config.config_id(wanted, extra={"model_sha256": checksum, "data": VALUES.data}))
    tune(data, made, settings, folder, wanted)
    control, tuned = (
        remembered(Row(name, "fitted", functools.partial(weighed, folder, with_tuned)))
        for name, with_tuned in ((CONTROL, False), (TUNED, True))
    )
    single = Row("the tuned reader alone", "fitted", functools.partial(alone, folder))
    baseline = next(row for row in rows.ROWS if row.name == BASELINE)
    with reader_table.status() as say:
        found = evaluate.run(made, settings, rows=(baseline, single, control, tuned), say=say)
    gain = gained(made, settings, tuned, control)
    outputs.write_json(workdir / "tuned.json", {"tuning": wanted.model_dump(), "gain": gain, "rows": found})
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
