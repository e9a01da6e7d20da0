"""Train a decoder on a text: resumable, measured, in Flax or PyTorch.

    python experiments/train.py --config=configs/lm/tiny.yaml                        seconds, a first look
    python experiments/train.py --config=configs/lm/shakespeare_char.yaml --data=input.txt
    python experiments/train.py --config=configs/lm/books_bpe.yaml --backend=torch

Writes records.jsonl, checkpoints/, tensorboard/, summary.json and export/ (a Hugging Face folder) into --workdir.
Kill it at any moment: the same command resumes from the newest complete checkpoint, and ends with the same numbers.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from absl import flags

from jaxbench import cli, process_environment
from jaxbench.parallel import processes
from jaxbench.pretrained import small_tokenizers
from jaxbench.text import dataset


def main() -> int:
    """Run the configuration that the flags name."""
    from jaxbench.memory.train_config import MemoryTrainConfig

    values = flags.FLAGS
    settings = cli.load_config(MemoryTrainConfig)
    profile_steps = profiled(values.profile_steps, settings)
    check_searches()
    if values.memory_ladder and values.backend != "flax":
        raise ValueError(f"--memory_ladder reads XLA's memory analysis; --backend={values.backend} has none")
    for name in ("find_batch_size", "memory_ladder"):
        if values[name].value and settings.parallel is not None:
            raise ValueError(f"--{name} works on one device, got parallel.mesh={settings.parallel.mesh}")
        if values[name].value and (values.cluster or values.coordinator is not None):
            raise ValueError(f"--{name} works in one process, got --cluster or --coordinator={values.coordinator}")
    processes.check_place(values.coordinator, values.num_processes, values.process_id)
    check_input(settings)
    workdir = cli.workdir(Path("out") / f"{Path(values.config).stem}-{values.backend}")
    is_joined = values.cluster or values.coordinator is not None
    if is_joined and values.backend != "flax":
        raise ValueError(f"several processes train with --backend=flax only, got --backend={values.backend}")
    if is_joined and values.device == "cpu":  # one process may have a program in its cache, and another not
        os.environ.setdefault(process_environment.CACHES, "false")
    process_environment.ensure(values.device, library=cli.array_library())
    from jaxbench.training import checkpoint, trainer

    run_by = processes.ALONE
    if is_joined:
        join = importlib.import_module("jaxbench.parallel.distributed").start
        run_by = join(values.coordinator, values.num_processes, values.process_id)
    package = "jaxbench" if values.backend == "flax" else "torch_ref"
    importlib.import_module(f"{package}.devices").check_device(values.device)
    if settings.lora is None:
        extension = importlib.import_module(f"{package}.memory.decoder").extension(settings.memory)
    else:
        extension = importlib.import_module(f"{package}.lora.layers").extension(settings.lora)
    engine = importlib.import_module(f"{package}.training.engine").Engine
    make_engine = functools.partial(engine, extension=extension)
    if values.backend == "torch":
        make_engine = functools.partial(make_engine, device="cuda" if values.device == "gpu" else values.device)
    if values.find_batch_size:
        return find_batch_size(settings, make_engine, extension, package)
    if values.memory_ladder:
        return measure_memory_savings(settings, make_engine, workdir)
    kept = workdir / trainer.CHECKPOINTS
    cli.keep(
        f"finished checkpoints in {workdir} are kept; the same command goes on",
        when=lambda: bool(checkpoint.finished(kept)),
    )
    trainer.run(
        settings, make_engine, backend=values.backend, workdir=workdir, data_path=values.data,
        profile_steps=profile_steps, processes=run_by,
    )  # fmt: skip
    return cli.EXIT_OK


def check_searches() -> None:
    """Check the flags of --find_batch_size and --memory_ladder against each other.

    Raises:
      ValueError: both are given, a limit without either, two limits, or steps to profile although no training run
        follows.
    """
    values = flags.FLAGS
    asked = [f"--{name}" for name in ("find_batch_size", "memory_ladder") if values[name].value]
    if len(asked) == 2:
        raise ValueError(f"{asked[0]} and {asked[1]}={values.memory_ladder} end the command each; wanted one of them")
    limits = [f"--{name}={values[name].value}" for name in ("memory_mib", "memory_share") if values[name].present]
    if limits and not asked:
        raise ValueError(f"{limits[0]} is the limit of --find_batch_size and --memory_ladder; name one of them")
    if len(limits) == 2:
        raise ValueError(f"{limits[0]} and {limits[1]} are two limits; wanted one of them")
    if not 0 < values.memory_share <= 1:
        raise ValueError(f"--memory_share={values.memory_share}, wanted a share above 0, up to 1")
    if values.profile_steps is not None and asked:
        raise ValueError(f"--profile_steps={values.profile_steps} is for a training run, and {asked[0]} is none")


def check_input(settings: Any) -> None:
    """Check what can be checked before JAX starts and before anything is written.

    Raises:
      ValueError: the run cannot fit, the backend does not run on the device, or the text is not a file.
    """
    from jaxbench.bench import estimate

    values = flags.FLAGS
    if values.backend == "torch" and values.device == "tpu":
        raise ValueError(f"--backend=torch runs on cpu and gpu, got --device={values.device}; use --backend=flax")
    estimate.check_run(settings)
    named = settings.data.path if values.data is None else values.data
    if named is None:
        return
    text = Path(named).expanduser()
    if not text.is_file():
        raise ValueError(f"data: {text} is no file; name a text with --data")
    if text.suffix in (".txt", ".jsonl") and 0 < (size := text.stat().st_size) < least_bytes(settings):
        raise ValueError(
            f"data: {text} has {size} bytes, and training takes at least {least_bytes(settings)}: a token that follows "
            "another in each part; use a longer text"
        )
    if text.suffix in dataset.TOKEN_SUFFIXES and settings.data.tokenizer in small_tokenizers.KINDS:
        try:
            settings.model.resolved(None)
        except ValueError as error:
            raise ValueError(f"data: {text}: {error}") from error


def least_bytes(settings: Any) -> int:
    """Return the bytes of the shortest text with a target to train on, and one held out unless that is another file."""
    return 4 if settings.data.validation_path is None else 2


def profiled(text: str | None, settings: Any) -> tuple[int, int] | None:
    """Return the first and last step of --profile_steps=10:13.

    Raises:
      ValueError: the text is not such a range inside the run.
    """
    if text is None:
        return None
    first, colon, last = text.partition(":")
    if not (colon and first.isdecimal() and last.isdecimal() and int(first) < int(last) <= settings.steps):
        raise ValueError(f"--profile_steps={text} is not a:b with a < b <= steps={settings.steps}")
    return int(first), int(last)


def find_batch_size(settings: Any, make_engine: Any, extension: Any, package: str) -> int:
    """Print the largest batch whose step and evaluation fit, after taking one step with it.

    Sizes are told on stderr as they are compiled (JAX), traced (PyTorch on a CPU) or measured (PyTorch on a GPU): those
    of a deep decoder take minutes to compile.

    Raises:
      ValueError: no batch fits in the limit.
    """
    values = flags.FLAGS
    from jaxbench.training import largest_batch, train_inputs

    batch_size = importlib.import_module(f"{package}.training.batch_size")
    of_device, of_run, verb = batch_size.device_bytes, batch_size.run_bytes, "compiled"
    if values.backend == "torch":
        device = "cuda" if values.device == "gpu" else values.device
        of_device, of_run = functools.partial(of_device, device=device), functools.partial(of_run, device=device)
        verb = "measured" if device == "cuda" else "traced"
    data, model, params = train_inputs.prepare(settings, values.data)
    limit = limit_bytes(of_device)
    sized = lambda rows: settings.model_copy(update={"batch_size": rows})

    def bytes_of(rows: int) -> int:
        found = of_run(sized(rows), model, extension=extension)
        print(f"{verb} batch_size={rows}: {found / 2**20:.1f} MiB", file=sys.stderr)
        return found

    largest = largest_batch.find_optimal_batch_size(bytes_of, limit_bytes=limit, multiple=settings.step.accumulation)
    engine = make_engine(sized(largest.batch_size), model, params)
    metrics = engine.fetch(engine.step(data.train.batch(0, largest.batch_size), settings.learning_rate))
    print(
        f"batch_size={largest.batch_size}: {largest.run_bytes / 2**20:.1f} MiB of {limit / 2**20:.1f} MiB, "
        f"{len(largest.tried)} sizes {verb}; one step was taken with it, loss {metrics.loss:.4f}"
    )
    return cli.EXIT_OK


def limit_bytes(of_device: Callable[[], int]) -> int:
    """Return the memory that a search may fill; of_device: reads how much the device has."""
    values = flags.FLAGS
    return int(values.memory_share * of_device()) if values.memory_mib is None else values.memory_mib * 2**20


def measure_memory_savings(settings: Any, make_engine: Any, workdir: Path) -> int:
    """Print what each way of saving memory saves and costs, and write it to memory_ladder.json."""
    values = flags.FLAGS
    from jaxbench import outputs
    from jaxbench.training import batch_size, memory_savings, train_inputs

    data, model, params = train_inputs.prepare(settings, values.data)
    limit = limit_bytes(batch_size.device_bytes)
    batches = [data.train.batch(step, settings.batch_size) for step in range(values.memory_ladder + 1)]
    rows = []
    for row in memory_savings.measure(
        settings, model, lambda run: make_engine(run, model, params), batches,
        kernel="blocked" if values.device == "cpu" else "fused", limit_bytes=limit,
    ):  # fmt: skip
        rows.append(row)
        print(f"compiled {len(rows)} of {len(memory_savings.SAVINGS)}: {row.name}", file=sys.stderr)
    count = sum(value.size for value in params.values())
    facts = {"parameters": int(count), "vocabulary": model.vocab_size, "sequence": settings.data.seq_len}
    facts |= {"batch": settings.batch_size, "precision": settings.step.precision, "limit_bytes": limit}
    print(", ".join(f"{name} {value}" for name, value in facts.items()))
    print(memory_savings.table(rows, limit_bytes=limit))
    content = {"facts": facts, "rows": [row._asdict() for row in rows], "config": settings.model_dump(mode="json")}
    outputs.write_json(workdir / "memory_ladder.json", content)
    return cli.EXIT_OK


if __name__ == "__main__":
    cli.define_config("configs/lm/tiny.yaml")
    cli.define_data()
    cli.define_backend(choices=("flax", "torch"))
    cli.define_device()
    cli.define_workdir()
    flags.DEFINE_string("profile_steps", None, "a:b writes a trace of steps a + 1 to b into profile/ of the workdir")
    flags.DEFINE_bool("find_batch_size", False, "print the largest batch_size whose step and evaluation fit, and end")
    about = "this many steps under one way of saving memory after another: bytes, tokens/s, MFU of each; and end"
    flags.DEFINE_integer("memory_ladder", 0, about, lower_bound=0)
    about = "limit for --find_batch_size and --memory_ladder (unset: what the device has)"
    flags.DEFINE_integer("memory_mib", None, about, lower_bound=1)
    flags.DEFINE_float("memory_share", 1.0, "of what the device has, in place of --memory_mib: the same limit")
    flags.DEFINE_bool("cluster", False, "run together with the other processes of a SLURM, Open MPI or Kubernetes job")
    flags.DEFINE_string("coordinator", None, "host:port of the first process, where no cluster says it")
    flags.DEFINE_integer("num_processes", None, "processes that run together, beside --coordinator", lower_bound=1)
    flags.DEFINE_integer("process_id", None, "which of them this is, from 0", lower_bound=0)
    cli.run(main, about=__doc__)
