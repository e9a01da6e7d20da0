"""Compress many tokens into few vectors, which a decoder reads instead of them.

    compress.py compress --input=book.txt --output=book.vectors.safetensors --name=rfcc-base-8x
    compress.py list
    compress.py ask --input=book.vectors.safetensors --question="Who owns the mill?"
    compress.py evaluate --data=books.jsonl.gz --output=figures.json
    compress.py evaluate --questions=squad.jsonl.gz --output=answers.json
    compress.py benchmark --output=speed.json
    compress.py pack --weights=out/compress/compressor.safetensors --output=small.safetensors
    compress.py train --config=configs/compress/cpu.yaml --data=books.jsonl.gz --held_out=others.jsonl.gz

A killed `train`, `compress` or `evaluate` is resumed by the same command. Bad input: exit code 2 and one line.
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

from jaxbench import cli, outputs, process_environment, store, terminal
from jaxbench.measure import environment

VALUES = flags.FLAGS


def define_train() -> None:
    """Define the flags of train."""
    cli.define_config("configs/compress/cpu.yaml")
    cli.define_data()
    cli.define_device()
    flags.DEFINE_string("held_out", None, "other text, for held-out figures; unset: the last tenth of --data")
    flags.DEFINE_list(
        "questions", [], "questions over passages: .jsonl or .jsonl.gz files, where the settings have `questions`"
    )
    cli.define_workdir("out/compress")


def train() -> int:
    """Train a compressor."""
    from jaxbench.compress.train_config import TrainingConfig

    settings = cli.load_config(TrainingConfig)
    process_environment.ensure(VALUES.device)
    from jaxbench.compress import curve, material, training
    from jaxbench.pretrained import tokenizer, weights
    from jaxbench.text import packing
    from jaxbench.training.observe import Records

    shape = settings.shape(weights.read_config(settings.model))
    files = {"data": VALUES.data, "held_out": VALUES.held_out, "question_files": VALUES.questions}
    sides = material.of_files(settings, shape, tokenizer.load_tokenizer(settings.model), **files)
    for each in itertools.chain(*sides):
        each.draw(each.rows, seed=settings.seed, step=0)  # raises at once if a text does not fit
    if settings.questions is None or settings.questions.share < 1:
        print(f"text: {VALUES.data or 'default'}, sha256 {packing.text_sha256(VALUES.data)}", flush=True)
    held = weights.load_checkpoint(settings.model)
    workdir = cli.workdir("out/compress")
    cli.keep(f"checkpoints are in {workdir}; the same command goes on")
    with terminal.progress(settings.steps) as advance:
        training.train(settings, held, *sides, workdir, say=lambda line: print(line, flush=True), progress=advance)
    records = Records(workdir / training.RECORDS).read()
    outputs.write_text(workdir / "curve.svg", curve.picture(records, f"{settings.steps} steps"))
    print(f"written: {workdir}/{training.WEIGHTS}, {training.RECORDS}, curve.svg and {training.CHECKPOINTS}")
    return cli.EXIT_OK


def _define_weights() -> None:
    cli.define_model()
    flags.DEFINE_string("weights", None, "what `train` wrote; unset: the ones that are shipped")
    cli.define_backend(choices=("flax", "torch"))
    flags.DEFINE_enum("precision", "bfloat16", ["float32", "bfloat16"], "number type of products")


def _model() -> str | None:
    return None if VALUES.model == "default" else VALUES.model


def _made() -> dict[str, Any]:
    """Return how vectors are computed: the decoder's name, the number type, the backend."""
    twin = importlib.import_module("torch_ref.compress.compressor") if VALUES.backend == "torch" else None
    return {"model": _model(), "precision": VALUES.precision, "twin": twin}


def _compressor(name: str) -> Any:
    from jaxbench.compress.auto import AutoCompressor

    return AutoCompressor.from_pretrained(name, file=VALUES.weights, **_made())


def define_compress() -> None:
    """Define the flags of compress."""
    _define_weights()
    flags.DEFINE_string("name", "rfcc-base-8x", "rfcc-base-Nx: N tokens a vector, one of 2, 4, 8, 16, 32")
    flags.DEFINE_string("input", None, "text: a UTF-8 file", required=True)
    flags.DEFINE_string("output", None, "vectors: a .safetensors file", required=True)
    flags.DEFINE_enum(
        "dtype", "bfloat16", ["float32", "bfloat16", "int8", "pq"], "of vectors in the file; pq: product codes"
    )
    flags.DEFINE_bool("overwrite", False, "replace the output")
    cli.define_workdir()


def compress() -> int:
    """Compress a text."""
    outputs.check_file(VALUES.output, [VALUES.input], overwrite=VALUES.overwrite)
    workdir = cli.workdir(f"{VALUES.output}.parts")
    from jaxbench.compress import auto, bulk
    from jaxbench.text import stream as text_stream

    source = Path(VALUES.input)
    sha256 = text_stream.check(source)
    auto.check_name(VALUES.name, VALUES.weights)
    process_environment.ensure("cpu")
    compressor = _compressor(VALUES.name)
    cli.keep(f"finished parts are in {workdir}; the same command goes on", when=lambda: bulk.has_parts(workdir))
    with store.alone(Path(VALUES.output), workdir), terminal.progress(source.stat().st_size) as advance:
        # again: another command may have ended since
        outputs.check_file(VALUES.output, [VALUES.input], overwrite=VALUES.overwrite)
        found = bulk.compress_file(
            compressor, source, Path(VALUES.output), sha256=f"{sha256}-{VALUES.precision}-{VALUES.backend}",
            dtype=VALUES.dtype, workdir=workdir, progress=advance,
        )  # fmt: skip
    if found.resumed_at:
        print(f"went on from byte {found.resumed_at}")
    print(
        f"{found.tokens} tokens became {found.vectors} vectors, {found.tokens / found.vectors:.2f} times fewer, in "
        f"{found.seconds:.1f} s ({found.tokens / found.seconds:.0f} tokens/s)"
    )
    print(f"written: {VALUES.output}, {found.bytes} bytes where the text has {source.stat().st_size}")
    return cli.EXIT_OK


def _compressed(compressor: Any, source: Path) -> Any:
    """Compress a file's text to vectors, in memory."""
    from jaxbench.compress import auto
    from jaxbench.text import stream as text_stream

    stream, at = auto.StreamingCompressor(compressor), 0
    with terminal.progress(source.stat().st_size) as advance:
        for piece, end in text_stream.read(source):
            stream.add_chunk(piece)
            advance(end - at)
            at = end
        return stream.finish()


def define_ask() -> None:
    """Define the flags of ask."""
    _define_weights()
    flags.DEFINE_string("name", "rfcc-base-8x", "of the compressor, where the input is a text")
    flags.DEFINE_string("input", None, "vectors that `compress` made (.safetensors), or a UTF-8 text", required=True)
    flags.DEFINE_string("question", None, "what to ask", required=True)


def ask() -> int:
    """Ask a question about a text that is already compressed, or compress it first."""
    from jaxbench.compress import auto, document
    from jaxbench.text import stream as text_stream

    source, result = Path(VALUES.input), None
    if not VALUES.question.strip():
        raise ValueError(f"--question={VALUES.question!r}; wanted words")
    if source.suffix == ".safetensors":
        result = document.load(source)
        auto.check_name(name := f"rfcc-base-{result.ratio}x", VALUES.weights)
        if VALUES["name"].present and VALUES.name != name:
            raise ValueError(f"--name={VALUES.name}, and {source} was compressed by {name}; leave it out")
    else:
        text_stream.check(source)
        auto.check_name(name := VALUES.name, VALUES.weights)
    process_environment.ensure("cpu")
    from jaxbench.compress import answer_run
    from jaxbench.compress import ask as asking
    from jaxbench.pretrained import weights

    compressor = _compressor(name)
    result = _compressed(compressor, source) if result is None else result
    held = weights.load_checkpoint(_model())
    side = answer_run.side(held.config, compressor.reader(held.params), compressor.tokenizer, VALUES.precision)
    with terminal.progress(len(asking.blocks(result, asking.CHUNKS * compressor.config.chunk))) as advance:
        found = asking.ask(compressor, *side, result, VALUES.question, progress=advance)
    where = f"characters {found.span[0]} to {found.span[1]}"
    if found.text is None:
        print(f"the text does not answer this (nearest to an answer: {where})")
    else:
        print(found.text)
        print(f"({where} of the text; {found.margin:+.1f} nats beside the answer that there is none)")
    return cli.EXIT_OK


def list_() -> int:
    """List the available compressors."""
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
    flags.DEFINE_list("questions", [], "in place of texts: .jsonl or .jsonl.gz files of questions over passages")
    flags.DEFINE_integer(
        "needles", 0, "in place of all else: tokens of texts in which a sentence is hidden", lower_bound=0
    )
    flags.DEFINE_integer("count", 200, "of questions, or of needles of a kind at a depth", lower_bound=2)
    flags.DEFINE_list("ratios", ["2", "4", "8", "16", "32"], "tokens a vector")
    flags.DEFINE_integer("windows", 200, "of text whose continuation is looked at", lower_bound=1)
    flags.DEFINE_integer("tokens", 512, "of a window, compressed", lower_bound=1)
    flags.DEFINE_integer("chunks", 48, "that are read back, of those windows", lower_bound=1)
    flags.DEFINE_integer("seed", 0, "of the windows", lower_bound=0)
    flags.DEFINE_bool(
        "adapters", True, "of the decoder, where the weights have any; --noadapters: the decoder as it is"
    )
    flags.DEFINE_enum("store", "float32", ["float32", "bfloat16", "int8", "pq"], "what all vectors are rounded to")
    flags.DEFINE_string("output", None, "figures: a .json file, a picture beside it", required=True)
    flags.DEFINE_bool("overwrite", False, "replace the output")
    cli.define_workdir()


FIGURES_OF = {  # flags that only these figures have
    "data": ("texts", "needles"), "needles": ("needles",), "count": ("questions", "needles"), "windows": ("texts",),
    "chunks": ("texts",), "store": ("texts",), "adapters": ("texts",), "tokens": ("texts",),
}  # fmt: skip


def evaluate() -> int:
    """Compute figures of quality: continuations of texts, answers to questions, or needles in texts."""
    ratios = tuple(dict.fromkeys(_whole(each, "--ratios") for each in VALUES.ratios))
    if not ratios:
        raise ValueError(f"--ratios={','.join(VALUES.ratios)}; wanted one at least")
    kind = "questions" if VALUES.questions else "needles" if VALUES.needles else "texts"
    inputs = [VALUES.data, *VALUES.questions]
    outputs.check_file(VALUES.output, inputs, overwrite=VALUES.overwrite)
    if kind == "texts":
        outputs.check_beside(VALUES.output, ".svg", inputs, overwrite=VALUES.overwrite)
    for name in (name for name, kinds in FIGURES_OF.items() if VALUES[name].present and kind not in kinds):
        raise ValueError(f"--{name}={VALUES[name].value}: not of figures of {kind}, which this command asks for")
    process_environment.ensure("cpu")
    from jaxbench.compress import auto, evaluation

    for ratio in ratios:
        auto.check_name(f"rfcc-base-{ratio}x", VALUES.weights)
    names = (
        "data", "needles", "windows", "tokens", "chunks", "count", "seed", "store", "adapters", "precision", "backend",
    )  # fmt: skip
    how = evaluation.How(
        load=lambda ratio: _compressor(f"rfcc-base-{ratio}x"), model=_model(), ratios=ratios,
        workdir=cli.workdir(f"{VALUES.output}.parts"), questions=tuple(VALUES.questions),
        **{name: VALUES[name].value for name in names},
    )  # fmt: skip
    with store.alone(Path(VALUES.output), how.workdir):
        found = evaluation.run(how)
        about = found.about | {"machine": environment.describe(threads=environment.usable_cores())}
        outputs.write_json(VALUES.output, {"about": about, "rows": found.rows})
        if found.picture is not None:
            outputs.write_text(Path(VALUES.output).with_suffix(".svg"), found.picture)
    sums = found.about.get("text_sha256") or ", ".join(found.about["questions_sha256"])
    print(f"written: {VALUES.output}{'' if found.picture is None else ', and .svg beside it'} (texts: sha256 {sums})")
    return cli.EXIT_OK


def define_benchmark() -> None:
    """Define the flags of benchmark."""
    _define_weights()
    cli.define_data()
    flags.DEFINE_string("name", "rfcc-base-8x", "rfcc-base-Nx: N tokens a vector, one of 2, 4, 8, 16, 32")
    flags.DEFINE_list("lengths", ["1000", "10000", "100000"], "tokens of the texts")
    flags.DEFINE_list("batches", ["1", "4", "8", "16"], "chunks at once, of 16 texts of 1,000 tokens")
    flags.DEFINE_integer(
        "num_layers", None, "of an encoder that is not trained, for its speed alone; unset: the trained one",
        lower_bound=1,
    )  # fmt: skip
    flags.DEFINE_integer("question_over", 2000, "tokens of the text that a question is asked over", lower_bound=1)
    flags.DEFINE_string("output", None, "figures: a .json file", required=True)
    flags.DEFINE_bool("overwrite", False, "replace the output")


def benchmark() -> int:
    """Measure speed and memory: texts by length and batch, the first token of a question over a compressed text."""
    counts, batches = ([_whole(each, f"--{flag}") for each in VALUES[flag].value] for flag in ("lengths", "batches"))
    for flag, numbers in (("lengths", counts), ("batches", batches)):
        if min(numbers, default=0) < 1:
            raise ValueError(f"--{flag}={','.join(VALUES[flag].value)}; wanted numbers from 1 on")
    outputs.check_file(VALUES.output, [VALUES.data], overwrite=VALUES.overwrite)
    from jaxbench.compress import auto

    auto.check_name(VALUES.name, VALUES.weights)
    if VALUES.num_layers is not None and VALUES.weights is not None:
        raise ValueError(f"--num_layers={VALUES.num_layers} with --weights={VALUES.weights}; wanted one of them")
    process_environment.ensure("cpu")
    from jaxbench.compress import benchmark as speed
    from jaxbench.text import dataset, packing

    text = "\n\n".join(dataset.documents(None if VALUES.data is None else Path(VALUES.data)))
    started = time.perf_counter()
    layers = VALUES.num_layers
    compressor = speed.untrained(VALUES.name, layers, **_made()) if layers else _compressor(VALUES.name)
    loaded = time.perf_counter() - started
    sums = {"model_sha256": compressor.model_sha256, "text_sha256": packing.text_sha256(VALUES.data)}
    print(f"loaded in {loaded:.2f} s; text: sha256 {sums['text_sha256']}", flush=True)
    found = {"load_s": loaded, "lengths": speed.lengths(compressor, text, counts)}
    found["documents"] = speed.documents(compressor, text, count=16, tokens=1000, batches=batches)
    if VALUES.num_layers is None:
        found["questions"] = _questions_asked(compressor, text)
    about = {
        "name": VALUES.name, "compressor": compressor.id, "num_layers": compressor.config.num_layers,
        "precision": VALUES.precision, "backend": VALUES.backend, **sums,
        "machine": environment.describe(threads=environment.usable_cores()),
    }  # fmt: skip
    outputs.write_json(VALUES.output, {"about": about, **found})
    print(f"written: {VALUES.output}")
    return cli.EXIT_OK


def _questions_asked(compressor: Any, text: str) -> dict[str, Any]:
    """Measure seconds to first token of a question over a compressed text, with activations of 32 and 8 bits."""
    from jaxbench import sample
    from jaxbench.compress import benchmark as speed
    from jaxbench.compress import questions
    from jaxbench.generation import decoder, flax_decoder

    question, how = questions.asked("What is it about?"), {"over": VALUES.question_over, "new_tokens": 65}
    asked = {}
    for activations in ("float32", "int8"):
        choice = decoder.choose(decoder.Options(), "cpu")
        if choice.kernels == "native":
            choice = decoder.choose(decoder.Options(activations=activations), "cpu")
        reader = flax_decoder.load(_model(), choice)
        generate = sample.Generator(reader.model, eos_id=None, sampling=sample.SamplingParams(temperature=0.0))
        found = speed.first_token(compressor, generate, text, question, **how)
        print(
            f"a question over {found['tokens']} tokens, read as {found['prompt']} positions: first token after "
            f"{1e3 * found['first_token_s']:.0f} ms, then {found['tokens_a_second']:.0f} tokens/s ({choice.kernels}, "
            f"activations {activations})"
        )
        asked[activations] = found | {"kernels": choice._asdict()}
        if choice.kernels != "native":
            break
    return asked


def _whole(value: str, flag: str) -> int:
    if not value.strip().isdecimal():
        raise ValueError(f"{flag}: {value!r} is no whole number")
    return int(value)


def define_pack() -> None:
    """Define the flags of pack."""
    cli.define_model()
    flags.DEFINE_string("weights", None, "what `train` wrote", required=True)
    flags.DEFINE_integer("bits", 4, "of an encoder's changes; kept in 4, from 5 on in 8", lower_bound=2, upper_bound=8)
    flags.DEFINE_string("output", None, "weights: a .safetensors file", required=True)
    flags.DEFINE_bool("overwrite", False, "replace the output")


def pack() -> int:
    """Write trained weights in few bits, without parts that only training needs."""
    from jaxbench.compress import artifact
    from jaxbench.pretrained import weights

    outputs.check_file(VALUES.output, [VALUES.weights], overwrite=VALUES.overwrite)
    artifact.describe(VALUES.weights)
    held = weights.load_checkpoint(_model())
    trained = artifact.load(VALUES.weights, held)
    size = artifact.save(VALUES.output, trained.config, trained.params, held, about=trained.about, bits=VALUES.bits)
    print(f"written: {VALUES.output}, {size / 1e6:.1f} MB")
    return cli.EXIT_OK


COMMANDS = {
    "compress": cli.Command(define_compress, compress, "Compress a text file."),
    "ask": cli.Command(define_ask, ask, "Ask a question about a text."),
    "list": cli.Command(define_list, list_, "List the compressors that are there."),
    "evaluate": cli.Command(define_evaluate, evaluate, "Compute figures of quality on texts."),
    "benchmark": cli.Command(define_benchmark, benchmark, "Measure speed and memory."),
    "pack": cli.Command(define_pack, pack, "Write trained weights in few bits."),
    "train": cli.Command(define_train, train, "Train a compressor on text, resumable."),
}

if __name__ == "__main__":
    cli.run_commands(COMMANDS, about=__doc__)
