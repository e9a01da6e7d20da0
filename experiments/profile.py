"""Profile a command's time and memory: by operation, by line, over repeated calls, while it runs.

    profile.py cpu --command="experiments/generate.py --prompt=Hello"
    profile.py memory --command="experiments/generate.py --prompt=Hello"
    profile.py leaks --call=my_file.py:function --repeats=50
    profile.py leaks --url=http://127.0.0.1:8000/v1/completions --body=@request.json --pid=4711
    profile.py gpu --command="experiments/train.py --config=configs/lm/tiny.yaml" --output=out/gpu
    profile.py operations --trace=FOLDER
    profile.py compare --base=FOLDER --head=FOLDER
    profile.py monitor --pid=4711

FOLDER is written by any command with --profile=FOLDER. A leak, or a command that fails, ends with exit code 1, bad
input with 2 and one line. Ctrl-C ends the command too, and shows what was sampled until then.
"""

from __future__ import annotations

import sys

if __name__ == "profile":
    # cProfile, which PyTorch imports, imports the standard library's module of this name, but Python searches the
    # folder of the main script first: give it the module that it wants.
    import importlib.util
    import sysconfig

    _found = importlib.util.spec_from_file_location("profile", f"{sysconfig.get_path('stdlib')}/profile.py")
    _module = sys.modules["profile"] = importlib.util.module_from_spec(_found)
    _found.loader.exec_module(_module)

from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from absl import flags

from jaxbench import cli, outputs, process_environment, terminal
from jaxbench.profiling import compare, events, host, leaks, monitor, trace

VALUES = flags.FLAGS
WRITING_S = 300.0  # for an interrupted command to write what --profile recorded


def _define_command() -> None:
    flags.DEFINE_string("command", None, "a script of experiments with its flags, or -m MODULE with its arguments")


def _define_top() -> None:
    flags.DEFINE_integer("top", 20, "rows that are shown", lower_bound=1)


def _define_output() -> None:
    flags.DEFINE_string("output", None, "new folder for the profile; unset: the table alone")


def _wanted(*names: str) -> None:
    """Check that flags are given.

    Raises:
      ValueError: one is missing.
    """
    for name in names:
        if not VALUES[name].value:
            raise ValueError(f"--{name}={VALUES[name].value or ''} is empty: {VALUES[name].help}")


def _words() -> list[str]:
    _wanted("command")
    return host.words_of(VALUES.command)


def define_host() -> None:
    """Define the flags of cpu and memory."""
    _define_command()
    _define_top()
    _define_output()


def define_cpu() -> None:
    """Define the flags of cpu."""
    define_host()
    flags.DEFINE_integer("rate", 100, "samples a second, at most", lower_bound=1, upper_bound=1000)
    flags.DEFINE_enum("tool", None, ["py-spy", "thread"], "unset: py-spy where it is installed")


def cpu() -> int:
    """Sample a command's stacks."""
    words = _words()
    if VALUES.tool == "py-spy" and host.py_spy() is None:
        raise ValueError(f"--tool={VALUES.tool} is not installed; pip install py-spy, or leave it out")
    _check_output()
    _keep_nothing()
    found = host.cpu(words, rate=VALUES.rate, use=VALUES.tool)
    seconds = sum(weight for _, weight in found.stacks) * found.scale
    about = f"{seconds:.4g} seconds in {len(found.stacks)} stacks, by {found.tool}"
    about += f", which looked {1 / found.scale:.3g} times a second" if found.tool == "thread" else ""
    return _finish(found, unit="seconds", scale=found.scale, about=about)


def define_memory() -> None:
    """Define the flags of memory."""
    define_host()
    flags.DEFINE_enum("tool", None, ["memray", "tracemalloc"], "unset: memray where it is installed")


def memory() -> int:
    """Show what a command had allocated at its peak."""
    import importlib.util

    words = _words()
    if VALUES.tool == "memray" and importlib.util.find_spec("memray") is None:
        raise ValueError(f"--tool={VALUES.tool} is not installed; pip install memray, or leave it out")
    _check_output()
    _keep_nothing()
    found = host.memory(words, use=VALUES.tool)
    size = sum(weight for _, weight in found.stacks) / 2**20
    about = (
        f"peak {found.peak / 2**20:.4g} MiB; the lines are of {size:.4g} MiB in {len(found.stacks)} stacks, "
        f"by {found.tool}"
    )
    return _finish(found, unit="MiB", scale=2**-20, about=about)


def _keep_nothing() -> None:
    """Let an interrupt report that nothing was finished; commands that show results later replace this."""
    cli.keep("", when=lambda: False)


def _check_output() -> None:
    if VALUES["output"].value is not None:
        trace.check_folder(VALUES.output, flag="--output")


def _finish(found: host.Profile, *, unit: str, scale: float, about: str) -> int:
    """Show and write a profile of the host, also of a command that failed or was interrupted."""
    lines = host.by_line(found.stacks)
    terminal.console().print(host.picture(lines, top=VALUES.top, unit=unit, scale=scale))
    print(about)
    if VALUES.output is not None:
        folder = Path(VALUES.output)
        outputs.write_json(folder / "lines.json", [line._asdict() for line in lines])
        text = "".join(_folded(stack, weight) for stack, weight in found.stacks)
        outputs.write_text(folder / "stacks.txt", text)
        print(f"written: lines.json, stacks.txt (for speedscope.app or flamegraph.pl) in {folder}")
    if found.interrupted:
        cli.keep("the profile is of what ran until then")
        raise KeyboardInterrupt
    if found.exit_code is None:
        said = "was killed, or ended past Python (os._exit): its exit code is not known"
        raise cli.GateFailed(f"{VALUES.command} {said}")
    if found.exit_code:
        raise cli.GateFailed(f"the command ended with exit code {found.exit_code}; its profile ends there")
    return cli.EXIT_OK


def _folded(stack: tuple, weight: float) -> str:
    return ";".join(f"{function} ({file}:{line})" for function, file, line in stack) + f" {weight:.0f}\n"


def define_leaks() -> None:
    """Define the flags of leaks."""
    flags.DEFINE_string("call", None, "FILE.py:FUNCTION or MODULE:FUNCTION, which takes no arguments")
    flags.DEFINE_string("url", None, "of a running server that is asked again and again")
    flags.DEFINE_string("body", None, "what --url is sent: JSON, or @FILE with it; unset: nothing, a GET")
    flags.DEFINE_integer("pid", None, "process of --url's server", lower_bound=1)
    flags.DEFINE_integer("repeats", leaks.REPEATS, "calls that are measured", lower_bound=leaks.FEWEST)
    flags.DEFINE_integer("warmup", leaks.WARMUP, "calls before them", lower_bound=0)
    cli.define_device()


def find_leaks() -> int:
    """Call something repeatedly, and show what memory it keeps."""
    if (VALUES.call is None) == (VALUES.url is None):
        raise ValueError(f"--call={VALUES.call} and --url={VALUES.url}: give one of them")
    options: dict[str, Any] = {"repeats": VALUES.repeats, "warmup": VALUES.warmup}
    if VALUES.url is not None:
        find = _find_in_server()
    else:
        for name in ("body", "pid"):
            if VALUES[name].value is not None:
                raise ValueError(f"--{name}={VALUES[name].value} needs --url; leave it out")
        file, name = leaks.split(VALUES.call)
        process_environment.ensure(VALUES.device)
        call = leaks.load(file, name)
        find = lambda **rest: leaks.find(call, **rest)  # noqa: E731
    _keep_nothing()
    found = find(advance=_counter(VALUES.repeats + VALUES.warmup), **options)
    print("\n".join(leaks.report(found)))
    if found.is_leak:
        raise cli.GateFailed(f"memory grew over {VALUES.repeats} calls")
    return cli.EXIT_OK


def _counter(total: int) -> Callable[[int], None]:
    """Return a function that shows on a terminal how many calls are done; a progress bar would keep samples."""
    done = [0]

    def advance(count: int) -> None:
        done[0] += count
        if sys.stderr.isatty():
            end = "\n" if done[0] == total else ""
            print(f"\r{done[0]} of {total} calls", end=end, file=sys.stderr, flush=True)

    return advance


def _find_in_server() -> Callable[..., leaks.Found]:
    """Return the search for leaks in a running server, with its flags checked before the first request."""
    if VALUES.pid is None:
        raise ValueError(f"--url={VALUES.url} needs --pid, the process whose memory is read")
    read, ask = leaks.resident_of(VALUES.pid), leaks.asker(VALUES.url, VALUES.body)
    return lambda **rest: leaks.find_elsewhere(ask, read, **rest)


def define_gpu() -> None:
    """Define the flags of gpu."""
    _define_command()
    flags.DEFINE_string("output", None, "new folder for the profile")


def gpu() -> int:
    """Run a command on a GPU with --profile."""
    try:
        process_environment.check_attached("gpu")
    except ValueError as error:  # its cure, --device=cpu, is no flag here
        cure = "on a CPU give --profile=FOLDER to the command itself"
        raise ValueError(f"profile.py gpu: {str(error).partition(';')[0]}; {cure}") from error
    words = _words()
    _wanted("output")
    trace.check_folder(VALUES.output, flag="--output")
    words = [*words, f"--profile={VALUES.output}"] + ["--device=gpu"] * (host.flag_value(words, "device") is None)
    cli.keep(f"the profile is in {VALUES.output}", when=lambda: Path(VALUES.output, trace.OPERATIONS).is_file())
    code, interrupted = host.run([sys.executable, *words], env=host.environment(words), grace_s=WRITING_S)
    if interrupted:
        raise KeyboardInterrupt
    if code:
        raise cli.GateFailed(f"the command ended with exit code {code}")
    return cli.EXIT_OK


def define_operations() -> None:
    """Define the flags of operations."""
    flags.DEFINE_string("trace", None, "folder of --profile, or of train.py --profile_steps")
    _define_top()


def operations() -> int:
    """Show the operation table of a profile."""
    _wanted("trace")
    folder = Path(VALUES.trace)
    if not folder.is_dir():
        raise ValueError(f"--trace={folder} is no folder; wanted one that --profile=FOLDER wrote")
    scoped = []
    if (folder / trace.OPERATIONS).is_file():
        kept = compare.read(VALUES.trace, trace.OPERATIONS, flag="--trace")
        rows, scoped = kept["rows"], kept.get("scopes", [])  # a profile of an earlier version has no scopes
    else:
        file = events.newest(folder)
        process_environment.ensure("cpu")
        rows = [row._asdict() for row in trace.read_operations(file, [], None)[0]]
    if not rows:
        print(trace.NO_ROWS)
        return cli.EXIT_OK
    terminal.console().print(trace.table.picture(rows, top=VALUES.top))
    if scoped:
        terminal.console().print(trace.scope_table.picture(scoped, top=VALUES.top))
    return cli.EXIT_OK


def define_compare() -> None:
    """Define the flags of compare."""
    flags.DEFINE_string("base", None, "folder of --profile before a change")
    flags.DEFINE_string("head", None, "folder of --profile after it")
    _define_top()


def side_by_side() -> int:
    """Show two profiles side by side."""
    _wanted("base", "head")
    sides = [
        [compare.read(VALUES[flag].value, file, flag=f"--{flag}") for flag in ("base", "head")]
        for file in (trace.OPERATIONS, trace.COMPILE, trace.MEMORY)
    ]
    (base, head), functions, peaks = sides
    console = terminal.console()
    console.print(compare.picture(compare.operations(base["rows"], head["rows"]), top=VALUES.top, what="operation"))
    console.print(compare.picture(compare.compiled(*functions), top=VALUES.top, what="traced, lowered, compiled"))
    before, after = (peak["peak_resident_bytes"] / 2**20 for peak in peaks)
    print(f"peak of the resident memory: {before:.0f} MiB to {after:.0f} MiB ({after - before:+.0f} MiB)")
    print("one run a side: experiments/benchmarks.py run --compare_with=COMMIT says what is beyond chance")
    return cli.EXIT_OK


def define_monitor() -> None:
    """Define the flags of monitor."""
    flags.DEFINE_integer("pid", None, "process of the command", lower_bound=1)
    flags.DEFINE_multi_string("rows", [], ".jsonl file that it writes, or a folder of them; may be repeated")
    flags.DEFINE_float("interval_s", monitor.INTERVAL_S, "between two lines", lower_bound=0.1, upper_bound=3600)
    flags.DEFINE_float("for_s", None, "how long; unset: until the process ends", lower_bound=0.1)


def follow() -> int:
    """Report what a running process does until it ends."""
    import time

    if VALUES.pid is None:
        raise ValueError(f"--pid={VALUES.pid or ''} is empty: wanted the number of a running process")
    for row in VALUES.rows:
        if not Path(row).exists():
            raise ValueError(f"--rows={row} is neither a file nor a folder")
        if Path(row).is_file() and Path(row).suffix != ".jsonl":
            raise ValueError(f"--rows={row} is no .jsonl file, wanted one, or a folder of them")
    watched, started = monitor.Watched(VALUES.pid, VALUES.rows), time.monotonic()
    cli.keep(f"process {VALUES.pid} goes on")
    while VALUES.for_s is None or time.monotonic() - started < VALUES.for_s:
        left = VALUES.interval_s if VALUES.for_s is None else VALUES.for_s - (time.monotonic() - started)
        time.sleep(max(min(VALUES.interval_s, left), 0.0))
        if (look := watched.look()) is None:
            print(f"process {VALUES.pid} has ended")
            return cli.EXIT_OK
        print(monitor.sentence(look), flush=True)
    return cli.EXIT_OK


COMMANDS = {
    "cpu": cli.Command(define_cpu, cpu, "Where a command's Python spends its time, by line."),
    "memory": cli.Command(define_memory, memory, "What a command had allocated when it was most, by line."),
    "leaks": cli.Command(define_leaks, find_leaks, "What memory repeated calls, or requests to a server, keep."),
    "gpu": cli.Command(define_gpu, gpu, "Run a command on a GPU, profiled by operation."),
    "operations": cli.Command(define_operations, operations, "The operation table of a profile."),
    "compare": cli.Command(define_compare, side_by_side, "Two profiles side by side."),
    "monitor": cli.Command(define_monitor, follow, "What a running process does."),
}

if __name__ == "__main__":
    cli.run_commands(COMMANDS, about=__doc__)
