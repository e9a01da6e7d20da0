"""Few vectors in place of many tokens, for a decoder that reads them.

    compress.py compress --input=book.txt --output=book.vectors.safetensors --name=rfcc-base-8x
    compress.py list
    compress.py evaluate --data=books.jsonl.gz --output=figures.json
    compress.py train --config=configs/compress/cpu.yaml --data=books.jsonl.gz --held_out=others.jsonl.gz

A run of `train` or `evaluate` that is killed goes on with the same command. Bad input ends with exit code 2 and one
line.
"""

from __future__ import annotations

import importlib
import itertools
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from absl import flags

from jaxbench import cli, outputs, process_environment, terminal
from jaxbench.measure import environment

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


def _define_weights() -> None:
    cli.define_model()
    flags.DEFINE_string("weights", None, "what `train` wrote; unset: the ones that are shipped")
    cli.define_backend(choices=("flax", "torch"))
    flags.DEFINE_enum("precision", "bfloat16", ["float32", "bfloat16"], "number type of products")


def _compressor(name: str) -> Any:
    from jaxbench.compress.auto import AutoCompressor

    model = None if VALUES.model == "default" else VALUES.model
    twin = importlib.import_module("torch_ref.compress.compressor") if VALUES.backend == "torch" else None
    return AutoCompressor.from_pretrained(
        name, file=VALUES.weights, model=model, precision=VALUES.precision, twin=twin
    )  # fmt: skip


def define_compress() -> None:
    """Define the flags of compress."""
    _define_weights()
    flags.DEFINE_string("name", "rfcc-base-8x", "rfcc-base-Nx: N tokens a vector, one of 2, 4, 8, 16, 32")
    flags.DEFINE_string("input", None, "text: a UTF-8 file", required=True)
    flags.DEFINE_string("output", None, "vectors: a .safetensors file", required=True)
    flags.DEFINE_enum("dtype", "bfloat16", ["float32", "bfloat16", "int8"], "of vectors in the file")
    flags.DEFINE_bool("overwrite", False, "replace the output")


def compress() -> int:
    """Compress a text."""
    outputs.check_file(VALUES.output, [VALUES.input], overwrite=VALUES.overwrite)
    from jaxbench.compress import auto, document
    from jaxbench.text import stream as text_stream

    source = Path(VALUES.input)
    text_stream.check(source)
    auto.check_name(VALUES.name, VALUES.weights)
    process_environment.ensure("cpu")
    stream = auto.StreamingCompressor(_compressor(VALUES.name))
    with terminal.progress(source.stat().st_size) as advance:
        for piece, size in text_stream.read(source):
            stream.add_chunk(piece)
            advance(size)
        result = stream.finish()
    size = document.save(VALUES.output, result, dtype=VALUES.dtype)
    rate = result.original_length / result.processing_time
    print(
        f"{result.original_length} tokens became {result.compressed_length} vectors, {result.compression_ratio:.2f} "
        f"times fewer, in {result.processing_time:.1f} s ({rate:.0f} tokens/s)"
    )
    print(f"written: {VALUES.output}, {size} bytes where the text has {source.stat().st_size}")
    return cli.EXIT_OK


def list_() -> int:
    """List the compressors that are there."""
    from jaxbench.compress import artifact

    known = artifact.describe(VALUES.weights)
    for ratio in known["ratios"]:
        print(f"rfcc-base-{ratio}x  {ratio} tokens a vector, {known['num_layers']} layers")
    print(f"one set of weights: {known['file']}, {known['bytes'] / 1e6:.1f} MB, id {known['id']}, {known['about']}")
    return cli.EXIT_OK


def define_list() -> None:
    """Define the flags of list."""
    flags.DEFINE_string("weights", None, "what `train` wrote; unset: the ones that are shipped")


def define_evaluate() -> None:
    """Define the flags of evaluate."""
    _define_weights()
    cli.define_data()
    flags.DEFINE_list("ratios", ["2", "4", "8", "16", "32"], "tokens a vector")
    flags.DEFINE_integer("windows", 200, "of text whose continuation is looked at", lower_bound=1)
    flags.DEFINE_integer("chunks", 48, "that are read back, of those windows", lower_bound=1)
    flags.DEFINE_integer("seed", 0, "of the windows", lower_bound=0)
    flags.DEFINE_string("output", None, "figures: a .json file, a picture beside it", required=True)
    flags.DEFINE_bool("overwrite", False, "replace the output")
    cli.define_workdir()


def evaluate() -> int:
    """Compute figures of quality on texts."""
    ratios = tuple(_whole(each, "--ratios") for each in VALUES.ratios)
    outputs.check_file(VALUES.output, [VALUES.data], overwrite=VALUES.overwrite)
    process_environment.ensure("cpu")
    from jaxbench import store, transformer
    from jaxbench.compress import auto, evaluate_run, reading
    from jaxbench.compress import evaluate as quality
    from jaxbench.pretrained import tokenizer, weights
    from jaxbench.text import dataset

    for ratio in ratios:
        auto.check_name(f"rfcc-base-{ratio}x", VALUES.weights)
    model = None if VALUES.model == "default" else VALUES.model
    words = tokenizer.load_tokenizer(model)
    corpus, name = dataset.prepare(VALUES.data, tokenizer=words), VALUES.data or "default"
    dataset.check(corpus, vocab_size=weights.read_config(model).vocab_size, what=f"the text {name}")
    texts = [corpus.ids[a:b] for a, b in itertools.pairwise(corpus.starts)]
    drawn = quality.windows(texts, VALUES.windows, seed=VALUES.seed)
    compressor, held = _compressor(f"rfcc-base-{ratios[0]}x"), weights.load_checkpoint(model)
    reader = reading.Reader(transformer.build(held.config, held.params, dtype=VALUES.precision))
    start = words.eos_id if words.bos_id is None else words.bos_id
    plan = evaluate_run.Plan(ratios, min(VALUES.chunks, VALUES.windows), start or 0)
    workdir = cli.workdir(f"{VALUES.output}.parts")
    store.claim(workdir, f"{plan}-{VALUES.windows}-{VALUES.seed}-{compressor.id}-{VALUES.precision}-{len(corpus.ids)}")
    rows = evaluate_run.run(compressor, reader, drawn, plan, workdir)
    about = {
        "compressor": compressor.id, "trained": dict(compressor.about), "data": name, "windows": len(drawn),
        "documents": len({window.document for window in drawn}), "chunks": plan.chunks, "precision": VALUES.precision,
        "machine": environment.describe(threads=environment.usable_cores()),
    }  # fmt: skip
    evaluate_run.write(Path(VALUES.output), rows, about)
    print(f"written: {VALUES.output}, and .svg beside it")
    return cli.EXIT_OK


def _whole(value: str, flag: str) -> int:
    if not value.strip().isdecimal():
        raise ValueError(f"{flag}: {value!r} is no whole number")
    return int(value)


COMMANDS = {
    "compress": cli.Command(define_compress, compress, "Compress a text file."),
    "list": cli.Command(define_list, list_, "List the compressors that are there."),
    "evaluate": cli.Command(define_evaluate, evaluate, "Compute figures of quality on texts."),
    "train": cli.Command(define_train, train, "Train a compressor on text, resumable."),
}

if __name__ == "__main__":
    cli.run_commands(COMMANDS, about=__doc__)
