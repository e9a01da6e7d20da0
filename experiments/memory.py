"""Measure long-term memory.

    memory.py arms                    what a memory gains: decoders with and without it on tasks that need one
    memory.py cost                    cost of a layer of attention or memory by context length
    memory.py speed                   the neural memory versus titans-pytorch: speed, peak memory, time by length
    memory.py stability               long training of deep memories: do values become NaN or infinite?

Bad input ends with exit code 2 and one line; a missed target of cost or stability with 1.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from absl import flags

from jaxbench import cli, process_environment, terminal

VALUES = flags.FLAGS
AIM, AIM_LENGTH = 128, 32_768  # target: times less memory than naive attention, at so many tokens


def configured(name: str) -> Callable[[], None]:
    """Return a function that defines a command's flags: --config, --set, --workdir; arms: --part; layers: --device."""

    def define() -> None:
        cli.define_config(f"configs/memory/{name}.yaml")
        cli.define_workdir(f"out/memory-{name}")
        if name == "arms":
            cli.define_part()
        if name in ("cost", "speed"):
            cli.define_device()

    return define


def measure_arms() -> int:
    """Train every arm on every task, and print accuracy by distance."""
    process_environment.ensure("cpu")
    from jaxbench.memory.study import arm_report, arm_runs, arms

    settings, workdir, part = cli.load_config(arms.Arms), Path(VALUES.workdir), cli.part()
    arm_runs.run_all(settings, workdir, part=part)
    show(arm_report.write(settings, arms.known(settings, workdir), workdir))
    print(f"written: {workdir}/report.html, report.svg, results.csv, summary.json")
    return cli.EXIT_OK


def refuse_tpu() -> None:
    """Refuse a --device that PyTorch does not have here.

    Raises:
      ValueError: --device is a TPU.
    """
    if VALUES.device == "tpu":
        raise ValueError(f"--device={VALUES.device}: layers are timed on both backends; wanted cpu or gpu")


def measure_speed() -> int:
    """Measure the neural memory and titans-pytorch alternately, and print the tables."""
    refuse_tpu()
    process_environment.ensure(VALUES.device)
    from jaxbench.memory.study import speed

    show(speed.tables(speed.run(cli.load_config(speed.Speed), VALUES.workdir, device=VALUES.device)))
    print(f"written: {VALUES.workdir}/summary.json")
    return cli.EXIT_OK


def measure_stability() -> int:
    """Train memories of several depths, and print their losses; return 1 if a number is not finite."""
    process_environment.ensure("cpu")
    from jaxbench.memory.study import stability

    summary = stability.run(cli.load_config(stability.Stability), VALUES.workdir)
    show([stability.table(summary)])
    print(f"written: {VALUES.workdir}/summary.json")
    return cli.EXIT_OK if all(row["is_finite"] for row in summary["rows"]) else cli.EXIT_GATE


def measure_cost() -> int:
    """Measure layers by length, and print the table; return 1 if the bank saves less than its target."""
    refuse_tpu()
    process_environment.ensure(VALUES.device)
    import torch_ref.memory.study.cost_layer
    from jaxbench.memory.study import cost, cost_layer

    backends = {"flax": cost_layer, "torch": torch_ref.memory.study.cost_layer}
    summary = cost.run(cli.load_config(cost.Cost), VALUES.workdir, backends, device=VALUES.device)
    show([cost.table(summary)])
    savings = cost.saving(summary["rows"], AIM_LENGTH)
    if not savings:
        print(f"no length is {AIM_LENGTH:,}, so the aim of {AIM} times less memory was not measured")
    for backend, saving in savings.items():
        print(f"{backend}: at {AIM_LENGTH:,} tokens the bank takes {saving:,.0f} times less than naive attention")
    print(f"written: {VALUES.workdir}/summary.json, cost.csv, cost.html, cost.svg")
    return cli.EXIT_OK if all(saving >= AIM for saving in savings.values()) else cli.EXIT_GATE


def show(tables: list) -> None:
    """Print rich renderables."""
    screen = terminal.console()
    for table in tables:
        screen.print(table)


COMMANDS = {
    name: cli.Command(configured(name), main, about)
    for name, main, about in (
        ("arms", measure_arms, "what a memory buys, on tasks that need one"),
        ("cost", measure_cost, "what a layer of attention or memory costs by length of context"),
        ("speed", measure_speed, "the neural memory beside titans-pytorch"),
        ("stability", measure_stability, "long training of deep memories"),
    )
}


if __name__ == "__main__":
    cli.run_commands(COMMANDS, about=__doc__)
