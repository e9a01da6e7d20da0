"""Compile jaxbench's programs for an NVIDIA GPU that is not attached, and read the compiler's output.

    python -m jaxbench.gpu.ahead --config=configs/lm/gpt2_124m.yaml --program=train --target=h200 [--set=K=V]
    python -m jaxbench.gpu.ahead --config=FILE --program=decode --batch=8 --prompt_tokens=64 --new_tokens=64

It needs JAX with its CUDA plugin (`pip install -e '.[gpu]'`), but no GPU and no driver. Programs are compiled from
shapes: a model of 1 B parameters takes no memory, unless its matrices are quantised (--weights). kernels.py counts the
bytes read and written. With a GPU, XLA times several kernels for each product; without one it takes a default, so
products may run as other kernels on the GPU. Without a GPU, JAX_PLATFORMS=cpu must be set before JAX is imported; the
command does this.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from typing import Any, NamedTuple

from absl import flags

from jaxbench import cli, outputs, terminal
from jaxbench.config import TransformerConfig
from jaxbench.gpu import kernels, packed_weights
from jaxbench.training.train_config import TrainConfig

PLUGINS = ("xla_cuda13", "xla_cuda12")  # of the namespace package jax_plugins
OPTIONS = {"xla_gpu_autotune_level": "4"}  # XLA's default; at 0 it rejects products with fused operands (llama_1b.yaml)


class Target(NamedTuple):
    """A GPU to compile for: a GH100 of 132 multiprocessors."""

    name: str  # CUDA's name
    memory_bytes: int
    memory_bytes_per_s: int
    l2_bytes: int


# NVIDIA's data sheets (H100 SXM5: 80 GB, 3.35 TB/s; H200: 141 GB, 4.8 TB/s). The exact digits, and the common part in
# PROTO (stream_executor.GpuTargetConfigProto), are XLA's xla/backends/gpu/target_config/specs/{h100_sxm,h200}.txtpb
TARGETS = {
    "h100": Target("NVIDIA H100 80GB HBM3", 84942979072, 3352320000000, 52428800),
    "h200": Target("NVIDIA H200 141GB HBM3e", 151397597184, 4800000000000, 52428800),
}
PROTO = """
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 shared_memory_per_core: 233472 shared_memory_per_block_optin: 232448
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535 thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98 cuda_compute_capability {{ major: 9 minor: 0 }}
  memory_bandwidth: {memory_bytes_per_s} l2_cache_size: {l2_bytes} device_memory_size: {memory_bytes}
  driver_version: "13.0.0" kernel_mode_driver_version: "13.0.0" runtime_version: "13.0.0"
  compile_time_toolkit_version: "13.0.0" dnn_version: "9.10.0" device_vendor: "NVIDIA Corporation"
}}
platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 10 patch: 0 }} device_description_str: "{name}"
"""


def unavailable() -> str:
    """Return why nothing can be compiled for NVIDIA GPUs here, or an empty string."""
    has_plugins = importlib.util.find_spec("jax_plugins") is not None
    if has_plugins and any(importlib.util.find_spec(f"jax_plugins.{name}") for name in PLUGINS):
        return ""
    return "gpu: JAX's CUDA plugin is not installed; `pip install -e '.[gpu]'` brings it (no GPU is needed)"


def device(target: str) -> Any:
    """Return the device of a GPU that is not attached, for shardings; see devices."""
    return devices(target, 1)[0]


def devices(target: str, count: int) -> list[Any]:
    """Return devices of one host's GPUs (target: one of TARGETS) that are not attached, for shardings.

    Raises:
      ValueError: the target is unknown, or JAX has no CUDA plugin, or the plugin did not start.
    """
    if target not in TARGETS:
        raise ValueError(f"gpu: target={target!r} is unknown; wanted one of {', '.join(TARGETS)}")
    if reason := unavailable():
        raise ValueError(f"{reason} (asked for {target})")
    from jax.experimental import topologies

    proto = PROTO.format(**TARGETS[target]._asdict())
    try:
        return list(topologies.get_topology_desc(target, "cuda", topology=f"1x1x{count}", target_config=proto).devices)
    except NotImplementedError as error:
        hint = "where there is no GPU, set JAX_PLATFORMS=cpu before JAX is imported"
        raise ValueError(f"gpu: JAX's CUDA plugin did not start for {target}; {hint}") from error


def train_program(settings: TrainConfig, target: str) -> Any:
    """Compile the training step of a configuration for one GPU (jax.stages.Compiled); its state is donated.

    Raises:
      ValueError: as `devices`; the vocabulary size is left to a tokenizer; or the configuration asks for a mesh.
    """
    import jax
    import jax.numpy as jnp

    from jaxbench import prng, train
    from jaxbench.extension import Extension
    from jaxbench.native import products
    from jaxbench.training import optimizer_step, precision, state_shapes

    if settings.parallel is not None:
        raise ValueError(f"gpu: parallel.mesh={settings.parallel.mesh}, wanted null: one GPU is compiled for")
    place = _place(target)
    step_config = products.resolved(settings.step, is_on_mesh=False, device="gpu")
    compute = settings.compute(precision.POLICIES[step_config.precision].compute)
    if settings.implementation == "fused":  # "fused" selects the kernel of JAX's own platform, not of the target
        compute = compute._replace(implementation="cudnn")
    decoder = settings.decoder(None)
    state = state_shapes.abstract_state(decoder, compute, step_config, host=place, extension=Extension())
    shape = (settings.batch_size, settings.data.seq_len)
    ids, mask = jax.ShapeDtypeStruct(shape, jnp.int32), jax.ShapeDtypeStruct(shape, bool)
    packed = ids if settings.data.document_mask else None
    key = jax.eval_shape(lambda: prng.key_from_seed(0)) if settings.has_dropout else None
    batch, rate = train.Batch(ids, ids, packed, mask, packed), jax.ShapeDtypeStruct((), "float32")
    step = jax.jit(functools.partial(optimizer_step.train_step, step_config=step_config), donate_argnums=0)
    return _compiled(step, place, state, batch, rate, key)


def generation_programs(
    model_config: TransformerConfig, dtype: str, batch: int, prompt_tokens: int, new_tokens: int, target: str,
    weights: str = "float", products: str = "xla", num_devices: int = 1,
) -> Any:  # fmt: skip
    """Compile prefill and decode of a greedy generator for these sizes for GPUs (prompts.Programs).

    The programs are those of the sizes' bucket; the compiler knows no bound of the decode loop.

    Args:
      weights: float, or one of packed_weights.RECIPES for the layers' matrices.
      products: implementation of products with such matrices, see weight_only_pallas.matmul.
      num_devices: GPUs that the decoder is split over (parallel/decoding.py).

    Raises:
      ValueError: as `devices`, or as decoding.shardings.
    """
    import jax
    import jax.numpy as jnp

    from jaxbench import prompts, sample
    from jaxbench.parallel import decoding

    place = _place(target, num_devices)
    model = _decoder(model_config, dtype, weights, products)
    kind = sample.Generator
    if num_devices > 1:
        model, kind = _split(model, model_config, place.mesh), decoding.Generator
    generator = kind(model, eos_id=None, sampling=prompts.SamplingParams(temperature=0.0))
    # Values that a generator reads from JAX's default platform, which is not the target
    generator._cache_dtype = dtype
    is_transposed = batch == 1 and "gpu" in sample.TRANSPOSES_ON
    bucket = prompts.bucket(batch, prompt_tokens, new_tokens)
    arguments = generator._shapes(bucket, generator._padded_states(None, batch, bucket.batch_size), None)
    run = functools.partial(generator._prefill, bucket.num_slots)
    where = generator._place(lambda: jax.eval_shape(run, *arguments))
    prefill = jax.jit(run, out_shardings=where)
    state = jax.eval_shape(prefill, *arguments)
    weights = generator._weights
    weights = weights._replace(leaves=_transposed(generator, weights.leaves)) if is_transposed else weights
    decode_fn = functools.partial(generator._decode, is_transposed=is_transposed)
    decode = jax.jit(decode_fn, donate_argnums=1, out_shardings=where)
    rest = weights, state, jax.ShapeDtypeStruct((), jnp.int32)
    return prompts.Programs(_compiled(prefill, place, *arguments), _compiled(decode, place, *rest))


def _decoder(config: TransformerConfig, dtype: str, weights: str, products: str) -> Any:
    """Make a decoder of shapes without values."""
    import jax
    from flax import nnx

    from jaxbench import transformer
    from jaxbench.quantization import weight_only

    attention = "dense" if dtype == "float32" else "cudnn"
    if weights == "float":
        compute = transformer.Compute(dtype=dtype, implementation=attention)
        return nnx.eval_shape(lambda: transformer.Transformer(config, compute))
    held = packed_weights.random_model(config, weights)
    graph, state = nnx.split(weight_only.build(held, dtype=dtype, implementation=products, attention=attention))
    return nnx.merge(graph, jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), state))


def _split(model: Any, config: TransformerConfig, mesh: Any) -> Any:
    """Split a decoder of shapes over a mesh."""
    import jax
    from flax import nnx

    from jaxbench.parallel import decoding

    graph, state = nnx.split(model)

    def at(leaf: Any, where: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where)

    return nnx.merge(graph, jax.tree.map(at, state, decoding.shardings(state, config, mesh)))


def _transposed(generator: Any, leaves: list) -> list:
    """Return the shapes of transposed kernels, sharded as the kernels are."""
    import jax

    def at(shape: Any, leaf: Any, swaps: bool) -> jax.ShapeDtypeStruct:
        where = leaf.sharding
        if swaps and where is not None:
            spec = (*where.spec, None, None)[:2]
            where = jax.sharding.NamedSharding(where.mesh, jax.sharding.PartitionSpec(*reversed(spec)))
        return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=where)

    return list(map(at, jax.eval_shape(generator._transpose, leaves), leaves, generator._is_transposable))


def _place(target: str, count: int = 1) -> Any:
    """Return a sharding that replicates an array on all targets; always a mesh, as others need an attached device."""
    import jax

    from jaxbench.mesh import MODEL

    return jax.sharding.NamedSharding(jax.sharding.Mesh(devices(target, count), (MODEL,)), jax.sharding.PartitionSpec())


def _compiled(program: Any, place: Any, *arguments: Any) -> Any:
    """Compile a jitted function for shapes on the target; arguments with a sharding keep it."""
    import jax

    def placed(leaf: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=getattr(leaf, "sharding", None) or place)

    lowered = program.trace(*jax.tree.map(placed, arguments)).lower(lowering_platforms=("cuda",))
    return lowered.compile(compiler_options=OPTIONS)


def define_flags() -> None:
    """Define the command's flags."""
    cli.define_config("configs/lm/gpt2_124m.yaml", "training configuration (YAML); decode and prefill read its decoder")
    flags.DEFINE_enum("program", "train", ["train", "prefill", "decode"], "which program is compiled")
    flags.DEFINE_enum("target", "h200", list(TARGETS), "GPU to compile for")
    flags.DEFINE_integer("batch", 1, "prefill and decode: rows", lower_bound=1)
    flags.DEFINE_integer("prompt_tokens", 64, "prefill and decode: tokens of a prompt", lower_bound=1)
    flags.DEFINE_integer("new_tokens", 64, "prefill and decode: tokens that are generated", lower_bound=2)
    flags.DEFINE_enum("dtype", "bfloat16", ["float32", "bfloat16", "float16"], "prefill and decode: of weights, cache")
    flags.DEFINE_enum("weights", "float", ["float", *packed_weights.RECIPES], "prefill and decode: of the matrices")
    flags.DEFINE_enum(
        "products", "xla", packed_weights.PRODUCTS, "of weights of few bits: by XLA or by a Pallas kernel"
    )
    flags.DEFINE_integer("devices", 1, "prefill and decode: GPUs that the decoder is split over", lower_bound=1)
    flags.DEFINE_string("output", None, "file for the optimised HLO")


def main() -> int:
    """Compile the program that --program names and print its kernels and memory; return the exit code."""
    values = flags.FLAGS
    settings = cli.load_config(TrainConfig)
    output = None if values.output is None else outputs.check_file(values.output, overwrite=True)
    if values.program == "train":
        program = train_program(settings, values.target)
    else:
        sizes = values.batch, values.prompt_tokens, values.new_tokens
        how = {"weights": values.weights, "products": values.products, "num_devices": values.devices}
        programs = generation_programs(settings.decoder(None), values.dtype, *sizes, values.target, **how)
        program = getattr(programs, values.program)
    text, memory, out = program.as_text(), program.memory_analysis(), terminal.console()
    if output is not None:
        output.write_text(text, encoding="utf-8")
    out.print(*kernels.tables(kernels.read(text), TARGETS[values.target].memory_bytes_per_s), sep="\n")
    parts = ("argument", "output", "alias", "temp")
    listed = ", ".join(f"{part} {getattr(memory, f'{part}_size_in_bytes') / 1e9:.3f}" for part in parts)
    out.print(f"memory, GB: {listed} (alias: arguments that results are written over)")
    return cli.EXIT_OK


if __name__ == "__main__":
    # Set before JAX is imported: do not look for a GPU, and do not load programs for an absent GPU from a cache
    os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_ENABLE_COMPILATION_CACHE": "false"}
    define_flags()
    cli.run(main, about=__doc__)
