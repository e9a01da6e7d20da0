"""Run the measurements that need a GPU, in stages, the most valuable first, within a budget of seconds.

    make gpu_pack                                        one folder to copy: code, wheels that such a machine lacks
    make gpu                                             every stage in 540 s; python experiments/gpu.py --budget_s=540
    python experiments/gpu.py --stage=rates,train_124m   some of them
    python experiments/gpu.py --resume                   the ones that are not done yet, on this machine or another
    python experiments/gpu.py --rehearse                 every stage tiny, on a CPU, a stage a core (3 minutes on 2)
    python experiments/gpu.py --config=configs/gpu/long.yaml --data=FOLDER     training runs, in a separate lease

Each stage is a command with a time limit (configs/gpu/stages.yaml); its measurements are written as they come:
results.jsonl, figures.csv, environment.json and log.txt in --workdir, the stages' own files under --work. Exit code
1: a stage failed; 2: nothing could be started.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

try:
    from absl import flags

    from jaxbench import cli
except ModuleNotFoundError as error:  # packages that everything needs; those of a stage are checked below
    wanted = "carry the wheels of `make gpu_pack` and begin with its script `run`"
    print(f"error: gpu: this Python lacks {error.name}; {wanted}", file=sys.stderr)
    raise SystemExit(2) from error

VALUES = flags.FLAGS
AT_ONCE = 4  # stages of a rehearsal beside one another, at most: each takes up to 1.5 GB


def main() -> int:
    """Run the stages, or gather a pack; exit code 1 if a stage failed."""
    from jaxbench import outputs, process_environment, terminal
    from jaxbench.gpu import pack, run
    from jaxbench.gpu.stages import Stages, missing
    from jaxbench.measure import environment

    console = terminal.console(stderr=True)
    if VALUES.pack is not None:
        if VALUES.rehearse or VALUES.resume or VALUES.stage is not None:
            raise ValueError(f"--pack={VALUES.pack} only gathers files; leave --rehearse, --resume and --stage out")
        folder = outputs.check_folder(VALUES.pack, flag="--pack")
        for line in pack.gather(folder, with_model=VALUES.with_model):
            print(line)
        return cli.EXIT_OK
    if VALUES.with_model:
        raise ValueError(f"--with_model={VALUES.with_model} stands beside --pack=FOLDER, which is missing")
    if VALUES.at_once is not None and not VALUES.rehearse:
        raise ValueError(f"--at_once={VALUES.at_once} is for --rehearse: figures measured at once disturb each other")
    if not math.isfinite(VALUES.budget_s):
        raise ValueError(f"--budget_s={VALUES.budget_s} is no number of seconds")
    data = "" if VALUES.data is None else str(Path(VALUES.data).resolve())
    if data and not Path(data).is_dir():
        raise ValueError(f"--data={VALUES.data} is no folder, wanted one of texts that long trainings read")
    settings = cli.load_config(Stages)
    stages = settings.chosen(VALUES.stage)
    if lacking := missing(settings.needs):
        raise ValueError(f"gpu: this Python lacks {', '.join(lacking)}; {pack.ADVICE}")
    device = "cpu" if VALUES.rehearse else "gpu"
    try:
        process_environment.check_attached(device)
    except ValueError as error:
        raise ValueError(f"gpu: {str(error).partition(';')[0]}; --rehearse runs the stages tiny on a CPU") from error
    workdir = cli.workdir("out/gpu-rehearsal" if VALUES.rehearse else "out/gpu")
    work = outputs.check_folder(f"{workdir}-work" if VALUES.work is None else VALUES.work, flag="--work")
    cli.keep(f"finished stages are in {workdir}/results.jsonl; go on with --resume")
    place = run.Place(device, VALUES.rehearse, workdir.absolute(), work.absolute(), data)
    say = lambda text: console.print(text, soft_wrap=True, markup=False, style="dim")
    at_once = (VALUES.at_once or min(AT_ONCE, environment.usable_cores())) if VALUES.rehearse else 1
    ended = run.run(stages, place, budget_s=VALUES.budget_s, resume=VALUES.resume, say=say, at_once=at_once)
    terminal.console().print(run.table(workdir))
    print(f"written: {workdir}/results.jsonl, figures.csv, environment.json, log.txt")
    failed = [record for record in ended if record.status == "error"]
    if failed:
        raise cli.GateFailed("; ".join(f"{record.arm}: {record.reason}" for record in failed))
    return cli.EXIT_OK


if __name__ == "__main__":
    cli.define_config("configs/gpu/stages.yaml")
    cli.define_workdir()
    flags.DEFINE_list("stage", None, "names of the stages to run (unset: all, in the order of the file)")
    flags.DEFINE_float("budget_s", 540.0, "seconds for all of them", lower_bound=1.0)
    flags.DEFINE_bool(
        "resume",
        False,
        "leave out what ended well with this code, command and configurations on such a GPU, in --workdir",
    )
    flags.DEFINE_bool("rehearse", False, "every stage at a tiny size on the CPU")
    flags.DEFINE_integer(
        "at_once", None, "stages of a rehearsal that run beside one another (unset: one a core, up to 4)", lower_bound=1
    )
    flags.DEFINE_string("work", None, "folder of the stages' own files (unset: WORKDIR-work)")
    flags.DEFINE_string("data", None, "folder of texts, for the stages that read some (configs/gpu/long.yaml)")
    flags.DEFINE_string("pack", None, "only gather code and wheels for another machine into this new folder")
    flags.DEFINE_bool("with_model", False, "beside --pack: the default model too, in two packs FOLDER-model-1 and -2")
    cli.run(main, about=__doc__)
