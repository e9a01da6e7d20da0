"""Compare Flax, Equinox and PyTorch on one model: speed, memory, compile time, proof of equality, TPU figures.

    python experiments/compare.py --config=configs/suites/default.yaml        (or: make compare)

Writes results.jsonl, results.csv, report.html and TensorBoard scalars into --workdir. Interrupt at any point: finished
results are kept, and --resume continues from those of the same configuration, device, commit, versions and arms.

Exit code 1, with the reasons printed last: a parity proof failed or crashed, float32 outputs differ by more than a near
tie, or an arm, a TPU compile or a trace that the suite asks for crashed. What this machine cannot run at all (no
compiler, no libtpu) is named in the report; the exit code stays 0.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from absl import flags

from jaxbench import cli


def main() -> int:
    """Run the suite that the flags name; exit code 1 if a proof, an arm or another part failed."""
    from rich import markup

    from jaxbench import terminal
    from jaxbench.bench import run
    from jaxbench.bench.report import report
    from jaxbench.bench.suite import Suite
    from jaxbench.measure import records

    suite = cli.load_config(Suite)
    if (topologies := flags.FLAGS.tpu_topology) is not None:
        if not topologies or not all(topologies):
            given = ",".join(topologies)
            raise ValueError(f"--tpu_topology={given} has no name; write v5e:2x2,v6e:2x4, or --set=tpu.topologies=[]")
        suite = suite.model_copy(update={"tpu": suite.tpu.model_copy(update={"topologies": tuple(topologies)})})
    suite = suite.model_copy(
        update={name: flags.FLAGS[name].value for name in ("model", "data") if flags.FLAGS[name].present}
    )
    workdir = cli.workdir(Path("out") / Path(flags.FLAGS.config).stem)
    console, started = terminal.console(stderr=True), time.monotonic()
    cli.keep(f"finished results are in {workdir / records.RESULTS_NAME}; go on with --resume")

    def say(text: str) -> None:
        console.print(f"[dim]{time.monotonic() - started:6.1f} s[/dim] {markup.escape(text)}", soft_wrap=True)

    results = run.compare(
        suite, device=flags.FLAGS.device, workdir=workdir, resume=flags.FLAGS.resume, profile=flags.FLAGS.profile,
        say=say,
    )  # fmt: skip
    report.write(results, suite, workdir)
    if failures := run.failures(results):
        raise cli.GateFailed("; ".join(failures))
    return cli.EXIT_OK


if __name__ == "__main__":
    cli.define_config("configs/suites/default.yaml")
    cli.define_model()
    cli.define_data()
    cli.define_device()
    cli.define_workdir()
    flags.DEFINE_bool("resume", False, "go on with the results in --workdir: finished launches and parts are skipped")
    flags.DEFINE_bool("profile", False, "also write a trace of each workload (xprof for JAX, Chrome for PyTorch)")
    flags.DEFINE_list("tpu_topology", None, "compile for these TPUs instead of the suite's: v5e:2x2,v6e:2x4")
    cli.run(main, about=__doc__)
