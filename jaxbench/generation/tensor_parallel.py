"""--tensor_parallel: a decoder's matrices split over several devices (S file).

With JAX one process computes on all devices, simulated ones on a CPU. With PyTorch each device has a process: the
command starts itself again for the second one and on, with the same flags and what the user types. Those processes
print nothing; the first one speaks for all.
"""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import IO

from absl import flags

from jaxbench import cli, process_environment
from jaxbench.config import TransformerConfig

VALUES = flags.FLAGS
FLAG = "tensor_parallel"
RANK, THREADS = "RANK", "OMP_NUM_THREADS"
FOLLOWS = "JAXBENCH_FOLLOWS"  # set in a process that another one started
NOT_PASSED_ON = ("stream", "profile", "monitor")  # flags: the first process decides, or is observed
GRACE_S = 5.0  # between the ends of two processes: the one that is left may be about to say why, or the other to end


def define() -> None:
    """Define the flag."""
    about = "devices that decode together, each with a part of every matrix; on a CPU simulated ones or processes"
    flags.DEFINE_integer(FLAG, 1, about, lower_bound=1)


def check_flags(backend: str, *, has_input: bool) -> None:
    """Check the flag against the others.

    Raises:
      ValueError: the backend decodes on one device; or it has a process for each device, and a file is to be written.
    """
    count = VALUES[FLAG].value
    if count > 1 and backend == "equinox":
        raise ValueError(f"--{FLAG}={count}: --backend={backend} decodes on one device; wanted flax or torch")
    if count > 1 and backend == "torch" and has_input:
        raise ValueError(
            f"--{FLAG}={count} with --input={VALUES.input}: --backend={backend} continues a prompt or a conversation "
            "over several devices; wanted --backend=flax, or no --input"
        )


def check_heads(config: Callable[[], TransformerConfig]) -> None:
    """Check that the devices divide the model's key-value heads; config: reads the model's configuration.

    Raises:
      ValueError: they do not.
    """
    count = VALUES[FLAG].value
    if count > 1 and (heads := config().num_kv_heads) % count:
        fitting = " or ".join(str(each) for each in range(1, heads + 1) if heads % each == 0)
        raise ValueError(f"--{FLAG}={count} does not divide the model's num_kv_heads={heads}; wanted {fitting}")


def prepare(backend: str, device: str) -> None:
    """Set the environment that the flag needs, before JAX or PyTorch start: simulated devices, threads."""
    count = VALUES[FLAG].value
    if count == 1 or device != "cpu":
        return
    if backend == "torch":  # the cores are divided among the processes
        os.environ.setdefault(THREADS, str(max(1, process_environment.usable_cores() // count)))
    else:
        os.environ.update(process_environment.simulated_devices(count))


def starts_others(backend: str) -> bool:
    """True in a process that has to start others to compute with: PyTorch's first."""
    return backend == "torch" and VALUES[FLAG].value > 1 and FOLLOWS not in os.environ


@contextlib.contextmanager
def processes(*, is_streamed: bool) -> Iterator[Callable[[str], str]]:
    """Start the other processes of this command; yields a function that passes a typed line on to them, and returns it.

    is_streamed: whether this process reads its rows a few tokens at a time, which all must do alike.

    Raises:
      ChildProcessError: another process ended before this one; its last line is part of the message.
    """
    has_ended, count = threading.Event(), VALUES[FLAG].value
    with contextlib.ExitStack() as stack:
        said = [stack.enter_context(tempfile.TemporaryFile()) for _ in range(1, count)]
        others = _start(said, is_streamed)
        stack.callback(_end, others)
        stack.callback(has_ended.set)
        for rank, (process, file) in enumerate(zip(others, said), start=1):
            threading.Thread(target=_watch, args=(rank, process, file, has_ended), daemon=True).start()
        try:
            yield functools.partial(_type, others)
        except BaseException as error:
            if isinstance(error, RuntimeError):  # a collective that another process has left
                for rank, (process, file) in enumerate(zip(others, said), start=1):
                    if _has_failed(process):
                        raise ChildProcessError(_ended(rank, process, file)) from error
            has_ended.set()
            for process in others:
                process.kill()
            raise


def _start(said: Sequence[IO[bytes]], is_streamed: bool) -> list[subprocess.Popen]:
    """Start the other processes, whose standard error goes to a file each."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    size = {"WORLD_SIZE": str(len(said) + 1), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ.update(size | {RANK: "0"})
    command = [sys.executable, sys.argv[0], *_words(), f"--stream={str(is_streamed).lower()}"]
    how = {"stdin": subprocess.PIPE, "stdout": subprocess.DEVNULL, "start_new_session": True}  # Ctrl-C is the first's
    return [
        subprocess.Popen(command, env=os.environ | {RANK: str(rank), FOLLOWS: "1"}, stderr=file, **how)
        for rank, file in enumerate(said, start=1)
    ]


def _has_failed(process: subprocess.Popen) -> bool:
    try:
        return process.wait(GRACE_S) != 0
    except subprocess.TimeoutExpired:
        return False


def _words() -> list[str]:
    """Return this command's flags as words of another's command line."""
    given = [(name, VALUES[name]) for name in VALUES if VALUES[name].present and name not in NOT_PASSED_ON]
    pairs = [(name, flag.value if isinstance(flag.value, list) else [flag.value]) for name, flag in given]
    return [f"--{name}={value}" for name, values in pairs for value in values]


def _type(others: list[subprocess.Popen], line: str) -> str:
    """Pass a typed line on to the other processes, and return it."""
    for process in others:
        try:
            process.stdin.write(line.encode("utf-8", "surrogateescape") + b"\n")
            process.stdin.flush()
        except BrokenPipeError as error:
            raise RuntimeError(f"--{FLAG}={VALUES[FLAG].value}: process {process.pid} reads no more") from error
    return line


def _watch(rank: int, process: subprocess.Popen, file: IO[bytes], has_ended: threading.Event) -> None:
    """End this process if another one has failed: a collective would wait for it for ever."""
    if process.wait() and not has_ended.wait(GRACE_S):
        sys.stdout.flush()
        print(f"error: {_ended(rank, process, file)}", file=sys.stderr, flush=True)
        os._exit(cli.EXIT_USAGE)


def _ended(rank: int, process: subprocess.Popen, file: IO[bytes]) -> str:
    """Say how another process ended, with its last line."""
    file.seek(0)
    lines = file.read().decode(errors="replace").split("\n")
    last = next((line.strip() for line in reversed(lines) if line.strip()), "it said nothing")
    return f"--{FLAG}={VALUES[FLAG].value}: process {rank} ended with exit code {process.returncode}: {last[:300]}"


def _end(others: list[subprocess.Popen]) -> None:
    for process in others:
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()  # the end of a conversation
    until = time.monotonic() + GRACE_S
    for process in others:
        try:
            process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
