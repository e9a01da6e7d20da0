"""Measure the overhead of a watermark in decoding on a device, by alternating plain and marked decode calls of a model.

    python -m jaxbench.gpu.marked --config=configs/lm/smollm2_135m.yaml --schemes=kgw,unigram --batches=1,64,256

Weights and prompts are random. Each round decodes plainly and then marked, so that both see the machine in the same
state; the overhead is the median over rounds of their ratio, minus one. The scheme `control` marks nothing.
"""

from __future__ import annotations

import statistics
from pathlib import Path

import numpy as np
from absl import flags

from jaxbench import cli, initial, outputs, process_environment
from jaxbench.gpu import rates
from jaxbench.measure import environment
from jaxbench.measure.records import Record, RecordFile, Workload
from jaxbench.training.train_config import TrainConfig
from jaxbench.watermark.config import parse_scheme

VALUES = flags.FLAGS
SCHEMES = ("control", "kgw", "unigram", "gumbel", "synthid", "dip")


def main() -> int:
    """Measure every scheme at every batch, and append a record as each ends."""
    settings = cli.load_config(TrainConfig)
    schemes = {name: {"scheme": name} for name in VALUES.schemes}
    for name, scheme in schemes.items():
        if name != "control":
            parse_scheme(scheme)
    batches = [_count(text) for text in VALUES.batches]
    if settings.model.vocab_size is None:
        raise ValueError(f"marked: --config={VALUES.config} leaves model.vocab_size to its tokenizer; --set a size")
    file = RecordFile(outputs.check_file(Path(VALUES.output), overwrite=True))
    process_environment.ensure(VALUES.device)
    from jaxbench import transformer
    from jaxbench.watermark.study.decode_overhead import Generation

    config, dtype = settings.decoder(settings.model.vocab_size), settings.step.precision
    kernel = "fused" if VALUES.device == "gpu" and dtype != "float32" else "dense"
    generation = Generation()
    generation.hold(
        transformer.build(config, initial.initial_params(config, seed=0), dtype=dtype, implementation=kernel)
    )
    common = {"device": VALUES.device, "commit": environment.commit(), "versions": environment.versions()}
    lost: list[str] = []
    for batch in batches:
        rows = np.random.default_rng(0).integers(0, config.vocab_size, (batch, VALUES.prompt_tokens)).tolist()
        sizes = {"batch": batch, "prompt_tokens": VALUES.prompt_tokens, "new_tokens": VALUES.new_tokens}
        common["workload"] = Workload(kind="decode", dtype=dtype, **sizes)
        for name, scheme in schemes.items():
            record = Record(metric="watermark_overhead", unit="ratio", arm=name, **common)
            with rates.apart(lost, f"{name} batch {batch}", file.append, record):
                seconds = generation.overhead(
                    scheme=scheme, prompts=rows, new_tokens=VALUES.new_tokens, rounds=VALUES.rounds, loop_steps=8,
                    loop_rounds=VALUES.rounds,
                )  # fmt: skip
                record = _with(record, seconds)
                file.append(record)
                plain_s = record.detail["plain_s"]
                print(f"{name} batch {batch}: {100 * record.value:+.2f} % of a step of {plain_s:.3g} s", flush=True)
    rates.check_all(lost, len(batches) * len(schemes))
    return cli.EXIT_OK


def _with(record: Record, seconds: dict[str, list[float]]) -> Record:
    """Fill a record with measured values; isolated_s: extra time of the draw alone, in a loop without the model."""
    pairs = {name: (seconds[f"plain_{name}"], seconds[f"marked_{name}"]) for name in ("step", "loop")}
    ratios = tuple(b / a - 1 for a, b in zip(*pairs["step"], strict=True))
    isolated = statistics.median(b - a for a, b in zip(*pairs["loop"], strict=True))
    detail = {"plain_s": statistics.median(pairs["step"][0]), "isolated_s": isolated, "config": VALUES.config}
    return record.model_copy(update={"value": statistics.median(ratios), "samples": ratios, "detail": detail})


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise ValueError(f"--batches={text!r} is no number of rows, wanted 1 or more")
    return int(text)


if __name__ == "__main__":
    cli.define_config("configs/lm/smollm2_135m.yaml")
    cli.define_device("gpu")
    flags.DEFINE_list("schemes", list(SCHEMES), "watermarking schemes by name; control marks nothing")
    flags.DEFINE_list("batches", ["1", "64", "256"], "rows that are decoded together")
    flags.DEFINE_integer("prompt_tokens", 32, "tokens of a prompt", lower_bound=1)
    flags.DEFINE_integer("new_tokens", 64, "tokens that are generated", lower_bound=2)
    flags.DEFINE_integer("rounds", 9, "pairs of plain and marked calls", lower_bound=1)
    flags.DEFINE_string("output", "out/gpu-marked/results.jsonl", "file that records are appended to")
    cli.run(main, about=__doc__)
