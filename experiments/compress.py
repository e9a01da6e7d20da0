"""Few vectors in place of many tokens, for a decoder that reads them.

    compress.py compress --input=book.txt --output=book.vectors.safetensors --name=rfcc-base-8x
    compress.py list
    compress.py evaluate --data=books.jsonl.gz --output=figures.json
    compress.py benchmark --output=speed.json
    compress.py pack --weights=out/compress/compressor.safetensors --output=small.safetensors
    compress.py train --config=configs/compress/cpu.yaml --data=books.jsonl.gz --held_out=others.jsonl.gz

A run of `train` or `evaluate` that is killed goes on with the same command. Bad input ends with exit code 2 and one
line.
"""

from __future__ import annotations

import importlib
import itertools
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from absl import flags

from jaxbench import cli, outputs, process_environment, terminal
from jaxbench.measure import environment

VALUES = flags.FLAGS
HELD_OUT = 0.1  # share of --data, where nothing else is named
ASKED = 0.25  # share of the articles of --questions that are asked about and not learned from


def define_train() -> None:
    """Define the flags of train."""
    cli.define_config("configs/compress/cpu.yaml")
    cli.define_data()
    flags.DEFINE_string("held_out", None, "other text, for held-out figures; unset: the last tenth of --data")
    flags.DEFINE_list("questions", [], "in place of texts: .jsonl or .jsonl.gz files of questions over passages")
    cli.define_workdir("out/compress")


def train() -> int:
    """Train a compressor."""
    from jaxbench.compress.train_config import TrainingConfig

    settings = cli.load_config(TrainingConfig)
    process_environment.ensure("cpu")
    from jaxbench.compress import training
    from jaxbench.pretrained import tokenizer, weights

    shape = settings.shape(weights.read_config(settings.model))
    words = tokenizer.load_tokenizer(settings.model)
    material = _questions(words, shape, settings.rows) if VALUES.questions else _texts(words, shape)
    for each in material:
        each.draw(settings.rows, seed=settings.seed, step=0)  # what does not fit is said at once
    held = weights.load_checkpoint(settings.model)
    workdir = cli.workdir("out/compress")
    cli.keep(f"checkpoints are in {workdir}; the same command goes on")
    with terminal.progress(settings.steps) as advance:
        training.train(settings, held, *material, workdir, say=lambda line: print(line, flush=True), progress=advance)
    print(f"written: {workdir}/{training.RECORDS} and {workdir}/{training.CHECKPOINTS}")
    return cli.EXIT_OK


def _texts(words: Any, shape: Any) -> list[Any]:
    """Texts to learn from, and others."""
    from jaxbench.compress import training
    from jaxbench.text import dataset

    corpus = dataset.prepare(VALUES.data, tokenizer=words)
    if VALUES.held_out is None:
        corpus, other = dataset.split(corpus, HELD_OUT)
    else:
        other = dataset.prepare(VALUES.held_out, tokenizer=words)
    named = [VALUES.data or "default", VALUES.held_out or f"the last {HELD_OUT:.0%} of {VALUES.data or 'default'}"]
    found = []
    for each, name in zip((corpus, other), named):
        dataset.check(each, vocab_size=shape.decoder.vocab_size, what=f"the text {name}")
        found.append(training.of_texts([each.ids[a:b] for a, b in itertools.pairwise(each.starts)], shape))
    return found


def _questions(words: Any, shape: Any, settings: Any) -> list[Any]:
    """Questions to learn from, and those of other articles."""
    from jaxbench.compress import questions, training

    if VALUES.data or VALUES.held_out:
        raise ValueError(
            f"--questions with --data={VALUES.data} and --held_out={VALUES.held_out}; name one or the others"
        )
    found = [each for path in VALUES.questions for each in questions.of_file(path, words)]
    return [training.of_questions(side, shape, settings) for side in questions.split(found, ASKED)]


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
    reader = reading.Reader(transformer.build(held.config, compressor.reader(held.params), dtype=VALUES.precision))
    start = words.eos_id if words.bos_id is None else words.bos_id
    plan = evaluate_run.Plan(ratios, min(VALUES.chunks, VALUES.windows), start or 0)
    workdir = cli.workdir(f"{VALUES.output}.parts")
    store.claim(workdir, f"{plan}-{VALUES.windows}-{VALUES.seed}-{compressor.id}-{VALUES.precision}-{len(corpus.ids)}")
    rows = evaluate_run.run(compressor, reader, drawn, plan, workdir)
    about = {
        "compressor": compressor.id, "trained": dict(compressor.about), "data": Path(name).name, "windows": len(drawn),
        "documents": len({window.document for window in drawn}), "chunks": plan.chunks, "precision": VALUES.precision,
        "machine": environment.describe(threads=environment.usable_cores()),
    }  # fmt: skip
    evaluate_run.write(Path(VALUES.output), rows, about)
    print(f"written: {VALUES.output}, and .svg beside it")
    return cli.EXIT_OK


def define_benchmark() -> None:
    """Define the flags of benchmark."""
    _define_weights()
    cli.define_data()
    flags.DEFINE_string("name", "rfcc-base-8x", "rfcc-base-Nx: N tokens a vector, one of 2, 4, 8, 16, 32")
    flags.DEFINE_list("lengths", ["1000", "10000", "100000"], "tokens of the texts")
    flags.DEFINE_integer("question_over", 2000, "tokens of the text that a question is asked over", lower_bound=1)
    flags.DEFINE_string("output", None, "figures: a .json file", required=True)
    flags.DEFINE_bool("overwrite", False, "replace the output")


def benchmark() -> int:
    """Measure speed and memory: texts by length, the first token of a question over a compressed text."""
    counts = [_whole(each, "--lengths") for each in VALUES.lengths]
    if min(counts, default=0) < 1:
        raise ValueError(f"--lengths={','.join(VALUES.lengths)}; wanted numbers from 1 on")
    outputs.check_file(VALUES.output, [VALUES.data], overwrite=VALUES.overwrite)
    from jaxbench.compress import auto

    auto.check_name(VALUES.name, VALUES.weights)
    process_environment.ensure("cpu")
    from jaxbench import sample
    from jaxbench.compress import benchmark as speed
    from jaxbench.compress import questions
    from jaxbench.generation import decoder, flax_decoder
    from jaxbench.text import dataset

    text = "\n\n".join(dataset.documents(None if VALUES.data is None else Path(VALUES.data)))
    started = time.perf_counter()
    compressor = _compressor(VALUES.name)
    loaded = time.perf_counter() - started
    print(f"loaded in {loaded:.2f} s", flush=True)
    rows = speed.lengths(compressor, text, counts)
    model = None if VALUES.model == "default" else VALUES.model
    choice = decoder.choose(decoder.Options(), "cpu")
    reader = flax_decoder.load(model, choice)
    generate = sample.Generator(reader.model, eos_id=None, sampling=sample.SamplingParams(temperature=0.0))
    piece = compressor.words.decode(compressor.words.encode(text, add_special=False)[: VALUES.question_over])
    asked = speed.first_token(compressor, generate, piece, questions.asked("What is it about?"), new_tokens=65)
    print(
        f"a question over {VALUES.question_over} tokens, {asked['prompt']} of them read: first token after "
        f"{1e3 * asked['first_token_s']:.0f} ms, then {asked['tokens_a_second']:.0f} tokens/s ({choice.kernels})"
    )
    about = {
        "name": VALUES.name, "compressor": compressor.id, "precision": VALUES.precision, "backend": VALUES.backend,
        "kernels": choice._asdict(), "machine": environment.describe(threads=environment.usable_cores()),
    }  # fmt: skip
    outputs.write_json(VALUES.output, {"about": about, "load_s": loaded, "lengths": rows, "question": asked})
    print(f"written: {VALUES.output}")
    return cli.EXIT_OK


def _whole(value: str, flag: str) -> int:
    if not value.strip().isdecimal():
        raise ValueError(f"{flag}: {value!r} is no whole number")
    return int(value)


def define_pack() -> None:
    """Define the flags of pack."""
    cli.define_model()
    flags.DEFINE_string("weights", None, "what `train` wrote", required=True)
    flags.DEFINE_integer("bits", 4, "of what training changed in an encoder's layers", lower_bound=2, upper_bound=8)
    flags.DEFINE_string("output", None, "weights: a .safetensors file", required=True)
    flags.DEFINE_bool("overwrite", False, "replace the output")


def pack() -> int:
    """Write trained weights in few bits, without what only trains."""
    from jaxbench.compress import artifact
    from jaxbench.pretrained import weights

    outputs.check_file(VALUES.output, [VALUES.weights], overwrite=VALUES.overwrite)
    artifact.describe(VALUES.weights)
    held = weights.load_checkpoint(None if VALUES.model == "default" else VALUES.model)
    trained = artifact.load(VALUES.weights, held)
    size = artifact.save(VALUES.output, trained.config, trained.params, held, about=trained.about, bits=VALUES.bits)
    print(f"written: {VALUES.output}, {size / 1e6:.1f} MB")
    return cli.EXIT_OK


COMMANDS = {
    "compress": cli.Command(define_compress, compress, "Compress a text file."),
    "list": cli.Command(define_list, list_, "List the compressors that are there."),
    "evaluate": cli.Command(define_evaluate, evaluate, "Compute figures of quality on texts."),
    "benchmark": cli.Command(define_benchmark, benchmark, "Measure speed and memory."),
    "pack": cli.Command(define_pack, pack, "Write trained weights in few bits."),
    "train": cli.Command(define_train, train, "Train a compressor on text, resumable."),
}

if __name__ == "__main__":
    cli.run_commands(COMMANDS, about=__doc__)
