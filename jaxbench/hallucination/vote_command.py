"""The command that makes one detector of several, by their votes: hallucination.py vote (S file)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from absl import flags

from jaxbench import cli, outputs, store, terminal
from jaxbench.hallucination import where

ABOUT = "One detector of several, by their votes, its threshold chosen on responses that none was fitted to."
VALUES = flags.FLAGS
RULES = ("soft", "hard", "weighted")  # the first is the default; voting.RULES


def define() -> None:
    """Define the flags of vote."""
    cli.define_config("configs/hallucination/reader.yaml")
    cli.define_device()
    cli.define_workdir("out/hallucination")
    flags.DEFINE_multi_string("detector", None, "what `fit` wrote; once for each member of the vote, two or more")
    flags.DEFINE_string("data", None, "development responses: a folder of contexts that no member was fitted to")
    flags.DEFINE_enum("rule", RULES[0], RULES, "mean probability, majority, or mean weighed by the members' AUC there")
    flags.DEFINE_string("output", None, "the vote: a .safetensors file, which holds its members")
    flags.DEFINE_integer("processes", 2, "of one thread each, that read for a member's tuned reader", lower_bound=1)
    flags.DEFINE_bool("overwrite", False, "replace the output; never a member")


def vote() -> int:
    """Choose a vote's weights and thresholds on development responses whose features are in the cache, and save it.

    Raises:
      ValueError: a flag is missing, detectors cannot vote together, features are missing, the responses are of contexts
        that a member was fitted to, or their labels are of one class.
    """
    from jaxbench.hallucination import ragtruth, reader_settings, saved_detector, voting

    cli.require_flag("detector", "what `fit` wrote, once for each member")
    cli.require_flag("data", "a folder of RAGTruth's format: the development responses")
    cli.require_flag("output", "a file for the vote")
    paths = VALUES.detector
    reading = cli.load_config(reader_settings.ReaderSettings)
    outputs.check_file(VALUES.output, paths, overwrite=VALUES.overwrite)
    names = saved_detector.names_of(paths)
    found = [saved_detector.load(path) for path in paths]
    voting.check([each.detector for each in found], names)
    data = ragtruth.load(VALUES.data)
    ragtruth.check_labels(data, VALUES.data)
    with store.alone(Path(VALUES.output)):
        saved = saved_detector.joined(found, paths)
        members = [each.detector for each in found]
        made = table_of(saved._replace(detector=voting.majority(members, names)), data, reading)
        fitted = voting.fit(members, names, made.inputs, made.labels, rule=VALUES.rule)
        seen = {saved_detector.context_id(data.source(response).context) for response in data.responses}
        saved = saved._replace(detector=fitted, contexts=tuple(sorted(seen | {*saved.contexts})))
        outputs.check_file(VALUES.output, paths, overwrite=VALUES.overwrite)  # again: another command may have ended
        saved_detector.save(VALUES.output, saved)
    for name, auc, weight in zip(names, fitted.aucs, fitted.weights):
        print(f"{name}: development AUC {auc:.3f}, weight {weight:.3f}")
    sha256 = ragtruth.sha256(VALUES.data)
    print(f"written: {VALUES.output} ({len(names)} detectors, {VALUES.rule}; {VALUES.data}, sha256 {sha256})")
    return cli.EXIT_OK


def reader_of(saved: Any, data: Any, reading: Any, checksum: str) -> Any:
    """Return the reader's settings that a saved detector takes, with the model that the settings name.

    Raises:
      ValueError: the detector was fitted to a context of the folder, with another model, or to other settings than
        those that the user named.
    """
    from jaxbench.hallucination import saved_detector

    saved_detector.check_unseen(saved, data, folder=VALUES.data)
    saved_detector.check_model(saved, checksum, name=reading.model or "the default model")
    named = {each.partition("=")[0].strip() for each in VALUES.set}
    if VALUES["config"].present:  # the default one is not the user's choice
        named |= reading.model_fields_set
    saved_detector.check_settings(saved, reading, named)
    return saved.settings.model_copy(update={"model": reading.model})


def table_of(saved: Any, data: Any, reading: Any) -> Any:
    """Return a folder's table as a saved detector takes it, from features in the cache.

    Raises:
      ValueError: as `reader_of`, or features are missing.
    """
    where.start()
    from jaxbench.hallucination import extract
    from jaxbench.hallucination.study import table
    from jaxbench.pretrained import weights

    checksum = weights.checksum(reading.model)
    reading = reader_of(saved, data, reading, checksum)
    folder = cli.workdir("out/hallucination")
    features = extract.Store(folder / "features", reading, checksum)
    with terminal.progress(len(data.responses)) as advance:
        made = table.make(data, features, progress=lambda: advance(1))
    return with_tuned(made, saved, data, reading)


def with_tuned(made: Any, saved: Any, data: Any, reading: Any) -> Any:
    """Add what a detector's tuned reader says of the responses to their table, if it has one."""
    tuned = saved.detector.tuned
    if tuned is None:
        return made
    from jaxbench.hallucination import tuned_sources

    lower = tuned_sources.of_detector(cli.workdir("out/hallucination") / "tuned", reading, tuned)
    tuned_sources.read(lower, data, processes=VALUES.processes, bar=terminal.progress)
    return made._replace(inputs=made.inputs._replace(tuned=tuned_sources.said(lower, data, tuned)))
