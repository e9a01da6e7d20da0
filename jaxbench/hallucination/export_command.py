"""The command that writes a detector for other runtimes: hallucination.py export (S file)."""

from __future__ import annotations

import time
from pathlib import Path

from absl import flags

from jaxbench import cli, process_environment

ABOUT = "A detector and its reader for other runtimes: ONNX, StableHLO or safetensors."
VALUES = flags.FLAGS


def define() -> None:
    """Define the flags of export."""
    from jaxbench.hallucination import portable

    cli.define_model()
    flags.DEFINE_string("detector", None, "what `fit` wrote")
    flags.DEFINE_enum("format", None, list(portable.KINDS), "what its reader becomes")
    flags.DEFINE_string("output", None, "a folder, which `detect --detector=FOLDER` reads")
    about = f"tokens of prompt and response that programs take (unset: {portable.WINDOW}); not of safetensors"
    flags.DEFINE_integer("window", None, about, lower_bound=16)
    flags.DEFINE_bool("overwrite", False, "replace an export that is there")


def export() -> int:
    """Write a detector and its reader into a folder.

    Raises:
      ValueError: a flag is missing, or as portable.check and portable.write.
    """
    for name, what in {"detector": "what `fit` wrote", "format": "one", "output": "a folder"}.items():
        cli.require_flag(name, what)
    kind = VALUES["format"].value
    process_environment.ensure("cpu", library="PyTorch" if kind == "onnx" else "XLA")
    from jaxbench.hallucination import portable, saved_detector

    model = None if VALUES.model == "default" else VALUES.model
    inputs = (VALUES.detector, model)
    how = {"model": model, "window": VALUES.window}
    folder = portable.check(VALUES.output, kind, inputs=inputs, overwrite=VALUES.overwrite, **how)
    saved = saved_detector.load(VALUES.detector)
    started = time.monotonic()
    portable.write(folder, saved, kind, package="torch_ref" if kind == "onnx" else "jaxbench", **how)
    size = sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())
    print(f"written: {folder} ({size / 1e6:.0f} MB in {time.monotonic() - started:.0f} s)")
    return cli.EXIT_OK
