"""Measure cost and AUC of readers with fewer bits, or a lens on fewer tokens, on the same responses (S file).

    python -m jaxbench.hallucination.study.readers --data=FOLDER --workdir=out/hallucination

Run `hallucination.py features` first, with the same --data, --config, --set and --workdir; its settings are the first
form. All responses to some sources of the split `dev` are judged by a detector that is fitted to that form's features
of all other sources and then frozen, whichever form reads. Each form's cost is measured in a fresh process of one
thread. Forms with a lens on fewer tokens are judged by a subset of the scores of all tokens, which are read once.
After an interruption, the same command resumes.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from absl import flags

from jaxbench import cli, outputs, process_environment, store, terminal, worker_pool
from jaxbench.hallucination import detector, extract, group, linear, metrics, ragtruth, reader_table, saved_detector
from jaxbench.hallucination.reader_settings import ReaderSettings
from jaxbench.hallucination.response_features import ResponseFeatures
from jaxbench.hallucination.study import evaluate, table
from jaxbench.measure import environment, process

VALUES = flags.FLAGS
Array = np.ndarray
BASE, EXACT = "bfloat16", "lens_all"
FORMS: dict[str, dict[str, Any]] = {
    BASE: {"dtype": "bfloat16"}, "float32": {"dtype": "float32"},
    "8_bits": {"bits": 8}, "4_bits": {"bits": 4}, "3_bits": {"bits": 3}, "2_bits": {"bits": 2},
    EXACT: {"lens_tokens": None}, "lens_4": {"lens_tokens": 4}, "lens_1": {"lens_tokens": 1},
}  # fmt: skip
WORKER = "jaxbench.hallucination.study.reader_worker"
MEASURES = (*evaluate.MEASURES, "parametric")


class Thinned(NamedTuple):
    """Features as with a lens on fewer tokens: a subset of those of all tokens."""

    store: extract.Store  # of a reader with a lens on all tokens
    count: int

    @property
    def folder(self) -> Path:
        """The folder of the features of all tokens."""
        return self.store.folder

    def key(self, item: extract.Item) -> str:
        """Return the cache key of a response's features."""
        return self.store.key(item)

    def has(self, key: str) -> bool:
        """True if features are in the cache."""
        return self.store.has(key)

    def read(self, key: str) -> ResponseFeatures:
        """Read the features of a response."""
        features = self.store.read(key)
        slots = group.lens_slots(len(features["loss"]), self.count)
        return features | {"parametric_slots": slots.astype(np.int32), "parametric": features["parametric"][slots]}


class Study(NamedTuple):
    """What is measured: reader settings, whose forms change them, and responses."""

    settings: ReaderSettings
    model_sha256: str
    data: ragtruth.Data
    sources: tuple[str, ...]  # that are judged
    folder: Path  # of features
    finished: Path  # of finished results

    def form(self, name: str) -> ReaderSettings:
        """Return the reader settings of a form."""
        return self.settings.model_copy(update=FORMS[name])

    def reading(self, name: str) -> ReaderSettings:
        """Return the settings to read a form's features with: a lens on all tokens, if the form only thins the lens."""
        return self.form(EXACT if set(FORMS[name]) == {"lens_tokens"} else name)

    def store(self, settings: ReaderSettings) -> extract.Store:
        """Return the feature cache of a reader."""
        return extract.Store(self.folder, settings, self.model_sha256)

    def part(self, is_judged: bool) -> ragtruth.Data:
        """Return the data with only the judged responses, or only others, which share no context with a judged one."""
        judged = {self.data.sources[name].context for name in self.sources}
        rows = tuple(
            row for row in self.data.responses
            if (row.source_id in self.sources if is_judged else self.data.source(row).context not in judged)
        )  # fmt: skip
        return self.data.model_copy(update={"responses": rows})


def drawn(data: ragtruth.Data, split: str, num: int, *, seed: int) -> tuple[str, ...]:
    """Draw sources of a split, as evenly over tasks as possible, without looking at the responses.

    Raises:
      ValueError: the split has fewer.
    """
    names = sorted({row.source_id for row in data.responses if row.split == split})
    if len(names) < num:
        raise ValueError(f"--sources={num}: the split {split} has {len(names)}")
    order = np.random.default_rng(seed).permutation(len(names))
    by_task: dict[str, list[str]] = {}
    for i in order:
        by_task.setdefault(data.sources[names[i]].task, []).append(names[i])
    rank = {name: (place, task) for task, each in by_task.items() for place, name in enumerate(each)}
    return tuple(sorted(rank, key=rank.__getitem__)[:num])


# What is fitted once


def fitted(study: Study) -> tuple[detector.Detector, linear.Linear]:
    """Fit, once, the detector and the regression on parametric scores to the first form's features of other sources."""
    settings = study.form(BASE)

    @functools.cache
    def made() -> table.Table:
        others = study.part(False)
        with terminal.progress(len(others.responses)) as advance:
            return table.make(others, study.store(settings), progress=lambda: advance(1))

    def saved() -> saved_detector.Saved:
        from jaxbench.hallucination import token_training

        with reader_table.status() as say:
            say("fitting the detector")
            judge = token_training.fit_detector(made().inputs, made().labels)
        return saved_detector.Saved(judge, settings, study.model_sha256)

    def parametric() -> dict[str, Any]:
        x = detector.prepared(made().inputs.whole, "parametric")
        strength = linear.choose(x, made().labels.response, made().labels.source)
        regression = linear.fit(x, made().labels.response, strength=strength)
        return {name: np.asarray(value).tolist() for name, value in regression._asdict().items()}

    path = study.finished / "detector.safetensors"
    judge, _ = store.kept(path, saved, read=saved_detector.load, write=saved_detector.save)
    weights, _ = store.kept(study.finished / "parametric.json", parametric)
    return judge.detector, linear.Linear(**{name: np.asarray(value) for name, value in weights.items()})


# One form


def items(data: ragtruth.Data) -> list[extract.Item]:
    """Return the responses as items to read."""
    return [extract.Item(data.source(row).context, data.source(row).asked, row.response) for row in data.responses]


def cost(study: Study, name: str, *, num_sources: int) -> dict[str, Any]:
    """Measure a form's cost on the responses to the first few sources, in a fresh process of one thread."""
    settings = study.form(name)
    few = study._replace(sources=study.sources[:num_sources]).part(True)
    groups = extract.by_prompt(items(few), study.store(settings))
    variables = process.environment("cpu", threads=1) | worker_pool.one_thread()
    log = study.finished / "worker.log"
    with process.Worker(name, WORKER, environment=variables, log=log, timeout_s=7200) as worker:
        found = worker.request(
            "read",
            settings=settings.model_dump(),
            groups=groups,
            model_sha256=study.model_sha256,
            folder=str(study.folder),
        )
    rates = {f"{kind}_a_response": found[kind] / found["responses"] for kind in ("cpu_s", "wall_s")}
    return found | rates | {"responses_a_core_minute": 60 / rates["cpu_s_a_response"]}


def read(study: Study, settings: ReaderSettings, *, processes: int) -> None:
    """Read all judged responses that have not been read yet."""
    work = extract.groups(items(study.part(True)), study.store(settings))
    load = functools.partial(extract.load_reader, package="jaxbench")
    with terminal.progress(sum(len(each.keys) for each in work)) as advance:
        for count in extract.run(work, extract.Worker(settings, study.store(settings), load), processes=processes):
            advance(count)


def scores(study: Study, name: str, judges: tuple[detector.Detector, linear.Linear]) -> dict[str, list[float]]:
    """Score each judged response of a form by the detector and by the regression on parametric scores."""
    features = study.store(study.reading(name))
    count = study.form(name).lens_tokens
    made = table.make(
        study.part(True), features if study.reading(name) == study.form(name) else Thinned(features, count)
    )
    logit = judges[1].logit(detector.prepared(made.inputs.whole, "parametric"))
    return {"detector": detector.judge(judges[0], made.inputs).probability.tolist(), "parametric": logit.tolist()}


# All forms


def compared(
    given: table.Table, by_form: Mapping[str, Mapping[str, Array]], *, draws: int, seed: int
) -> dict[str, Any]:
    """AUC of the detector in three ways and of the parametric regression; paired differences from the first form."""
    rows = np.arange(len(given.labels.response))

    def of(name: str) -> dict[str, Callable[[Array], float]]:
        said = {kind: np.asarray(each) for kind, each in by_form[name].items()}
        pooled = evaluate.measures(given, rows, said["parametric"])["pooled"]
        return evaluate.measures(given, rows, said["detector"]) | {"parametric": pooled}

    base, found = of(BASE), {}
    for name in by_form:
        mine = of(name)
        wanted = list(mine.values())
        wanted += [lambda at, one=mine[key], other=base[key]: one(at) - other(at) for key in MEASURES]
        each = metrics.bootstrap(wanted, given.labels.source, draws=draws, seed=seed)
        found[name] = dict(zip((*MEASURES, *(f"{key}_gain" for key in MEASURES)), map(list, each), strict=True))
    return found


def shown(found: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """Return the rows of the table on the terminal, the worst first."""

    def gain(row: Mapping[str, Any], key: str) -> str:
        value, low, high = row[f"{key}_gain"]
        return f"{row[key][0]:.3f} {value:+.3f} [{low:+.3f}, {high:+.3f}]"

    worst_first = sorted(
        found.items(), key=lambda each: [each[1][f"{key}_gain"][0] for key in ("pooled", "parametric")]
    )
    return [
        (
            name,
            *(f"{row[key] / 1e6:.0f}" for key in ("weight_bytes", "peak_bytes")),
            f"{row['cpu_s_a_response']:.2f}",
            f"{row['responses_a_core_minute']:.1f}",
            *(gain(row, key) for key in MEASURES),
        )
        for name, row in worst_first
    ]


def wanted_forms(given: Sequence[str]) -> list[str]:
    """Return the names of the requested forms, with the first form always in front.

    Raises:
      ValueError: one is unknown.
    """
    unknown = [name for name in given if name not in FORMS]
    if unknown:
        raise ValueError(f"--forms: {unknown[0]!r} is none of {', '.join(FORMS)}")
    return [BASE, *(name for name in given if name != BASE)]


def kept(
    workdir: Path, settings: ReaderSettings, model_sha256: str, sources: Sequence[str], *, measured: int,
    data_sha256: str,
) -> Path:  # fmt: skip
    """Path of the folder of finished results, named by all that decides them."""
    chosen = [settings.identity(), model_sha256, list(sources), measured, extract.code_version(saved_detector.CODE)]
    name = hashlib.sha256(json.dumps([*chosen, data_sha256]).encode()).hexdigest()[:12]
    return workdir / f"readers_{name}"


def begin(settings: ReaderSettings) -> Study:
    """Return the study that the flags select."""
    from jaxbench.pretrained import weights

    if settings.bits is not None:
        raise ValueError(f"bits={settings.bits}: the forms say how many; leave it out of --config and --set")
    data, workdir = ragtruth.load(VALUES.data), cli.workdir("out/hallucination")
    ragtruth.check_labels(data, VALUES.data)
    sources = drawn(data, "dev", VALUES.sources, seed=VALUES.seed)
    sha256 = weights.checksum(settings.model)
    finished = kept(
        workdir, settings, sha256, sources, measured=VALUES.measured, data_sha256=ragtruth.sha256(VALUES.data)
    )
    return Study(settings, sha256, data, sources, workdir / "features", finished)


def check_features(study: Study) -> None:
    """Check that the first form has read everything, before any other form reads.

    Raises:
      ValueError: it has not.
    """
    features = study.store(study.form(BASE))
    missing = sum(not features.has(features.key(item)) for item in items(study.data))
    if missing:
        raise ValueError(
            f"features of {missing} of {len(study.data.responses)} responses are not in {study.folder}; run "
            "`hallucination.py features` with the same --config, --set and --workdir"
        )


def main() -> int:
    """Measure every form, compare them, and return the exit code."""
    settings, names = cli.load_config(ReaderSettings), wanted_forms(VALUES.forms)
    process_environment.ensure("cpu")
    study = begin(settings)
    check_features(study)
    cli.keep(f"finished forms are in {study.finished}; the same command goes on")
    found: dict[str, dict[str, Any]] = {}
    for name in names:
        costs = functools.partial(cost, study, name, num_sources=VALUES.measured)
        found[name], _ = store.kept(study.finished / f"{name}.json", costs)
        print(f"{name}: {found[name]['cpu_s_a_response']:.2f} s of one core a response", flush=True)
        read(study, study.reading(name), processes=VALUES.processes)
    judges = fitted(study)
    by_form = {name: scores(study, name, judges) for name in names}
    given = table.make(study.part(True), study.store(study.form(BASE)))
    told = compared(given, by_form, draws=VALUES.draws, seed=VALUES.seed)
    found = {
        name: {"settings": study.form(name).model_dump(exclude={"model"})} | found[name] | told[name] for name in names
    }
    about = {
        "sources": len(study.sources), "responses": len(given.labels.response),
        "labelled": int(given.labels.response.sum()), "measured_sources": VALUES.measured, "seed": VALUES.seed,
        "machine": environment.describe(threads=1),
    }  # fmt: skip
    outputs.write_json(study.folder.parent / "readers.json", about | {"forms": found})
    columns = ("", "MB of weights", "peak MB", "core s a response", "responses a core minute", *MEASURES)
    terminal.console().print(reader_table.plain(columns, shown(found)))
    return cli.EXIT_OK


if __name__ == "__main__":
    cli.define_config("configs/hallucination/reader.yaml")
    cli.define_workdir("out/hallucination")
    flags.DEFINE_string("data", None, "folder with sources.jsonl[.gz] and responses*.jsonl[.gz]", required=True)
    flags.DEFINE_integer("sources", 30, "whose responses are judged", lower_bound=2)
    flags.DEFINE_integer("measured", 3, "of them, whose responses are read on the clock", lower_bound=1)
    flags.DEFINE_list("forms", list(FORMS), "what is measured")
    flags.DEFINE_integer("processes", 2, "of one thread each, that read", lower_bound=1)
    flags.DEFINE_integer("draws", 2000, "of the bootstrap by source", lower_bound=100)
    flags.DEFINE_integer("seed", 0, "of the sources and the bootstrap", lower_bound=0)
    cli.run(main, about=__doc__)
