"""Few vectors in place of many tokens, for a decoder that reads them.

    compress.py train --config=configs/compress/cpu.yaml --data=books.jsonl.gz --held_out=others.jsonl.gz

A run of `train` that is killed goes on with the same command. Bad input ends with exit code 2 and one line.
docs/compression.md
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from absl import flags

from jaxbench import cli, process_environment, terminal

VALUES = flags.FLAGS
HELD_OUT = 0.1  # share of --data, where nothing else is named


def define_train() -> None:
    """Define the flags of train."""
    cli.define_config("configs/compress/cpu.yaml")
    cli.define_data()
    flags.DEFINE_string("held_out", None, "other text, for held-out figures; unset: the last tenth of --data")
    cli.define_workdir("out/compress")


def train() -> int:
    """Train a compressor."""
    from jaxbench.compress.train_config import TrainingConfig

    settings = cli.load_config(TrainingConfig)
    process_environment.ensure("cpu")
    from jaxbench.compress import rows, training
    from jaxbench.pretrained import tokenizer, weights
    from jaxbench.text import dataset

    shape = settings.shape(weights.read_config(settings.model))
    words = tokenizer.load_tokenizer(settings.model)
    corpus = dataset.prepare(VALUES.data, tokenizer=words)
    if VALUES.held_out is None:
        corpus, other = dataset.split(corpus, HELD_OUT)
    else:
        other = dataset.prepare(VALUES.held_out, tokenizer=words)
    named = [VALUES.data or "default", VALUES.held_out or f"the last {HELD_OUT:.0%} of {VALUES.data or 'default'}"]
    texts = []
    for each, name in zip((corpus, other), named):
        dataset.check(each, vocab_size=shape.decoder.vocab_size, what=f"the text {name}")
        texts.append([each.ids[a:b] for a, b in itertools.pairwise(each.starts)])
        rows.draw(texts[-1], shape, settings.rows, seed=settings.seed, step=0)  # what does not fit is said at once
    held = weights.load_checkpoint(settings.model)
    workdir = cli.workdir("out/compress")
    cli.keep(f"checkpoints are in {workdir}; the same command goes on")
    with terminal.progress(settings.steps) as advance:
        training.train(settings, held, *texts, workdir, say=lambda line: print(line, flush=True), progress=advance)
    print(f"written: {workdir}/{training.RECORDS} and {workdir}/{training.CHECKPOINTS}")
    return cli.EXIT_OK


COMMANDS = {"train": cli.Command(define_train, train, "Train a compressor on text, resumable.")}

if __name__ == "__main__":
    cli.run_commands(COMMANDS, about=__doc__)
