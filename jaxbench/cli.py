"""The command line that every main in `experiments/` shares (S file: neither JAX nor PyTorch).

A main declares its flags with the functions below, then hands its work to `run`:

    from jaxbench import cli

    def main() -> int:
        suite = cli.load_config(Suite)
        ...
        return 0 if passed else cli.EXIT_GATE

    if __name__ == "__main__":
        cli.define_config("configs/suites/default.yaml")
        cli.define_device()
        cli.run(main, about=__doc__)

A main with several commands, `watermark.py detect --input=FILE`, gives each its own flags:

    cli.run_commands({"detect": cli.Command(define_detect, detect, "find a watermark")}, about=__doc__)

Exit codes: 0 success, 1 a gate or a requested part failed, 2 bad input (one line on stderr that says what is wrong and
how to fix it), 130 interrupted, 141 the reader of the output closed it (`| head`). JAXBENCH_DEBUG=1 shows the whole
traceback of bad input. Before the main runs, `run` checks that --device is attached and --workdir is a folder that can
be written, and leaves nothing there. Every command has --profile=FOLDER and --monitor (docs/profiling.md), unless it
defines a flag of that name itself.
"""

from __future__ import annotations

import contextlib
import difflib
import errno
import os
import re
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TextIO, TypeVar

from absl import flags

from jaxbench import config, outputs, process_environment, terminal

FLAGS = flags.FLAGS
DEVICES = ("cpu", "gpu", "tpu")
BACKENDS = ("flax", "equinox", "torch")
EXIT_OK, EXIT_GATE, EXIT_USAGE, EXIT_INTERRUPT = 0, 1, 2, 130
EXIT_PIPE = 141  # a shell's exit code for a command that SIGPIPE ends
ROOT = Path(__file__).resolve().parents[1]
FULL_DISK = {errno.ENOSPC, errno.EFBIG, errno.EDQUOT}

Model = TypeVar("Model", bound=config.Base)
_kept: list[tuple[str, Callable[[], bool]]] = []  # the sentence given to `keep`, and whether it holds


class GateFailed(Exception):
    """One of jaxbench's own checks failed: the command ends with exit code 1 and this message."""


# Flags: called by the mains that need them, never at import


def define_config(default: str | None, about: str = "YAML file to run") -> None:
    """Define --config and --set a.b=c (any number of times).

    The default is relative to the repository's root, a path that the user gives to the working folder.
    """
    flags.DEFINE_string("config", default, about)
    flags.DEFINE_multi_string("set", [], "change one key of the config: --set decode.new_tokens=64; may be repeated")


def define_model(default: str = "default") -> None:
    """Define --model."""
    about = "default (SmolLM2-135M-Instruct), a .gguf file, a Hugging Face folder, or a hub id"
    flags.DEFINE_string("model", default, about)


def define_data() -> None:
    """Define --data."""
    flags.DEFINE_string("data", None, "text: a .txt, .jsonl or .jsonl.gz file (unset: the packaged English prose)")


def define_backend(default: str = "flax", choices: Sequence[str] = BACKENDS) -> None:
    """Define --backend."""
    flags.DEFINE_enum("backend", default, list(choices), "which implementation runs")


def array_library() -> str:
    """Name of the library that computes for --backend, as process_environment.environment expects it."""
    return "PyTorch" if FLAGS.backend == "torch" else "XLA"


def define_device(default: str = "cpu") -> None:
    """Define --device."""
    flags.DEFINE_enum("device", default, list(DEVICES), "where it runs")


def define_workdir(default: str | None = None) -> None:
    """Define --workdir."""
    flags.DEFINE_string("workdir", default, "folder for everything this run writes")


def define_part() -> None:
    """Define --part."""
    flags.DEFINE_string("part", "1/1", "k/n: every n-th one from the k-th on, 1 <= k <= n")


def part() -> slice:
    """Slice that --part=k/n selects, as in `items[cli.part()]`: every n-th item from the k-th on.

    Raises:
      ValueError: the flag is not k/n with 1 <= k <= n.
    """
    match = re.fullmatch(r"(\d+)/(\d+)", FLAGS.part)
    if not match or not 1 <= int(match[1]) <= int(match[2]):
        raise ValueError(f"--part={FLAGS.part} is not k/n with 1 <= k <= n")
    return slice(int(match[1]) - 1, None, int(match[2]))


def define_observation() -> None:
    """Define --profile and --monitor, unless the main has flags of these names; `run` calls it for every main."""
    if "profile" not in FLAGS:
        about = "folder for a profile of this command: operations, scopes, compile times, memory; unset: none"
        flags.DEFINE_string("profile", None, about)
    if "monitor" not in FLAGS:
        flags.DEFINE_bool("monitor", False, "say every 5 s what this command does: rates, memory, stragglers")


def require_flag(name: str, what: str) -> None:
    """Raise ValueError if a flag is unset or empty; `what` completes "name ..." in the message."""
    if not FLAGS[name].value:
        raise ValueError(f"--{name} is missing: name {what}")


def load_config(model_class: type[Model]) -> Model:
    """Read --config with every --set applied."""
    require_flag("config", f"a YAML file with the keys of {model_class.__name__}")
    return config.load(FLAGS.config, FLAGS.set, model_class)


# Devices and folders: checked by `run` before the main starts, and by the mains for what they choose themselves


def workdir(default: str | Path) -> Path:
    """Absolute path of --workdir, or `default` if it is not given, checked to be a folder that can be written.

    Raises:
      ValueError: it cannot be written.
    """
    return outputs.check_folder(FLAGS.workdir or default).absolute()  # workers run in another folder


def resolve_default_config() -> None:
    """If --config was not given, make its default a path that is valid in any working folder."""
    if "config" not in FLAGS or FLAGS["config"].present or not FLAGS["config"].default:
        return
    place = ROOT / (named := Path(FLAGS["config"].default))
    # In the root itself it keeps its short name, which records and pages show.
    if place.is_file() and not (named.is_file() and named.samefile(place)):
        FLAGS["config"].value = str(place)


def _check_flags() -> None:
    """Check --device, --workdir and --profile, where a command has them, before anything heavy starts."""
    if "device" in FLAGS:
        process_environment.check_attached(FLAGS.device)
    if "workdir" in FLAGS and FLAGS.workdir is not None:
        outputs.check_folder(FLAGS.workdir)
    if (folder := _profile_folder()) is not None:
        from jaxbench.profiling import trace

        trace.check_folder(folder)
        if "profile_steps" in FLAGS and FLAGS.profile_steps is not None:
            raise ValueError(f"--profile={folder} and --profile_steps={FLAGS.profile_steps}: give one of them")


def _profile_folder() -> str | None:
    """Folder of --profile, if it is the flag that every main has; else None."""
    return FLAGS.profile if isinstance(FLAGS.profile, str) else None


@contextlib.contextmanager
def _observed() -> Iterator[None]:
    """Profile and monitor the block, as --profile and --monitor ask."""
    with contextlib.ExitStack() as stack:
        if FLAGS["monitor"].boolean and FLAGS.monitor:
            from jaxbench.profiling import monitor

            rows = [FLAGS[name].value for name in ("workdir", "output") if name in FLAGS]
            stack.enter_context(monitor.running([str(row) for row in rows if row]))
        if (folder := _profile_folder()) is not None:
            from jaxbench.profiling import trace

            library = array_library() if "backend" in FLAGS else "XLA"
            stack.enter_context(trace.recorded(Path(folder), library=library))
        yield


# Running a main


def keep(sentence: str, *, when: Callable[[], bool] = lambda: True) -> None:
    """Set the sentence that an interrupt prints, e.g. `3 launches in out/results.jsonl; go on with --resume`.

    when: called before it is printed; False = nothing is kept yet, and the sentence is left out.
    """
    _kept[:] = [(sentence, when)]


def _kept_sentence() -> str:
    """Sentence that was given to `keep`, or "" if it does not hold now."""
    return next((sentence for sentence, when in _kept if when()), "")


def run(main: Callable[[], int | None], *, about: str | None = None, argv: Sequence[str] | None = None) -> None:
    """Parse the flags, call `main` and end the process with its exit code (None is success).

    about: first text of --help; argv: the command line, program name first (unset: `sys.argv`).
    """
    argv = list(sys.argv if argv is None else argv)
    define_observation()
    if any(word in ("--help", "-h", "-help", "--helpfull") for word in argv[1:]):
        raise SystemExit(_exit_code(lambda: print(help_text(Path(argv[0]).name, about))))
    raise SystemExit(_exit_code(lambda: _call(main, argv)))


class Command(NamedTuple):
    """One command of a main: its flags are defined when it is chosen."""

    define: Callable[[], None]
    main: Callable[[], int | None]
    about: str  # first text of its --help; its first line is shown in the list of commands


def run_commands(commands: Mapping[str, Command], *, about: str, argv: Sequence[str] | None = None) -> None:
    """Run the command that the first word names, with its own flags; end the process with its exit code."""
    program, *words = list(sys.argv if argv is None else argv)
    name = words[0] if words else ""
    if name in ("", "--help", "-h", "-help", "--helpfull"):
        code = _exit_code(lambda: print(commands_text(Path(program).name, commands, about)))
        raise SystemExit(code if name else EXIT_USAGE)
    if name not in commands:
        close = difflib.get_close_matches(name, commands, n=1, cutoff=0.5)
        hint = f"the nearest is {close[0]}" if close else f"wanted one of {', '.join(commands)}"
        raise SystemExit(_complain(f"{name!r} is no command of {Path(program).name}, {hint}", EXIT_USAGE))
    commands[name].define()
    run(commands[name].main, about=commands[name].about, argv=[f"{program} {name}", *words[1:]])


def commands_text(program: str, commands: Mapping[str, Command], about: str) -> str:
    """Help text of a main with commands: its own text, then one line per command."""
    width = max(map(len, commands))
    lines = [f"  {name:<{width}}  {command.about.strip().splitlines()[0]}" for name, command in commands.items()]
    usage = f"usage: {program} COMMAND [--flag=value ...]; {program} COMMAND --help lists its flags"
    return "\n".join([about.strip(), "", usage, "", *lines])


def _exit_code(work: Callable[[], int | None]) -> int:
    """Run work that prints and return its exit code; silent if the reader of standard output has closed it."""
    terminal.prepare_streams()
    code, before = EXIT_OK, _file_id(sys.stdout)
    try:
        code = work() or EXIT_OK
        sys.stdout.flush()
    except (SystemExit, BrokenPipeError) as error:
        # On a closed pipe, rich redirects the output and ends the process itself, with a failed gate's 1.
        if not (_file_id(sys.stdout) != before if isinstance(error, SystemExit) else _is_closed(sys.stdout)):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains at exit
        return code or EXIT_PIPE
    return code


def _file_id(stream: TextIO) -> tuple[int, int] | None:
    """Device and inode of a stream's file; None if it has no file."""
    with contextlib.suppress(AttributeError, OSError, ValueError):
        found = os.fstat(stream.fileno())
        return found.st_dev, found.st_ino
    return None


def _is_closed(stream: TextIO) -> bool:
    """True if a stream has no reader any more; the broken pipe may also be another one."""
    with contextlib.suppress(AttributeError, OSError, ValueError):  # no poll on this system, or no file behind it
        poll = select.poll()
        poll.register(stream.fileno(), select.POLLOUT)
        return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))
    return False


def _call(main: Callable[[], int | None], argv: list[str]) -> int:
    """Run a main and return its exit code; its errors become one line on stderr."""
    if threading.current_thread() is threading.main_thread():
        # SIGTERM is what a batch system sends, and the default would orphan the workers; a shell's background job is
        # started with SIGINT ignored.
        for signal_number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(signal_number, _interrupt)
    try:
        parse(argv)
        resolve_default_config()
        _check_flags()
        with _observed():
            return main() or EXIT_OK
    except KeyboardInterrupt:
        # With `python -m` an interrupt that came through an exec of text, such as a NamedTuple's, would end the process
        # by SIGINT instead of the exit code; the next exec makes CPython forget it (pythonrun.c, run_eval_code_obj).
        exec("")
        otherwise = "nothing was finished" if _kept else "finished outputs are kept"
        return _complain(f"interrupted; {_kept_sentence() or otherwise}", EXIT_INTERRUPT, "")
    except GateFailed as failure:
        return _complain(str(failure), EXIT_GATE, "failed: ")
    except (ValueError, OSError, MemoryError) as error:
        if os.environ.get("JAXBENCH_DEBUG") or (isinstance(error, BrokenPipeError) and _is_closed(sys.stdout)):
            raise
        return _complain(explain(error), EXIT_USAGE)


def _interrupt(signal_number: int, _: object) -> None:
    raise KeyboardInterrupt(signal.Signals(signal_number).name)


def _complain(message: str, code: int, prefix: str = "error: ") -> int:
    """Print one line on stderr and return the exit code."""
    with contextlib.suppress(BrokenPipeError):  # the message matters more
        sys.stdout.flush()
    print(prefix + " ".join(message.split()), file=sys.stderr, flush=True)
    return code


def parse(argv: Sequence[str]) -> None:
    """Parse the command line into FLAGS.

    Raises:
      ValueError: a flag is invalid, or unknown (the nearest one is named), or a word is not a flag.
    """
    try:
        rest = FLAGS(list(argv), known_only=False)
    except flags.UnrecognizedFlagError as error:
        raise ValueError(f"--{error.flagname} is no flag of this command{_nearest(error.flagname)}") from error
    except flags.Error as error:
        said = re.sub(r"flag --(\S+)=None: .* other than None\.", r"--\1 is missing", str(error))
        raise ValueError(f"{said}; see --help") from error
    if len(rest) > 1:
        raise ValueError(f"{rest[1]!r} is not a flag; flags are written --name=value, see --help")


def explain(error: BaseException) -> str:
    """One-sentence error message: what is wrong and, if known, how to fix it."""
    flag = next((name for name in ("workdir", "output") if name in FLAGS), None)
    where = f"--{flag} (JAXBENCH_CACHE for downloads)" if flag else "JAXBENCH_CACHE where it is a download"
    if isinstance(error, OSError) and error.errno in FULL_DISK:
        place = f" {error.filename}" if error.filename else ""
        kept = f"; kept: {sentence}" if (sentence := _kept_sentence()) else ""
        mend = f"free some space, or name a folder on another disk with {where}"
        return f"cannot write{place}: {error.strerror}{kept}; {mend}"
    if isinstance(error, PermissionError):
        return f"{error.strerror}: {error.filename}; name a folder you may use with {where}"
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    if isinstance(error, MemoryError):
        return f"out of memory ({error or 'no details'}); lower the batch or the sequence length"
    return config.said(error) or type(error).__name__


# Help


def own_flags() -> list[flags.Flag]:
    """Flags that jaxbench and the running main define, by name, without those of the libraries."""
    by_name = {}
    for module, members in FLAGS.flags_by_module_dict().items():
        if module.startswith(("jaxbench", "experiments", "__main__")) or module == sys.argv[0]:
            by_name |= {flag.name: flag for flag in members}
    return [by_name[name] for name in sorted(by_name)]


def help_text(program: str, about: str | None = None) -> str:
    """Help text of a main: its own text, then one entry per flag with its default."""
    lines = [(about or "").strip(), ""] if about else []
    lines += [f"usage: {program} [--flag=value ...]", ""]
    for flag in own_flags():
        wanted = "|".join(flag.parser.enum_values) if isinstance(flag.parser, flags.EnumParser) else flag.name.upper()
        shape = f"--[no]{flag.name}" if flag.boolean else f"--{flag.name}={wanted}"
        default = "" if flag.default in (None, [], "") else f" (default: {flag.default_as_str.strip(chr(39))})"
        text = flag.help.removeprefix(f"<{wanted}>: ").split(";\n")[0]
        lines += [f"  {shape}", f"      {text}{default}"]
    return "\n".join(lines)


def _nearest(name: str) -> str:
    """Hint that names the nearest flag, or else all flags."""
    names = [flag.name for flag in own_flags()]
    if close := difflib.get_close_matches(name, names, n=1, cutoff=0.5):
        return f", the nearest is --{close[0]}"
    return f"; it takes {', '.join('--' + known for known in names)}" if names else "; it takes no flags"
