"""Measure one backend alone, in one process: a training step or decoding, in under a minute on a GPU.

    python -m jaxbench.gpu.one_arm --workload=train --config=configs/lm/gpt2_124m.yaml --output=results.jsonl
    python -m jaxbench.gpu.one_arm --workload=train --backend=torch --set=step.torch_compile=true
    python -m jaxbench.gpu.one_arm --workload=decode --config=configs/lm/smollm2_135m.yaml --batch=1 --weights=int8
    python -m jaxbench.gpu.one_arm --workload=memory_ladder --config=configs/lm/llama_1b.yaml --steps=3
    python -m jaxbench.gpu.one_arm --workload=largest_batch --config=configs/lm/llama_1b.yaml
    python -m jaxbench.gpu.one_arm --workload=ladder --config=configs/lm/smollm2_135m.yaml --prompt_tokens=2048

It is made for short leases of a GPU. It tells how fast one arm is; to tell whether it is faster than another, use
experiments/compare.py, which alternates them. Weights and tokens are random. Steps are timed in groups, with a device
synchronisation after each; a rate is that of the fastest group, and `samples` has all. A ladder decodes in one form
after another, each with one change: number type, fused attention, 8-bit and 4-bit weights, and with several devices the
same over all of them (tensor parallel). A memory ladder takes steps with one way of saving memory after another. The
largest batch is found by compiling, and steps are taken with it.
"""

from __future__ import annotations

import functools
import importlib
import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from absl import flags

from jaxbench import cli, initial, outputs, process_environment
from jaxbench.config import TransformerConfig
from jaxbench.gpu import packed_weights, rates, train_memory
from jaxbench.measure import environment, flops
from jaxbench.measure.records import Record, RecordFile, Workload
from jaxbench.text.dataset import Batch
from jaxbench.training import observe
from jaxbench.training.train_config import TrainConfig

GROUPS = 3
TRAININGS, DECODINGS = ("train", "memory_ladder", "largest_batch"), ("decode", "ladder")
VALUES = flags.FLAGS


def train(settings: TrainConfig, config: TransformerConfig) -> list[Record]:
    """Measure rate, MFU, memory and compile time of a run's step; return records without their common fields."""
    saved = rates.seconds_saved(VALUES.backend)
    engine, wait = make_engine(settings, config)
    compiling = rates.compile_metric(engine.compile_seconds, saved())
    batch, seq_len = settings.batch_size, settings.data.seq_len
    arrays = random_batch(settings, config)
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
    workload = train_memory.sizes(settings)
    speeds, memory = [batch * seq_len / each for each in seconds], engine.memory()
    detail = {"losses": losses, "device_kind": engine.device_kind()}
    found = [
        Record(metric="train_tokens_per_s", value=max(speeds), unit="tokens/s", samples=tuple(speeds), detail=detail),
        Record(metric=compiling, value=engine.compile_seconds, unit="s"),
        Record(metric="device_peak_bytes", value=float(memory["step"]), unit="bytes"),
    ]
    peak = observe.peak_flops(engine.device_kind(), engine.product_type())
    if peak and not engine.policy.is_float8:  # some of its products are of 8 bits, others not: there is no one peak
        is_trained = settings.step.optimizer.is_trained
        used = observe.utilisation(config, seq_len, tokens_per_s=max(speeds), peak=peak, is_trained=is_trained)
        found += [Record(metric=f"train_{name}", value=value, unit="ratio") for name, value in used.items()]
    return [record.model_copy(update={"workload": workload}) for record in found]


def random_batch(settings: TrainConfig, config: TransformerConfig) -> Batch:
    """Make a run's batch of random tokens."""
    batch, seq_len = settings.batch_size, settings.data.seq_len
    rows = np.random.default_rng(0).integers(0, config.vocab_size, (batch, seq_len + 1)).astype(np.int32)
    positions = np.broadcast_to(np.arange(seq_len, dtype=np.int32), (batch, seq_len))
    return Batch(
        np.ascontiguousarray(rows[:, :-1]), np.ascontiguousarray(rows[:, 1:]), np.ascontiguousarray(positions),
        np.ones((batch, seq_len), bool), np.ones((batch, seq_len), np.int32),
    )  # fmt: skip


def make_engine(settings: TrainConfig, config: TransformerConfig) -> tuple[Any, Callable[[], None]]:
    """Return the engine of --backend on --device, and a function that waits for it."""
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


class Form(NamedTuple):
    """How a decoder is stored and computed."""

    dtype: str
    attention: str
    weights: str = "float"  # int8, int4: type of the layers' matrices; the rest is in dtype
    products: str = "xla"  # implementation of products with such weights
    devices: int = 1  # devices that heads, feed-forward width and embedding are split over

    @property
    def name(self) -> str:
        """Short name, unique in a ladder."""
        kernel = "" if self.weights == "float" else f" {self.products}"
        parts = "" if self.devices == 1 else f" tensor={self.devices}"
        return f"{self.dtype} {self.attention} {self.weights}{kernel}{parts}"


def forms(dtype: str, num_kv_heads: int) -> list[Form]:
    """Return the forms that --workload, --weights and --products ask for, in the order of measurement."""
    fused = "fused" if VALUES.device == "gpu" else "dense"
    if VALUES.workload == "ladder":
        # Other devices have no fused attention, and there "pallas" means XLA's product.
        ways = packed_weights.PRODUCTS if VALUES.device == "gpu" else ("xla",)
        plain = [Form("float32", "dense"), Form("bfloat16", "dense"), Form("bfloat16", fused)]
        packed = [Form("bfloat16", fused, bits, way) for way in ways for bits in packed_weights.RECIPES]
        import jax

        # A Pallas kernel runs on one device, and a head is not split.
        count = math.gcd(jax.device_count(), num_kv_heads)
        over_all = [Form("bfloat16", fused, each, devices=count) for each in ("float", *packed_weights.RECIPES)]
        return list(dict.fromkeys(plain + packed + over_all))
    attention = "fused" if VALUES.backend == "torch" else fused if dtype != "float32" else "dense"
    return [Form(dtype, attention, VALUES.weights, VALUES.products)]


def decode(config: TransformerConfig, form: Form) -> list[Record]:
    """Measure greedy decoding: rate after the first token, first-token time, compile time, and bytes of the weights.

    float32 products are computed in float32, as PyTorch does; XLA would use TF32 on a GPU.
    """
    if VALUES.backend == "flax" and form.dtype == "float32":
        import jax

        with jax.default_matmul_precision("highest"):
            return _decode(config, form)
    return _decode(config, form)


def _decode(config: TransformerConfig, form: Form) -> list[Record]:
    batch, prompt, new = VALUES.batch, VALUES.prompt_tokens, VALUES.new_tokens
    generator, to_host, size = make_generator(config, form)
    saved = rates.seconds_saved(VALUES.backend)
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
    speeds, read = [batch / each for each in rest[1:]], read_bytes(config, form, size)
    found = [
        Record(metric="decode_tokens_per_s", value=max(speeds), unit="tokens/s", samples=tuple(speeds)),
        Record(metric="weights_bytes", value=float(size), unit="bytes"),
        Record(metric="weights_bytes_per_s", value=read * max(speeds) / batch, unit="bytes/s"),
        Record(metric="first_token_s", value=min(first[1:]), unit="s", samples=tuple(first[1:])),
        Record(metric=rates.compile_metric(compiled, saved()), value=compiled, unit="s"),
    ]
    return [record.model_copy(update={"workload": workload_of(form), "detail": form._asdict()}) for record in found]


def read_bytes(config: TransformerConfig, form: Form, size: int) -> int:
    """Return the bytes of the weights that a step reads: of all (`size`), without tables in which it looks up rows."""
    looked_up = {"position.embedding"} | (set() if config.tie_embeddings else {"embed.embedding"})
    shapes = initial.parameter_shapes(config)
    rows = sum(math.prod(shape) for name, shape in shapes.items() if name in looked_up)
    return size - rows * flops.dtype_bytes(form.dtype)


def workload_of(form: Form) -> Workload:
    """Return the workload of decoding in a form."""
    sizes = {"batch": VALUES.batch, "prompt_tokens": VALUES.prompt_tokens, "new_tokens": VALUES.new_tokens}
    return Workload(kind="decode", dtype=form.dtype, **sizes)


def make_generator(config: TransformerConfig, form: Form) -> tuple[Any, Callable[[Any], np.ndarray], int]:
    """Return the generator of --backend on --device, its copy of tokens to the host, and the bytes of the weights."""
    if VALUES.backend == "flax":
        import jax
        from flax import nnx

        from jaxbench import sample

        model = built(config, form, "jaxbench")
        size, to_host = sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(model))), np.asarray
        if form.devices > 1:
            from jaxbench.parallel import decoding

            decoding.split(model, config, jax.devices()[: form.devices])
    else:
        from torch_ref import sample

        place = {"device": "cuda" if VALUES.device == "gpu" else "cpu"}
        compiled = {"torch_compile": "step"} if VALUES.compile else {}
        model = built(config, form, "torch_ref", **place, **compiled).eval().requires_grad_(False)
        size, to_host = sum(tensor.nbytes for tensor in model.parameters()), lambda tokens: tokens.cpu().numpy()
    make = sample.Generator if form.devices == 1 else decoding.Generator
    return make(model, eos_id=None, sampling=sample.SamplingParams(temperature=0.0)), to_host, size


def built(config: TransformerConfig, form: Form, package: str, **place: Any) -> Any:
    """Build a decoder with random weights from the modules of a package."""
    if form.weights == "float":
        build = importlib.import_module(f"{package}.transformer").build
        params = random_params(config.model_dump_json())
        return build(config, params, dtype=form.dtype, implementation=form.attention, **place)
    build, how = importlib.import_module(f"{package}.quantization.weight_only").build, form.products
    model = packed_weights.random_model(config, form.weights)
    if form.products == "pallas":
        from jaxbench.quantization import weight_only_pallas

        packed_weights.check_kernel(model, weight_only_pallas.misfit)  # else XLA's products would be measured instead
    return build(model, dtype=form.dtype, implementation=how, attention=form.attention, **place)


@functools.lru_cache(maxsize=1)
def random_params(config: str) -> dict[str, np.ndarray]:
    """Return initial values of a decoder whose configuration is given as JSON; the same in every form of a ladder."""
    return initial.initial_params(TransformerConfig.model_validate_json(config), seed=0)


def main() -> int:
    """Measure the workload that the flags name and append its records."""
    settings = cli.load_config(TrainConfig)
    if settings.model.vocab_size is None:
        raise ValueError(f"one_arm: --config={VALUES.config} leaves model.vocab_size to its tokenizer; --set a size")
    config = settings.decoder(settings.model.vocab_size)
    if VALUES.workload in TRAININGS:
        check_training()
    else:
        check_decode(config, settings.step.precision)
    output = outputs.check_file(VALUES.output, overwrite=True)
    process_environment.ensure(VALUES.device, library=cli.array_library())
    common = {"device": VALUES.device, "commit": environment.commit(), "versions": environment.versions()}
    changed = {"config": VALUES.config, "set": list(VALUES.set)}

    def keep(arm: str, found: list[Record]) -> None:
        for record in found:
            own = {"arm": arm, "detail": record.detail | changed}
            RecordFile(output).append(record.model_copy(update=common | own))
            if record.value is not None:
                print(f"{arm} {record.workload.label()} {record.metric}: {record.value:.6g} {record.unit}", flush=True)

    limit = None if VALUES.memory_mib is None else VALUES.memory_mib * 2**20
    if VALUES.workload == "memory_ladder":
        how = {"steps": VALUES.steps, "device": VALUES.device, "limit": limit}
        batch = random_batch(settings, config)
        train_memory.ladder(settings, config, batch, lambda record: keep(record.arm, [record]), **how)
        return cli.EXIT_OK
    if VALUES.workload == "largest_batch":
        settings, found = train_memory.largest(settings, config, limit=limit)
        keep(VALUES.backend, [found])
    if VALUES.workload in TRAININGS:
        keep(VALUES.backend, train(settings, config))
        return cli.EXIT_OK
    wanted = forms(settings.step.precision, config.num_kv_heads)
    if len(wanted) == 1:
        keep(VALUES.backend, decode(config, wanted[0]))
        return cli.EXIT_OK
    lost: list[str] = []
    for form in wanted:  # a form that does not fit, or whose kernel does not compile, does not stop the others
        arm = f"{VALUES.backend} {form.name}"
        absent = Record(metric="decode_tokens_per_s", workload=workload_of(form), detail=form._asdict())
        with rates.apart(lost, arm, lambda record, arm=arm: keep(arm, [record]), absent):
            keep(arm, decode(config, form))
    rates.check_all(lost, len(wanted))
    return cli.EXIT_OK


def check_training() -> None:
    """Check that a training workload that only Flax has is measured with Flax.

    Raises:
      ValueError: the backend is another one.
    """
    if VALUES.workload != "train" and VALUES.backend != "flax":
        raise ValueError(f"--workload={VALUES.workload} is Flax's; got --backend={VALUES.backend}")


def check_decode(config: TransformerConfig, dtype: str) -> None:
    """Check the flags of decoding.

    Raises:
      ValueError: a row is longer than the model's context; the precision is one for training only; torch.compile is
        combined with quantised weights; or a ladder is combined with PyTorch or --weights.
    """
    prompt, new = VALUES.prompt_tokens, VALUES.new_tokens
    if prompt + new > config.max_seq_len:
        raise ValueError(f"one_arm: {prompt} + {new} tokens, the model's context is {config.max_seq_len}; take fewer")
    if dtype not in ("float32", "bfloat16"):
        raise ValueError(f"one_arm: step.precision={dtype} is a training's; wanted float32 or bfloat16")
    if VALUES.compile and VALUES.weights != "float":
        raise ValueError(f"--compile, --weights={VALUES.weights}: torch.compile takes weights=float; leave one out")
    if VALUES.workload == "ladder" and (VALUES.backend != "flax" or VALUES.weights != "float"):
        raise ValueError(
            f"--workload=ladder has forms of its own, by Flax; got --backend={VALUES.backend}, "
            f"--weights={VALUES.weights}"
        )


if __name__ == "__main__":
    cli.define_config("configs/lm/gpt2_124m.yaml")
    cli.define_backend(choices=("flax", "torch"))
    cli.define_device("gpu")
    flags.DEFINE_enum("workload", "train", [*TRAININGS, *DECODINGS], "what is measured")
    flags.DEFINE_integer("steps", 10, "training steps of a group", lower_bound=1)
    flags.DEFINE_integer(
        "memory_mib", None, "limit of memory_ladder and largest_batch (unset: what the device has)", lower_bound=1
    )
    flags.DEFINE_integer("batch", 1, "rows that are decoded", lower_bound=1)
    flags.DEFINE_integer("prompt_tokens", 64, "tokens of a prompt", lower_bound=1)
    flags.DEFINE_integer("new_tokens", 128, "tokens that are generated", lower_bound=2)
    flags.DEFINE_bool("compile", False, "PyTorch's decode step by torch.compile, in CUDA graphs on a GPU")
    flags.DEFINE_enum(
        "weights", "float", ["float", *packed_weights.RECIPES], "of the layers' matrices, where rows are decoded"
    )
    flags.DEFINE_enum(
        "products", "xla", packed_weights.PRODUCTS, "of weights of few bits: by XLA or by a Pallas kernel"
    )
    flags.DEFINE_string("output", "out/gpu-one-arm/results.jsonl", "file that records are appended to")
    cli.run(main, about=__doc__)
