"""One backend alone, in one process: a training step or decoding, in under a minute on a GPU.

    python -m jaxbench.gpu.one_arm --workload=train --config=configs/lm/gpt2_124m.yaml --output=results.jsonl
    python -m jaxbench.gpu.one_arm --workload=train --backend=torch --set=step.torch_compile=true
    python -m jaxbench.gpu.one_arm --workload=decode --config=configs/lm/smollm2_135m.yaml --batch=1

What a short lease has time for. It says how fast one arm is; that it is faster than another is for
experiments/compare.py, which alternates them. Weights and tokens are random. Steps are timed in groups, the device
waited for behind each group, and a rate is that of the fastest group; `samples` has all.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
from absl import flags

from jaxbench import cli, initial, outputs, process_environment
from jaxbench.config import TransformerConfig
from jaxbench.measure import environment
from jaxbench.measure.records import Record, RecordFile, Workload
from jaxbench.text.dataset import Batch
from jaxbench.training import observe
from jaxbench.training.train_config import TrainConfig

GROUPS = 3
VALUES = flags.FLAGS


def train(settings: TrainConfig, config: TransformerConfig) -> list[Record]:
    """Rate, MFU, memory and compile time of a run's step, as records without their common fields."""
    engine, wait = make_engine(settings, config)
    batch, seq_len = settings.batch_size, settings.data.seq_len
    rows = np.random.default_rng(0).integers(0, config.vocab_size, (batch, seq_len + 1)).astype(np.int32)
    positions = np.broadcast_to(np.arange(seq_len, dtype=np.int32), (batch, seq_len))
    arrays = Batch(
        np.ascontiguousarray(rows[:, :-1]), np.ascontiguousarray(rows[:, 1:]), np.ascontiguousarray(positions),
        np.ones((batch, seq_len), bool), np.ones((batch, seq_len), np.int32),
    )  # fmt: skip
    losses = [engine.fetch(engine.step(arrays, settings.learning_rate)).loss for _ in range(3)]
    wait()
    seconds = []
    for _ in range(GROUPS):
        start = time.perf_counter()
        for _ in range(VALUES.steps):
            metrics = engine.step(arrays, settings.learning_rate)
        losses.append(engine.fetch(metrics).loss)
        wait()
        seconds.append((time.perf_counter() - start) / VALUES.steps)
    workload = Workload(kind="train", dtype=settings.step.precision, batch=batch, prompt_tokens=seq_len)
    rates, memory = [batch * seq_len / each for each in seconds], engine.memory()
    detail = {"losses": losses, "device_kind": engine.device_kind()}
    found = [
        Record(metric="train_tokens_per_s", value=max(rates), unit="tokens/s", samples=tuple(rates), detail=detail),
        Record(metric="compile_cold_s", value=engine.compile_seconds, unit="s"),
        Record(metric="device_peak_bytes", value=float(memory["step"]), unit="bytes"),
    ]
    if peak := observe.peak_flops(engine.device_kind(), settings.step.precision):
        used = observe.utilisation(config, seq_len, tokens_per_s=max(rates), peak=peak)
        found += [Record(metric=f"train_{name}", value=value, unit="ratio") for name, value in used.items()]
    return [record.model_copy(update={"workload": workload}) for record in found]


def make_engine(settings: TrainConfig, config: TransformerConfig) -> tuple[Any, Callable[[], None]]:
    """Engine of --backend on --device, and what waits for it."""
    params = initial.initial_params(config, seed=settings.seed)
    if VALUES.backend == "flax":
        import jax

        from jaxbench.training.engine import Engine

        engine = Engine(settings, config, params)
        return engine, lambda: jax.block_until_ready(engine.state.params)
    import torch

    from torch_ref.training.engine import Engine

    if VALUES.device == "cpu":
        return Engine(settings, config, params), lambda: None
    return Engine(settings, config, params, device="cuda"), torch.cuda.synchronize


def decode(config: TransformerConfig, dtype: str) -> list[Record]:
    """Rate of greedy decoding behind the first token, that token's time, and compile time."""
    batch, prompt, new = VALUES.batch, VALUES.prompt_tokens, VALUES.new_tokens
    if prompt + new > config.max_seq_len:
        raise ValueError(f"one_arm: {prompt} + {new} tokens, the model's context is {config.max_seq_len}; take fewer")
    generator, to_host = make_generator(config, dtype)
    rows = np.random.default_rng(0).integers(0, config.vocab_size, (batch, prompt)).tolist()
    start = time.perf_counter()
    to_host(generator.decode(generator.prefill(rows, max_new_tokens=new, seed=0), new).tokens)
    compiled, first, rest = time.perf_counter() - start, [], []
    for _ in range(2 * GROUPS):
        start = time.perf_counter()
        state = generator.prefill(rows, max_new_tokens=new, seed=0)
        to_host(state.tokens)
        middle = time.perf_counter()
        to_host(generator.decode(state, new).tokens)
        first.append(middle - start)
        rest.append((time.perf_counter() - middle) / (new - 1))
    rates = [batch / each for each in rest[1:]]
    width = 4 if dtype == "float32" else 2
    read = width * initial.num_parameters(config) * max(rates) / batch
    workload = Workload(kind="decode", dtype=dtype, batch=batch, prompt_tokens=prompt, new_tokens=new)
    found = [
        Record(metric="decode_tokens_per_s", value=max(rates), unit="tokens/s", samples=tuple(rates)),
        Record(metric="weights_bytes_per_s", value=read, unit="bytes/s"),
        Record(metric="first_token_s", value=min(first[1:]), unit="s", samples=tuple(first[1:])),
        Record(metric="compile_cold_s", value=compiled, unit="s"),
    ]
    return [record.model_copy(update={"workload": workload}) for record in found]


def make_generator(config: TransformerConfig, dtype: str) -> tuple[Any, Callable[[Any], np.ndarray]]:
    """Generator of --backend on --device, and what brings its tokens to the host."""
    params, plain = initial.initial_params(config, seed=0), {"eos_id": None}
    kernel = "fused" if VALUES.device == "gpu" and dtype != "float32" else "dense"
    if VALUES.backend == "flax":
        from jaxbench import sample, transformer

        model = transformer.build(config, params, dtype=dtype, implementation=kernel)
        return sample.Generator(model, **plain, sampling=sample.SamplingParams(temperature=0.0)), np.asarray
    from torch_ref import sample, transformer

    place = {"device": "cuda" if VALUES.device == "gpu" else "cpu", "torch_compile": "step" if VALUES.compile else ""}
    model = transformer.build(config, params, dtype=dtype, implementation="fused", **place).eval().requires_grad_(False)
    generator = sample.Generator(model, **plain, sampling=sample.SamplingParams(temperature=0.0))
    return generator, lambda tokens: tokens.cpu().numpy()


def main() -> int:
    """Measure what the flags name and append its records."""
    settings = cli.load_config(TrainConfig)
    if settings.model.vocab_size is None:
        raise ValueError(f"one_arm: --config={VALUES.config} leaves model.vocab_size to its tokenizer; --set a size")
    output = outputs.check_file(VALUES.output, overwrite=True)
    process_environment.ensure(VALUES.device, library=cli.array_library())
    config = settings.decoder(settings.model.vocab_size)
    if VALUES.workload == "train":
        found = train(settings, config)
    else:
        found = decode(config, settings.step.precision)
    common = {"arm": VALUES.backend, "device": VALUES.device, "commit": environment.commit()}
    common["versions"] = environment.versions()
    changed = {"config": VALUES.config, "set": list(VALUES.set)}
    for record in found:
        RecordFile(output).append(record.model_copy(update=common | {"detail": record.detail | changed}))
        print(f"{VALUES.backend} {record.workload.label()} {record.metric}: {record.value:.6g} {record.unit}")
    return cli.EXIT_OK


if __name__ == "__main__":
    cli.define_config("configs/lm/gpt2_124m.yaml")
    cli.define_backend(choices=("flax", "torch"))
    cli.define_device("gpu")
    flags.DEFINE_enum("workload", "train", ["train", "decode"], "what is measured")
    flags.DEFINE_integer("steps", 10, "training steps of a group", lower_bound=1)
    flags.DEFINE_integer("batch", 1, "rows that are decoded", lower_bound=1)
    flags.DEFINE_integer("prompt_tokens", 64, "tokens of a prompt", lower_bound=1)
    flags.DEFINE_integer("new_tokens", 128, "tokens that are generated", lower_bound=2)
    flags.DEFINE_bool("compile", False, "PyTorch's decode step by torch.compile, in CUDA graphs on a GPU")
    flags.DEFINE_string("output", "out/gpu-one-arm/results.jsonl", "file that records are appended to")
    cli.run(main, about=__doc__)
