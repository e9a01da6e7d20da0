"""Measure long-term memory.

    memory.py arms                    what a memory buys: decoders with and without it on tasks that need one
    memory.py cost                    what a layer of attention or memory costs by length of context
    memory.py speed                   the neural memory beside titans-pytorch: speed, peak memory, time by length
    memory.py stability               long training of deep memories: does a number stop being one?

Bad input ends with exit code 2 and one line; a missed aim of cost or stability with 1.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from absl import flags

from jaxbench import cli, process_environment, terminal

VALUES = flags.FLAGS
AIM, AIM_LENGTH = 128, 32_768  # times less memory than naive attention, at so many tokens


def define_arms() -> None:
    """Define the flags of arms."""
    cli.define_config("configs/memory/arms.yaml")
    cli.define_workdir("out/memory-arms")
    cli.define_part()


def arms() -> int:
    """Train every arm on every task, and print accuracy by distance."""
    process_environment.ensure("cpu")
    from jaxbench.memory.study import arm_report, arm_runs
    from jaxbench.memory.study import arms as part

    settings, workdir, mine = cli.load_config(part.Arms), Path(VALUES.workdir), cli.part()
    arm_runs.run_all(settings, workdir, part=mine)
    show(arm_report.write(settings, part.known(settings, workdir), workdir))
    print(f"written: {workdir}/report.html, report.svg, results.csv, summary.json")
    return cli.EXIT_OK


def define_speed() -> None:
    """Define the flags of speed."""
    cli.define_config("configs/memory/speed.yaml")
    cli.define_workdir("out/memory-speed")


def speed() -> int:
    """Measure the neural memory and titans-pytorch in turn, and print the tables."""
    process_environment.ensure("cpu")
    from jaxbench.memory.study import speed as part

    summary = part.run(cli.load_config(part.Speed), VALUES.workdir)
    show(part.tables(summary))
    print(f"written: {VALUES.workdir}/summary.json")
    return cli.EXIT_OK


def define_stability() -> None:
    """Define the flags of stability."""
    cli.define_config("configs/memory/stability.yaml")
    cli.define_workdir("out/memory-stability")


def stability() -> int:
    """Train memories of several depths, and print their losses; 1 when a number is not finite."""
    process_environment.ensure("cpu")
    from jaxbench.memory.study import stability as part

    summary = part.run(cli.load_config(part.Stability), VALUES.workdir)
    show([part.table(summary)])
    print(f"written: {VALUES.workdir}/summary.json")
    return cli.EXIT_OK if all(row["is_finite"] for row in summary["rows"]) else cli.EXIT_GATE


def define_cost() -> None:
    """Define the flags of cost."""
    cli.define_config("configs/memory/cost.yaml")
    cli.define_workdir("out/memory-cost")


def cost() -> int:
    """Measure layers by length, and print the table; 1 when the bank saves less than its aim."""
    process_environment.ensure("cpu")
    from jaxbench.memory.study import cost as part
    from jaxbench.memory.study import cost_layer
    from torch_ref.memory.study import cost_layer as torch_cost_layer

    backends = {"flax": cost_layer, "torch": torch_cost_layer}
    summary = part.run(cli.load_config(part.Cost), VALUES.workdir, backends)
    show([part.table(summary)])
    savings = part.saving(summary["rows"], AIM_LENGTH)
    if not savings:
        print(f"no length is {AIM_LENGTH:,}, so the aim of {AIM} times less memory was not measured")
    for backend, found in savings.items():
        print(f"{backend}: at {AIM_LENGTH:,} tokens the bank takes {found:,.0f} times less than naive attention")
    print(f"written: {VALUES.workdir}/summary.json, cost.csv, cost.html, cost.svg")
    return cli.EXIT_OK if all(found >= AIM for found in savings.values()) else cli.EXIT_GATE


def show(tables: list) -> None:
    """Print rich renderables."""
    screen = terminal.console()
    for table in tables:
        screen.print(table)


COMMANDS = {
    "arms": cli.Command(define_arms, arms, "what a memory buys, on tasks that need one"),
    "cost": cli.Command(define_cost, cost, "what a layer of attention or memory costs by length of context"),
    "speed": cli.Command(define_speed, speed, "the neural memory beside titans-pytorch"),
    "stability": cli.Command(define_stability, stability, "long training of deep memories"),
}


if __name__ == "__main__":
    cli.run_commands(COMMANDS, about=__doc__)
