"""Run bulk jobs later, one after another: a queue in a folder.

    jobs.py submit --command="experiments/watermark.py detect --key_file=k --input=a.jsonl --output=a.parquet"
    jobs.py work                            run waiting jobs, until Ctrl-C; on any machine that shares the folder
    jobs.py work --until_empty --workers=2  two at a time, until nothing is left
    jobs.py list                            every job and its state
    jobs.py show --job=ID                   one job, and the end of its log
    jobs.py wait --job=ID                   wait until it has ended; ends with its exit code
    jobs.py cancel --job=ID                 retry, remove: likewise

A killed worker loses nothing: the next one runs the same command, which resumes where it stopped. A command that
crashes is run again; one that ends with 1 or 2 (a failed gate, bad input) is not. --queue names the folder.
"""

from __future__ import annotations

import datetime
import json
import shlex
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from absl import flags

from jaxbench import cli, log_lines, outputs, terminal

if TYPE_CHECKING:
    from jaxbench.jobs.queue import Entry, Queue

VALUES = flags.FLAGS
SHOWN_LINES = 20


def define_queue() -> None:
    """Define --queue."""
    flags.DEFINE_string("queue", "out/jobs", "folder of the jobs")


def define_job() -> None:
    """Define --queue and --job."""
    define_queue()
    flags.DEFINE_string("job", None, "id of a job, as `list` shows it")


def define_submit() -> None:
    """Define the flags of submit."""
    define_queue()
    flags.DEFINE_string("command", None, "what is run: experiments/NAME.py and its flags, in one string")
    flags.DEFINE_string("title", "", "what people call it")
    flags.DEFINE_integer("priority", 0, "higher is run first", lower_bound=-1000, upper_bound=1000)
    flags.DEFINE_integer("attempts", 3, "of a command that breaks", lower_bound=1, upper_bound=100)


def define_work() -> None:
    """Define the flags of work."""
    define_queue()
    flags.DEFINE_integer("workers", 1, "jobs at a time", lower_bound=1, upper_bound=256)
    flags.DEFINE_integer("nice", 0, "niceness of what is run; 19 lets everything else go first", 0, 19)
    flags.DEFINE_float("keep_days", None, "remove jobs that ended so many days ago (unset: none)", lower_bound=0.0)
    flags.DEFINE_float("poll_s", 1.0, "seconds between looks for a job", lower_bound=0.01, upper_bound=3600.0)
    flags.DEFINE_bool("until_empty", False, "end when nothing waits or runs; with 1 where a job failed")


def held(*, is_written: bool = True) -> Queue:
    """Return the queue that --queue names; is_written: False where a command only reads it.

    Raises:
      ValueError: it is not a folder.
    """
    from jaxbench.jobs.queue import Queue

    return Queue(outputs.check_folder(VALUES.queue, flag="--queue", is_written=is_written))


def named() -> str:
    """Return the id that --job names, in full or by its beginning.

    Raises:
      ValueError: it names none, or several.
    """
    ids = held(is_written=False).ids()
    found = [id for id in ids if id.startswith(VALUES.job or " ")]
    if len(found) != 1:
        known = ", ".join(ids[-5:]) or "none: the queue is empty"
        raise ValueError(f"--job={VALUES.job} names {len(found)} jobs of {VALUES.queue}; wanted one of {known}")
    return found[0]


def submit() -> int:
    """Add a job."""
    from jaxbench.jobs import queue

    try:
        words = shlex.split(VALUES.command or "")
    except ValueError as error:
        raise ValueError(f"--command={VALUES.command} cannot be split into words ({error})") from error
    if not words:
        raise ValueError(f"--command={VALUES.command}: name what is run, as in experiments/watermark.py detect ..")
    queue.check_words(words)
    entry = held().submit(words, title=VALUES.title, priority=VALUES.priority, most_attempts=VALUES.attempts)
    print(entry.job.id)
    return cli.EXIT_OK


def work() -> int:
    """Run jobs."""
    from jaxbench.jobs.work import Workers

    log_lines.start("jaxbench.jobs")
    keep_s = None if VALUES.keep_days is None else VALUES.keep_days * 86_400
    workers = Workers(
        held(), count=VALUES.workers, poll_s=VALUES.poll_s, niceness=VALUES.nice, keep_s=keep_s,
        until_empty=VALUES.until_empty,
    )  # fmt: skip
    cli.keep("what ran waits again; the same command goes on")
    workers.start()
    try:
        workers.join()
    finally:
        workers.stop()
        workers.join()
    return cli.EXIT_GATE if workers.failed else cli.EXIT_OK


def list_jobs() -> int:
    """Print one line per job."""
    from rich.table import Table
    from rich.text import Text

    jobs = held(is_written=False)
    ids, entries = jobs.ids(), jobs.entries()
    if not ids:
        print(f"{VALUES.queue} holds no jobs")
        return cli.EXIT_OK
    table = Table("job", "state", "attempts", "time", "command")
    for entry in entries:
        table.add_row(
            entry.job.id, entry.progress.state, str(entry.progress.attempts), _time(entry),
            Text(entry.job.title or shlex.join(entry.job.words)),  # brackets in a command are no markup
        )  # fmt: skip
    for id in sorted({*ids}.intersection(jobs.ids()) - {entry.job.id for entry in entries}):  # not those removed
        table.add_row(id, "damaged", "", "", "its files cannot be read: `show` says why, `remove` removes it")
    terminal.console().print(table)
    return cli.EXIT_OK


def show() -> int:
    """Print a job as JSON, and the end of its log."""
    from jaxbench.jobs import work

    entry = held(is_written=False).find(named())
    print(json.dumps(entry.as_dict(), indent=1, ensure_ascii=False))
    said = work.said(entry.log) if entry.log.exists() else ""
    print(*said.splitlines()[-SHOWN_LINES:], sep="\n")
    return cli.EXIT_OK


def wait() -> int:
    """Wait for a job; return its exit code, or 1 where it has none."""
    from jaxbench.jobs import queue

    id, jobs = named(), held(is_written=False)
    while (entry := jobs.find(id)).progress.state not in queue.ENDED:
        time.sleep(0.5)
    print(f"{id} {entry.progress.state} {entry.progress.note}".rstrip())
    code = entry.progress.exit_code
    return cli.EXIT_OK if entry.progress.state == "done" else code if code and code > 0 else cli.EXIT_GATE


def change(what: str) -> int:
    """Cancel, retry or remove a job."""
    id = named()
    changed = getattr(held(), what)(id)
    print(f"{id} {'removed' if changed is None else changed.progress.state}")
    return cli.EXIT_OK


def _time(entry: Entry) -> str:
    """Return how long a job ran, or since when it waits."""
    progress = entry.progress
    if progress.started is None:
        return f"since {datetime.datetime.fromtimestamp(entry.job.submitted):%m-%d %H:%M}"
    return f"{(progress.ended or time.time()) - progress.started:.0f} s"


COMMANDS = {
    "submit": cli.Command(define_submit, submit, "Add a command to the queue; print the job's id."),
    "work": cli.Command(define_work, work, "Run what waits."),
    "list": cli.Command(define_queue, list_jobs, "Print every job and its state."),
    "show": cli.Command(define_job, show, "Print one job, and the end of what it said."),
    "wait": cli.Command(define_job, wait, "Wait for a job's end."),
    "cancel": cli.Command(define_job, lambda: change("cancel"), "End a job that waits or runs."),
    "retry": cli.Command(define_job, lambda: change("retry"), "Run a job again that failed or was cancelled."),
    "remove": cli.Command(define_job, lambda: change("remove"), "Remove a job that has ended, with its files."),
}


if __name__ == "__main__":
    cli.run_commands(COMMANDS, about=__doc__)
