"""Time a command from its start to the first token, and the loading of a model, versus llama.cpp.

    startup.py                                      12 rounds of whole processes, alternating: 3 minutes
    startup.py --only=load --rounds=20 --output=startup.json

Each round starts every program once, in alternating order; a row has its median seconds and, with an interval over
rounds, its ratio to llama.cpp's (above 1: slower). llama.cpp is llama-bench of `make peers`; if it is not built, its
rows and the ratios are missing. Loading is timed inside a process that has imported what it needs: it reads, checks and
packs the file and builds the model. For llama.cpp, it is the time of its process minus those of its start without a
model and of its token. --output is written after every round, so that an interrupt keeps the rounds before it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from absl import flags

from jaxbench import cli, outputs, process_environment
from jaxbench.measure import process

VALUES = flags.FLAGS
PROMPT = "The capital of France is"  # 5 tokens
LOAD = """
import time, jax
from jaxbench.native import checkpoint, library, model
jax.devices(), library.load()
started = time.perf_counter()
jax.block_until_ready(jax.tree.leaves(model.build(checkpoint.load({spec!r}), cache_dtype="bfloat16")))
print(time.perf_counter() - started)
"""
TORCH_LOAD = """
import time, torch
from jaxbench.native import checkpoint, library
from torch_ref.native import model
library.load()
started = time.perf_counter()
model.build(checkpoint.load({spec!r}), cache_dtype="bfloat16")
print(time.perf_counter() - started)
"""


def define() -> None:
    """Define the flags."""
    cli.define_model()
    flags.DEFINE_integer("rounds", 12, "processes of each program", lower_bound=2, upper_bound=1000)
    flags.DEFINE_string("only", "", "rows whose name has this in it, such as load; unset: all")
    flags.DEFINE_string("output", None, "JSON file of all seconds; unset: the table alone")
    flags.DEFINE_bool("overwrite", False, "replace the output; never a file of the model")


def check_output() -> None:
    """Check that --output may be written.

    Raises:
      ValueError: it is a file of the model, exists without --overwrite, or cannot be written.
    """
    from jaxbench.pretrained import assets

    model = assets.default_model_path() if VALUES.model == "default" else Path(VALUES.model).expanduser()
    files = list(model.rglob("*")) if model.is_dir() else [model]
    outputs.check_file(VALUES.output, files, overwrite=VALUES.overwrite)


def seconds_of(command: list[str]) -> tuple[float, str]:
    """Return the wall time of a process, and what it printed.

    Raises:
      ValueError: it failed; its last line is given.
    """
    started = time.perf_counter()
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    seconds = time.perf_counter() - started
    if done.returncode:
        last = process.last_line(done.stderr, "nothing on stderr")
        raise ValueError(f"{Path(command[0]).name} {command[1][:40]!r} ended with {done.returncode}: {last}")
    return seconds, done.stdout


def llama_bench(program: str, file: str) -> dict[str, Callable[[], float]]:
    """llama-bench with and without work."""
    base = [program, "-m", file, "-r", "1", "--no-warmup", "-t", str(process_environment.usable_cores()), "-o", "json"]

    def load() -> float:
        empty, _ = seconds_of([*base, "-p", "0", "-n", "0"])
        wall, printed = seconds_of([*base, "-p", "0", "-n", "1"])
        return wall - empty - json.loads(printed)[0]["samples_ns"][0] / 1e9

    return {
        "first token, llama-bench": lambda: seconds_of([*base, "-p", "5", "-n", "1"])[0],
        "load, llama-bench": load,
    }


def programs() -> dict[str, Callable[[], float]]:
    """Return the timed programs by the names of their rows; llama.cpp first, if it is built.

    Raises:
      ValueError: no row has --only in its name.
    """
    from jaxbench.bench.arms import llama_bench as arm
    from jaxbench.pretrained import weights

    spec = None if VALUES.model == "default" else VALUES.model
    path = weights.resolve(spec)
    weights.read_config(path)  # a damaged file is reported once here, not in each process
    program = shutil.which(str(Path(os.environ.get("JAXBENCH_LLAMA_CPP") or arm.FOLDER) / "llama-bench"))
    generate = [sys.executable, str(Path(__file__).parent / "generate.py"), f"--prompt={PROMPT}", "--new_tokens=1"]
    generate.append(f"--model={VALUES.model}")

    def whole(*command: str) -> Callable[[], float]:
        return lambda: seconds_of(list(command))[0]

    def inside(code: str) -> Callable[[], float]:
        return lambda: float(seconds_of([sys.executable, "-c", code.format(spec=spec and str(path))])[1])

    found = llama_bench(program, str(path)) if program and path.is_file() else {}
    found |= {
        "first token, Flax native": whole(*generate, "--kernels=native"),
        "first token, PyTorch native": whole(*generate, "--kernels=native", "--backend=torch"),
        "first token, Flax XLA": whole(*generate, "--kernels=xla"),
        "start of Python and JAX": whole(sys.executable, "-c", "import jax; jax.devices()"),
        "start of Python, JAX and Flax": whole(sys.executable, "-c", "import jax; jax.devices(); from flax import nnx"),
        "load, Flax native": inside(LOAD),
        "load, PyTorch native": inside(TORCH_LOAD),
    }
    chosen = {name: run for name, run in found.items() if VALUES.only in name}
    if not chosen:
        raise ValueError(f"--only={VALUES.only} is in no row's name: {'; '.join(found)}")
    return chosen


def main() -> int:
    """Time all programs alternately, and print the table."""
    process_environment.ensure("cpu")
    if VALUES.output is not None:
        check_output()
    os.environ["PYTHONPATH"] = str(Path(__file__).resolve().parents[1])
    import rich.progress
    import rich.table

    from jaxbench import terminal
    from jaxbench.measure import environment, process, verdicts

    cli.keep("", when=lambda: False)
    timed = programs()
    for name in timed:  # a first run builds programs and caches
        timed[name]()
    seconds: dict[str, list[float]] = {name: [] for name in timed}
    about = environment.describe(threads=environment.usable_cores())
    for index in rich.progress.track(range(VALUES.rounds), "rounds", console=terminal.console(stderr=True)):
        found = {name: timed[name]() for name in process.turn(list(timed), index)}
        for name, each in found.items():  # only complete rounds count
            seconds[name].append(each)
        if VALUES.output is not None:
            outputs.write_json(VALUES.output, {"seconds": seconds, "environment": about})
            cli.keep(f"{index + 1} of {VALUES.rounds} rounds are in {VALUES.output}")
    table = rich.table.Table("program", "median s", "ratio to llama.cpp", "95 %")
    for name, found in seconds.items():
        reference = seconds.get(f"{name.partition(',')[0]}, llama-bench")
        row = [name, f"{verdicts.median(found):.3f}", "", ""]
        if reference and reference is not found and min(reference) > 0:  # a tiny model loads in less than noise
            logs = [verdicts.log_ratio([a], [b], higher_is_better=True) for a, b in zip(found, reference, strict=True)]
            ratio, low, high = verdicts.t_interval(logs).ratio()
            row[2:] = [f"{ratio:.2f}", f"[{low:.2f}, {high:.2f}]"]
        table.add_row(*row)
    terminal.console().print(table)
    return cli.EXIT_OK


if __name__ == "__main__":
    define()
    cli.run(main, about=__doc__)
