"""Compile the decoder's programs for TPU slices that are not attached, and say what the compiler says.

    python -m jaxbench.bench.tpu --topology=v5e:2x2 --topology=v6e:2x4 [--train_layers=4] [--output=tpu.jsonl]

Prefill, one decode step and one AdamW step are compiled by the real TPU compiler (libtpu) with abstract arguments.
Reported per chip: bytes (fits or not), FLOPs counted analytically and beside them the compiler's own count, memory
traffic, collectives by kind, and the time that the chip's published rates allow: the longest of compute, memory and
interconnect, each alone at its peak. That is a bound, not a forecast. The compiler's `optimal_seconds` is never used.

Weights are replicated and the batch is split for prefill and decode; for training the weights are split too (fsdp).
`--model_axis=m` splits feed-forward width and vocabulary over m chips as well. Batches are rounded up to a multiple of
the chips that share them.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pydantic

from jaxbench.bench import chips, flops, hlo
from jaxbench.bench.records import Record, RecordFile, Workload, now_utc
from jaxbench.config import Base, TransformerConfig

# libtpu asks the cloud's metadata server for these, waits, and complains on stderr where there is none.
ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # else a second process that compiles is refused over its lock file
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_STDERR_LOG_LEVEL": "3",
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "JAX_PLATFORMS": "cpu",  # the compiler is called directly, no TPU is looked for
}
# SmolLM2-135M's shape (config.json of HuggingFaceTB/SmolLM2-135M-Instruct): compiling needs no weights.
SMOLLM2_135M = TransformerConfig(
    vocab_size=49152, d_model=576, d_ff=1536, num_layers=30, num_heads=9, num_kv_heads=3, head_dim=64,
    max_seq_len=8192, rope_theta=100000.0,
)  # fmt: skip


class Settings(Base):
    """Shapes of the three programs."""

    dtype: str = "bfloat16"  # of weights, activations and cache; AdamW's moments are float32
    prefill_batch: int = pydantic.Field(default=1, gt=0)  # rows, over all chips
    prefill_tokens: int = pydantic.Field(default=512, gt=0)  # prompt tokens a row
    decode_batch: int = pydantic.Field(default=8, gt=0)  # rows, over all chips
    decode_length: int = pydantic.Field(default=1024, gt=0)  # cache slots a row
    train_batch: int = pydantic.Field(default=8, gt=0)  # rows, over all chips
    train_tokens: int = pydantic.Field(default=512, gt=0)  # sequence length
    train_layers: int | None = pydantic.Field(default=None, gt=0)  # the model's first layers; None = all
    model_axis: int = pydantic.Field(default=1, gt=0)  # chips that split feed-forward width and vocabulary
    scan_layers: bool = False  # one compiled body for all layers; unrolled, the compiler's FLOPs can be checked


class Measured(NamedTuple):
    """What the compiler said about one program, per chip."""

    compile_s: float
    memory: dict[str, int]  # argument, output, alias, temp, code: bytes
    compiled_flops: float
    compiled_bytes: float
    collectives: dict[str, hlo.Collective]


def unavailable() -> str:
    """Return why nothing can be compiled for TPUs here, or an empty string."""
    if importlib.util.find_spec("libtpu") is None:
        return "tpu: libtpu is not installed; `pip install 'jaxbench[tpu]'` brings it (no TPU is needed)"
    return ""


def check(topologies: Sequence[str], settings: Settings | None = None) -> list[chips.Topology]:
    """Return the slices of these names; ValueError for an unknown one, or a model axis that does not divide one."""
    found = [chips.parse_topology(name) for name in topologies]
    for topology in found:
        if settings and topology.num_chips % settings.model_axis:
            raise ValueError(
                f"tpu: model_axis={settings.model_axis} does not divide the {topology.num_chips} chips of "
                f"{topology.name}"
            )
    return found


def compile_topology(config: TransformerConfig, topology: chips.Topology, settings: Settings) -> Iterator[list[Record]]:
    """Compile the three programs for one slice; yield each one's records as it is done.

    A program that does not fit gives one record with status "error" and the compiler's sentence.
    """
    if reason := unavailable():
        raise ValueError(f"{reason} (asked for {topology.name})")
    from jax.experimental import topologies as jax_topologies

    from jaxbench.bench import tpu_programs as programs

    check([topology.name], settings)
    description = jax_topologies.get_topology_desc(platform="tpu", topology_name=topology.name, **topology.chip.options)
    rows = topology.num_chips // settings.model_axis
    model = programs.abstract_model(config, dtype=settings.dtype, scan_layers=settings.scan_layers)
    shallow = config.model_copy(
        update={"num_layers": min(settings.train_layers or config.num_layers, config.num_layers)}
    )

    plan = functools.partial(programs.make_plan, devices=description.devices, model_axis=settings.model_axis)

    def prefill() -> programs.Program:
        size = {"batch": _round_up(settings.prefill_batch, rows), "tokens": settings.prefill_tokens}
        return programs.prefill(model, plan(config, **size), **size)

    def decode() -> programs.Program:
        batch, length = _round_up(settings.decode_batch, rows), settings.decode_length
        return programs.decode(model, plan(config, batch=batch, tokens=1), batch=batch, length=length)

    def train() -> programs.Program:
        small = programs.abstract_model(shallow, dtype=settings.dtype, scan_layers=settings.scan_layers)
        size = {"batch": _round_up(settings.train_batch, rows), "tokens": settings.train_tokens}
        return programs.train(small, plan(shallow, is_split=True, **size), **size)

    makers: list[tuple[TransformerConfig, Callable[[], programs.Program]]] = [
        (config, prefill),
        (config, decode),
        (shallow, train),
    ]
    for used, make in makers:
        program = make()
        yield _compile_program(program, used, topology, settings)


def _compile_program(program, config: TransformerConfig, topology: chips.Topology, settings: Settings) -> list[Record]:
    """Compile one program and return its records; a program that does not fit is a record too."""
    import jax

    workload = _workload(program, settings)
    common = {"workload": workload, "device": topology.name, "time_utc": now_utc()}
    start = time.perf_counter()
    try:
        compiled = program.jitted.lower(*program.arguments).compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        detail = {"fits": False, "hbm_bytes": topology.chip.hbm_bytes}
        reason = f"does not fit: {_first_line(error)}"
        return [Record(metric="tpu_memory_bytes", unit="bytes", status="error", reason=reason, detail=detail, **common)]
    memory, cost = compiled.memory_analysis(), compiled.cost_analysis()
    kinds = {"argument": "argument", "output": "output", "alias": "alias", "temp": "temp", "code": "generated_code"}
    measured = Measured(
        compile_s=time.perf_counter() - start,
        memory={name: int(getattr(memory, f"{field}_size_in_bytes")) for name, field in kinds.items()},
        compiled_flops=float(cost["flops"]),
        compiled_bytes=float(cost["bytes accessed"]),
        collectives=hlo.collectives(compiled.as_text(), topology.num_chips),
    )
    flops_per_chip, traffic = per_chip_work(program, config, topology, settings)
    return make_records(measured, flops_per_chip, traffic, topology, settings, common, config.num_layers)


def per_chip_work(program, config: TransformerConfig, topology: chips.Topology, settings: Settings) -> tuple[int, int]:
    """Return the analytic FLOPs and the least memory traffic of one chip.

    Attention is repeated on the chips of one model axis; feed-forward layers and the head are split over it.
    """
    rows = topology.num_chips // settings.model_axis
    batch = program.batch // rows
    shape = {"dtype": settings.dtype, "batch": batch}
    if program.name == "prefill":
        cost = flops.prefill_cost(config, prompt_tokens=program.tokens, **shape)
        traffic = flops.prefill_traffic(
            config, prompt_tokens=program.tokens, weight_bytes=_size(program.stored_parameters, settings), **shape
        )
    elif program.name == "decode":
        cost = flops.decode_cost(config, cache_length=program.tokens, **shape)
        traffic = flops.decode_traffic(
            config, cache_length=program.tokens, weight_bytes=_size(program.stored_parameters, settings), **shape
        )
    else:
        cost = flops.train_cost(config, seq_len=program.tokens, **shape)
        traffic = flops.train_traffic(
            config,
            seq_len=program.tokens,
            stored_parameters=program.stored_parameters,
            used_parameters=program.used_parameters,
            vocab_chips=settings.model_axis,
            **shape,
        )
    split = cost.parts["mlp"] + cost.parts["head"]
    return cost.flops - split + split // settings.model_axis, traffic


def make_records(
    measured: Measured,
    flops_per_chip: int,
    traffic: int,
    topology: chips.Topology,
    settings: Settings,
    common: dict,
    num_layers: int,
) -> list[Record]:
    """Return the records of one compiled program, every figure per chip."""
    chip, memory = topology.chip, measured.memory
    resident = memory["argument"] + memory["output"] - memory["alias"] + memory["temp"] + memory["code"]
    sent = sum(kind.sent_bytes for kind in measured.collectives.values())
    times = {
        "compute_s": flops_per_chip / chip.flops_per_s,
        "memory_s": traffic / chip.hbm_bytes_per_s,
        "interconnect_s": sent / chip.ici_bytes_per_s,
    }
    bound = max(times, key=times.get)
    workload = common["workload"]
    tokens = workload.batch * (1 if workload.kind == "decode" else workload.prompt_tokens)
    shape = {"num_chips": topology.num_chips, "num_layers": num_layers, "model_axis": settings.model_axis}
    rates = {"chip": chip.name, "source": chip.source, "tokens_per_s": tokens / times[bound]}
    fits = {"fits": resident <= chip.hbm_bytes, "hbm_bytes": chip.hbm_bytes}
    counted = {kind: total._asdict() for kind, total in measured.collectives.items()}
    compared = {"compiled": measured.compiled_flops, "is_unrolled": not settings.scan_layers}
    if not settings.scan_layers:
        compared["compiled_over_analytic"] = measured.compiled_flops / flops_per_chip
    figures = [
        ("tpu_memory_bytes", resident, "bytes", memory | fits | shape),
        ("tpu_flops", flops_per_chip, "FLOP", compared | shape),
        ("tpu_traffic_bytes", traffic, "bytes", {"compiled": measured.compiled_bytes} | shape),
        ("tpu_collective_bytes", sent, "bytes", {"kinds": counted} | shape),
        ("tpu_roofline_s", times[bound], "s", times | {"bound": bound.removesuffix("_s")} | rates | shape),
        ("tpu_compile_s", measured.compile_s, "s", shape),
    ]
    return [Record(metric=name, value=float(value), unit=unit, detail=detail, **common)
            for name, value, unit, detail in figures]  # fmt: skip


def _workload(program, settings: Settings) -> Workload:
    new_tokens = 1 if program.name == "decode" else 0
    return Workload(
        kind=program.name,
        dtype=settings.dtype,
        batch=program.batch,
        prompt_tokens=program.tokens,
        new_tokens=new_tokens,
    )


def _size(parameters: int, settings: Settings) -> int:
    return parameters * flops.dtype_bytes(settings.dtype)


def _round_up(batch: int, chips_sharing: int) -> int:
    return -(-batch // chips_sharing) * chips_sharing


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return next((line for line in lines if "memory" in line.lower()), lines[0])[:300]


# The process: `python -m jaxbench.bench.tpu '<request>' <output.jsonl>` from the comparison, flags from people.


def serve_request(request: dict, output: Path) -> None:
    """Answer the comparison's request: write one slice's records to `output`, a line each, whole or not at all."""
    from jaxbench import families

    folder = Path(request["checkpoint"])
    config = families.config_from_hf(json.loads((folder / "config.json").read_text()), folder)
    known = {name: value for name, value in request.items() if name in Settings.model_fields}
    settings = Settings(**known, train_layers=request.get("num_layers_train"))
    [topology] = check([request["topology"]], settings)
    temporary = output.with_name(f".{output.name}.{os.getpid()}")
    file = RecordFile(temporary)
    try:
        for found in compile_topology(config, topology, settings):
            file.append(*found)
        os.replace(temporary, output)
    finally:
        temporary.unlink(missing_ok=True)


def main() -> int:
    """Compile for every --topology and print a table; --output keeps the records as JSON lines."""
    from absl import flags

    from jaxbench import config as configs

    values = flags.FLAGS
    model = SMOLLM2_135M
    if values.model_config:
        model = configs.load(values.model_config, [], TransformerConfig)
    settings = Settings(**{name: getattr(values, name) for name in Settings.model_fields})
    topologies = check(values.topology, settings)
    for topology in topologies:
        for found in compile_topology(model, topology, settings):
            if values.output:
                RecordFile(values.output).append(*found)
            for record in found:
                print(describe(record), flush=True)
    return 0


def describe(record: Record) -> str:
    """Return one line for a person."""
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
    for name, field in Settings.model_fields.items():
        if field.annotation is bool:
            flags.DEFINE_boolean(name, field.default, name.replace("_", " "))
        elif field.annotation is str:
            flags.DEFINE_string(name, field.default, name)
        else:
            flags.DEFINE_integer(name, field.default, name.replace("_", " "))


def start_anew() -> None:
    """Start this process anew, once, where libtpu's variables are not set yet; leave the compile cache out."""
    wanted = {name: os.environ.get(name, value) for name, value in ENVIRONMENT.items()} | {"JAX_PLATFORMS": "cpu"}
    if any(os.environ.get(name) != value for name, value in wanted.items()):
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, **wanted})
    import jax

    # Programs for a device that is not there cannot be read back from the cache.
    jax.config.update("jax_enable_compilation_cache", False)


def _start() -> None:
    start_anew()
    if len(sys.argv) == 3 and sys.argv[1].startswith("{"):
        serve_request(json.loads(sys.argv[1]), Path(sys.argv[2]))
        return
    from jaxbench import cli

    _define_flags()
    cli.run(main, about=__doc__)


if __name__ == "__main__":
    _start()
