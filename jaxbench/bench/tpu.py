"""Compile the decoder's programs for TPU slices that are not attached, and report the compiler's figures.

    python -m jaxbench.bench.tpu --topology=v5e:2x2 --topology=v6e:2x4 [--train_layers=4] [--output=tpu.jsonl]

Prefill, one decode step and one AdamW step are compiled by the real TPU compiler (libtpu) with abstract arguments.
Reported per chip: bytes (fits or not), analytic FLOPs and the compiler's own count, memory traffic, collectives by
kind, and a lower bound on time: the longest of compute, memory and interconnect, each alone at the chip's published
peak rate. That is a bound, not a forecast. The compiler's `optimal_seconds` is never used.

Weights are replicated and the batch is split for prefill and decode; for training the weights are split too (fsdp).
`--model_axis=m` splits feed-forward width and vocabulary over m chips as well. Batches are rounded up to a multiple of
the chips that share them. Ends with 1 where a program does not fit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, get_args, get_origin

import pydantic

from jaxbench.config import Base, TransformerConfig
from jaxbench.measure import chips, flops, tpu_compile
from jaxbench.measure.records import Record, RecordFile, Workload

# SmolLM2-135M's shape (config.json of HuggingFaceTB/SmolLM2-135M-Instruct): compiling needs no weights.
SMOLLM2_135M = TransformerConfig(
    vocab_size=49152, d_model=576, d_ff=1536, num_layers=30, num_heads=9, num_kv_heads=3, head_dim=64,
    max_seq_len=8192, rope_theta=100000.0,
)  # fmt: skip


class Settings(Base):
    """Shapes of the three programs."""

    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"  # of weights, activations, cache; moments: float32
    prefill_batch: int = pydantic.Field(default=1, gt=0)  # rows, over all chips
    prefill_tokens: int = pydantic.Field(default=512, gt=0)  # prompt tokens per row
    decode_batch: int = pydantic.Field(default=8, gt=0)  # rows, over all chips
    decode_length: int = pydantic.Field(default=1024, gt=0)  # cache slots per row
    train_batch: int = pydantic.Field(default=8, gt=0)  # rows, over all chips
    train_tokens: int = pydantic.Field(default=512, gt=0)  # sequence length
    train_layers: int | None = pydantic.Field(default=None, gt=0)  # the model's first layers; None = all
    model_axis: int = pydantic.Field(default=1, gt=0)  # chips that split feed-forward width and vocabulary
    scan_layers: bool = False  # one compiled body for all layers; False unrolls, so that FLOPs can be checked


def check(topologies: Sequence[str], settings: Settings | None = None) -> list[chips.Topology]:
    """Return the slices of these names; ValueError if one is unknown or not divisible by the model axis."""
    slices = [chips.parse_topology(name) for name in topologies]
    for topology in slices:
        if settings and topology.num_chips % settings.model_axis:
            raise ValueError(
                f"tpu: model_axis={settings.model_axis} does not divide the {topology.num_chips} chips of "
                f"{topology.name}"
            )
    return slices


def compile_topology(config: TransformerConfig, topology: chips.Topology, settings: Settings) -> Iterator[list[Record]]:
    """Compile the three programs for one slice; yield each one's records as it is done.

    A program that does not fit gives one record with status "error" and the compiler's sentence.
    """
    devices = tpu_compile.devices(topology)
    from jaxbench.parallel import mesh_programs

    check([topology.name], settings)
    rows = topology.num_chips // settings.model_axis
    shallow = config.model_copy(
        update={"num_layers": min(settings.train_layers or config.num_layers, config.num_layers)}
    )
    programs = (
        (mesh_programs.prefill, config, settings.prefill_batch, {"tokens": settings.prefill_tokens}),
        (mesh_programs.decode, config, settings.decode_batch, {"length": settings.decode_length}),
        (mesh_programs.train, shallow, settings.train_batch, {"tokens": settings.train_tokens}),
    )
    for make, used, batch, size in programs:
        batch = -(-batch // rows) * rows
        plan = mesh_programs.make_plan(
            used, batch=batch, tokens=size.get("tokens", 1), is_split=make is mesh_programs.train, devices=devices,
            model_axis=settings.model_axis,
        )  # fmt: skip
        model = mesh_programs.abstract_model(used, dtype=settings.dtype, scan_layers=settings.scan_layers)
        yield _compile_program(make(model, plan, batch=batch, **size), used, topology, settings)


def _compile_program(program, config: TransformerConfig, topology: chips.Topology, settings: Settings) -> list[Record]:
    """Compile one program and return its records; a program that does not fit gives a record too."""
    workload = Workload(
        kind=program.name, dtype=settings.dtype, batch=program.batch, prompt_tokens=program.tokens,
        new_tokens=int(program.name == "decode"),
    )  # fmt: skip
    try:
        compiled = tpu_compile.compile_program(lambda: program.jitted.lower(*program.arguments), topology)
    except tpu_compile.DoesNotFitError as error:
        shape = {"hbm_bytes": topology.chip.hbm_bytes}
        return [tpu_compile.refusal(error, shape, workload=workload, device=topology.name)]
    flops_per_chip, traffic = per_chip_work(program, config, topology, settings)
    return make_records(compiled, flops_per_chip, traffic, topology, settings, workload, config.num_layers)


def per_chip_work(program, config: TransformerConfig, topology: chips.Topology, settings: Settings) -> tuple[int, int]:
    """Return the analytic FLOPs and the least memory traffic, in bytes, of one chip.

    Attention is repeated on the chips of one model axis; feed-forward layers and the head are split over it.
    """
    rows = topology.num_chips // settings.model_axis
    shape = {"batch": program.batch // rows, "dtype": settings.dtype}
    weight_bytes = program.stored_parameters * flops.dtype_bytes(settings.dtype)
    if program.name == "prefill":
        cost = flops.prefill_cost(config, prompt_tokens=program.tokens, weight_bytes=weight_bytes, **shape)
    elif program.name == "decode":
        cost = flops.decode_cost(config, cache_length=program.tokens, weight_bytes=weight_bytes, **shape)
    else:
        own = {"stored_parameters": program.stored_parameters, "used_parameters": program.used_parameters}
        cost = flops.train_cost(config, seq_len=program.tokens, vocab_chips=settings.model_axis, **own, **shape)
    split = cost.parts["mlp"] + cost.parts["head"]
    return cost.flops - split + split // settings.model_axis, cost.bytes


def make_records(
    compiled: tpu_compile.Compiled,
    flops_per_chip: int,
    traffic: int,
    topology: chips.Topology,
    settings: Settings,
    workload: Workload,
    num_layers: int,
) -> list[Record]:
    """Return the records of one compiled program, every figure per chip."""
    chip, resident, sent = topology.chip, compiled.resident_bytes, compiled.sent_bytes
    times, bound = chips.least_seconds(chip, flops=flops_per_chip, traffic=traffic, sent=sent)
    tokens = workload.batch * (1 if workload.kind == "decode" else workload.prompt_tokens)
    shape = {"num_chips": topology.num_chips, "num_layers": num_layers, "model_axis": settings.model_axis}
    rates = {"chip": chip.name, "source": chip.source, "tokens_per_s": tokens / times[f"{bound}_s"]}
    fits = {"fits": resident <= chip.hbm_bytes, "hbm_bytes": chip.hbm_bytes}
    compared = {"compiled": compiled.flops, "is_unrolled": not settings.scan_layers}
    if not settings.scan_layers:
        compared["compiled_over_analytic"] = compiled.flops / flops_per_chip
    figures = [
        ("tpu_memory_bytes", resident, "bytes", compiled.memory | fits),
        ("tpu_flops", flops_per_chip, "FLOP", compared),
        ("tpu_traffic_bytes", traffic, "bytes", {"compiled": compiled.traffic}),
        ("tpu_collective_bytes", sent, "bytes", {"kinds": compiled.kinds}),
        ("tpu_roofline_s", times[f"{bound}_s"], "s", times | {"bound": bound} | rates),
        ("tpu_compile_s", compiled.compile_s, "s", {}),
    ]
    return tpu_compile.make_records(figures, shape, workload=workload, device=topology.name)


def main() -> int:
    """Compile for every --topology and print the results; return the exit code, 1 if a program does not fit.

    --output keeps the records of each finished slice.
    """
    from absl import flags

    from jaxbench import cli, config, outputs

    values = flags.FLAGS
    if values.output:  # fail before minutes of compiling
        outputs.check_file(values.output, [values.model_config], overwrite=True)
    model = config.load(values.model_config, [], TransformerConfig) if values.model_config else SMOLLM2_135M
    settings = Settings(**{name: getattr(values, name) for name in Settings.model_fields})
    fits = True
    for topology in check(values.topology, settings):
        collected = []
        for records in compile_topology(model, topology, settings):
            collected += records
            print("\n".join(map(describe, records)), flush=True)
        if values.output:
            RecordFile(values.output).append(*collected)
        fits = fits and all(record.detail.get("fits", True) for record in collected)
    return cli.EXIT_OK if fits else cli.EXIT_GATE


def describe(record: Record) -> str:
    """Format a record as one readable line."""
    place = f"{record.device} {record.workload.label()}: {record.metric.removeprefix('tpu_')}"
    if record.value is None:
        return f"{place} {record.reason}"
    extra = ""
    if record.metric == "tpu_memory_bytes":
        room = record.detail["hbm_bytes"] / 2**30
        extra = f" ({'fits' if record.detail['fits'] else 'does not fit'} in {room:.0f} GiB)"
    if record.metric == "tpu_collective_bytes":
        extra = "".join(f" {kind} x{total['count']}" for kind, total in record.detail["kinds"].items())
    if record.metric == "tpu_flops" and "compiled_over_analytic" in record.detail:
        extra = f" (compiler counts {record.detail['compiled_over_analytic']:.3f} of it)"
    if record.metric == "tpu_roofline_s":
        extra = f" ({record.detail['bound']} bound, at most {record.detail['tokens_per_s']:.0f} tokens/s)"
    return f"{place} {record.value:.4g} {record.unit}{extra}"


def _define_flags() -> None:
    from absl import flags

    flags.DEFINE_multi_string("topology", ["v5e:2x2"], "slice to compile for, e.g. v6e:2x4; may be repeated")
    flags.DEFINE_string("model_config", None, "YAML or JSON with the model's fields (unset: SmolLM2-135M)")
    flags.DEFINE_string("output", None, "file that records are appended to")
    define = {bool: flags.DEFINE_boolean}
    for name, field in Settings.model_fields.items():
        about = name.replace("_", " ")
        if choices := get_args(field.annotation) if get_origin(field.annotation) is Literal else ():
            flags.DEFINE_enum(name, field.default, choices, about)
        else:
            define.get(field.annotation, flags.DEFINE_integer)(name, field.default, about)


if __name__ == "__main__":
    tpu_compile.start_anew()
    from jaxbench import cli

    _define_flags()
    cli.run(main, about=__doc__)
