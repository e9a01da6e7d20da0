"""Bad input of jobs.py: commands, queues, ids."""

from __future__ import annotations

import functools
import json

from tests.bad_input.harness import Case, case_of

ID = "20260101T000000-0123456789ab"
KEYGEN = "--command=experiments/watermark.py keygen"


def job(**progress) -> dict[str, str | bytes]:
    """Return the files of a queue with one job."""
    about = {"id": ID, "words": ["experiments/watermark.py", "keygen"], "cwd": ".", "submitted": 1.0}
    files = {"job.json": json.dumps(about), "state.json": json.dumps(progress)}
    return {f"out/jobs/{ID}/{name}": content for name, content in files.items()}


submit, work, show = (functools.partial(case_of, ("jobs.py", name)) for name in ("submit", "work", "show"))
cancel, retry, remove, wait = (
    functools.partial(case_of, ("jobs.py", name)) for name in ("cancel", "retry", "remove", "wait")
)

CASES = [
    Case("jobs.py begin", ("'begin' is no command",)),
    Case("jobs.py lists", ("'lists' is no command of jobs.py, the nearest is list",)),
    Case("jobs.py list now", ("'now' is not a flag",)),
    Case("jobs.py list --queu=x", ("--queu", "--queue")),
    Case("jobs.py list --queue=a.txt", ("--queue=a.txt", "is a file"), {"a.txt": "x"}),
    Case("jobs.py list --queue=a.txt/b", ("--queue=a.txt/b", "is a file"), {"a.txt": "x"}),
    Case(("jobs.py", "list", "--queue="), ("--queue= ", "empty")),
    submit("", "--command=None", "name what is run"),
    submit("--command=", "--command=", "name what is run"),
    submit("--command=ls", "'ls' is no command"),
    submit("--command=rm -rf x", "'rm -rf x' is no command"),
    submit("--command=/bin/sh -c x", "is no command"),
    submit("--command=python experiments/parity.py", "is no command"),
    submit("--command=../experiments/parity.py", "is no command"),
    submit("--command=experiments/watermarks.py", "experiments/watermarks.py is not there", "watermark.py"),
    submit("--command=experiments/watermark", "is no command"),
    submit("--command=experiments/'parity.py", "cannot be split", "No closing quotation"),
    submit(f"{KEYGEN}|--priority=high", "--priority", "high"),
    submit(f"{KEYGEN}|--priority=1001", "--priority", "1001"),
    submit(f"{KEYGEN}|--priority=-1001", "--priority", "-1001"),
    submit(f"{KEYGEN}|--attempts=0", "--attempts", "0"),
    submit(f"{KEYGEN}|--attempts=many", "--attempts", "many"),
    submit(f"{KEYGEN}|--queue=a.txt", "--queue=a.txt", "is a file", a_txt="x"),
    submit(f"{KEYGEN}|--comand=x", "--comand", "--command"),
    submit(f"{KEYGEN}|now", "'now' is not a flag"),
    work("--workers=0", "--workers", "0"),
    work("--workers=two", "--workers", "two"),
    work("--workers=257", "--workers", "257"),
    work("--nice=20", "--nice", "20"),
    work("--nice=-1", "--nice", "-1"),
    work("--keep_days=-1", "--keep_days", "-1"),
    work("--poll_s=0", "--poll_s", "0"),
    work("--until_emty", "--until_emty", "--until_empty"),
    work("--queue=a.txt", "--queue=a.txt", "is a file", a_txt="x"),
    show("", "--job=None names 0 jobs", "the queue is empty"),
    show("--job=x", "--job=x names 0 jobs", "the queue is empty"),
    show("--job=", "--job= names 0 jobs"),
    Case("jobs.py show --job=2027", ("--job=2027 names 0 jobs", ID), job()),
    Case("jobs.py show --job=..", ("--job=.. names 0 jobs",), job()),
    wait("--job=x", "--job=x names 0 jobs"),
    cancel("--job=x", "--job=x names 0 jobs"),
    retry("--job=x", "--job=x names 0 jobs"),
    remove("--job=x", "--job=x names 0 jobs"),
]
