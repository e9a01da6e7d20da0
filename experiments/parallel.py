"""Prove that a training step over a mesh computes what one device computes, on 8 simulated devices.

    python experiments/parallel.py                     2 minutes: the pairwise list and ten more cases
    python experiments/parallel.py --all               30 minutes: every mesh, schedule and ZeRO stage for 8 devices
    python experiments/parallel.py --all --part=2/8    every eighth case of it, from the second on
    python experiments/parallel.py --case=2.5d         one case
    python experiments/parallel.py --output=FILE       also write one JSON line per case

Three float64 training steps per case: losses, gradients, parameters and AdamW's moments versus the unsharded program.
Expected: every case passes, worst relative error 4e-12 (the gate is 1e-9). A failing case names the kind and the
tensor, and the command ends with exit code 1.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from absl import flags

from jaxbench import cli, outputs, process_environment, store

NUM_DEVICES = 8
ROW = b'{"case": '  # how each line of --output begins
COUNT = "--xla_force_host_platform_device_count="


def define_flags() -> None:
    """Define the flags of this command."""
    flags.DEFINE_bool(
        "all", False, "the full product of the settings instead of the pairwise list; ten more cases go with both"
    )
    flags.DEFINE_string("case", None, "id of one case, such as 2.5d or llama-stage4-micro8-1f1b-model2-one")
    cli.define_part()
    flags.DEFINE_string("output", None, "file that a JSON line a case is appended to")


def selected() -> list:
    """Return the cases that the flags ask for.

    Raises:
      ValueError: an unknown case, a case together with --all or --part, or a part that is not k/n with 1 <= k <= n, or
        holds no case.
    """
    from jaxbench.parity import memory_meshes, meshes

    values = flags.FLAGS
    part = cli.part()
    if values.case is not None and values.all:
        raise ValueError(f"--case={values.case} and --all exclude each other")
    if values.case is not None and values["part"].present:
        raise ValueError(f"--case={values.case} and --part={values.part} exclude each other")
    if values.case is not None:
        return [meshes.find(values.case, *memory_meshes.FORMS)]
    cases = list(meshes.every_case() if values.all else (*meshes.PAIRWISE, *meshes.MORE))
    if not cases[part]:
        raise ValueError(f"--part={values.part} has none of the {len(cases)} cases; wanted k from 1 to {len(cases)}")
    return cases[part]


def check_rows(path: Path) -> None:
    """Check that a file that lines are appended to holds such lines alone; a last one may be cut short.

    Raises:
      ValueError: it holds something else, of which an append would drop what has no newline at its end.
    """
    content = path.read_bytes() if path.exists() else b""
    for number, line in enumerate(content.splitlines(), start=1):
        if not line.startswith(ROW[: len(line)]):
            raise ValueError(f"--output={path} line {number} is no case of this command ({line[:40]!r}); name another")


def main() -> int:
    """Prove the selected cases; return 1 if one fails."""
    if (output := flags.FLAGS.output) is not None:
        if not Path(output).parent.is_dir():
            raise ValueError(f"--output={output}: there is no folder {Path(output).parent}; make it, or name another")
        check_rows(outputs.check_file(output, overwrite=True))  # lines are appended
    flags_of_xla = os.environ.get("XLA_FLAGS", "").split()  # a training run's device count must not apply here
    os.environ["XLA_FLAGS"] = " ".join(flag for flag in flags_of_xla if not flag.startswith(COUNT))
    os.environ.update(process_environment.simulated_devices(NUM_DEVICES))
    process_environment.ensure("cpu")
    cases = selected()
    from jaxbench import terminal
    from jaxbench.parity import meshes

    console, failed, worst = terminal.console(), 0, 0.0
    for index, case in enumerate(cases, start=1):
        proof = meshes.prove(case)
        failures = [comparison.first_failure for comparison in proof.values() if not comparison.passed]
        largest = max((comparison.worst.error, kind) for kind, comparison in proof.items())
        failed, worst = failed + bool(failures), max(worst, largest[0])
        verdict = f"FAILED at {failures[0].name}" if failures else "equal"
        line = f"{index}/{len(cases)} {case.id}: {verdict}, worst {largest[1]} {largest[0]:.1e}"
        console.print(line, style="bold red" if failures else "green")
        if output is not None:
            store.append(Path(output), [
                {"case": case.id, "passed": not failures, "worst": largest[0], "kind": largest[1]}
            ])  # fmt: skip
    console.print(f"{len(cases) - failed} of {len(cases)} cases equal the unsharded program, worst {worst:.1e}")
    return cli.EXIT_GATE if failed else cli.EXIT_OK


if __name__ == "__main__":
    os.environ.setdefault("JAX_ENABLE_X64", "1")
    define_flags()
    cli.run(main, about=__doc__)
