"""Compile the step of a training configuration with memory for a TPU slice, as training/tpu_train.py does.

    python -m jaxbench.memory.study.tpu_train --config=configs/ltm/mac.yaml --topology=v5e:2x2 \\
        --set='parallel={mesh: {data: 4}}' --set=model.vocab_size=257 [--output=F]
"""

from __future__ import annotations

from jaxbench import cli
from jaxbench.measure import tpu_compile
from jaxbench.memory.train_config import MemoryTrainConfig
from jaxbench.training import tpu_train


def main() -> int:
    """Compile the configuration's step; return the exit code."""
    from jaxbench.memory import decoder

    settings = cli.load_config(MemoryTrainConfig)
    return tpu_train.report(settings, decoder.extension(settings.memory))


if __name__ == "__main__":
    tpu_compile.start_anew()
    tpu_train.define_flags("configs/ltm/mac.yaml")
    cli.run(main, about=__doc__)
