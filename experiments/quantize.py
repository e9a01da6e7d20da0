"""Write a model with fewer bits a weight: a GGUF file that llama.cpp and jaxbench's native kernels read.

    quantize.py --format=q4_0 --output=model-q4_0.gguf                  the default model
    quantize.py --model=MODEL.gguf --format=q8_0 --output=FILE.gguf

Weights are rounded to nearest by ggml's rules, in groups of 32. Bad input ends with exit code 2 and one line.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from absl import flags

from jaxbench import cli

VALUES = flags.FLAGS
FORMATS = ("q8_0", "q4_0", "q4_1", "bfloat16", "float32")


def main() -> int:
    """Write the file and say what rounding changed."""
    from jaxbench.quantization import gguf_export

    if not VALUES.output:
        raise ValueError(f"--output={VALUES.output!r} is missing: name a .gguf file")
    written = gguf_export.export(
        VALUES.model, VALUES.output, format=VALUES.format, embedding=VALUES.embedding, overwrite=VALUES.overwrite
    )
    found = gguf_export.summary(written)
    print(
        f"{written.path}: {found['bytes'] / 1e6:.1f} MB (of {found['source_bytes'] / 1e6:.1f}), {found['rounded']} "
        f"matrices rounded, relative error {found['error_median']:.2e} (median), {found['error_largest']:.2e} (largest)"
    )
    return cli.EXIT_OK


if __name__ == "__main__":
    cli.define_model()
    flags.DEFINE_enum("format", "q4_0", FORMATS, "of the layers' matrices")
    flags.DEFINE_enum("embedding", None, FORMATS, "of embedding and head (unset: q8_0 with four bits, else --format)")
    flags.DEFINE_string("output", None, "the file to write")
    flags.DEFINE_bool("overwrite", False, "replace a file that is there")
    cli.run(main, about=__doc__)
