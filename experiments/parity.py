"""Prove that the JAX model and its PyTorch twin compute the same function, layer by layer, against float64.

    python experiments/parity.py --case=transformer/llama-grouped    20 seconds: every gate on a tiny model
    python experiments/parity.py --case=transformer/smollm2          1 minute, 7 GB: the default model
    python experiments/parity.py --case=transformer/smollm2 --gradients    1 minute, 13 GB: its float64 gradients too
    python experiments/parity.py --case=watermark/*,memory/bank      several
    python experiments/parity.py --all                               10 minutes: every case, and the mutation score
    python experiments/parity.py --all --device=gpu                  the same with JAX on a GPU, and its fused attention
    python experiments/parity.py --model=PATH                        your checkpoint: GGUF file or Hugging Face folder

Writes parity.json and parity.html (a heat map of every layer) into --workdir. A failing run names the module where the
difference starts and the module that causes it, and ends with exit code 1. Expected: equal, worst error about 1e-14.

--model compares Flax and Equinox with PyTorch module by module in float64, and PyTorch with transformers where
transformers reads the file; --backend selects only one of Flax and Equinox.
"""

from __future__ import annotations

import fnmatch
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from absl import flags

from jaxbench import cli, process_environment
from jaxbench.parity import cases


def define_flags() -> None:
    """Define the flags that only this command has."""
    flags.DEFINE_list("case", None, "ids of the cases to prove, such as transformer/smollm2 or watermark/*")
    flags.DEFINE_bool("all", False, "prove every case, and print the mutation score")
    flags.DEFINE_bool("quick", False, "float64 outputs, blame, weights and decoding only")
    flags.DEFINE_bool("gradients", None, "compare gradients too (default: as the case says; off for the default model)")
    flags.DEFINE_bool("mutations", False, "inject the table of bugs and check that the gates catch every one (gate P9)")
    flags.DEFINE_string("model", None, "checkpoint to prove: .gguf file, Hugging Face folder, hub id, or `default`")
    cli.define_backend(choices=tuple(cases.BACKENDS))
    cli.define_device()
    cli.define_workdir("out/parity")


def found(name: str) -> list[cases.Case]:
    """Return the case with this id, or all that match a pattern such as watermark/*."""
    ids = fnmatch.filter([case.id for case in cases.CASES], name) if "*" in name else []
    return [cases.find(each) for each in ids or [name]]


def selected() -> list[cases.Case]:
    """Return the cases of the table that the flags ask for.

    Raises:
      ValueError: nothing or two things are asked for, a case is unknown, or it needs another device.
    """
    values = flags.FLAGS
    named = {"case": None if values.case is None else ",".join(values.case), "model": values.model}
    wanted = [f"--{name}={value}" for name, value in named.items() if value is not None]
    wanted += ["--all"] if values.all else []
    if len(wanted) > 1:
        raise ValueError(f"{wanted[0]} and {wanted[1]} exclude each other")
    if values.case is not None:
        chosen = list({case.id: case for name in values.case or [""] for case in found(name)}.values())
        for case in chosen:
            if case.device not in (None, values.device):
                raise ValueError(f"--case={case.id} is proved on a {case.device} alone; pass --device={case.device}")
        return chosen
    if not (wanted or values.mutations):
        known = ", ".join(case.id for case in cases.CASES)
        raise ValueError(f"name a case with --case=ID, or pass --all; the {len(cases.CASES)} cases are {known}")
    here = [case for case in cases.CASES if case.device in (None, values.device)]
    return [case for case in here if values.backend in case.backends] if values.all else []


def results_of(chosen: list[cases.Case]) -> Iterator[dict[str, Any] | str]:
    """Yield the result of each case, or of --model's checkpoint per backend; a sentence where there is none."""
    from jaxbench.parity import own_model, run
    from jaxbench.pretrained import weights

    values = flags.FLAGS
    options = {"quick": values.quick, "gradients": values.gradients}
    for case in chosen:
        yield run.run(case, backend=values.backend, **options)
    if values.model is not None:
        path = weights.resolve(values.model)
        checkpoint = weights.load_checkpoint(values.model)
        case = own_model.case_of(path, checkpoint)
        yield own_model.against_transformers(case, path, checkpoint)
        del checkpoint
        for backend in [values.backend] if flags.FLAGS["backend"].present else cases.BACKENDS:
            yield run.run(case, backend=backend, model=str(path), dtypes=(), **options)


def main() -> int:
    """Run what the flags ask for; return 1 if a gate fails."""
    chosen = selected()
    process_environment.ensure(flags.FLAGS.device)
    from jaxbench import outputs, terminal
    from jaxbench.parity import mutation, report

    values, console = flags.FLAGS, terminal.console()
    workdir, results = Path(values.workdir), []
    cli.keep("", when=lambda: False)
    for result in results_of(chosen):
        if isinstance(result, str):
            console.print(result, style="yellow")
            continue
        results.append(result)
        if len(chosen) <= 1:
            report.show(result, console)
        else:
            style = "green" if result["passed"] else "bold red"
            console.print(f"[dim]{len(results)} of {len(chosen)}[/dim] {report.summary(result)}", style=style)
        outputs.write_json(workdir / "parity.json", results)
        cli.keep(f"finished cases are in {workdir / 'parity.json'}")
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
