"""Prepare a run before the first launch: check every input, put the model on disk, draw prompts, make ids (S file)."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

import jaxbench.bench.suite
from jaxbench import config, process_environment
from jaxbench.bench import estimate
from jaxbench.bench.suite import Suite
from jaxbench.config import TransformerConfig
from jaxbench.measure import chips, environment
from jaxbench.measure.records import Record, Workload, now_utc
from jaxbench.pretrained import assets
from jaxbench.training.train_config import TrainConfig

ROOT = Path(__file__).resolve().parents[2]

# The model of the tiny suite: every part of the default family (grouped heads, SwiGLU, tied head), random weights.
TINY = TransformerConfig(
    vocab_size=128, d_model=32, d_ff=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, max_seq_len=128
)


class Model(NamedTuple):
    """The model of a run, as every worker loads it."""

    config: TransformerConfig
    folder: Path  # Hugging Face folder, which our loader and transformers both read
    sha256: str  # of the original file
    tokenizer: Path | None  # None: random weights, so that prompts are random ids

    @property
    def file(self) -> Path:
        """The original model: a GGUF file, or a folder."""
        return self.tokenizer or self.folder


class Plan(NamedTuple):
    """Everything fixed before the first launch."""

    suite: Suite
    model: Model
    device: str
    threads: int
    workdir: Path
    config_id: str
    origin: dict  # what a run's results depend on besides chance; equal for two runs that may share their results
    run_id: str  # hash of the origin
    text_sha256: str
    inputs: dict[Workload, list[list[int]]]  # token ids of each workload, equal for every arm
    common: dict  # fields that every record carries

    def trained_config(self) -> TransformerConfig:
        """Configuration of the shallow model of the train step."""
        layers = min(self.suite.train.num_layers, self.model.config.num_layers)
        return self.model.config.model_copy(update={"num_layers": layers})

    def record(self, metric: str, **fields) -> Record:
        """Return a record with the run's common fields filled in."""
        return Record(metric=metric, **{**self.common, "time_utc": now_utc(), **fields})


def make_plan(suite: Suite, *, device: str, workdir: Path) -> Plan:
    """Check every input and return the plan; raise ValueError before anything is compiled or measured."""
    process_environment.check_attached(device)
    for topology in suite.tpu.topologies:
        chips.parse_topology(topology)
    for run in suite.tpu.runs:
        chips.parse_topology(run.topology)
        config.load(ROOT / run.config, run.set, TrainConfig)
    threads = suite.threads or environment.usable_cores()
    if threads > environment.usable_cores():
        raise ValueError(f"suite: threads={threads}, this process may use {environment.usable_cores()} cores")
    if device == "cpu" and suite.roofline.enabled:
        estimate.check_roofline(suite.roofline)
    if (shape := random_decoder(suite.model)) is not None:  # checked before its model is written
        check_shape(suite, shape, device)
        if suite.data is not None:
            raise ValueError(f"compare: --data={suite.data} needs a tokenizer, model {suite.model!r} has none")
    text, text_sha256 = read_text(suite)  # before the model, which may have to be converted
    model = find_model(suite, workdir)
    check_shape(suite, model.config, device)
    if model.tokenizer is None:
        token_ids = np.random.default_rng(suite.seed).integers(0, model.config.vocab_size, size=tokens_wanted(suite))
        text_sha256 = hashlib.sha256(token_ids.tobytes()).hexdigest()
    else:
        token_ids = encode(suite, model, text)
    config_id = jaxbench.bench.suite.config_id(suite, model_sha256=model.sha256, text_sha256=text_sha256)
    origin = {
        "configuration": config_id,
        "device": device,
        "host": environment.fingerprint(),
        "commit": environment.commit(),
        "arms": list(suite.arms),
        "threads": threads,
        "tpu": suite.tpu.model_dump(mode="json", exclude={"topologies", "runs"}),
        "versions": environment.versions(),
    }
    run_id = hashlib.sha256(json.dumps(origin, sort_keys=True).encode()).hexdigest()[:12]
    common = {
        **{name: origin[name] for name in ("device", "host", "commit")},
        "config_id": config_id,
        "run_id": run_id,
        "model_sha256": model.sha256,
        "text_sha256": text_sha256,
    }
    inputs = {workload: draw(token_ids, workload, seed=suite.seed) for workload in suite.workloads()}
    return Plan(suite, model, device, threads, workdir, config_id, origin, run_id, text_sha256, inputs, common)


def check_shape(suite: Suite, shape: TransformerConfig, device: str) -> None:
    """Raise ValueError if the suite's lengths exceed the model's context, or this machine's memory is too small."""
    suite.check_context(shape.max_seq_len)
    if device == "cpu":
        estimate.check_fits(suite, shape)


def random_decoder(model: str) -> TransformerConfig | None:
    """Return the shape of a model with random weights (tiny, or a training configuration's); None for others."""
    if model == "tiny":
        return TINY
    if not model.endswith(".yaml"):
        return None
    decoder = config.load(model, (), TrainConfig).model
    if decoder.vocab_size is None:
        raise ValueError(f"compare: --model={model} leaves model.vocab_size to its tokenizer; name a size in it")
    return decoder.resolved(decoder.vocab_size)


def find_model(suite: Suite, workdir: Path) -> Model:
    """Return the model as a Hugging Face folder; a GGUF file is converted once, into the cache."""
    from jaxbench.pretrained import hf_config, weights

    if (shape := random_decoder(suite.model)) is not None:
        return _random_model(shape, workdir, distinct=suite.model == "tiny")
    path = weights.resolve(suite.model)
    if path.is_dir():
        checkpoint = weights.load_checkpoint(path)
        return Model(checkpoint.config, path, checkpoint.sha256, checkpoint.tokenizer)
    sha256 = assets.sha256_file(path)
    folder = process_environment.cache_dir() / "checkpoints" / sha256[:16]
    if not (folder / "config.json").exists():
        checkpoint = weights.load_checkpoint(suite.model)
        weights.save_checkpoint(folder, checkpoint.config, checkpoint.params)
        return Model(checkpoint.config, folder, sha256, path)
    values = json.loads((folder / "config.json").read_text())
    return Model(hf_config.config_from_hf(values, folder), folder, sha256, path)


def _random_model(config: TransformerConfig, workdir: Path, *, distinct: bool) -> Model:
    """Write a decoder with random weights as a checkpoint, once; `distinct` is that of initial.initial_params."""
    from jaxbench import initial
    from jaxbench.pretrained import weights

    folder = workdir / f"model-{hashlib.sha256(config.model_dump_json().encode()).hexdigest()[:12]}"
    params = initial.initial_params(config, seed=0, distinct=distinct)
    if not (folder / "config.json").exists():
        weights.save_checkpoint(folder, config, params)
    digest = hashlib.sha256(b"".join(name.encode() + params[name].tobytes() for name in sorted(params)))
    return Model(config, folder, digest.hexdigest(), None)


def read_text(suite: Suite) -> tuple[str, str]:
    """Return the text that prompts are cut from, and its sha256."""
    if suite.data is None:
        return assets.default_text(), assets.TEXT_SHA256
    from jaxbench.text import packing

    return "\n\n".join(packing.load_text(suite.data)), assets.sha256_file(suite.data)


def encode(suite: Suite, model: Model, text: str) -> Int[np.ndarray, " N"]:
    """Return the token ids of a text, or of as much of it as the suite wants."""
    from jaxbench.pretrained import tokenizer

    ids = tokenizer.load_tokenizer(model.tokenizer).encode(text[: 8 * tokens_wanted(suite)])
    return np.asarray(ids, dtype=np.int64)


def tokens_wanted(suite: Suite) -> int:
    """Return a number of tokens that is enough for the prompts of all workloads at distinct places."""
    return 4 * sum(workload.batch * (workload.prompt_tokens + 1) for workload in suite.workloads()) + 4096


def draw(token_ids: Int[np.ndarray, " N"], workload: Workload, *, seed: int) -> list[list[int]]:
    """Cut one workload's rows from the text at distinct places, fixed by the seed; a train row has one more token."""
    length = workload.prompt_tokens + (1 if workload.kind == "train" else 0)
    if length < 1:
        raise ValueError(f"compare: {workload.label()} has an empty prompt (prompt_tokens={workload.prompt_tokens})")
    if len(token_ids) < length + workload.batch:
        raise ValueError(
            f"compare: {workload.label()} needs {workload.batch} rows of {length} tokens, the text has "
            f"{len(token_ids)}; pass a longer --data"
        )
    generator = np.random.default_rng([seed, workload.batch, length])
    starts = generator.choice(len(token_ids) - length + 1, size=workload.batch, replace=False)
    return [token_ids[start : start + length].tolist() for start in starts]
