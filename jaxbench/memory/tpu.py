"""Compile decoders with memory for TPU slices that are not attached, and say what the compiler says.

    python -m jaxbench.memory.tpu --topology=v5e:2x2 --config=configs/ltm/mac.yaml --config=configs/ltm/bank.yaml

Prefill and decode with the batch split over the chips and the training step with weights split too (fsdp), in bfloat16;
one JSON line a program: bytes per chip, collectives by kind, seconds to compile.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

from absl import flags

from jaxbench import cli, config
from jaxbench.bench import chips, hlo, tpu
from jaxbench.config import TransformerConfig
from jaxbench.memory import decoder_config
from jaxbench.train_config import TrainConfig

VOCAB_SIZE = 257  # of the byte tokenizer, where a configuration leaves it open


def compile_programs(
    model: TransformerConfig, topology: chips.Topology, *, batch: int, tokens: int
) -> Iterator[dict[str, Any]]:
    """Yield what the compiler says about prefill, decode and the training step of a decoder, per chip.

    Args:
      model: the decoder.
      topology: the slice.
      batch: rows, over all chips; a multiple of their number.
      tokens: of a prompt, a cache and a training row.

    Raises:
      ValueError: libtpu is not installed.
    """
    if reason := tpu.unavailable():
        raise ValueError(f"{reason} (asked for {topology.name})")
    from jax.experimental import topologies

    from jaxbench.bench import tpu_programs as programs

    description = topologies.get_topology_desc(platform="tpu", topology_name=topology.name, **topology.chip.options)
    abstract = programs.abstract_model(model, dtype="bfloat16", scan_layers=False)
    size = {"batch": batch, "tokens": tokens}
    serve, fit = (programs.make_plan(model, description.devices, **size, is_split=split) for split in (False, True))
    for make in (
        lambda: programs.prefill(abstract, serve, **size),
        lambda: programs.decode(abstract, serve, batch=batch, length=tokens),
        lambda: programs.train(abstract, fit, **size),
    ):
        program, start = make(), time.perf_counter()
        compiled = program.jitted.lower(*program.arguments).compile()
        seconds, memory = time.perf_counter() - start, compiled.memory_analysis()
        needed = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
        sent = hlo.collectives(compiled.as_text(), topology.num_chips)
        yield {
            "program": program.name,
            "device": topology.name,
            "bytes": needed - memory.alias_size_in_bytes,
            "collectives": {kind: found.count for kind, found in sent.items()},
            "compile_s": round(seconds, 1),
        }


def main() -> int:
    """Compile every configuration for every slice; return the exit code."""
    values = flags.FLAGS
    for name in values.topology:
        topology = tpu.check([name])[0]
        for path in values.config:
            settings = config.load(path, (), TrainConfig)
            plain = settings.model.resolved(settings.model.vocab_size or VOCAB_SIZE)
            model = decoder_config.with_memory(plain, settings.memory)
            batch = -(-settings.batch_size // topology.num_chips) * topology.num_chips
            for found in compile_programs(model, topology, batch=batch, tokens=settings.data.seq_len):
                print(json.dumps({"config": path} | found), flush=True)
    return cli.EXIT_OK


if __name__ == "__main__":
    tpu.start_anew()
    flags.DEFINE_multi_string("topology", ["v5e:2x2"], "TPU slice, such as v5e:2x2; may be given again")
    flags.DEFINE_multi_string("config", ["configs/ltm/mac.yaml"], "training run whose decoder is compiled")
    cli.run(main, about=__doc__)
