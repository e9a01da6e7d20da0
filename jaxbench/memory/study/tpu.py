"""Compile decoders with memory for TPU slices that are not attached, and report what the compiler says.

    python -m jaxbench.memory.study.tpu --topology=v5e:2x2 --config=configs/ltm/mac.yaml --config=configs/ltm/bank.yaml

Prefill and decode are compiled with the batch sharded over the chips, the training step with weights sharded too
(fsdp), in bfloat16. One JSON line per program: bytes per chip, collectives by kind, seconds to compile. A program that
does not fit gives a line with the compiler's message, and the exit code is 1.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from absl import flags

from jaxbench import cli, config
from jaxbench.config import TransformerConfig
from jaxbench.measure import chips, tpu_compile
from jaxbench.memory.decoder_config import MemoryTransformerConfig
from jaxbench.memory.train_config import MemoryTrainConfig

VOCAB_SIZE = 257  # of the byte tokenizer, if a configuration leaves it unset


def compile_programs(
    model: TransformerConfig, topology: chips.Topology, *, batch: int, tokens: int
) -> Iterator[dict[str, Any]]:
    """Yield what the compiler says about prefill, decode and the training step of a decoder, per chip.

    A program that does not fit has no `bytes` but `does_not_fit`, the compiler's message.

    Args:
      batch: rows, over all chips; a multiple of their number.
      tokens: of a prompt, a cache and a training row.

    Raises:
      ValueError: libtpu is not installed.
    """
    devices = tpu_compile.devices(topology)
    from jaxbench.memory import decoder
    from jaxbench.parallel import mesh_programs

    extension = decoder.extension(model.memory if isinstance(model, MemoryTransformerConfig) else None)
    abstract = mesh_programs.abstract_model(model, dtype="bfloat16", scan_layers=False, extension=extension)
    size = {"batch": batch, "tokens": tokens}
    serve, fit = (
        mesh_programs.make_plan(model, devices, **size, is_split=is_split, extension=extension)
        for is_split in (False, True)
    )
    for program in (
        mesh_programs.prefill(abstract, serve, **size),
        mesh_programs.decode(abstract, serve, batch=batch, length=tokens),
        mesh_programs.train(abstract, fit, **size),
    ):
        about = {"program": program.name, "device": topology.name}
        try:
            compiled = tpu_compile.compile_program(lambda p=program: p.jitted.lower(*p.arguments), topology)
        except tpu_compile.DoesNotFitError as error:
            yield about | {"does_not_fit": str(error)}
            continue
        yield about | {
            "bytes": compiled.resident_bytes - compiled.memory["code"],
            "collectives": {kind: total.count for kind, total in compiled.collectives.items()},
            "compile_s": round(compiled.compile_s, 1),
        }


def main() -> int:
    """Compile every configuration for every slice; return the exit code."""
    values, fits = flags.FLAGS, True
    runs = {path: config.load(path, (), MemoryTrainConfig) for path in values.config}
    for topology in [chips.parse_topology(name) for name in values.topology]:
        for path, settings in runs.items():
            model = settings.decoder(settings.model.vocab_size or VOCAB_SIZE)
            batch = -(-settings.batch_size // topology.num_chips) * topology.num_chips
            for facts in compile_programs(model, topology, batch=batch, tokens=settings.data.seq_len):
                print(json.dumps({"config": path} | facts), flush=True)
                fits = fits and "does_not_fit" not in facts
    return cli.EXIT_OK if fits else cli.EXIT_GATE


if __name__ == "__main__":
    tpu_compile.start_anew()
    flags.DEFINE_multi_string("topology", ["v5e:2x2"], "TPU slice, such as v5e:2x2; may be given again")
    flags.DEFINE_multi_string("config", ["configs/ltm/mac.yaml"], "training run whose decoder is compiled")
    cli.run(main, about=__doc__)
