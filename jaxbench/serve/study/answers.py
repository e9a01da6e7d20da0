"""Measure the quality cost of a narrow cache: loss on right answers to questions over passages, by engine steps.

    python -m jaxbench.serve.study.answers --data=questions.jsonl.gz --output=FILE

The loss is that of the first of a question's answers. Prompts are read by the steps that serve them, with keys and
values in the cache's number type. Ratios are versus the first cache, with 95 % intervals over questions.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import scipy.special
import scipy.stats
from absl import flags

from jaxbench import cli, outputs, process_environment, terminal
from jaxbench.measure import environment
from jaxbench.serve.batch_rows import Rows, Runner, batch_of
from jaxbench.text import questions

VALUES = flags.FLAGS
RESAMPLES = 2000


class Question(NamedTuple):
    """A prompt and the answer that should follow, in tokens."""

    prompt: list[int]
    answer: list[int]


def chosen(path: str, tokenizer: Any, count: int, most: int) -> list[Question]:
    """Return the first `count` questions of a file that have an answer and at most `most` tokens in their prompt.

    Raises:
      ValueError: as text/questions.read raises, or there is no such question.
    """
    found: list[Question] = []
    for each in questions.read(path):
        prompt = tokenizer.encode(f"{each.context}\n\nQuestion: {each.question}\nAnswer:")
        if each.answers and len(prompt) <= most:
            found.append(Question(prompt, tokenizer.encode(f" {each.answers[0]}", add_special=False)))
        if len(found) == count:
            break
    if not found:
        raise ValueError(f"{path}: no question whose prompt has at most {most} tokens")
    return found


def loss(runner: Runner, question: Question) -> float:
    """Return the sum of the losses of an answer's tokens, nats."""
    tokens, num_wanted = question.prompt + question.answer[:-1], len(question.answer)
    blocks = range(1, 2 + len(tokens) // runner.block_size)
    logits, size = [], runner.sizes[-1]
    for start in range(0, len(tokens), size):
        part = tokens[start : start + size]
        wanted = max(0, start + len(part) - max(start, len(tokens) - num_wanted))
        step = batch_of(runner, [Rows(list(blocks), part, start, wanted)], np.zeros((0, 2), np.int32))
        logits.append(runner.run(step))
    rows = np.concatenate(logits).astype(np.float64)
    picked = rows[np.arange(num_wanted), question.answer]
    return float((scipy.special.logsumexp(rows, axis=1) - picked).sum())


def ratio(losses: Sequence[float], base: Sequence[float]) -> tuple[float, float, float]:
    """Return losses over those of another cache, with a 95 % bootstrap interval over questions."""

    def of(mine: np.ndarray, other: np.ndarray, axis: int = -1) -> Any:
        return mine.sum(axis=axis) / other.sum(axis=axis)

    mine, other = np.array(losses), np.array(base)
    drawn = scipy.stats.bootstrap(
        (mine, other), of, paired=True, vectorized=True, n_resamples=RESAMPLES, method="percentile",
        rng=np.random.default_rng(0),
    )  # fmt: skip
    return float(of(mine, other)), float(drawn.confidence_interval.low), float(drawn.confidence_interval.high)


def main() -> int:
    """Measure every cache, and show the results; return the exit code."""
    from jaxbench.pretrained import tokenizer
    from jaxbench.serve.settings import EngineConfig, load_engine

    outputs.check_file(VALUES.output, [VALUES.data], overwrite=VALUES.overwrite)
    asked = chosen(VALUES.data, tokenizer.load_tokenizer(None), VALUES.questions, VALUES.most)
    process_environment.ensure("cpu")
    found: dict[str, list[float]] = {}
    for cache in VALUES.caches:
        runner = load_engine(EngineConfig(cache=cache, cache_tokens=4096)).runner
        found[cache] = []
        with terminal.progress(len(asked)) as advance:
            for question in asked:
                found[cache].append(loss(runner, question))
                advance(1)
    tokens = sum(len(question.answer) for question in asked)
    base = found[VALUES.caches[0]]
    table = [
        {"cache": cache, "nats": sum(mine) / tokens, "over_first": ratio(mine, base)} for cache, mine in found.items()
    ]
    about = {
        "questions": len(asked), "answer_tokens": tokens, "data": Path(VALUES.data).name,
        "machine": environment.describe(threads=environment.usable_cores()),
    }  # fmt: skip
    outputs.write_json(VALUES.output, {"about": about, "table": table, "losses": found})
    for row in table:
        over = "{:.4f} [{:.4f}, {:.4f}]".format(*row["over_first"])
        print(f"{row['cache']:9s} {row['nats']:.4f} nats a token, over the first {over}")
    print(f"written: {VALUES.output}")
    return cli.EXIT_OK


if __name__ == "__main__":
    flags.DEFINE_string("data", None, "questions: a .jsonl or .jsonl.gz file", required=True)
    flags.DEFINE_list("caches", ["float32", "bfloat16", "int8"], "number types of keys and values; the first: the base")
    flags.DEFINE_integer("questions", 150, "that are asked", lower_bound=2)
    flags.DEFINE_integer("most", 400, "tokens of a prompt", lower_bound=16)
    flags.DEFINE_string("output", None, "figures: a .json file", required=True)
    flags.DEFINE_bool("overwrite", False, "replace the output")
    cli.run(main, about=__doc__)
