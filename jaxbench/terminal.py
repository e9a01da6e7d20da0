"""Standard streams and rich consoles for every command (S file: neither JAX nor PyTorch).

On a terminal rich lays text out in the terminal's width. Anywhere else (a file, a pipe, a log) a line is as long as its
content, whatever COLUMNS says: a path broken in two can be neither copied nor searched for.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

UNWRAPPED = 10_000  # columns of output that is no terminal; wider than any table here


def prepare_streams() -> None:
    """Open standard streams that were closed (`>&-`), so that what is printed there is dropped; escape what they lack.

    A closed descriptor from 0 to 2 is taken first: else the next file that is opened would get it, and with it all that
    libraries and started processes print.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # gets the lowest closed number
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # characters that the locale lacks are escaped
            stream.reconfigure(errors="backslashreplace")


def console(*, stderr: bool = False, quiet: bool = False) -> Any:
    """A rich console on standard output (or error) that wraps on terminals only.

    Numbers are not coloured; markup and styles work. quiet=True prints nothing.
    """
    from rich.console import Console

    options = {"stderr": stderr, "quiet": quiet, "highlight": False}
    console = Console(**options)
    # Ask the file itself: with FORCE_COLOR, rich takes a pipe for a terminal.
    return console if console.file.isatty() else Console(**options, width=UNWRAPPED, soft_wrap=True)


@contextlib.contextmanager
def progress(total: int) -> Iterator[Callable[[int], None]]:
    """Yield a function that advances a progress bar on standard error."""
    from rich import progress as bars

    columns = (bars.BarColumn(), bars.MofNCompleteColumn(), bars.TimeElapsedColumn(), bars.TimeRemainingColumn())
    to = console(stderr=True)
    with bars.Progress(*columns, console=to, disable=not to.is_terminal) as bar:
        task = bar.add_task("", total=total)
        yield lambda count: bar.advance(task, count)
