"""Check that inserting a memory leaves a pretrained model's logits unchanged.

    python -m jaxbench.memory.study.insert --config=configs/ltm/smollm2.yaml

Prints the relative 2-norm of the change in float32 on one batch of the configuration's rows; exits with 1 above 1e-6.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxbench import cli, process_environment
from jaxbench.memory.train_config import MemoryTrainConfig

LIMIT = 1e-6  # relative 2-norm in float32


def change_of_logits(settings: MemoryTrainConfig, batch: Any) -> float:
    """Relative 2-norm of the change in the starting model's logits on a batch when the run's memory is inserted.

    Raises:
      ValueError: the run has no memory, or no model to start from.
    """
    import jax
    from flax import nnx

    from jaxbench import initial
    from jaxbench.memory import decoder
    from jaxbench.training import train_inputs

    if settings.memory is None or settings.start is None:
        given = "unset" if settings.memory is None else "given"
        raise ValueError(f"insert: wanted a run with memory and start, got memory {given} and start={settings.start}")
    logits, shape = [], settings.model.resolved(settings.model.vocab_size)
    params = train_inputs.starting_point(settings, shape.vocab_size)[1]
    for config in (shape, settings.decoder(shape.vocab_size)):
        names = initial.parameter_shapes(config)
        model = decoder.build(config, {name: params[name] for name in names})
        graph, held = nnx.split(model)
        run = jax.jit(lambda held, x, graph=graph: nnx.merge(graph, held)(*x[:2], segments=x[2]))
        logits.append(np.asarray(run(held, (batch.tokens, batch.positions, batch.segments)), np.float64))
    is_token = batch.positions >= 0
    before, after = (each[is_token] for each in logits)
    return float(np.linalg.norm(after - before) / np.linalg.norm(before))


def main() -> int:
    """Print the change; the exit code is 1 if it exceeds the limit."""
    process_environment.ensure("cpu")
    from jaxbench.training import train_inputs

    settings = cli.load_config(MemoryTrainConfig)
    batch = train_inputs.prepare_data(settings).train.batch(0, settings.batch_size)
    change = change_of_logits(settings, batch)
    print(f"relative change of {batch.mask.size} tokens' logits: {change:.2e}, limit {LIMIT:.0e}")
    if not change <= LIMIT:  # a change that is not a number is no agreement
        raise cli.GateFailed(f"insert: the logits change by {change:.2e}, more than {LIMIT:.0e}")
    return cli.EXIT_OK


if __name__ == "__main__":
    cli.define_config("configs/ltm/smollm2.yaml")
    cli.run(main, about=__doc__)
