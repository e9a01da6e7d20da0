"""Compile jaxbench's programs for an NVIDIA GPU that is not attached, and read what the compiler made of them.

    python -m jaxbench.gpu.ahead --config=configs/lm/gpt2_124m.yaml --program=train --target=h200 [--set=K=V]
    python -m jaxbench.gpu.ahead --config=FILE --program=decode --batch=8 --prompt_tokens=64 --new_tokens=64

It wants JAX with its CUDA plugin (`pip install 'jaxbench[gpu]'`), no GPU and no driver. Shapes alone are compiled: a
model of 1 B parameters takes no memory. `read` counts, for each computation that the program runs, its kernels and the
bytes that they read and write. These are counts, not times: what a cache holds is counted again. With a GPU XLA times
several kernels for each product; without one it takes a default, so products may run as other kernels there. Where
there is no GPU, JAX_PLATFORMS=cpu has to be set before JAX is imported; the command does it.
"""

from __future__ import annotations

import collections
import functools
import importlib.util
import os
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from absl import flags

from jaxbench import cli, outputs, terminal
from jaxbench.config import TransformerConfig
from jaxbench.measure import hlo
from jaxbench.training.train_config import TrainConfig

PLUGINS = ("xla_cuda13", "xla_cuda12")  # of the namespace package jax_plugins
OPTIONS = {"xla_gpu_autotune_level": "4"}  # XLA's own; at 0 it refuses products whose operands it fused (llama_1b.yaml)
NUM_GROUPS = 16  # rows of the table of groups

# Opcodes that start no kernel: they name, bundle, wait, or hand over to computations that are read by themselves
FREE = {
    "parameter", "get-tuple-element", "tuple", "bitcast", "constant", "while", "conditional", "call", "after-all",
    "opt-barrier", "partition-id", "replica-id", "add-dependency", "async-start", "async-update", "async-done",
    "copy-done", "fusion-done", "custom-call-done",
}  # fmt: skip
IN_PLACE = {"dynamic-update-slice": 1, "scatter": 2}  # opcode -> which operand holds all that is written
RUN = re.compile(r"(body|condition|branch|true|false)(?:_computations?)?=(?:\{([^}]*)\}|%?([\w.\-]+))")
PARTS = ("dynamic-slice", "slice", "gather")  # read no more of their first operand than they return


class Target(NamedTuple):
    """A GPU to compile for: a GH100 of 132 multiprocessors."""

    name: str  # as CUDA calls it
    memory_bytes: int
    memory_bytes_per_s: int
    l2_bytes: int


# NVIDIA's data sheets (H100 SXM5: 80 GB, 3.35 TB/s; H200: 141 GB, 4.8 TB/s); all digits, and what both share in PROTO
# (stream_executor.GpuTargetConfigProto): XLA's xla/backends/gpu/target_config/specs/{h100_sxm,h200}.txtpb
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
}}
platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 10 patch: 0 }} device_description_str: "{name}"
"""


class Group(NamedTuple):
    """Kernels of one kind and one origin in a computation."""

    kind: str  # a fusion's name without its number, a custom call's target, else the opcode
    op_name: str  # where in the traced function it comes from; empty where the compiler made it
    count: int
    bytes_read: int
    bytes_written: int
    largest: str  # shape of the largest result


class Computation(NamedTuple):
    """What one run of a computation does: the entry, a loop's body or condition, or a branch."""

    name: str
    role: str  # entry, body, condition or branch
    runs: int | None  # rounds of its loop for each run of what holds it; None = not known to the compiler
    kernels: int
    bytes_read: int
    bytes_written: int
    kinds: dict[str, int]  # kernels by kind, the most frequent first
    groups: tuple[Group, ...]  # the most bytes first


def unavailable() -> str:
    """Why nothing can be compiled for NVIDIA GPUs here, or an empty string."""
    has_plugins = importlib.util.find_spec("jax_plugins") is not None
    if has_plugins and any(importlib.util.find_spec(f"jax_plugins.{name}") for name in PLUGINS):
        return ""
    return "gpu: JAX's CUDA plugin is not installed; `pip install 'jaxbench[gpu]'` brings it (no GPU is needed)"


def device(target: str) -> Any:
    """Device of a GPU that is not attached, one of TARGETS, for shardings.

    Raises:
      ValueError: the target is unknown, or JAX has no CUDA plugin, or one that did not start.
    """
    if target not in TARGETS:
        raise ValueError(f"gpu: target={target!r} is unknown; wanted one of {', '.join(TARGETS)}")
    if reason := unavailable():
        raise ValueError(f"{reason} (asked for {target})")
    from jax.experimental import topologies

    proto = PROTO.format(**TARGETS[target]._asdict())
    try:
        return topologies.get_topology_desc(target, "cuda", topology="1x1x1", target_config=proto).devices[0]
    except NotImplementedError as error:
        hint = "where there is no GPU, set JAX_PLATFORMS=cpu before JAX is imported"
        raise ValueError(f"gpu: JAX's CUDA plugin did not start for {target}; {hint}") from error


def train_program(settings: TrainConfig, target: str) -> Any:
    """Training step of a configuration, compiled for one GPU (jax.stages.Compiled); its state is donated.

    Raises:
      ValueError: as `device`; the vocabulary is left to a tokenizer; or the configuration asks for a mesh.
    """
    import jax
    import jax.numpy as jnp

    from jaxbench import prng, train
    from jaxbench.extension import Extension
    from jaxbench.native import products
    from jaxbench.training import batch_size, optimizer_step, precision

    if settings.parallel is not None:
        raise ValueError(f"gpu: parallel.mesh={settings.parallel.mesh}, wanted null: one GPU is compiled for")
    place = _place(target)
    step_config = products.resolved(settings.step, is_on_mesh=False, device="gpu")
    compute = settings.compute(precision.POLICIES[step_config.precision].compute)
    if settings.implementation == "fused":  # asks for the kernel of JAX's own platform, not of the one compiled for
        compute = compute._replace(implementation="cudnn")
    decoder = settings.decoder(None)
    state = batch_size.abstract_state(decoder, compute, step_config, host=place, extension=Extension())
    shape = (settings.batch_size, settings.data.seq_len)
    ids, mask = jax.ShapeDtypeStruct(shape, jnp.int32), jax.ShapeDtypeStruct(shape, bool)
    packed = ids if settings.data.document_mask else None
    key = jax.eval_shape(lambda: prng.key_from_seed(0)) if settings.has_dropout else None
    batch, rate = train.Batch(ids, ids, packed, mask, packed), jax.ShapeDtypeStruct((), "float32")
    step = jax.jit(functools.partial(optimizer_step.train_step, step_config=step_config), donate_argnums=0)
    return _compiled(step, place, state, batch, rate, key)


def generation_programs(
    model_config: TransformerConfig, dtype: str, batch: int, prompt_tokens: int, new_tokens: int, target: str
) -> Any:
    """Prefill and decode of a greedy sample.Generator for these sizes, compiled for one GPU (prompts.Programs).

    They are the programs of the sizes' bucket; the compiler knows no bound of the decode loop.

    Raises:
      ValueError: as `device`.
    """
    import jax
    import jax.numpy as jnp
    from flax import nnx

    from jaxbench import prompts, sample, transformer

    place = _place(target)
    compute = transformer.Compute(dtype=dtype, implementation="dense" if dtype == "float32" else "cudnn")
    model = nnx.eval_shape(lambda: transformer.Transformer(model_config, compute))
    generator = sample.Generator(model, eos_id=None, sampling=prompts.SamplingParams(temperature=0.0))
    # What a generator asks JAX's default platform for, which is not the one compiled for
    generator._cache_dtype = dtype
    is_turned = batch == 1 and "gpu" in sample.TURNED_ON
    bucket = prompts.bucket(batch, prompt_tokens, new_tokens)
    arguments = generator._shapes(bucket, generator._padded_states(None, batch, bucket.batch_size), None)
    prefill = jax.jit(functools.partial(generator._prefill, bucket.num_slots))
    state = jax.eval_shape(prefill, *arguments)
    leaves, shared = generator._weights
    leaves = jax.eval_shape(generator._turn, leaves) if is_turned else leaves
    decode = jax.jit(functools.partial(generator._decode, is_turned=is_turned), donate_argnums=1)
    rest = (leaves, shared), state, jax.ShapeDtypeStruct((), jnp.int32)
    return prompts.Programs(_compiled(prefill, place, *arguments), _compiled(decode, place, *rest))


def _place(target: str) -> Any:
    """Sharding that puts an array on the target; a mesh of one device, as other shardings need an attached one."""
    import jax

    return jax.sharding.NamedSharding(jax.sharding.Mesh([device(target)], ("x",)), jax.sharding.PartitionSpec())


def _compiled(program: Any, place: Any, *arguments: Any) -> Any:
    """Compile a jitted function for shapes on the target; what has a sharding keeps it."""
    import jax

    def placed(leaf: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=getattr(leaf, "sharding", None) or place)

    lowered = program.trace(*jax.tree.map(placed, arguments)).lower(lowering_platforms=("cuda",))
    return lowered.compile(compiler_options=OPTIONS)


def read(text: str) -> list[Computation]:
    """Computations that a program runs, from its optimised HLO text, the one that moves the most bytes in a run first.

    What a computation calls outright counts as its own; loops and branches are computations of their own. A kernel
    reads each operand once and writes its result once; of what it slices it reads the slice, of what it updates in
    place it writes the update.

    Raises:
      ValueError: the text has no entry computation.
    """
    program, entry = hlo._parse(text)
    found: dict[str, Computation] = {}
    waiting: list[tuple[str, str, int | None]] = [(entry, "entry", 1)]
    while waiting:
        name, role, runs = waiting.pop()
        if name not in found and name in program:
            found[name] = _summary(program, name, role, runs)
            waiting += _run_by(program, name)
    return sorted(found.values(), key=lambda each: -(each.bytes_read + each.bytes_written))


def _run_by(program: dict[str, list], name: str) -> Iterator[tuple[str, str, int | None]]:
    """Loops and branches of a computation: name, role, runs."""
    for each in _inlined(program, name):
        runs = hlo._trip_count(program, each.line) if each.opcode == "while" else None
        for role, several, single in RUN.findall(each.line) if each.opcode in ("while", "conditional") else ():
            for called in re.findall(r"[\w.\-]+", several or single):
                yield called, role if each.opcode == "while" else "branch", runs


def _inlined(program: dict[str, list], name: str) -> Iterator[Any]:
    """Instructions of a computation, those of what it calls in place of the calls."""
    for each in program[name]:
        called = re.search(r"(?:to_apply|calls|called_computations)=\{?%?([\w.\-]+)", each.line)
        if each.opcode in ("call", "async-start") and called and called.group(1) in program:
            yield from _inlined(program, called.group(1))
        else:
            yield each


def _summary(program: dict[str, list], name: str, role: str, runs: int | None) -> Computation:
    shapes: dict[str, str] = {}  # by name
    groups: dict[tuple[str, str], Group] = {}
    kinds: collections.Counter[str] = collections.Counter()
    for each in _inlined(program, name):
        shapes[_name(each)] = each.shape
        if each.opcode in FREE or not each.opcode:
            continue
        origin = re.search(r'op_name="([^"]*)"', each.line)
        key = _kind(each), origin.group(1) if origin else ""
        old = groups.get(key, Group(*key, 0, 0, 0, ""))
        taken, written = _moved(program, each, shapes)
        shape = re.sub(r"\{[^}]*\}|/\*[^*]*\*/", "", each.shape)  # without layouts
        largest = max(old.largest, shape, key=_size)
        groups[key] = Group(*key, old.count + 1, old.bytes_read + taken, old.bytes_written + written, largest)
        kinds[key[0]] += 1
    ordered = sorted(groups.values(), key=lambda group: -(group.bytes_read + group.bytes_written))
    moved = sum(group.bytes_read for group in ordered), sum(group.bytes_written for group in ordered)
    return Computation(name, role, runs, kinds.total(), *moved, dict(kinds.most_common()), tuple(ordered))


def _moved(program: dict[str, list], kernel: Any, shapes: dict[str, str]) -> tuple[int, int]:
    """Bytes that a kernel reads and writes; shapes: of what comes before it, by name."""
    operands, root = _operands(kernel), kernel
    called = re.search(r"calls=%?([\w.\-]+)", kernel.line)
    if called is not None and called.group(1) in program:
        inside = {_name(each): each for each in program[called.group(1)]}
        root = next(each for each in inside.values() if each.line.lstrip().startswith("ROOT "))
        numbers = {_arguments(each): name for name, each in inside.items() if each.opcode == "parameter"}
    else:  # as a fusion of itself alone
        inside = {name: hlo._Instruction("parameter", shapes.get(name, ""), "") for name in operands}
        inside, numbers = inside | {_name(kernel): kernel}, {f"{n}": name for n, name in enumerate(operands)}
    uses: dict[str, list] = {}
    for each in inside.values():
        for name in dict.fromkeys(_operands(each)):
            uses.setdefault(name, []).append(each)
    shares: dict[str, float] = {}
    for number, name in enumerate(operands):  # the same array may be several operands
        shares[name] = min(1.0, shares.get(name, 0.0) + _share(numbers[f"{number}"], inside, uses))
    taken = sum(_size(shapes.get(name, "")) * share for name, share in shares.items())
    return round(taken), _written(inside, root)


def _share(name: str, inside: dict[str, Any], uses: dict[str, list]) -> float:
    """Part of a value that the kernel reads, 0 to 1, from what it does with it."""
    total = 0.0 if name in uses else 1.0  # else it is the result
    for each in uses.get(name, []):
        is_first = _operands(each)[0] == name
        if each.opcode in ("bitcast", "convert"):
            total += _share(_name(each), inside, uses)
        elif each.opcode in PARTS and is_first:
            total += _size(each.shape) / max(1, _size(inside[name].shape))
        elif not (each.opcode in IN_PLACE and is_first):
            return 1.0
    return min(total, 1.0)


def _written(inside: dict[str, Any], root: Any) -> int:
    """Bytes that a kernel writes, from the root of what it computes."""
    total = 0
    for name in _operands(root) if root.opcode == "tuple" else [_name(root)]:
        while inside[name].opcode == "bitcast":
            name = _operands(inside[name])[0]
        each = inside[name]
        kept = inside[_operands(each)[IN_PLACE[each.opcode]]] if each.opcode in IN_PLACE else each
        shape = re.sub(r", [su]8\[\d*\](\{0\})?\)$", "", kept.shape)  # without a custom call's workspace
        total += hlo._result_bytes(kept._replace(shape=shape))
    return total


def _size(shape: str) -> int:
    return sum(hlo.shape_bytes(shape))


def _name(instruction: Any) -> str:
    return hlo._INSTRUCTION.match(instruction.line).group(1)


def _operands(instruction: Any) -> list[str]:
    return re.findall(r"%([\w.\-]+)", _arguments(instruction))


def _arguments(instruction: Any) -> str:
    """Text between the brackets of an instruction."""
    found = re.search(rf" {re.escape(instruction.opcode)}\(([^)]*)\)", instruction.line)
    return found.group(1) if found else ""


def _kind(kernel: Any) -> str:
    target = re.search(r'custom_call_target="([^"]*)"', kernel.line)
    named = kernel.opcode.startswith("fusion")
    return target.group(1) if target else re.sub(r"(\.(\d+|clone))+$", "", _name(kernel) if named else kernel.opcode)


def tables(found: list[Computation], target: Target) -> list[Any]:
    """Tables of what `read` found: the computations, and the groups of the largest (rich.table.Table)."""
    from rich.markup import escape
    from rich.table import Table

    titles = "computation", "role", "runs", "kernels", "GB read", "GB written", "ms at peak"
    overview = Table(*titles, title="computations, one run of each")
    for each in found:
        moved = each.bytes_read / 1e9, each.bytes_written / 1e9
        figures = (f"{figure:9.3f}" for figure in (*moved, 1e12 * sum(moved) / target.memory_bytes_per_s))
        overview.add_row(each.name, each.role, f"{each.runs or '?'}", f"{each.kernels:6,}", *figures)
    titles = "kernels", "MB read", "MB written", "kind", "largest result", "from"
    groups = Table(*titles, title=f"largest groups of {found[0].name}")
    for group in found[0].groups[:NUM_GROUPS]:
        figures = f"{group.count:6}", f"{group.bytes_read / 1e6:9,.1f}", f"{group.bytes_written / 1e6:9,.1f}"
        groups.add_row(*figures, group.kind, group.largest, escape(group.op_name))
    return [overview, groups]


def define_flags() -> None:
    """Define the command's flags."""
    cli.define_config("configs/lm/gpt2_124m.yaml", "training configuration (YAML); decode and prefill read its decoder")
    flags.DEFINE_enum("program", "train", ["train", "prefill", "decode"], "which program is compiled")
    flags.DEFINE_enum("target", "h200", list(TARGETS), "GPU to compile for")
    flags.DEFINE_integer("batch", 1, "prefill and decode: rows", lower_bound=1)
    flags.DEFINE_integer("prompt_tokens", 64, "prefill and decode: tokens of a prompt", lower_bound=1)
    flags.DEFINE_integer("new_tokens", 64, "prefill and decode: tokens that are generated", lower_bound=2)
    flags.DEFINE_enum("dtype", "bfloat16", ["float32", "bfloat16", "float16"], "prefill and decode: of weights, cache")
    flags.DEFINE_string("output", None, "file for the optimised HLO")


def main() -> int:
    """Compile the program that --program names and say what it does; return the exit code."""
    values = flags.FLAGS
    settings = cli.load_config(TrainConfig)
    output = None if values.output is None else outputs.check_file(values.output, overwrite=True)
    if values.program == "train":
        program = train_program(settings, values.target)
    else:
        sizes = values.batch, values.prompt_tokens, values.new_tokens
        programs = generation_programs(settings.decoder(None), values.dtype, *sizes, values.target)
        program = getattr(programs, values.program)
    text, memory, out = program.as_text(), program.memory_analysis(), terminal.console()
    if output is not None:
        output.write_text(text, encoding="utf-8")
    out.print(*tables(read(text), TARGETS[values.target]), sep="\n")
    parts = ("argument", "output", "alias", "temp")
    listed = ", ".join(f"{part} {getattr(memory, f'{part}_size_in_bytes') / 1e9:.3f}" for part in parts)
    out.print(f"memory, GB: {listed} (alias: arguments that results are written over)")
    return cli.EXIT_OK


if __name__ == "__main__":
    # Before JAX is there: it looks for no GPU, and a cache cannot give programs back for one that is not attached
    os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_ENABLE_COMPILATION_CACHE": "false"}
    define_flags()
    cli.run(main, about=__doc__)
