"""The command `jaxbench pair FILE`: compare the pair of models that a Python file describes (S file).

The file defines a function `pair` that takes no arguments and returns a `jaxbench.Pair`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from absl import flags

from jaxbench import cli, process_environment
from jaxbench.pair import pair_file, speed

ABOUT = """Compare a JAX model with a PyTorch module: the same function? where not, and why?

    jaxbench pair FILE       FILE defines pair() -> jaxbench.Pair(jax_side, torch_module, inputs, ...)

    jaxbench pair FILE --speed       and how fast is each side? forward, backward, optimiser step, compiled and not

Writes pair.json and pair.html into --workdir, with --speed also speed.json and speed.html. Ends with 1 where they are
not the same function, and names the module where the difference starts, the one that causes it and the likely cause.
docs/your_own_pair.md has examples."""


def define_flags() -> None:
    """Define this command's flags."""
    flags.DEFINE_string("file", None, "Python file that defines pair(); may be written without --file=")
    cli.define_workdir("out/pair")
    flags.DEFINE_bool("speed", False, "time both sides too, in fresh processes")
    flags.DEFINE_list("dtypes", ["float32"], "types to time: float32, bfloat16")
    flags.DEFINE_list("arms", list(speed.ARMS), "what to time")
    flags.DEFINE_integer("launches", 5, "sets of fresh processes; the intervals are over them")
    flags.DEFINE_float("seconds", 0.5, "of samples, for every arm, part and round of a launch")
    flags.DEFINE_integer("threads", None, "cores to use (unset: all)")


def main() -> int:
    """Compare the pair; return 1 if the two sides are not the same function."""
    values = flags.FLAGS
    if values.file is None or not Path(values.file).is_file():
        pair_file.load(values.file)  # raises now, before the heavy imports
    settings = speed.checked(
        speed.Settings(tuple(values.dtypes), tuple(values.arms), values.launches, values.seconds, values.threads)
    )
    process_environment.ensure("cpu")
    from jaxbench import outputs
    from jaxbench.pair import proof, report
    from jaxbench.pair.public_types import checked

    name, folder = Path(values.file).stem, cli.workdir("out/pair")
    pair = pair_file.load(values.file)
    try:
        pair = checked(pair)
        result = proof.run(pair)
    except Exception as error:  # the file's own models, optimisers and functions may raise anything
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        raise ValueError(f"--file={values.file}: {kind}{pair_file.first_line(error)}") from error
    report.show(result, name=name)
    outputs.write_json(folder / "pair.json", report.as_dict(result, name=name))
    report.write_page(folder / "pair.html", result, name=name)
    print(f"written: {folder / 'pair.json'}, {folder / 'pair.html'}")
    if values.speed:
        _time(pair, settings, folder)
    return cli.EXIT_OK if result.passed else cli.EXIT_GATE


def _time(pair: Any, settings: speed.Settings, folder: Path) -> None:
    """Time the pair, show the tables and write them."""
    from jaxbench import outputs
    from jaxbench.pair import proof, speed_report

    path, say = Path(flags.FLAGS.file), lambda line: print(line, file=sys.stderr, flush=True)
    has_optimizers = pair.optimizers is not None
    timed = speed.run(path, proof.weights(pair), settings, folder, has_optimizers=has_optimizers, say=say)
    speed_report.show(timed)
    outputs.write_json(folder / "speed.json", timed._asdict())
    speed_report.write_page(folder / "speed.html", timed, name=path.stem)
    print(f"written: {folder / 'speed.json'}, {folder / 'speed.html'}")
