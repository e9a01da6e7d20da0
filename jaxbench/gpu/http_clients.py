"""Measure the real server under concurrent HTTP clients: throughput, latencies, errors (S file).

    python -m jaxbench.gpu.http_clients --config=configs/lm/smollm2_135m.yaml --clients=1,8,32,64

experiments/serve.py runs in its own process, on XLA, with a slot for each client. Clients stream, each with one request
in flight, from this process, which uses no device. Weights are random, of the shape that --config names, and so are the
prompts, each new to the server. Every token is a character, so that each token has an event, which times it. For the
same requests without HTTP see one_workload's `serving`.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import psutil
from absl import flags

from jaxbench import cli, outputs
from jaxbench.config import TransformerConfig
from jaxbench.gpu import one_workload
from jaxbench.measure.records import Record
from jaxbench.pretrained.small_tokenizers import CharacterTokenizer
from jaxbench.serve.study import clients, load
from jaxbench.training.train_config import TrainConfig

VALUES = flags.FLAGS
FIRST = 0x10000  # code point of token 0: from here on a character has four bytes, about as many as an English token
MOST = 0x110000 - FIRST  # largest vocabulary in which every token has a character
ROUNDS = 3
ERRORS = "serve_errors"
UNITS = {
    "serve_tokens_per_s": "tokens/s",
    "first_token_s": "s",
    "first_token_p99_s": "s",
    "token_s": "s",  # per token after the first, mean over an answer: not affected by events that arrive in bunches
    "token_gap_s": "s",
    "token_gap_p99_s": "s",
    "server_processor": "ratio",  # CPU seconds per second, without its engine: near 1, its loop is the bottleneck
    "clients_processor": "ratio",  # the same for this process: near 1, the clients are the bottleneck
}


def tokenizer_of(config: TransformerConfig) -> CharacterTokenizer:
    """Return a tokenizer in which every token is a character.

    Raises:
      ValueError: there are more tokens than characters.
    """
    if config.vocab_size > MOST:
        raise ValueError(f"--config={VALUES.config} has model.vocab_size={config.vocab_size}; wanted at most {MOST}")
    return CharacterTokenizer("".join(map(chr, range(FIRST, FIRST + config.vocab_size))))


def asked(tokenizer: CharacterTokenizer, count: int, random: np.random.Generator) -> list[load.Ask]:
    """Make requests with random prompts."""
    rows = random.integers(0, tokenizer.vocab_size, (count, VALUES.prompt_tokens))
    return [load.Ask(tokenizer.decode(row), VALUES.prompt_tokens, VALUES.new_tokens) for row in rows]


def measured(server: clients.Server, tokenizer: CharacterTokenizer, dtype: str) -> Iterator[Record]:
    """Yield the figures for each number of clients: medians over rounds, and the number of requests that failed.

    For each number of clients one request comes first and is not counted.
    """
    random, slots = np.random.default_rng(0), max(one_workload.counts("clients"))
    for count in one_workload.counts("clients"):
        requests, rounds = max(VALUES.least, VALUES.requests * count), []
        workload = one_workload.of_clients(count, dtype)
        common = {
            "workload": workload,
            "detail": {"slots": slots, "requests": requests, "ready_s": server.ready_s},
        }
        for number in range(ROUNDS):
            warm = () if number else asked(tokenizer, 1, random)
            rounds.append(played(server, asked(tokenizer, requests, random), count, warm))
        for name, unit in UNITS.items():
            samples = tuple(each[name] for each in rounds if name in each)
            if samples:  # empty if no request succeeded
                yield Record(metric=name, value=statistics.median(samples), unit=unit, samples=samples, **common)
        lost = tuple(each[ERRORS] for each in rounds)
        yield Record(metric=ERRORS, value=sum(lost), unit="count", samples=lost, **common)


def played(
    server: clients.Server, asks: Sequence[load.Ask], count: int, warm: Sequence[load.Ask]
) -> dict[str, float]:  # fmt: skip
    """Measure one round and return its figures by name; without answers, theirs are missing."""
    process = psutil.Process(server.pid)
    began, own, others = time.perf_counter(), time.process_time(), sum(process.cpu_times()[:2])
    found = clients.measured("jaxbench", server.port, asks, count, warm=warm)
    own, others = time.process_time() - own, sum(process.cpu_times()[:2]) - others
    seconds = time.perf_counter() - began
    made = {
        ERRORS: float(found["refused"] + found["lost"]),
        "server_processor": others / seconds,
        "clients_processor": own / seconds,
    }
    if found["answered"]:
        first, gaps = found["first_s"], found["between_s"]
        made |= {
            "serve_tokens_per_s": found["tokens_a_second"],
            "first_token_s": first["p50"],
            "first_token_p99_s": first["p99"],
            "token_s": (found["whole_s"]["p50"] - first["p50"]) / (VALUES.new_tokens - 1),
            "token_gap_s": gaps["p50"],
            "token_gap_p99_s": gaps["p99"],
        }
    return made


def command_of(folder: Path, port: int, dtype: str) -> list[str]:
    """Return the server's command line."""
    words = [word.format(model=folder) for word in clients.OWN]
    words += [f"--device={VALUES.device}", f"--set=port={port}"]
    return words + [
        f"--set=engine.{name}={json.dumps(value)}" for name, value in one_workload.engine_settings(dtype).items()
    ]


def main() -> int:
    """Measure the server, and append records as they come.

    Raises:
      ValueError: an input is bad, or the server does not start.
      GateFailed: a request ended with an error.
    """
    settings = cli.load_config(TrainConfig)
    config = one_workload.decoder_of(settings, row_tokens=VALUES.prompt_tokens + VALUES.new_tokens, least_vocab=1)
    dtype, tokenizer = settings.step.precision, tokenizer_of(config)
    one_workload.counts("clients")
    output = outputs.check_file(VALUES.output, overwrite=True)
    folder = one_workload.folder_of(config, output.parent, tokenizer=tokenizer)
    log, port = output.with_name("server.log"), clients.free_port()
    with clients.started("server", command_of(folder, port, dtype), log, port=port, limit_s=VALUES.start_s) as server:
        kept = one_workload.keep(measured(server, tokenizer, dtype), output)
    if lost := sum(record.value for record in kept if record.metric == ERRORS):
        raise cli.GateFailed(
            f"{lost:g} requests ended with an error, wanted none; {log} ends: {clients.last_lines(log)}"
        )
    return cli.EXIT_OK


if __name__ == "__main__":
    cli.define_config("configs/lm/smollm2_135m.yaml")
    cli.define_device("gpu")
    flags.DEFINE_list("clients", ["1", "8", "32", "64"], "with a request in flight each")
    flags.DEFINE_integer("requests", 2, "of each client in each of three rounds", lower_bound=1)
    flags.DEFINE_integer("least", 8, "requests of a round, where clients are few", lower_bound=1)
    flags.DEFINE_integer("prompt_tokens", 256, "of a request", lower_bound=2)
    flags.DEFINE_integer("new_tokens", 128, "of an answer", lower_bound=2)
    flags.DEFINE_float("start_s", 100.0, "seconds that the server has to start", lower_bound=0.0)
    flags.DEFINE_string("output", "out/gpu-http-clients/results.jsonl", "file that records are appended to")
    cli.run(main, about=__doc__)
