"""Measure the effect of mitigation on answers by what it does not alter: words, an untouched reader, length (S file).

    python -m jaxbench.hallucination.study.mitigated --data=FOLDER --workdir=out/mitigation
    python -m jaxbench.hallucination.study.mitigated --data=FOLDER --workdir=out/mitigation --calibrate

All arms answer the same sources of the split `dev`, the shortest contexts first. Differences from the plain arm are
paired by source; differences from the control show what the choice of heads is worth. With --calibrate: the percentiles
of scores over plain answers to sources of the split `train`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from absl import flags

from jaxbench import cli, config, outputs, process_environment, store
from jaxbench.hallucination import (
    detector,
    encoding,
    extract,
    layout,
    lexical,
    linear,
    metrics,
    mitigation,
    ragtruth,
    reader_settings,
)  # fmt: skip
from jaxbench.hallucination.bulk import row_files
from jaxbench.hallucination.mitigation import Mitigation
from jaxbench.hallucination.study import table
from jaxbench.pretrained import weights

VALUES = flags.FLAGS
PLAIN, CONTROL = "plain", "every token, random heads"
MEASURES = ("lexical logit", "share of novel words", "novel words", "loss, nats a token", "words")


def sources(data: ragtruth.Data, split: str, num: int) -> list[ragtruth.Source]:
    """Sources of a split, the shortest contexts first."""
    names = {response.source_id for response in data.responses if response.split == split}
    return sorted((data.sources[name] for name in names), key=lambda each: (len(each.context), each.source_id))[:num]


def arms(settings: Mitigation, *, num_layers: int, num_heads: int, seed: int = 0) -> dict[str, Mitigation | None]:
    """Settings by arm; None: plain. The control scales as many heads, drawn at random from the others."""
    others = sorted(set(np.ndindex(num_layers, num_heads)) - set(settings.heads))
    drawn = np.random.default_rng(seed).choice(len(others), len(settings.heads), replace=False)
    random = tuple(others[i] for i in sorted(drawn))
    always = settings.model_copy(update={"tau": None})
    return {
        PLAIN: None,
        "AARF": settings,
        "every token": always,
        CONTROL: always.model_copy(update={"heads": random}),
    }


def calibrate(settings: Mitigation, given: Sequence[ragtruth.Source], *, new_tokens: int) -> dict[str, Any]:
    """Percentiles of both scores over the tokens of plain answers, and of H with ranges from the 5th to the 95th."""
    answering = mitigation.load(None, settings.model_copy(update={"tau": 1.0}), is_on=True, package="jaxbench")
    found = []
    for start in range(0, len(given), 8):
        asked = [(source.context, source.asked) for source in given[start : start + 8]]
        found += [answer for answer, _ in answering(asked, new_tokens=new_tokens)]
    external, parametric = (np.concatenate([getattr(each, n) for each in found]) for n in ("external", "parametric"))
    kept = {"external": external, "parametric": parametric}
    ranged = settings.model_copy(update={f"{n}_range": tuple(np.percentile(x, (5, 95))) for n, x in kept.items()})
    score, at = ranged.score(external, parametric), (0, 5, 25, 50, 75, 95, 100)
    kept["score"] = score
    quantiles = {name: [round(float(q), 4) for q in np.percentile(x, at)] for name, x in kept.items()}
    return {
        "tokens": len(score),
        "percentiles": at,
        **quantiles,
        "share_above_tau": float(np.mean(score > settings.tau)),
    }


def arm_path(
    folder: Path, name: str, settings: Mitigation, is_on: bool, rows: Sequence[dict], *, new_tokens: int
) -> Path:
    """Path of an arm's answers, named by all that decides them: a run with other flags or data reads no old ones."""
    chosen = json.dumps([settings.model_dump(), is_on, new_tokens, list(rows)])
    short = "".join(letter for letter in name if letter.isalnum())
    return folder / f"{short}-{hashlib.sha256(chosen.encode()).hexdigest()[:12]}.jsonl"


def answers(
    name: str, settings: Mitigation, is_on: bool, given: Sequence[ragtruth.Source], folder: Path, *, new_tokens: int
) -> list[dict]:
    """Return the rows of one arm's answers, from their file if it is finished."""
    rows = [{"source_id": each.source_id, "context": each.context, "question": each.asked} for each in given]
    path = arm_path(folder, name, settings, is_on, rows, new_tokens=new_tokens)
    if not path.is_file():
        answering = mitigation.load(None, settings, is_on=is_on, package="jaxbench")
        how = {"new_tokens": new_tokens, "batch_size": 8}
        for _ in mitigation.answer_rows(answering, rows, path.with_suffix(".part"), path, **how):
            print(".", end="", flush=True)
        print(name, flush=True)
    return [row for _, row in row_files.numbered(path, texts=row_files.PROMPT, taken={})]


def losses(rows: Sequence[dict], reader: Any, tokenizer: Any, window: int) -> list[float]:
    """Mean loss of each answer after its context by an untouched reader, in nats per token."""
    found = []
    for row in rows:
        ids = encoding.encode_response(tokenizer, row["response"]).ids
        prompt = encoding.encode_prompt(tokenizer, row["context"], row["question"], window=window - len(ids))
        read = reader.read_prompt(layout.prompt_arrays([prompt.text], share=0.1))
        arrays = layout.response_arrays([prompt.text], [[ids]])
        found.append(float(reader.surprise(read, arrays)["loss"][0, : len(ids)].mean()))
    return found


def lexical_regression(data: ragtruth.Data, without: Sequence[ragtruth.Source]) -> linear.Linear:
    """Fit the regression on seven counts to all labelled responses to other contexts than those of some sources."""
    made, contexts = table.make(data, None), {source.context for source in without}
    rows = np.flatnonzero([data.source(response).context not in contexts for response in data.responses])
    x, labels = detector.prepared(made.inputs.whole, "lexical")[rows], made.labels.response[rows]
    return linear.fit(x, labels, strength=linear.choose(x, labels, made.labels.source[rows]))


def measured(rows: Sequence[dict], regression: linear.Linear, loss: Sequence[float]) -> np.ndarray:
    """MEASURES of each answer [rows, measures]."""
    found = []
    for row in rows:
        counts = lexical.counts(lexical.tokens(row["response"]), lexical.Lexicon(row["context"]))
        words, novel, share = counts[:3]
        found.append(
            (regression.logit(detector.prepared({"lexical": counts[None]}, "lexical"))[0], share, novel, words)
        )
    found = np.array(found)
    return np.concatenate([found[:, :3], np.array(loss)[:, None], found[:, 3:]], axis=1)


def compared(by_arm: dict[str, np.ndarray], source: np.ndarray) -> dict[str, Any]:
    """Means by arm, and differences from the plain arm and from the control, with intervals over sources."""
    found: dict[str, Any] = {}
    for name, values in by_arm.items():
        found[name] = {measure: {"mean": float(mean)} for measure, mean in zip(MEASURES, values.mean(0))}
        for other, key in ((PLAIN, "over_plain"), (CONTROL, "over_control")):
            gains = (values - by_arm[other]).T
            statistics = [lambda rows, gain=gain: float(gain[rows].mean()) for gain in gains]
            for measure, interval in zip(MEASURES, metrics.bootstrap(statistics, source)):
                found[name][measure][key] = list(interval)
    return found


def main() -> int:
    """Calibrate, or answer and compare; return the exit code."""
    settings, data = cli.load_config(Mitigation), ragtruth.load(VALUES.data)
    process_environment.ensure("cpu", library="XLA")
    workdir = cli.workdir("out/mitigation")
    if VALUES.calibrate:
        found = calibrate(settings, sources(data, "train", VALUES.sources), new_tokens=VALUES.new_tokens)
        outputs.write_json(workdir / "calibration.json", found)
        print(found)
        return cli.EXIT_OK
    store.claim(workdir, config.config_id(settings))
    given, model = sources(data, "dev", VALUES.sources), weights.load_checkpoint(None).config
    wanted = arms(settings, num_layers=model.num_layers, num_heads=model.num_heads)
    part = list(wanted.items())[cli.part()]
    how = {"new_tokens": VALUES.new_tokens}
    rows = {name: answers(name, each or settings, each is not None, given, workdir, **how) for name, each in part}
    if len(rows) < len(wanted):
        return cli.EXIT_OK
    empty = {row["source_id"] for each in rows.values() for row in each if not lexical.tokens(row["response"])}
    rows = {name: [row for row in each if row["source_id"] not in empty] for name, each in rows.items()}
    regression = lexical_regression(data, given)
    loaded = extract.load_reader(reader_settings.ReaderSettings(), package="jaxbench")
    by_arm = {name: measured(each, regression, losses(each, *loaded)) for name, each in rows.items()}
    source = np.array([row["source_id"] for row in rows[PLAIN]])
    plain = [row["response"] for row in rows[PLAIN]]
    told = {
        name: {
            "settings": None if wanted[name] is None else wanted[name].model_dump(),
            "answers_that_differ": sum(row["response"] != other for row, other in zip(each, plain)),
            "share_reweighted": sum(row["num_reweighted"] for row in each) / sum(row["num_tokens"] for row in each),
            "share_ended": float(np.mean([row["ended"] for row in each])),
        }
        for name, each in rows.items()
    }
    found = {name: told[name] | row for name, row in compared(by_arm, source).items()}
    outputs.write_json(
        workdir / "mitigation.json",
        {"sources": len(source), "left_out": len(empty), "new_tokens": VALUES.new_tokens, "arms": found},
    )
    for name, row in found.items():
        shown = [f"{m}: {row[m]['mean']:.3f} {np.round(row[m]['over_plain'], 3)}" for m in MEASURES]
        print(name, told[name]["answers_that_differ"], f"{told[name]['share_reweighted']:.3f}", *shown, sep="  ")
    return cli.EXIT_OK


if __name__ == "__main__":
    cli.define_config("configs/hallucination/mitigation.yaml")
    cli.define_workdir("out/mitigation")
    cli.define_part()
    flags.DEFINE_string("data", None, "folder with sources.jsonl[.gz] and responses*.jsonl[.gz]", required=True)
    flags.DEFINE_bool("calibrate", False, "measure the ranges of scores, and nothing else")
    flags.DEFINE_integer("sources", 40, "that are answered", lower_bound=2)
    flags.DEFINE_integer("new_tokens", 64, "of an answer, at most", lower_bound=1)
    cli.run(main, about=__doc__)
