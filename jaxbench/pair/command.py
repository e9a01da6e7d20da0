"""The command `jaxbench pair FILE`: compare the pair of models that a Python file describes (S file).

The file defines a function `pair` that takes nothing and returns a `jaxbench.Pair`.
"""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

from absl import flags

from jaxbench import cli, process_environment

ABOUT = """Compare a JAX model with a PyTorch module: the same function? where not, and why?

    jaxbench pair FILE       FILE defines pair() -> jaxbench.Pair(jax_side, torch_module, inputs, ...)

Writes pair.json and pair.html into --workdir. Ends with 1 where they are not the same function, and names the module
where the difference starts, the one that causes it and the likely cause. docs/your_own_pair.md has examples."""


def define_flags() -> None:
    """Define what this command has."""
    flags.DEFINE_string("file", None, "Python file that defines pair(); may be written without --file=")
    cli.define_workdir("out/pair")


def load(path: str | None) -> Any:
    """Pair that a file describes.

    Raises:
      ValueError: there is no such file, it fails, or it defines no function `pair` that returns a jaxbench.Pair.
    """
    if path is None:
        raise ValueError(f"--file={path}: name a Python file that defines pair()")
    if not Path(path).is_file():
        raise ValueError(f"--file={path}: no such file")
    try:
        names = runpy.run_path(path)
    except Exception as error:
        raise ValueError(f"--file={path}: {type(error).__name__}: {error}") from error
    if not callable(names.get("pair")):
        raise ValueError(f"--file={path}: defines no function pair()")
    from jaxbench.pair.contract import Pair

    pair = names["pair"]()
    if not isinstance(pair, Pair):
        raise ValueError(f"--file={path}: pair() returns a {type(pair).__name__}, wanted jaxbench.Pair(...)")
    return pair


def main() -> int:
    """Compare the pair; 1 where it is not the same function."""
    values = flags.FLAGS
    if values.file is None or not Path(values.file).is_file():
        load(values.file)  # before anything heavy starts
    process_environment.ensure("cpu")
    from jaxbench import outputs
    from jaxbench.pair import proof, report
    from jaxbench.pair.contract import checked

    name, folder = Path(values.file).stem, cli.workdir("out/pair")
    result = proof.run(checked(load(values.file)))
    report.show(result, name=name)
    outputs.write_json(folder / "pair.json", report.as_dict(result, name=name))
    report.write_page(folder / "pair.html", result, name=name)
    print(f"written: {folder / 'pair.json'}, {folder / 'pair.html'}")
    return cli.EXIT_OK if result.passed else cli.EXIT_GATE
