"""Write a model with fewer bits a weight.

    quantize.py --format=q4_0 --output=model-q4_0.gguf                  the default model, as llama.cpp rounds
    quantize.py --format=q4_0 --rounding=gptq --equalize=awq --output=model-gptq.gguf
    quantize.py --bits=3 --group_size=32 --rounding=gptq --output=model-w3       a folder in compressed-tensors' layout
    quantize.py --format=int8 --activations=dynamic --equalize=smoothquant --output=model-w8a8
    quantize.py --format=int8 --activations=static --activation_scales=percentile --output=model-w8a8-static

An --output that ends in .gguf is a GGUF file, which llama.cpp and jaxbench's native kernels read; any other is a
Hugging Face folder, which vLLM, transformers and jaxbench read. GPTQ, AWQ, SmoothQuant and static activations are
calibrated on --data. Bad input ends with exit code 2 and one line.
"""

from __future__ import annotations

import functools
import importlib
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from absl import flags

from jaxbench import cli, process_environment, terminal

VALUES = flags.FLAGS
say = functools.partial(print, file=sys.stderr, flush=True)
GGUF_FORMATS = ("q8_0", "q4_0", "q4_1", "bfloat16", "float32")
GRIDS = ("q8_0", "q4_0", "q4_1", "int8")
OF_GRID = ("bits", "group_size", "zero")  # what --format=int is made of
OF_RECIPE = ("scales", "rounding", "equalize", "activations", "activation_scales")
OF_CALIBRATION = ("data", "rows", "length", "backend")
SIDES = {"flax": "jaxbench.quantization.inputs", "torch": "torch_ref.quantization.inputs"}


def define() -> None:
    """Define the flags."""
    from jaxbench.quantization import grids

    cli.define_model()
    formats = ["int8", "int", *GGUF_FORMATS]
    flags.DEFINE_enum("format", None, formats, "of the layers' matrices (unset: q4_0, with --bits int)")
    flags.DEFINE_enum("embedding", None, GGUF_FORMATS, "of a GGUF file's embedding and head (q8_0 with four bits)")
    flags.DEFINE_integer("bits", None, "of a weight, with --format=int", lower_bound=2, upper_bound=8)
    flags.DEFINE_integer("group_size", 32, "inputs that share a scale, 0 = all, with --format=int", lower_bound=0)
    flags.DEFINE_enum("zero", "none", ["none", "integer"], "integer: each group has a zero point, with --format=int")
    flags.DEFINE_enum("scales", None, list(grids.RULES), "how scales are chosen (unset: minmax; mse with AWQ alone)")
    flags.DEFINE_enum("rounding", "nearest", ["nearest", "gptq"], "of the weights")
    flags.DEFINE_enum("equalize", "none", ["none", "awq", "smoothquant"], "channels scaled before rounding")
    flags.DEFINE_enum("activations", "float", ["float", "dynamic", "static"], "of a folder in int8: 8 bits or not")
    about = "how the ranges of --activations=static are chosen: percentile leaves the largest 0.01 % of inputs out"
    flags.DEFINE_enum("activation_scales", "percentile", list(grids.RULES), about)
    flags.DEFINE_string("output", None, "the .gguf file or the folder to write")
    flags.DEFINE_bool("overwrite", False, "replace a file that is there")
    cli.define_data()
    flags.DEFINE_integer("rows", 128, "of calibration text", lower_bound=1, upper_bound=10**6)
    flags.DEFINE_integer("length", 256, "tokens of a calibration row", lower_bound=2, upper_bound=10**6)
    cli.define_backend(choices=tuple(SIDES))


def check_flags() -> Any:
    """Return the recipe that the flags describe; None for a GGUF file that is rounded by ggml's own rules.

    Raises:
      ValueError: flags that contradict each other.
    """
    from jaxbench.quantization import grids, recipe

    if not VALUES.output:
        raise ValueError(f"--output={VALUES.output!r} is missing: name a .gguf file or a folder")
    is_gguf = VALUES.output.endswith(".gguf")
    format = VALUES.format or ("int" if VALUES["bits"].present else "q4_0")
    if format != "int":
        for name in OF_GRID:
            if VALUES[name].present:
                raise ValueError(f"--{name}={VALUES[name].value} goes with --format=int, and it is {format}")
    if is_gguf and format in ("int", "int8"):
        raise ValueError(f"--format={format} has no type in GGUF, wanted {', '.join(GGUF_FORMATS)}; or name a folder")
    if not is_gguf and format not in ("int", "int8", "q4_0", "q8_0"):
        raise ValueError(
            f"--format={format} with a folder ({VALUES.output}), wanted int, int8, q4_0 or q8_0; or name a .gguf file"
        )
    if not is_gguf and VALUES.embedding is not None:
        raise ValueError(f"--embedding={VALUES.embedding} is for .gguf files, and --output={VALUES.output}")
    asked = [name for name in (*OF_RECIPE, *OF_CALIBRATION) if VALUES[name].present]
    if is_gguf and (format not in GRIDS or not asked):
        if asked:
            raise ValueError(f"--{asked[0]}={VALUES[asked[0]].value} does nothing with --format={format}; leave it out")
        return None
    if is_gguf and VALUES.embedding not in (None, "q8_0"):
        raise ValueError(f"--embedding={VALUES.embedding} with --{asked[0]}: wanted q8_0, or leave it out")
    if is_gguf and VALUES.activations != "float":
        raise ValueError(f"--activations={VALUES.activations}: a GGUF file has none, name a folder")
    if VALUES["activation_scales"].present and VALUES.activations != "static":
        raise ValueError(
            f"--activation_scales={VALUES.activation_scales} goes with --activations=static, and it is "
            f"{VALUES.activations}"
        )
    grid = grids.NAMED.get(format)
    if grid is None:
        grid = grids.Grid(VALUES.bits or 4, VALUES.group_size or None, VALUES.zero)
    return _recipe(recipe, grid, is_gguf)


def _recipe(recipe: Any, grid: Any, is_gguf: bool) -> Any:
    """Return the recipe of a grid and the other flags."""
    import pydantic

    if VALUES.activations != "float" and grid.bits == 8 and grid.group_size is None:
        grid = grid._replace(scale_dtype="float32")
    values = {name: VALUES[name].value for name in OF_RECIPE}
    # docs/quantisation.md has the measurement
    is_awq = VALUES.equalize == "awq" and VALUES.rounding == "nearest" and grid.zero == "none"
    values["scales"] = VALUES.scales or ("mse" if is_awq else "minmax")
    try:
        made = recipe.Recipe(**values, **grid._asdict(), embedding_bits=8 if is_gguf else None)
    except pydantic.ValidationError as error:
        reason = error.errors()[0]["msg"].removeprefix("Value error, ")
        raise ValueError(f"--activations={VALUES.activations}: {reason}") from error
    idle = [name for name in OF_CALIBRATION if VALUES[name].present]
    if idle and not made.needs_calibration:
        raise ValueError(f"--{idle[0]}={VALUES[idle[0]].value} is for calibration, which rounding to nearest has not")
    return made


def quantized(made: Any) -> Any:
    """Quantise --model by a recipe."""
    from jaxbench.pretrained import tokenizer, weights
    from jaxbench.quantization import folder_export, quantize
    from jaxbench.quantization.study import windows
    from jaxbench.text import packing

    spec, tokens, calibrator = model(), None, None
    if made.needs_calibration:
        texts = packing.load_text(VALUES.data)
        words, wanted = tokenizer.load_tokenizer(spec), VALUES.rows * VALUES.length
        tokens = windows.rows_of(words, texts, VALUES.rows, VALUES.length)
        if (size := windows.count_tokens(words, texts, wanted)) < wanted:
            say(f"the calibration text has {size} tokens, of which --rows and --length want {wanted}: rows repeat them")
    held = weights.load_checkpoint(spec)
    if not VALUES.output.endswith(".gguf"):
        folder_export.check_model(held.config)
        tokenizer.load_tokenizer(held.tokenizer)  # written last: without one the work would be lost
    if made.needs_calibration:
        if VALUES.length > held.config.max_seq_len:
            raise ValueError(f"--length={VALUES.length}, the model has {held.config.max_seq_len} positions")
        calibrator = importlib.import_module(SIDES[VALUES.backend]).LayerByLayer(held.config)
    from rich import progress

    console = terminal.console(stderr=True)
    with progress.Progress(console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("layers", total=held.config.num_layers)
        return quantize.quantize(
            held.config, held.params, made, calibrator=calibrator, tokens=tokens,
            progress=lambda done, total: bar.update(task, completed=done),
        )  # fmt: skip


def text_sha256() -> str:
    """Return the SHA-256 of --data."""
    from jaxbench.text import packing

    return packing.text_sha256(VALUES.data)


def model() -> str | None:
    """Return --model as the loaders take it."""
    return None if VALUES.model == "default" else VALUES.model


def main() -> int:
    """Write the file or folder, and print what rounding changed."""
    process_environment.ensure("cpu")
    made = check_flags()
    from jaxbench.quantization import folder_export, gguf_export

    is_gguf = VALUES.output.endswith(".gguf")
    if is_gguf:
        gguf_export.check(VALUES.model, VALUES.output, overwrite=VALUES.overwrite)
    else:
        folder_export.check(VALUES.output, VALUES.model)
    result = None if made is None else quantized(made)
    if is_gguf:
        written = gguf_export.export(
            VALUES.model, VALUES.output, format=VALUES.format or "q4_0", embedding=VALUES.embedding,
            quantized=result, overwrite=VALUES.overwrite,
        )  # fmt: skip
        path, size, errors = written.path, written.bytes, written.errors
    else:
        path = folder_export.save(VALUES.output, result, model())
        size, errors = sum(f.stat().st_size for f in path.iterdir()), result.errors
    what = "relative error of products" if made is not None and made.needs_calibration else "relative error"
    middle, largest = gguf_export.summary(errors)
    print(
        f"{path}: {size / 1e6:.1f} MB, {len(errors)} matrices rounded, {what} {middle:.2e} (median), "
        f"{largest:.2e} (largest)"
    )
    if made is not None and made.needs_calibration:
        print(f"calibrated on {VALUES.rows} rows of {VALUES.length} tokens of the text with sha256 {text_sha256()}")
    if VALUES.activations != "float":
        print("commands here read its weights alone; quantization.folder_import.load reads its 8-bit inputs too")
    return cli.EXIT_OK


if __name__ == "__main__":
    define()
    cli.run(main, about=__doc__)
