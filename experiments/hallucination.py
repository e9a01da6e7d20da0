"""Detect whether an answer is supported by its context: features, attention heads and scores of a reader model.

    hallucination.py features   --data=FOLDER --workdir=out/hallucination     read every response of a RAGTruth folder
    hallucination.py scores     --input=FILE --output=FILE                    the scores of each token or chunk
    hallucination.py evaluate   --data=FOLDER --workdir=out/hallucination     how well each score detects, nested
    hallucination.py fit        --data=FOLDER --output=detector.safetensors   fit the detector to labelled responses
    hallucination.py vote       --detector=A --detector=B --data=FOLDER --output=vote.safetensors  one of several
    hallucination.py detect     --detector=FILE --input=FILE --output=FILE    verdicts on the responses of a file
    hallucination.py export     --detector=FILE --format=onnx --output=FOLDER a detector for other runtimes
    hallucination.py copy_heads --output=heads.json                           which attention heads copy
    hallucination.py answer     --input=FILE --output=FILE                    answers, risky tokens read again (AARF)
    hallucination.py redeep     --scores=FILE                                 ReDeEP's regression of stored scores

A folder of RAGTruth's format holds sources.jsonl[.gz] and responses*.jsonl[.gz]. A killed run of `features`,
`scores`, `detect` or `answer` is resumed by the same command. Bad input ends with exit code 2 and one line.
docs/hallucination.md
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from absl import flags

from jaxbench import cli, outputs, process_environment, store, terminal
from jaxbench.hallucination import export_command, fit_command, scores_command, vote_command, where
from jaxbench.measure import environment

VALUES = flags.FLAGS


# Features


def define_features() -> None:
    """Define the flags of features."""
    cli.define_config("configs/hallucination/reader.yaml")
    cli.define_backend(choices=("flax", "torch"))
    where.define()
    cli.define_workdir("out/hallucination")
    flags.DEFINE_string("data", None, "folder with sources.jsonl[.gz] and responses*.jsonl[.gz]")
    flags.DEFINE_integer("processes", 2, "processes of one thread each; 1 = this one, with all threads", lower_bound=1)


def features() -> int:
    """Read every response, and keep its features under --workdir."""
    from jaxbench.hallucination import extract, lengths, ragtruth, reader_settings, reading

    cli.require_flag("data", "a folder of RAGTruth's format")
    settings = cli.load_config(reader_settings.ReaderSettings)
    data = ragtruth.load(VALUES.data)
    place, processes = where.chosen()
    package = reading.PACKAGES[VALUES.backend]
    where.start(package)
    from jaxbench.pretrained import weights

    folder = cli.workdir("out/hallucination") / "features"
    store = extract.Store(folder, settings, weights.checksum(settings.model))
    sources = [data.source(response) for response in data.responses]
    items = [
        extract.Item(source.context, source.asked, response.response)
        for source, response in zip(sources, data.responses)
    ]
    asked = ((f"response {each.id}", *item[1:]) for each, item in zip(data.responses, items))
    tokenizer, window = lengths.limits(settings)
    lengths.check_all(asked, tokenizer, window=window, style=settings.style)
    said = reading.read(items, settings, store, package=package, where=place, processes=processes)
    print(f"written: {folder} ({said}; {VALUES.data}, sha256 {ragtruth.sha256(VALUES.data)})")
    return cli.EXIT_OK


# Evaluation


def define_evaluate() -> None:
    """Define the flags of evaluate."""
    cli.define_config("configs/hallucination/reader.yaml")
    cli.define_device()
    cli.define_workdir("out/hallucination")
    flags.DEFINE_string("data", None, "folder with sources.jsonl[.gz] and responses*.jsonl[.gz]")
    about = "judge this saved detector alone, as it is, on responses it has not seen; several: their majority"
    flags.DEFINE_multi_string("detector", None, about)
    flags.DEFINE_bool("reader", True, "judge what a reader's features give; no: words alone, without `features`")
    flags.DEFINE_integer("processes", 2, "of one thread each, that read for a detector's tuned reader", lower_bound=1)
    flags.DEFINE_bool("ablation", True, "judge every score and technique; no: priors, words and the detector, minutes")
    flags.DEFINE_bool("curve", False, "judge detectors fitted to a half, a quarter, ... of the sources, too")
    flags.DEFINE_integer("folds", 5, "folds of the judged sources", lower_bound=2)
    flags.DEFINE_integer("draws", 1000, "of the bootstrap by source", lower_bound=100)
    flags.DEFINE_integer("seed", 0, "of folds and bootstrap", lower_bound=0)


def evaluate_rows() -> int:
    """Evaluate priors, words, scores and detectors, each on sources that it was not fitted to."""
    from jaxbench.hallucination import extract, ragtruth, reader_settings, reader_table
    from jaxbench.hallucination.study import evaluate, report, rows, table

    cli.require_flag("data", "a folder of RAGTruth's format")
    reading = cli.load_config(reader_settings.ReaderSettings)
    check_evaluate()
    how = {"train_split": None} if VALUES.detector else {}  # nothing is fitted to a saved detector's responses
    settings = evaluate.Evaluation(folds=VALUES.folds, draws=VALUES.draws, seed=VALUES.seed, **how)
    data, workdir, store, saved = ragtruth.load(VALUES.data), cli.workdir("out/hallucination"), None, None
    ragtruth.check_labels(data, VALUES.data)
    if VALUES.reader or VALUES.detector:
        where.start()
        from jaxbench.hallucination import saved_detector
        from jaxbench.pretrained import assets, weights

        checksum = weights.checksum(reading.model)
        if VALUES.detector:
            saved = saved_detector.load_several(VALUES.detector)
            reading = vote_command.reader_of(saved, data, reading, checksum)
        store = extract.Store(workdir / "features", reading, checksum)
    with terminal.progress(len(data.responses)) as advance:
        made = table.make(data, store, progress=lambda: advance(1))
    if saved is not None:
        made = vote_command.with_tuned(made, saved, data, reading)
    evaluate.judged(made, settings)
    wanted, left_out = rows.ROWS if VALUES.ablation else rows.SHORT, {}
    with reader_table.status() as say:
        found = (
            evaluate.run(made, settings, rows=wanted + rows.CURVE * VALUES.curve, say=say, left_out=left_out)
            if saved is None
            else evaluate.as_saved(made, settings, saved.detector)
        )
    sums = {"data_sha256": ragtruth.sha256(VALUES.data), "model_sha256": None if store is None else checksum}
    about = {"settings": settings.model_dump(), "reader": None if store is None else reading.model_dump()}
    if saved is not None:
        sums_of = [assets.sha256_file(path) for path in VALUES.detector]
        about |= {"detector": " and ".join(VALUES.detector), "detector_sha256": " and ".join(sums_of)}
    machine = environment.describe(threads=environment.usable_cores())
    name, lead = ("evaluation", report.FITTED) if saved is None else ("detector_evaluation", report.SAVED)
    results = {"judged": evaluate.counts(made, settings), "machine": machine, "rows": found, "left_out": left_out}
    outputs.set_aside(workdir / f"{name}.json")  # of which the other files are drawn
    outputs.write_json(workdir / f"{name}.json", about | sums | results)
    report.write(found, workdir, name=name, lead=lead)
    terminal.console().print(reader_table.of_rows(found))
    for line in reader_table.votes(found):
        print(line)
    print(f"{VALUES.data}: sha256 {sums['data_sha256']}")
    print(f"written: {workdir / name}.json, and .csv, .svg, .html beside it")
    for row, reason in left_out.items():
        print(f"left out: {row}: {reason}", file=sys.stderr)
    return cli.EXIT_GATE if left_out else cli.EXIT_OK


def check_evaluate() -> None:
    """Check that no flag of evaluate is without effect next to the others.

    Raises:
      ValueError: one is; it is named.
    """
    if VALUES.detector:
        ignored = [name for name in ("reader", "ablation", "curve", "folds") if VALUES[name].present]
        if ignored:
            raise ValueError(
                f"--detector={VALUES.detector[0]}: it is judged as it is; leave out --{', --'.join(ignored)}"
            )
        return
    if VALUES.curve and not VALUES.reader:
        raise ValueError(f"--curve={VALUES.curve} is of the detector, which --noreader leaves out; leave one out")
    if VALUES["processes"].present:
        raise ValueError(f"--processes={VALUES.processes} is of a --detector with a tuned reader; leave it out")


# The detector


def define_detect() -> None:
    """Define the flags of detect."""
    cli.define_model()
    cli.define_backend(choices=("flax", "torch"))
    where.define()
    about = "what `fit` or `vote` wrote, or a folder of `export`, which holds its reader; several files: their majority"
    flags.DEFINE_multi_string("detector", None, about)
    flags.DEFINE_string("input", None, "rows with context, question and response: .jsonl or .parquet")
    flags.DEFINE_string("output", None, "verdicts, one a row, beside its other keys: .jsonl or .parquet")
    flags.DEFINE_string("sentences", None, "also one line a sentence: .jsonl or .parquet")
    flags.DEFINE_string("page", None, "also a page that shows rows, sentences and passages: .html")
    flags.DEFINE_bool("overwrite", False, "replace the outputs; never an input")
    flags.DEFINE_integer("processes", 1, "of one thread each, or Ray actors; 1 = this one, all threads", lower_bound=1)
    flags.DEFINE_enum("engine", "local", ["local", "ray"], "where they run: this machine, or a Ray cluster")
    flags.DEFINE_bool("follow", False, "verdicts on answers while they are written: JSON lines from standard input")


def detect_all() -> int:
    """Write a verdict on every row of a file, or on answers that are still being written."""
    cli.require_flag("detector", "what `fit` wrote")
    place, processes = where.chosen()
    package = {"flax": "jaxbench", "torch": "torch_ref"}[VALUES.backend]
    where.start(package)
    from jaxbench.hallucination import detect, follow
    from jaxbench.hallucination.bulk import run

    names = run.Outputs._fields
    wanted = part = None
    if VALUES.follow:
        others = ("input", *names, "overwrite", "processes", "engine", "devices")
        follow.check({name: VALUES[name].present for name in others})
    else:
        for name in ("input", "output"):
            cli.require_flag(name, "a .jsonl or .parquet file")
        wanted = run.Outputs.of(**{name: VALUES[name].value for name in names})
        how = {"overwrite": VALUES.overwrite, "package": package, "device": place.device}
        part, total = run.check(VALUES.input, VALUES.detector, wanted, **how)
    model = None if VALUES.model == "default" else VALUES.model
    made = detect.HallucinationDetector(VALUES.detector, model=model, package=package, where=place)
    if VALUES.follow:
        follow.run(made.follow, sys.stdin.buffer)
        return cli.EXIT_OK
    cli.keep(f"finished verdicts are in {part}; the same command goes on")
    count, results = 0, run.ENGINES[VALUES.engine]
    with store.alone(*filter(None, wanted)):
        run.check_free(wanted, part, overwrite=VALUES.overwrite)  # again: another command may have ended since
        with terminal.progress(total) as advance:
            for verdicts in run.detect(made, VALUES.input, part, processes=processes, results=results):
                count += len(verdicts)
                advance(len(verdicts))
        flagged = run.finish(VALUES.input, part, wanted, made, overwrite=VALUES.overwrite)
    print(f"written: {wanted} ({total} verdicts, {count} of them now; {flagged} hallucinated)")
    return cli.EXIT_OK


# Copying heads


def define_copy_heads() -> None:
    """Define the flags of copy_heads."""
    cli.define_model()
    flags.DEFINE_integer("rows", 1024, "tokens whose Gershgorin discs are looked at; 0 = all", lower_bound=0)
    flags.DEFINE_integer("top", 32, "heads that are shown", lower_bound=1)
    flags.DEFINE_integer("seed", 0, "of the sample of tokens", lower_bound=0)
    flags.DEFINE_string("output", None, "all heads: a .json file")
    flags.DEFINE_bool("overwrite", False, "replace the output")


def rank_copy_heads() -> int:
    """Rank a model's heads by how much they copy."""
    from jaxbench.hallucination import copy_heads, reader_table

    if VALUES.output is not None:
        outputs.check_file(VALUES.output, [VALUES.model], overwrite=VALUES.overwrite)
    from jaxbench.pretrained import weights

    checkpoint = weights.load_checkpoint(None if VALUES.model == "default" else VALUES.model)
    config = checkpoint.config
    with terminal.progress(config.num_layers * config.num_heads) as advance:
        heads = copy_heads.ranked(
            config, checkpoint.params, num_rows=VALUES.rows or None, seed=VALUES.seed, progress=lambda: advance(1)
        )
    terminal.console().print(reader_table.of_heads(heads[: VALUES.top]))
    if VALUES.output is not None:
        rows = [head._asdict() for head in heads]
        outputs.write_json(VALUES.output, {"model_sha256": checkpoint.sha256, "rows": VALUES.rows, "heads": rows})
        print(f"written: {VALUES.output}")
    return cli.EXIT_OK


# Answers


def define_answer() -> None:
    """Define the flags of answer."""
    cli.define_config("configs/hallucination/mitigation.yaml")
    cli.define_model()
    cli.define_backend(choices=("flax", "torch"))
    flags.DEFINE_bool("mitigate", True, "compute risky tokens again (AARF); no: plain answers")
    flags.DEFINE_string("input", None, "rows with context and question, other keys are kept: .jsonl or .parquet")
    flags.DEFINE_string("output", None, "the same rows with a response: a .jsonl file")
    flags.DEFINE_bool("overwrite", False, "replace the output")
    flags.DEFINE_integer("new_tokens", 128, "of an answer, at most", lower_bound=1)
    flags.DEFINE_integer("batch_size", 8, "rows that are answered together", lower_bound=1)


def answer() -> int:
    """Answer every row of a file."""
    from jaxbench.hallucination import mitigation
    from jaxbench.hallucination.bulk import row_files

    for name in ("input", "output"):
        cli.require_flag(name, "a .jsonl file")
    settings = cli.load_config(mitigation.Mitigation)
    if Path(VALUES.output).suffix != ".jsonl":
        raise ValueError(f"--output={VALUES.output} has an unknown suffix, wanted .jsonl")
    output = outputs.check_file(VALUES.output, (VALUES.input,), overwrite=VALUES.overwrite)
    placed = row_files.prompts(VALUES.input, dict.fromkeys(mitigation.ADDED, "the answer"))
    process_environment.ensure("cpu", library=cli.array_library())
    with store.alone(output):
        outputs.check_file(output, overwrite=VALUES.overwrite)  # again: another command may have ended since
        return answer_rows(settings, placed, output)


def answer_rows(settings: Any, placed: list[tuple[str, dict[str, Any]]], output: Path) -> int:
    """Answer the rows that are not finished yet; placed: the place and content of each row."""
    from jaxbench.hallucination import lengths, mitigation, reader_settings

    names = ("backend", "mitigate", "new_tokens", "batch_size")
    model, package = None if VALUES.model == "default" else VALUES.model, {"flax": "jaxbench", "torch": "torch_ref"}
    tokenizer, window = lengths.limits(reader_settings.ReaderSettings(model=model))
    if VALUES.new_tokens >= window:
        raise ValueError(f"--new_tokens={VALUES.new_tokens} leaves no room for a prompt in a window of {window}")
    asked, rows = [(place, row["question"], None) for place, row in placed], [row for _, row in placed]
    lengths.check_all(asked, tokenizer, window=window - VALUES.new_tokens, style=settings.style)
    answering = mitigation.load(model, settings, is_on=VALUES.mitigate, package=package[VALUES.backend])
    chosen = [settings.model_dump(), answering.sha256, *(VALUES[name].value for name in names)]
    part = mitigation.part_file(output, VALUES.input, chosen)
    cli.keep(f"finished answers are in {part}; the same command goes on")
    how = {name: VALUES[name].value for name in ("new_tokens", "batch_size", "overwrite")}
    with terminal.progress(len(rows)) as advance:
        for count in mitigation.answer_rows(answering, rows, part, output, **how):
            advance(count)
    print(f"written: {output} ({len(rows)} answers)")
    return cli.EXIT_OK


# ReDeEP's regression


def define_redeep() -> None:
    """Define the flags of redeep."""
    flags.DEFINE_string(
        "scores",
        None,
        "chunk scores: .jsonl[.gz] or .parquet with response, chunk_label, external, parametric, source_id if known",
    )
    flags.DEFINE_integer("top_n", 3, "heads", lower_bound=1)
    flags.DEFINE_integer("top_k", 4, "layers", lower_bound=1)
    flags.DEFINE_float("alpha", 0.6, "weight of the external score", lower_bound=0.0)
    flags.DEFINE_float("m", 1.0, "weight of the parametric score", lower_bound=0.0)
    flags.DEFINE_integer("folds", 5, "of the nested search", lower_bound=2)
    flags.DEFINE_integer("repeats", 5, "shuffles of the nested search", lower_bound=1)


def redeep() -> int:
    """Show a regression's results on the responses that it was chosen on, and on held-out ones."""
    from jaxbench.hallucination import reader_table, score_regression, stored_scores

    cli.require_flag("scores", "a file of chunk scores")
    units = stored_scores.load(VALUES.scores)
    point = score_regression.Point(VALUES.top_n, VALUES.top_k, VALUES.alpha, VALUES.m)
    rows = stored_scores.table(units, point, folds=VALUES.folds, repeats=VALUES.repeats)
    terminal.console().print(reader_table.of_regression(rows))
    return cli.EXIT_OK


COMMANDS = {
    "features": cli.Command(define_features, features, "Features of every response of a folder, resumable."),
    "scores": cli.Command(scores_command.define, scores_command.scores, scores_command.ABOUT),
    "evaluate": cli.Command(define_evaluate, evaluate_rows, "How well each score does on other sources, nested."),
    "fit": cli.Command(fit_command.define, fit_command.fit, fit_command.ABOUT),
    "vote": cli.Command(vote_command.define, vote_command.vote, vote_command.ABOUT),
    "detect": cli.Command(define_detect, detect_all, "Verdicts on responses and their sentences, resumable."),
    "export": cli.Command(export_command.define, export_command.export, export_command.ABOUT),
    "copy_heads": cli.Command(define_copy_heads, rank_copy_heads, "A model's attention heads by how much they copy."),
    "answer": cli.Command(define_answer, answer, "Answers, risky tokens computed again (AARF), resumable."),
    "redeep": cli.Command(define_redeep, redeep, "ReDeEP's regression of stored scores, as published and nested."),
}

if __name__ == "__main__":
    cli.run_commands(COMMANDS, about=__doc__)
