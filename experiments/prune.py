"""Prune a model, or measure what sparsity is worth here.

    prune.py model --method=wanda --fraction=0.5 --output=FOLDER           half of the weights become zero
    prune.py model --method=2:4 --finetune_steps=200 --output=FOLDER       two of every four; trained on with zeros held
    prune.py model --method=structured --keep_d_ff=1024 --output=FOLDER    a narrower model, whose products are smaller
    prune.py speed                                                         dense versus sparse, in one process

`model` writes a Hugging Face folder, complete or not at all, which every command here and transformers read, with
pruning.json: what was removed, and the held-out loss before and after. Bad input ends with exit code 2 and one line.
Methods and limits: docs/sparsity.md.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from absl import flags

from jaxbench import cli, outputs, process_environment

VALUES = flags.FLAGS
SPEED_HEADS = {"num_heads": 9, "num_kv_heads": 3, "head_dim": 64}  # those of SmolLM2-135M


def define_model_flags() -> None:
    """Define the flags of `model`."""
    from jaxbench.quantization import prune_run, pruning

    defaults = prune_run.Settings("magnitude")._asdict()
    cli.define_model()
    cli.define_data()
    flags.DEFINE_enum("method", None, prune_run.METHODS, "what is removed; wanda: judged by the text's inputs too")
    flags.DEFINE_string("output", None, "the folder to write")
    flags.DEFINE_float("fraction", None, "magnitude, wanda: share of the layers' weights that become zero")
    flags.DEFINE_enum("scope", None, pruning.SCOPES, "magnitude, wanda: what --fraction is counted in (unset: matrix, "
                      "with wanda output)")  # fmt: skip
    about = {
        "keep_kv_heads": (1, "structured: key-value heads that each layer keeps, with their query heads (unset: all)"),
        "keep_d_ff": (1, "structured: feed-forward units that each layer keeps (unset: all)"),
        "batches": (0, "of the text for wanda, and held-out ones for the loss; 0 = no loss"),
        "batch_size": (1, "rows of a batch"),
        "seq_len": (2, "tokens of a row"),
        "finetune_steps": (0, "optimiser steps after pruning, zeros held; longer runs: train.py"),
        "seed": (0, "order of the text"),
    }
    for name, (low, text) in about.items():
        flags.DEFINE_integer(name, defaults[name], text, lower_bound=low)
    flags.DEFINE_float("learning_rate", defaults["learning_rate"], "AdamW's peak in fine-tuning")


def prune_model() -> int:
    """Write the pruned model, and print what was removed."""
    from jaxbench.quantization import prune_run

    if VALUES.method is None:
        raise ValueError(f"--method={VALUES.method} is missing: pass one of {', '.join(prune_run.METHODS)}")
    settings = prune_run.Settings(**{name: VALUES[name].value for name in prune_run.Settings._fields})
    prune_run.check(settings)
    check_idle(settings)
    process_environment.ensure("cpu")
    result = prune_run.run(
        VALUES.model, VALUES.output, settings, data_path=VALUES.data,
        say=lambda line: print(line, file=sys.stderr),
    )  # fmt: skip
    print(f"{prune_run.summary(result, settings)}; written: {result.path}")
    return cli.EXIT_OK


def check_idle(settings: Any) -> None:
    """Check that no given flag is without effect next to the others.

    Raises:
      ValueError: a rate without steps, or settings of a text that is not read.
    """
    if VALUES["learning_rate"].present and not settings.finetune_steps:
        raise ValueError(f"--learning_rate={settings.learning_rate} is for fine-tuning; pass --finetune_steps too")
    if not settings.batches and not settings.finetune_steps:
        for name in ("data", "batch_size", "seq_len", "seed"):
            if VALUES[name].present:
                raise ValueError(
                    f"--{name}={VALUES[name].value}: no text is read with --batches=0 and no --finetune_steps; leave "
                    "it out"
                )


def define_speed_flags() -> None:
    """Define the flags of `speed`."""
    flags.DEFINE_multi_integer("tokens", [1, 128], "tokens that a feed-forward layer gets at once", lower_bound=1)
    flags.DEFINE_multi_integer("length", [1024, 4096], "tokens of a row under attention", lower_bound=1)
    for name, value, low, about in (
        ("d_model", 576, 1, "width of the residual stream"),
        ("d_ff", 1536, 2, "width of the feed-forward layer"),
        ("block_size", 64, 1, "tokens of an attention block"),
        ("local", 4, 1, "blocks that a block sees back from itself, itself included"),
        ("first", 1, 0, "blocks at the row's start that every block sees"),
        ("rounds", 20, 2, "visits of each arm"),
        ("repeats", 5, 1, "calls of a visit, of which the median counts"),
    ):
        flags.DEFINE_integer(name, value, about, lower_bound=low)
    flags.DEFINE_integer("stride", None, "every stride-th block before is seen too (unset: none)", lower_bound=1)
    flags.DEFINE_string("output", None, "JSON file of the figures")
    flags.DEFINE_bool("overwrite", False, "replace a file that is there")


def measure_speed() -> int:
    """Measure, print the table, and write it if asked to."""
    for name in ("d_model", "d_ff"):
        if VALUES[name].value % 4:
            raise ValueError(f"--{name}={VALUES[name].value} is not a multiple of 4, which 2:4 needs")
    if VALUES.output is not None:
        outputs.check_file(VALUES.output, overwrite=VALUES.overwrite)
    process_environment.ensure("cpu")
    from jaxbench.block_pattern import BlockPattern
    from jaxbench.measure import environment
    from jaxbench.quantization import sparsity_speed

    often, rows = {"rounds": VALUES.rounds, "repeats": VALUES.repeats}, []
    shape = {"d_model": VALUES.d_model, "d_ff": VALUES.d_ff}
    pattern = BlockPattern(**{name: VALUES[name].value for name in ("block_size", "local", "first", "stride")})
    for tokens in VALUES.tokens:
        arms = sparsity_speed.feed_forward_arms(tokens, **shape)
        rows += sparsity_speed.measure(f"feed-forward, {tokens} tokens", arms, **often)
    for length in VALUES.length:
        arms = sparsity_speed.attention_arms(length, pattern, **SPEED_HEADS)
        rows += sparsity_speed.measure(f"attention, {length} tokens", arms, **often)
    print(sparsity_speed.table(rows))
    print("Weights stored dense take the dense program: their zeros are multiplied. 2:4 needs a GPU's sparse units.")
    if VALUES.output is not None:
        facts = {"shape": shape, "heads": SPEED_HEADS, "pattern": pattern.model_dump(), **often}
        facts |= {
            "environment": environment.describe(threads=environment.usable_cores()),
            "rows": [row._asdict() for row in rows],
        }
        outputs.write_json(VALUES.output, facts)
    return cli.EXIT_OK


COMMANDS = {
    "model": cli.Command(define_model_flags, prune_model, "a model with fewer weights, as a Hugging Face folder"),
    "speed": cli.Command(define_speed_flags, measure_speed, "what sparsity is worth in time on this machine"),
}


if __name__ == "__main__":
    cli.run_commands(COMMANDS, about=__doc__)
