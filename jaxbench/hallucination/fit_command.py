"""The command that fits a detector to labelled responses and saves it: hallucination.py fit (S file)."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from absl import flags

from jaxbench import cli, outputs, store, terminal
from jaxbench.hallucination import where

ABOUT = "The detector, or one by another method, fitted to labelled responses and saved."
VALUES = flags.FLAGS
METHODS = ("detector", "redeep", "mutual_information", "ensemble")  # the first, and those of methods.METHODS
POINT = ("top_n", "top_k", "alpha", "m")  # one flag each
OWN = {**dict.fromkeys(POINT, ("redeep",)), "columns": METHODS[2:], "members": METHODS[3:]}  # flag -> its methods


def define() -> None:
    """Define the flags of fit."""
    cli.define_config("configs/hallucination/reader.yaml")
    cli.define_device()
    cli.define_workdir("out/hallucination")
    flags.DEFINE_string("data", None, "folder with sources.jsonl[.gz] and responses*.jsonl[.gz], all fitted to")
    flags.DEFINE_string("output", None, "the detector: a .safetensors file")
    flags.DEFINE_enum("method", METHODS[0], METHODS, "the others see external and parametric scores alone")
    flags.DEFINE_integer("top_n", None, "redeep: heads (unset, like the next three: searched over)", lower_bound=1)
    flags.DEFINE_integer("top_k", None, "redeep: layers", lower_bound=1)
    flags.DEFINE_float("alpha", None, "redeep: weight of the external score", lower_bound=0.0)
    flags.DEFINE_float("m", None, "redeep: weight of the parametric score", lower_bound=0.0)
    about = "mutual_information: heads and layers that are kept; ensemble: heads of a member"
    flags.DEFINE_integer("columns", 32, about, lower_bound=1)
    flags.DEFINE_integer("members", 5, "ensemble: regressions", lower_bound=1)
    flags.DEFINE_bool("labels", True, "fit to the labels; no: the detector that needs none, on the same responses")
    flags.DEFINE_bool("tuned", False, "with a tuned reader as a member: adapters on four blocks, trained for every fit")
    flags.DEFINE_integer("processes", 2, "of one thread each, that read for the tuned reader", lower_bound=1)
    flags.DEFINE_float(
        "rate", 0.4, "share of responses that a detector without labels flags", lower_bound=0, upper_bound=1
    )
    flags.DEFINE_bool("overwrite", False, "replace the output")


def fit() -> int:
    """Fit a detector to labelled responses whose features are in the cache, and save it.

    Raises:
      ValueError: a flag is missing or conflicts with another, features are missing, or the labels are of one class.
    """
    from jaxbench.hallucination import ragtruth, reader_settings, saved_detector

    _check_flags()
    reading = cli.load_config(reader_settings.ReaderSettings)
    outputs.check_file(VALUES.output, overwrite=VALUES.overwrite)
    data = ragtruth.load(VALUES.data)
    if VALUES.labels:
        ragtruth.check_labels(data, VALUES.data)
    with store.alone(Path(VALUES.output)):
        saved = _saved(reading, data)
        outputs.check_file(VALUES.output, overwrite=VALUES.overwrite)  # again: another command may have ended since
        saved_detector.save(VALUES.output, saved)
    sha256 = ragtruth.sha256(VALUES.data)
    print(f"written: {VALUES.output} (from {len(data.responses)} responses of {VALUES.data}, sha256 {sha256})")
    return cli.EXIT_OK


def _saved(reading: Any, data: Any) -> Any:
    """Fit the detector that the flags select to responses whose features are in the cache."""
    where.start()
    from jaxbench.hallucination import extract, reader_table, saved_detector
    from jaxbench.hallucination.study import table
    from jaxbench.pretrained import weights

    checksum = weights.checksum(reading.model)
    workdir = cli.workdir("out/hallucination")
    features = extract.Store(workdir / "features", reading, checksum)
    with terminal.progress(len(data.responses)) as advance:
        made = table.make(data, features, progress=lambda: advance(1))
    heard = _tuned(workdir / "tuned", reading, data, made) if VALUES.tuned else None
    with reader_table.status() as say:
        say("fitting")
        fitted = _fitted(made, heard)
    contexts = {saved_detector.context_id(data.source(response).context) for response in data.responses}
    return saved_detector.Saved(fitted, reading, checksum, tuple(sorted(contexts)))


def _check_flags() -> None:
    cli.require_flag("data", "a folder of RAGTruth's format")
    cli.require_flag("output", "a file for the detector")
    if not 0 < VALUES.rate < 1:  # nan passes a flag's bounds
        raise ValueError(f"--rate={VALUES.rate}: wanted a share between 0 and 1")
    if VALUES["rate"].present and VALUES.labels:
        raise ValueError(f"--rate={VALUES.rate} is of --nolabels, and --labels={VALUES.labels}; leave it out")
    if VALUES["processes"].present and not VALUES.tuned:
        raise ValueError(f"--processes={VALUES.processes} is of --tuned, and --tuned={VALUES.tuned}; leave it out")
    for name in ("alpha", "m"):
        if VALUES[name].value is not None and not math.isfinite(VALUES[name].value):
            raise ValueError(f"--{name}={VALUES[name].value}: wanted a finite number")
    if VALUES.tuned and not VALUES.labels:
        raise ValueError(f"--tuned, --labels={VALUES.labels}: a reader is tuned to labels; leave one of them out")
    if VALUES.method != METHODS[0] and (VALUES.tuned or not VALUES.labels):
        other = "--tuned" if VALUES.tuned else "--nolabels"
        raise ValueError(f"--method={VALUES.method}, {other}: that is of --method={METHODS[0]}; leave one of them out")
    for name, methods in OWN.items():
        if VALUES[name].present and VALUES.method not in methods:
            raise ValueError(
                f"--{name}={VALUES[name].value} is of --method={' or '.join(methods)}, not {VALUES.method}"
            )


def _tuned(folder: Any, reading: Any, data: Any, made: Any) -> Any:
    """Tune a reader; return its scores of labelled responses to sources held out from the tuning."""
    import numpy as np

    from jaxbench.hallucination import tuned_sources, tuning

    lower = tuned_sources.Lower.of(folder, reading, tuning.Tuning())
    tuned_sources.read(lower, data, processes=VALUES.processes, bar=terminal.progress)
    everyone = np.arange(len(data.responses))
    parts = tuned_sources.split(made.labels, everyone)
    heard, _ = tuned_sources.tune(lower, data, made.labels, parts, everyone[:0], bar=terminal.progress)
    return heard


def _fitted(made: Any, heard: Any) -> Any:
    """Fit the detector that the flags select."""
    if VALUES.method != METHODS[0]:
        from jaxbench.hallucination import methods
        from jaxbench.hallucination.score_regression import GRID

        given = {name: (VALUES[name].value,) for name in POINT if VALUES[name].value is not None}
        choice = methods.Choice(GRID | given, VALUES.columns, VALUES.members)
        return methods.fit(made.inputs, made.labels, method=VALUES.method, choice=choice)
    if not VALUES.labels:
        from jaxbench.hallucination import unlabelled

        return unlabelled.fit(made.inputs, rate=VALUES.rate)
    from jaxbench.hallucination import token_training

    return token_training.fit_detector(made.inputs, made.labels, tuned=heard)
