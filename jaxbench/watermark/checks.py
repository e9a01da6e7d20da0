"""Flag checks of the watermark commands, before anything is loaded or written (S file)."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from absl import flags

from jaxbench import cli, outputs, process_environment

VALUES = flags.FLAGS
FILE_FLAGS = ("output", "field", "prompt_field", "processes", "engine", "overwrite", "score_cache")  # for --input only
TEXT_FLAGS = ("prompt_tokens",)  # for --text only


def say_text(*, folders: bool = False) -> None:
    """Print the file (with `folders`: or folder) that --data names, and the sha256 that the results carry.

    A missing path, or a folder without `folders`, prints nothing: the command reports it when it reads the data.
    """
    from jaxbench.watermark.study import evaluate_data

    if VALUES.data is None:
        return
    path = Path(VALUES.data).expanduser()
    if path.is_file() or (folders and path.is_dir()):
        print(f"text: {VALUES.data}, sha256 {evaluate_data.fingerprint(VALUES.data)}", flush=True)


def check_device() -> None:
    """Raise if --backend has no --device, before anything is written or loaded; JAX starts here."""
    backend = VALUES.backend if "backend" in VALUES else "flax"
    if backend == "numpy":
        if VALUES.device != "cpu":
            raise ValueError(f"--device={VALUES.device}: --backend=numpy runs on the CPU; leave one of them out")
        return
    if backend != "torch":
        process_environment.ensure(VALUES.device)
    importlib.import_module("torch_ref.devices" if backend == "torch" else "jaxbench.devices").check_device(
        VALUES.device
    )


def check_where(*read: str | None) -> None:
    """Raise unless --text, or --input and --output, are given with matching flags (`read`: further input files)."""
    given = [name for name in ("text", "input") if VALUES[name].value is not None]
    if len(given) != 1:
        raise ValueError(f"give either --text or --input, got {' and '.join(given) or 'none'}")
    if VALUES.text is not None and any("\ud800" <= letter <= "\udfff" for letter in VALUES.text):
        raise ValueError(f"--text={VALUES.text[:60]!a} is not UTF-8")
    if given == ["input"] and VALUES.output is None:
        raise ValueError(f"--input={VALUES.input} needs --output=FILE.parquet (or .jsonl, .csv)")
    idle = FILE_FLAGS if given == ["text"] else TEXT_FLAGS
    unused = [name for name in idle if name in VALUES and VALUES[name].present]
    if unused:
        other = "input" if given == ["text"] else "text"
        raise ValueError(f"--{unused[0]} is for --{other} and would do nothing with --{given[0]}; leave it out")
    if not 0 < VALUES.level < 1:
        raise ValueError(f"--level={VALUES.level}: wanted a p-value between 0 and 1")
    if given == ["input"]:
        from jaxbench.text import lines
        from jaxbench.watermark.bulk import part_files

        part_files.kind_of(Path(VALUES.output))
        outputs.check_file(VALUES.output, [*lines.find(VALUES.input), *read], overwrite=VALUES.overwrite)
    check_device()


def vocab_size(model: str | None, candidates: tuple[Any, ...]) -> int | None:
    """Return --vocab_size, or else the width of --model's logits where its tokenizer has fewer tokens, or else None.

    Raises:
      ValueError: --vocab_size does not fit the schemes, or is smaller than the tokenizer of --model.
    """
    from jaxbench.pretrained import weights
    from jaxbench.pretrained.tokenizer import load_tokenizer
    from jaxbench.watermark.detection import checked_scheme
    from jaxbench.watermark.texts import check_sizes

    if VALUES.vocab_size is not None:
        for candidate in candidates:
            checked_scheme(candidate.scheme, VALUES.vocab_size)
        check_sizes(load_tokenizer(model).vocab_size, VALUES.vocab_size)
        return VALUES.vocab_size
    if model is None:
        return None
    try:
        size = weights.read_config(model).vocab_size
    except ValueError:  # a folder with only a tokenizer, or a model that jaxbench cannot run
        return None
    return size if size > load_tokenizer(model).vocab_size else None


def check_workdir(*written: str) -> None:
    """Raise if --workdir cannot be a folder, or if --data is one of the files that are written there."""
    cli.require_flag("workdir", "a folder")
    folder = outputs.check_folder(VALUES.workdir)
    for name in written:
        outputs.check_file(folder / name, [VALUES.data], overwrite=True, flag="--workdir")
