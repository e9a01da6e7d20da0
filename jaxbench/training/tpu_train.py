"""Compile a training configuration's step for a TPU slice that is not attached, and report the compiler's figures.

    python -m jaxbench.training.tpu_train --config=configs/lm/tpu_1b.yaml --topology=v5e:4x4 [--set=K=V] [--output=F]

It is the step that experiments/train.py runs on such a slice: precision, rematerialisation, optimiser, offload, mesh.
Reported per chip: bytes in its own memory (fits or not) and in the host's, collectives by kind, and the roofline: the
longest of compute, memory and interconnect at the chip's published rates, each alone at its peak. Whether collectives
overlap matrix products is read from the compiled schedule (hlo.py): a count and a share of bytes, not a time. MFU is
the model's FLOPs (observe.flops_per_token, both conventions) divided by what the chips could do in that time: a bound
from counts, not a measurement.

Compute counts what rematerialisation and a pipeline's stages do again; in a pipeline, a tick takes as long as its
slowest stage (pipeline_schedule.timetable). Memory counts weights once per pass, the optimiser's 32 bytes per
trained parameter, and logits four times in float32; activations are left out. Collectives are those of the compiled
program; one inside a branch counts as executed in every iteration of its loop.
"""

from __future__ import annotations

import collections
import functools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from absl import flags

from jaxbench import cli, initial, outputs
from jaxbench.config import TransformerConfig
from jaxbench.extension import Extension
from jaxbench.measure import chips, hlo, tpu_compile
from jaxbench.measure.flops import dtype_bytes
from jaxbench.measure.records import Record, RecordFile, Workload
from jaxbench.mesh import MODEL, STAGE
from jaxbench.parallel.pipeline_schedule import timetable
from jaxbench.training import observe, precision
from jaxbench.training.train_config import TrainConfig

# Per trained parameter: weight, gradient and two moments read in float32; all but the gradient written
OPTIMIZER_BYTES = 32


class Lowered(NamedTuple):
    """A step ready to compile, and one chip's share of it."""

    lowered: Any  # jax.stages.Lowered
    sizes: Mapping[str, int]  # of the mesh axes
    trained: int  # parameters that one chip stores and updates
    used: int  # parameters that one chip computes with; in a pipeline its stage's, plus embedding and head


# The step, from shapes alone


def model_of(settings: TrainConfig) -> TransformerConfig:
    """Decoder of a training configuration.

    Raises:
      ValueError: the vocabulary size is left to a tokenizer.
    """
    if settings.model.vocab_size is None:
        raise ValueError(
            f"tpu_train: model.vocab_size is unset and left to data.tokenizer={settings.data.tokenizer}, which is not "
            "read here; give it with --set=model.vocab_size=NUMBER"
        )
    return settings.decoder(None)


def lower_step(settings: TrainConfig, topology: chips.Topology, extension: Extension = Extension()) -> Lowered:
    """Lower the configuration's step for every chip of a slice.

    extension: what a workload adds to its decoder; adapters (settings.lora) need none.

    Raises:
      ValueError: the configuration has no mesh, or it does not fit the slice or the model.
    """
    import jax
    import jax.numpy as jnp

    from jaxbench import prng, train
    from jaxbench.lora import layers
    from jaxbench.native import products
    from jaxbench.parallel import mesh_plan
    from jaxbench.training import optimizer_step, state_shapes

    extension = extension if settings.lora is None else layers.extension(settings.lora)
    if settings.parallel is None:
        raise ValueError(f"tpu_train: parallel is unset, the {topology.num_chips} chips need parallel.mesh")
    model = model_of(settings)
    step_config = products.resolved(settings.step, is_on_mesh=True, device="tpu")
    shape = (settings.batch_size, settings.data.seq_len)
    plan = mesh_plan.make_plan(
        model, settings.parallel, batch=shape[0] // step_config.accumulation, tokens=shape[1],
        devices=tpu_compile.devices(topology), extension=extension,
    )  # fmt: skip
    mesh_plan.check_precision(plan, step_config.precision)
    groups = mesh_plan.projection_groups(settings.parallel, plan.mesh.size) if settings.fused_projections else 0
    compute = settings.compute(precision.POLICIES[step_config.precision].compute, groups)
    if settings.implementation == "fused":  # would select the kernel of JAX's own platform, not of the target
        compute = compute._replace(implementation="splash")
    everywhere = jax.sharding.NamedSharding(plan.mesh, jax.sharding.PartitionSpec())
    state = state_shapes.abstract_state(model, compute, step_config, host=everywhere, extension=extension)
    ids, mask = jax.ShapeDtypeStruct(shape, jnp.int32), jax.ShapeDtypeStruct(shape, bool)
    key = jax.eval_shape(lambda: prng.key_from_seed(0)) if settings.has_dropout else None
    extras = {"learning_rate": jax.ShapeDtypeStruct((), "float32"), "dropout_key": key}
    step = mesh_plan.make_step(plan, state, step=functools.partial(optimizer_step.train_step, step_config=step_config))
    lowered = step.lower(state, train.Batch(ids, ids, ids, mask, ids), extras)
    trained = sum(
        math.prod(plan.params[name].shard_shape(param_shape))
        for name, param_shape in initial.parameter_shapes(model).items()
        if settings.step.optimizer.is_trained(name)
    )
    return Lowered(lowered, dict(plan.mesh.shape), trained, plan.elements_per_chip()[1])


def compile_step(settings: TrainConfig, topology: chips.Topology, extension: Extension = Extension()) -> list[Record]:
    """Compile the step for a slice and return its records; one that does not fit gives one record of status error.

    extension: what a workload adds to the decoder.
    """
    step = lower_step(settings, topology, extension)
    load = {"batch": settings.batch_size, "prompt_tokens": settings.data.seq_len}
    axes = [f"{axis}={size}" for axis, size in step.sizes.items() if size > 1]
    workload = Workload(kind="train", dtype=settings.step.precision, **load)
    common = {"workload": workload, "device": " ".join([topology.name, *axes])}
    chip = {"hbm_bytes": topology.chip.hbm_bytes, "num_chips": topology.num_chips}
    shape = chip | {"num_layers": settings.model.num_layers, "mesh": dict(step.sizes)}
    try:
        compiled = tpu_compile.compile_program(lambda: step.lowered, topology)
    except tpu_compile.DoesNotFitError as error:
        return [tpu_compile.refusal(error, shape, **common)]
    resident = compiled.resident_bytes
    line = roofline(settings, topology, step, sent_bytes=compiled.sent_bytes)
    figures = [
        ("tpu_memory_bytes", resident, "bytes", compiled.memory | {"fits": resident <= topology.chip.hbm_bytes}),
        ("tpu_flops", line["flops_per_chip"], "FLOP", {"with_repeats": line["flops_done_per_chip"]}),
        ("tpu_traffic_bytes", line["traffic_bytes"], "bytes", {}),
        ("tpu_collective_bytes", line["sent_bytes"], "bytes", {"kinds": compiled.kinds}),
        ("tpu_overlapped_share", *overlapped(compiled.collectives)),
        ("tpu_roofline_s", line["seconds"], "s", line),
        ("tpu_roofline_mfu", line["mfu"], "ratio", {"causal": line["mfu_causal"], "bound": line["bound"]}),
        ("tpu_compile_s", compiled.compile_s, "s", {}),
    ]
    return tpu_compile.make_records(figures, shape, **common)


def overlapped(collectives: Mapping[str, hlo.Collective]) -> tuple[float, str, dict[str, int]]:
    """Share of the sent bytes that the schedule overlaps with a product, its unit, and the counts behind it.

    It is 0 if nothing is sent. What counts as overlapped: hlo.py.
    """
    names = ("count", "asynchronous", "overlapped", "sent_bytes", "overlapped_bytes")
    facts = {name: sum(getattr(kind, name) for kind in collectives.values()) for name in names}
    return facts["overlapped_bytes"] / max(facts["sent_bytes"], 1), "ratio", facts


# The roofline


def roofline(settings: TrainConfig, topology: chips.Topology, step: Lowered, *, sent_bytes: int) -> dict[str, Any]:
    """Roofline of a step: least seconds by each of the chip's rates, the longest of them, and the MFU at it."""
    model, chip = model_of(settings), topology.chip
    tokens, length = settings.batch_size * settings.data.seq_len, settings.data.seq_len
    count = functools.partial(observe.flops_per_token, model, length, is_trained=settings.step.optimizer.is_trained)
    whole, halved = (count(is_causal=is_causal) for is_causal in (False, True))
    forward = observe.flops_per_token(model, length, is_causal=False) / 3  # a third if everything is trained
    useful = tokens * whole / topology.num_chips
    done, longest = _computed(settings, model, step.sizes, tokens=tokens, per_token=whole, forward=forward)
    is_again = settings.step.remat.policy != "none"
    repeats = 2 + is_again + (step.sizes[STAGE] > 1)  # forward, blocks again, a stage's forward again, backward
    micro = settings.parallel.micro_batches * settings.step.accumulation
    logits = 4 * 4 * tokens * model.vocab_size / topology.num_chips
    width = dtype_bytes(precision.POLICIES[settings.step.precision].compute)
    traffic = repeats * micro * width * step.used + OPTIMIZER_BYTES * step.trained + logits
    times, bound = chips.least_seconds(chip, flops=longest, traffic=traffic, sent=sent_bytes)
    seconds = times[f"{bound}_s"]
    peak = chip.flops_per_s * seconds
    return times | {
        "bound": bound,
        "seconds": seconds,
        "mfu": useful / peak,
        "mfu_causal": useful * halved / whole / peak,
        "tokens_per_s": tokens / seconds,
        "flops_per_chip": useful,
        "flops_done_per_chip": done,
        "idle_factor": longest / done,
        "traffic_bytes": traffic,
        "sent_bytes": sent_bytes,
        "chip": chip.name,
        "source": chip.source,
    }


def _computed(
    settings: TrainConfig, model: TransformerConfig, sizes: Mapping[str, int], *, tokens: int, per_token: float,
    forward: float,
) -> tuple[float, float]:  # fmt: skip
    """FLOPs per chip in a step: the mean over the chips, and the sum along the longest chain of ticks."""
    chips_in_all, parallel = math.prod(sizes.values()), settings.parallel
    product = 2 * model.d_model * model.vocab_size  # of the head, per token
    name = "embed.embedding" if model.tie_embeddings else "head.kernel"
    head = (3 if settings.step.optimizer.is_trained(name) else 2) * product
    layers, layers_forward = per_token - head, forward - product
    stages, micro = sizes[STAGE], parallel.micro_batches
    again = layers_forward if settings.step.remat.policy != "none" else 0
    if stages == 1 and micro == 1:
        done = tokens * (per_token + again) / chips_in_all
        return done, done
    rows = chips_in_all // (stages * sizes.get(MODEL, 1))
    a_micro = tokens / settings.step.accumulation / micro / rows / sizes.get(MODEL, 1)  # tokens' worth on a chip
    # A stage's backward pass computes its forward pass again, and with rematerialised blocks once more.
    costs = {"forward": a_micro * layers_forward / stages, "backward": a_micro * (layers + again) / stages}
    ticks: dict[tuple[int, int], float] = collections.defaultdict(float)
    for work in timetable(parallel.schedule, stages, micro):
        is_head = work.kind == "backward" and work.stage == stages - 1
        ticks[work.tick, work.stage] += costs[work.kind] + (a_micro * head if is_head else 0)
    longest: dict[int, float] = collections.defaultdict(float)
    for (tick, _), cost in ticks.items():
        longest[tick] = max(longest[tick], cost)
    times = settings.step.accumulation
    return times * sum(ticks.values()) / stages, times * sum(longest.values())


# The command


def describe(records: list[Record]) -> str:
    """Text of the records, for the terminal."""
    if records[0].value is None:
        return f"{records[0].device}: {records[0].reason}"
    figures = {record.metric.removeprefix("tpu_"): record for record in records}
    memory, line = figures["memory_bytes"], figures["roofline_s"].detail
    fits = "fits" if memory.detail["fits"] else "does not fit"
    host = memory.detail["host_argument"] + memory.detail["host_temp"]
    kinds = figures["collective_bytes"].detail["kinds"].values()
    listed = ", ".join(
        f"{kind['kind']} x{kind['count']} ({kind['sent_bytes'] / 2**20:,.0f} MiB sent)" for kind in kinds
    )
    share, beside = figures["overlapped_share"].value, figures["overlapped_share"].detail
    times = ", ".join(f"{name} {1e3 * line[f'{name}_s']:.1f} ms" for name in ("compute", "memory", "interconnect"))
    return "\n".join([
        f"{memory.device}, batch {memory.workload.batch} x {memory.workload.prompt_tokens}, {memory.workload.dtype}: "
        f"{memory.value / 2**30:.2f} GiB a chip, {fits} in {memory.detail['hbm_bytes'] / 2**30:.0f} GiB"
        + (f", {host / 2**30:.2f} GiB in the host" if host else "")
        + f"; compiled in {figures['compile_s'].value:.0f} s",
        f"  FLOPs a chip: {line['flops_per_chip'] / 1e12:.2f} T of the model, "
        f"{line['flops_done_per_chip'] / 1e12:.2f} T computed; "
        f"waiting for the slowest stage makes it {line['idle_factor']:.2f} times as long",
        f"  collectives a chip: {listed or 'none'}",
        f"  overlap in the schedule: {beside['asynchronous']} of {beside['count']} collectives are asynchronous, "
        f"{beside['overlapped']} with a product between start and end: {100 * share:.1f} % of the bytes sent",
        f"  roofline, not a measurement: {times}; {line['bound']} bound, at most {line['tokens_per_s']:,.0f} tokens/s, "
        f"MFU {100 * line['mfu']:.1f} % ({100 * line['mfu_causal']:.1f} % with half the attention)",
    ])  # fmt: skip


def define_flags(path: str) -> None:
    """Define the command's flags; path: the default configuration."""
    cli.define_config(path)
    flags.DEFINE_string("topology", "v5e:4x4", "slice to compile for")
    flags.DEFINE_string("output", None, "file that records are appended to")


def main() -> int:
    """Compile the configuration's step; return the exit code."""
    return report(cli.load_config(TrainConfig))


def report(settings: TrainConfig, extension: Extension = Extension()) -> int:
    """Compile a step for --topology and print the results; --output appends the records as JSON lines.

    Raises:
      ValueError: the step does not fit the slice, or --output cannot be written.
    """
    values = flags.FLAGS
    if values.output:  # fail before minutes of compiling
        outputs.check_file(values.output, [values.config], overwrite=True)
    topology = chips.parse_topology(values.topology)
    records = compile_step(settings, topology, extension)
    print(describe(records), flush=True)
    if values.output:
        RecordFile(values.output).append(*records)
    return cli.EXIT_OK if records[0].value is not None and records[0].detail["fits"] else cli.EXIT_GATE


if __name__ == "__main__":
    tpu_compile.start_anew()
    define_flags("configs/lm/tpu_1b.yaml")
    cli.run(main, about=__doc__)
