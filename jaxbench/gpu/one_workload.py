"""Measure one workload of Flax alone on a device, in one process and in about a minute.

    python -m jaxbench.gpu.one_workload --workload=features      a reader's features of responses, responses a minute
    python -m jaxbench.gpu.one_workload --workload=compression   chunks of tokens as vectors, tokens/s by chunks at once
    python -m jaxbench.gpu.one_workload --workload=serving       requests that arrive together at the server's engine

Weights are random, of the shape that --config names. Tokens are random too, except in `features`, whose contexts and
responses are bytes of the packaged text. This measures speed, not quality. What a call compiles is compiled by an
earlier call that is not counted.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from absl import flags

from jaxbench import cli, initial, outputs, process_environment
from jaxbench.compress.config import CompressorConfig, group_positions, initial_params
from jaxbench.config import TransformerConfig, config_id
from jaxbench.measure import environment
from jaxbench.measure.records import Record, RecordFile, Workload
from jaxbench.pretrained import assets, weights
from jaxbench.pretrained.small_tokenizers import ByteTokenizer
from jaxbench.regress import workload_cases
from jaxbench.training.train_config import TrainConfig

VALUES = flags.FLAGS
SPREAD = 3  # calls of which the fastest counts
RESPONSES = 6  # per context, as in RAGTruth
RATIO = 8  # tokens per vector
AROUND = 64  # most tokens of a prompt besides its context
ENCODER_LAYERS = 12  # of the compressor, unless the decoder has fewer


def features(config: TransformerConfig, dtype: str, work: Path) -> Iterator[Record]:
    """Measure features of responses to contexts of the packaged text: tokenise, read, copy to the host, write files.

    The rate is the median over contexts.
    """
    from jaxbench.hallucination import extract
    from jaxbench.hallucination.reader_settings import ReaderSettings
    from jaxbench.hallucination.where import Where

    settings = ReaderSettings(model=str(folder_of(config, work)), dtype=dtype, row_tokens=VALUES.row_tokens)
    text, items = assets.default_text().encode("ascii", "ignore").decode(), []  # a character is a token
    for start in range(0, (VALUES.groups + 1) * VALUES.context_tokens, VALUES.context_tokens):
        context = text[start : start + VALUES.context_tokens]
        for number in range(RESPONSES):
            place = start + 7 * number
            items.append(extract.Item(context, "What does it say?", text[place : place + VALUES.new_tokens]))
    store = extract.Store(work / f"features-{time.time_ns()}", settings, "random weights")
    work_items = extract.groups(items, store)
    made = extract.load_reader(settings, package="jaxbench", where=Where(VALUES.device, 1))
    worker = extract.Worker(settings, store, lambda _: made)
    worker(work_items[0])
    seconds = []
    for group in work_items[1:]:
        started = time.perf_counter()
        worker(group)
        seconds.append(time.perf_counter() - started)
    sizes = {"batch": RESPONSES, "prompt_tokens": VALUES.context_tokens, "new_tokens": VALUES.new_tokens}
    yield Record(
        metric="responses_per_minute", value=60 * RESPONSES / statistics.median(seconds), unit="responses/minute",
        samples=tuple(60 * RESPONSES / each for each in seconds),
        workload=Workload(kind="inference", dtype=dtype, **sizes),
    )  # fmt: skip


def compression(config: TransformerConfig, dtype: str, work: Path) -> Iterator[Record]:
    """Measure compression of chunks of random tokens to vectors, from host to host, without tokenising."""
    from jaxbench.compress import compressor

    layers = min(ENCODER_LAYERS, config.num_layers)
    shape = CompressorConfig(decoder=config, num_layers=layers, chunk=min(256, config.max_seq_len))
    params = {n: v for n, v in initial_params(shape, 0).items() if n.startswith(("encoder.", "connector."))}
    params["embed.embedding"] = initial.initial_params(config, 0)["embed.embedding"]
    encode = compressor.chunk_encoder(shape, params, dtype=dtype)
    random = np.random.default_rng(0)
    for batch in counts("batches"):
        tokens = random.integers(0, config.vocab_size, (batch, shape.chunk)).astype(np.int32)
        groups = np.tile(group_positions(shape.chunk, RATIO, shape.chunk), (batch, 1))
        encode(tokens, groups)
        rates = []
        for _ in range(SPREAD):
            started = time.perf_counter()
            encode(tokens, groups)
            rates.append(tokens.size / (time.perf_counter() - started))
        sizes = Workload(kind="inference", dtype=dtype, batch=batch, prompt_tokens=shape.chunk)
        yield Record(
            metric="compress_tokens_per_s", value=max(rates), unit="tokens/s", samples=tuple(rates), workload=sizes,
            detail={"encoder_layers": layers, "ratio": RATIO},
        )  # fmt: skip


def serving(config: TransformerConfig, dtype: str, work: Path) -> Iterator[Record]:
    """Measure concurrent requests to the engine on XLA, without HTTP; each prompt is new to the cache.

    A step computes all slots, as many as the largest number of clients, so a single client waits for all of them too.
    The three figures are those of the fastest run.

    Raises:
      ValueError: a request ends with an error.
    """
    from jaxbench.serve import settings
    from jaxbench.serve.request import Request

    most, sizes = max(counts("clients")), engine_settings(dtype)
    engine = settings.load_engine(settings.EngineConfig(model=str(folder_of(config, work)), **sizes))
    random = np.random.default_rng(0)

    def run(clients: int) -> dict[str, Any]:
        rows = random.integers(0, config.vocab_size, (clients, VALUES.prompt_tokens)).tolist()
        return workload_cases.answered(engine, Request, rows, VALUES.new_tokens)

    run(1)
    for clients in counts("clients"):
        runs = sorted((run(clients) for _ in range(SPREAD)), key=lambda each: each["seconds"])
        gaps = [float(np.median(each["token_s"])) for each in runs]
        workload = of_clients(clients, dtype)
        for name, unit, samples in (
            ("serve_tokens_per_s", "tokens/s", [clients * VALUES.new_tokens / each["seconds"] for each in runs]),
            ("first_token_s", "s", [each["first_token_s"] for each in runs]),
            ("token_gap_s", "s", gaps),
        ):
            yield Record(
                metric=name, value=samples[0], unit=unit, samples=tuple(samples), workload=workload,
                detail={"slots": most, "segment": sizes["segment"]},
            )  # fmt: skip


def engine_settings(dtype: str) -> dict[str, Any]:
    """Return settings of an engine on XLA with a free slot for each client of --clients."""
    most, length = max(counts("clients")), VALUES.prompt_tokens + VALUES.new_tokens
    segment = min(256, VALUES.prompt_tokens)
    return {
        "kernels": "xla", "weights": dtype, "segment": segment, "slot_tokens": length,
        "cache_tokens": max(128, most * length),
        "limits": {"max_running": most, "max_batch_tokens": most + segment},
    }  # fmt: skip


def of_clients(clients: int, dtype: str) -> Workload:
    """Return the workload of a measurement with this number of clients."""
    sizes = {"batch": clients, "prompt_tokens": VALUES.prompt_tokens, "new_tokens": VALUES.new_tokens}
    return Workload(kind="decode", dtype=dtype, **sizes)


def folder_of(config: TransformerConfig, work: Path, *, tokenizer: Any = None) -> Path:
    """Write a checkpoint of random weights with a tokenizer, once, and return its folder; None = a byte tokenizer."""
    tokenizer = tokenizer or ByteTokenizer()
    folder = work / f"model-{config_id(config, extra={'tokenizer': type(tokenizer).__name__})}"
    if not folder.exists():
        params = {name: value.astype(np.float32) for name, value in initial.initial_params(config, 0).items()}
        with outputs.whole_folder(folder) as made:
            weights.save_checkpoint(made, config, params)
            tokenizer.save(made)
    return folder


def counts(flag: str) -> list[int]:
    """Return the whole numbers of a flag.

    Raises:
      ValueError: a value is not a whole number, or is below 1.
    """
    for text in VALUES[flag].value:
        if not text.isdigit() or int(text) < 1:
            raise ValueError(f"--{flag}={text!r} is no number, wanted 1 or more")
    return [int(text) for text in VALUES[flag].value]


WORKLOADS = {"features": features, "compression": compression, "serving": serving}


def decoder_of(
    settings: TrainConfig, *, row_tokens: int, least_vocab: int = ByteTokenizer.vocab_size
) -> TransformerConfig:
    """Return the decoder's shape, checked for rows of `row_tokens` and a vocabulary of at least `least_vocab`.

    Raises:
      ValueError: its vocabulary is left to a tokenizer or too small, its context is too short, or the precision is one
        for training only.
    """
    dtype = settings.step.precision
    if dtype not in ("float32", "bfloat16"):
        raise ValueError(
            f"--config={VALUES.config}: step.precision={dtype} is a training's; wanted float32 or bfloat16"
        )
    if settings.model.vocab_size is None or settings.model.vocab_size < least_vocab:
        raise ValueError(
            f"--config={VALUES.config} has model.vocab_size={settings.model.vocab_size}; wanted {least_vocab} or more, "
            "for a tokenizer"
        )
    config = settings.decoder(settings.model.vocab_size)
    if row_tokens > config.max_seq_len:
        raise ValueError(
            f"--config={VALUES.config}: {row_tokens} tokens a row; the model's context is {config.max_seq_len}"
        )
    return config


def check(settings: TrainConfig) -> TransformerConfig:
    """Check the flags and return the decoder's shape.

    Raises:
      ValueError: the shape does not fit the flags, or a flag of numbers has a value that is not one.
    """
    given = VALUES.context_tokens if VALUES.workload == "features" else VALUES.prompt_tokens
    wanted = {"compression": 0, "serving": given + VALUES.new_tokens, "features": given + VALUES.new_tokens + AROUND}
    config = decoder_of(settings, row_tokens=wanted[VALUES.workload])
    for flag in ("batches", "clients"):
        counts(flag)
    return config


def keep(found: Iterable[Record], output: Path) -> list[Record]:
    """Append records as they come, with the call's common fields, and print each; return the appended records."""
    common = {"arm": "flax", "device": VALUES.device, "commit": environment.commit()}
    common["versions"] = environment.versions()
    kept = []
    for record in found:
        detail = record.detail | {"config": VALUES.config, "set": list(VALUES.set)}
        kept.append(record.model_copy(update=common | {"detail": detail}))
        RecordFile(output).append(kept[-1])
        print(f"{record.workload.label()} {record.metric}: {record.value:.6g} {record.unit}", flush=True)
    return kept


def main() -> int:
    """Measure one workload and append its records as they come."""
    settings = cli.load_config(TrainConfig)
    config = check(settings)
    output = outputs.check_file(VALUES.output, overwrite=True)
    process_environment.ensure(VALUES.device)
    keep(WORKLOADS[VALUES.workload](config, settings.step.precision, output.parent), output)
    return cli.EXIT_OK


if __name__ == "__main__":
    cli.define_config("configs/lm/smollm2_135m.yaml")
    cli.define_device("gpu")
    flags.DEFINE_enum("workload", "features", list(WORKLOADS), "what is measured")
    flags.DEFINE_integer("groups", 16, "contexts whose responses are read together", lower_bound=1)
    flags.DEFINE_integer("context_tokens", 768, "of a context", lower_bound=2)
    flags.DEFINE_integer("row_tokens", 1024, "slots that responses to one context share", lower_bound=1)
    flags.DEFINE_list("batches", ["1", "8", "64", "256"], "chunks that are compressed at once")
    flags.DEFINE_list("clients", ["1", "8", "32", "64"], "requests at once")
    flags.DEFINE_integer("prompt_tokens", 256, "of a request", lower_bound=2)
    flags.DEFINE_integer("new_tokens", 128, "of an answer", lower_bound=2)
    flags.DEFINE_string("output", "out/gpu-one-workload/results.jsonl", "file that records are appended to")
    cli.run(main, about=__doc__)
