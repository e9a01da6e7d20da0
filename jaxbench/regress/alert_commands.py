"""The commands `benchmarks.py alerts ...`: list, send, acknowledge, close, try (S file)."""

from __future__ import annotations

import datetime
import functools
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from absl import flags

from jaxbench import cli, terminal
from jaxbench import config as configs
from jaxbench.measure.records import now_utc
from jaxbench.regress import channels, history_commands
from jaxbench.regress.alert_config import Alerts
from jaxbench.regress.alerts import Alert, Book
from jaxbench.regress.run_file import read

ABOUT = "Regressions that somebody should know of: list, send, acknowledge, close, try."
FOLDER = Path("configs/alerts")
VALUES = flags.FLAGS


def define_alerts() -> None:
    """Define --alerts."""
    flags.DEFINE_string("alerts", None, f"who hears of a regression: a name of {FOLDER}, or a YAML file")


def config() -> Alerts | None:
    """Load the channels that --alerts names; None if the flag is not given.

    Raises:
      ValueError: there is no such file, it is invalid, or a secret that it names is not set.
    """
    return None if VALUES.alerts is None else named(VALUES.alerts, "--alerts")


def named(name: str, flag: str) -> Alerts:
    """Load the channels of a file, or of a name in configs/alerts; flag: the flag to name in error messages.

    Raises:
      ValueError: there is no such file, it is invalid, or a secret that it names is not set.
    """
    path = Path(name)
    if not path.suffix:
        path = FOLDER / f"{name}.yaml"
        path = path if path.is_file() else cli.ROOT / path  # a name is relative to the repository root
    if not path.is_file():
        known = ", ".join(sorted(each.stem for each in (cli.ROOT / FOLDER).glob("*.yaml")))
        raise ValueError(f"{flag}={name}: {path} is no file; wanted one of {known}, or a YAML file")
    found = configs.load(path, [], Alerts)
    found.check_secrets()
    return found


def take_in(alerts: Alerts, record: Mapping[str, Any], run: str) -> None:
    """Open, update and end alerts from a run, and send what is due; failing channels are reported."""
    book = Book(Path(VALUES.history))
    book.note(record, run, now=_now())
    _send(book, alerts)


def list_() -> int:
    """List the alerts that are not over."""
    import rich.table

    table = rich.table.Table(
        "alert", "state", "level", "confirmed", "since", "cases", "head", "beside", "runs", "said to"
    )
    for each in Book(Path(VALUES.history)).alerts():
        if each.state != "over" or VALUES.all:
            held = "yes" if each.confirmed else "no"
            table.add_row(
                each.id, each.state, each.level, held, each.opened_utc, ", ".join(each.cases), each.head, each.base,
                str(each.runs), ", ".join(each.sent),
            )  # fmt: skip
    terminal.console().print(table)
    return cli.EXIT_OK


def define_list() -> None:
    """Define the flags of alerts list."""
    history_commands.define_folder()
    flags.DEFINE_bool("all", False, "also those that are over")


def define_send() -> None:
    """Define the flags of alerts send."""
    history_commands.define_folder()
    define_alerts()
    flags.DEFINE_string("run", None, "a run of the history that is taken in first; unset: none")


def send() -> int:
    """Send what is due now: messages held back by quiet hours, repeats of unacknowledged alerts, alerts now over."""
    alerts = _needed()
    book = Book(Path(VALUES.history))
    if VALUES.run is not None:
        path = history_commands.folder().find(VALUES.run)
        book.note(read(path), path.stem, now=_now())
    failed = _send(book, alerts)
    if failed:
        raise cli.GateFailed(f"{failed} messages did not go through; they are tried again by the next `alerts send`")
    return cli.EXIT_OK


def _define_settle() -> None:
    history_commands.define_folder()
    flags.DEFINE_string("alert", None, "its id, or the beginning of it", required=True)
    flags.DEFINE_string("note", "", "why, for the others")


def acknowledge() -> int:
    """Acknowledge an alert that somebody is working on: it is not repeated."""
    found = Book(Path(VALUES.history)).settle(VALUES.alert, "acknowledged", note=VALUES.note, now=_now())
    print(f"acknowledged: {found.words()}")
    return cli.EXIT_OK


def close() -> int:
    """Close an alert."""
    found = Book(Path(VALUES.history)).settle(VALUES.alert, "over", note=VALUES.note, now=_now())
    print(f"over: {found.words()}")
    return cli.EXIT_OK


def try_() -> int:
    """Send a message marked as a trial to every channel; exit code 1 if one fails."""
    alerts = _needed()
    trial = Alert(
        id="00000000", state="open", level="warning", confirmed=False, opened_utc=now_utc(),
        host="", device="", suite_id="", base="none", head="none", subject="a trial of this channel", run="", runs=1,
        cases=("trial",), lines=("this is a trial: nothing became slower",), sent={}, note="",
    )  # fmt: skip
    failed = 0
    for channel in alerts.channels:
        went, detail = channels.deliver(channel, trial, "", alerts)
        failed += not went
        print(f"{channel.name}: {'sent' if went else 'failed: ' + detail}")
    if failed:
        raise cli.GateFailed(f"{failed} of {len(alerts.channels)} channels failed")
    return cli.EXIT_OK


def _needed() -> Alerts:
    found = config()
    if found is None:
        raise ValueError(f"--alerts is missing: name one of {FOLDER}, or a YAML file")
    return found


def _send(book: Book, alerts: Alerts) -> int:
    """Send what is due and print a line for each message; return how many failed."""
    said = book.send(alerts, functools.partial(channels.deliver, config=alerts), now=_now())
    for id, channel, went, detail in said:
        print(f"alert {id} to {channel}: {'sent' if went else 'failed: ' + detail}")
    return sum(not went for _, _, went, _ in said)


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


COMMANDS = {
    "list": cli.Command(define_list, list_, "List the alerts that are not over."),
    "send": cli.Command(define_send, send, "Say what is due now."),
    "acknowledge": cli.Command(_define_settle, acknowledge, "Say that somebody is at work on an alert."),
    "close": cli.Command(_define_settle, close, "Say that an alert is over."),
    "try": cli.Command(lambda: (history_commands.define_folder(), define_alerts()), try_, "Try every channel."),
}


def main(about: str) -> None:
    """Run the command that follows `alerts`."""
    cli.run_commands(COMMANDS, about=about, argv=[f"{sys.argv[0]} alerts", *sys.argv[2:]])
