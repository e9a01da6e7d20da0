"""Prove that the JAX model and its PyTorch twin compute the same function, layer by layer, against float64.

    python experiments/parity.py --case=transformer/llama-grouped    20 seconds: every gate on a tiny model
    python experiments/parity.py --case=transformer/smollm2          1 minute, 7 GB: the default model
    python experiments/parity.py --case=transformer/smollm2 --gradients    1 minute, 13 GB: its gradients in float64 too
    python experiments/parity.py --all                               10 minutes: every case, and the mutation score

Writes parity.json and parity.html (a heat map of every layer) into --workdir. A failing run names the module where the
difference starts and the one that causes it, and ends with exit code 1. Expected: equal, worst error about 1e-14.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from absl import flags

from jaxbench import cli, process_environment
from jaxbench.parity import cases


def define_flags() -> None:
    """Define what only this command has."""
    flags.DEFINE_string("case", None, "id of the case to prove, such as transformer/smollm2")
    flags.DEFINE_bool("all", False, "prove every case, and print the mutation score")
    flags.DEFINE_bool("quick", False, "float64 outputs, blame, weights and decoding only")
    flags.DEFINE_bool("gradients", None, "compare gradients too (default: as the case says; off for the default model)")
    flags.DEFINE_bool("mutations", False, "inject the table of bugs and check that the gates catch every one (gate P9)")
    cli.define_backend(choices=tuple(cases.BACKENDS))
    cli.define_workdir("out/parity")


def selected() -> list[cases.Case]:
    """Cases that the flags ask for.

    Raises:
      ValueError: no case is asked for, or an unknown one.
    """
    values = flags.FLAGS
    if values.case is not None and values.all:
        raise ValueError(f"--case={values.case} and --all exclude each other")
    if values.case is not None:
        return [cases.find(values.case)]
    if not (values.all or values.mutations):
        known = ", ".join(case.id for case in cases.CASES)
        raise ValueError(f"name a case with --case=ID, or pass --all; the {len(cases.CASES)} cases are {known}")
    return [case for case in cases.CASES if values.backend in case.backends] if values.all else []


def main() -> int:
    """Run the selected cases; 1 when a gate fails."""
    chosen = selected()
    process_environment.ensure("cpu")
    from jaxbench import outputs, terminal
    from jaxbench.parity import mutation, report, run

    values, console = flags.FLAGS, terminal.console()
    workdir, results = Path(values.workdir), []
    cli.keep(f"finished cases are in {workdir / 'parity.json'}")
    for index, case in enumerate(chosen, start=1):
        if len(chosen) > 1:
            console.print(f"[dim]case {index} of {len(chosen)}: {case.id}[/dim]")
        result = run.run(case, backend=values.backend, quick=values.quick, gradients=values.gradients)
        results.append(result)
        if len(chosen) == 1:
            report.show(result, console)
        else:
            console.print(report.summary(result), style="green" if result["passed"] else "bold red")
        outputs.write_json(workdir / "parity.json", results)
        report.write_page(workdir / "parity.html", results)
    passed = all(result["passed"] for result in results)
    if values.mutations or values.all:
        gate = mutation.gate(mutation.score(lambda line: console.print(line, style="dim")))
        outputs.write_json(workdir / "mutations.json", gate._asdict())
        console.print(f"P9 {gate.note}" + (f"; wrong: {gate.where}" if gate.where else ""))
        passed = passed and gate.passed
    if results:
        console.print(f"written: {workdir / 'parity.json'}, {workdir / 'parity.html'}")
    return cli.EXIT_OK if passed else cli.EXIT_GATE


if __name__ == "__main__":
    os.environ.setdefault("JAX_ENABLE_X64", "1")
    define_flags()
    cli.run(main, about=__doc__)
