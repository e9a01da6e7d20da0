"""Alerts on regressions: opened, sent, acknowledged, over (S file).

Data flow: a run's record -> alerts, one per cause -> events, appended to HISTORY/alerts.jsonl -> what is due ->
channels (channels.py). Events are the source of truth and never change; an alert is derived from its events. Until
somebody finds out more, regressions between the same two commits have one cause: a run's regressions are one alert, and
a later run that finds them again against the same base is added to it. An alert is over when a run against that base
judges each of them to be no worse, or when somebody closes it. A run that leaves one undecided or unmeasured does not
end it. A run against another base proves nothing: both sides may be slow.
"""

from __future__ import annotations

import datetime
import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from jaxbench import store
from jaxbench.regress import report
from jaxbench.regress.alert_config import Alerts, AnyChannel
from jaxbench.regress.history import EVENTS

MOST_SUBJECT, MOST_LINES = 200, 40
State = Literal["open", "acknowledged", "over"]
OPENED, AGAIN, ACKNOWLEDGED, OVER, SENT, FAILED = "opened", "again", "acknowledged", "over", "sent", "failed"


class Sent(NamedTuple):
    """The last message of an alert on one channel."""

    state: State  # of the alert when it was sent
    level: Literal["warning", "critical"]
    time_utc: str
    reference: str  # the channel's own reference, such as an issue number; "" = none


class Alert(NamedTuple):
    """State of one alert, derived from its events."""

    id: str
    state: State
    level: Literal["warning", "critical"]
    confirmed: bool  # whether fresh launches found it again
    opened_utc: str
    host: str
    device: str
    suite_id: str
    base: str  # commits
    head: str
    subject: str  # of head
    run: str  # id of the run that found it
    runs: int  # how many runs found it
    cases: tuple[str, ...]
    lines: tuple[str, ...]  # what became worse, and why
    sent: Mapping[str, Sent]  # by channel
    note: str  # of who acknowledged or closed it
    series: tuple[str, ...] = ()  # everything that became worse in any of its runs; () = of an older version

    def key(self) -> tuple[str, ...]:
        """Host, device, suite and base that a later run must share to update the alert."""
        return (self.host, self.device, self.suite_id, self.base)

    def words(self) -> str:
        """Describe the alert in one line."""
        held = ", confirmed by fresh launches" if self.confirmed else ""
        return f"{self.level} performance regression{held}: {', '.join(self.cases)} at {self.head} beside {self.base}"

    def message(self) -> tuple[str, str]:
        """Return subject and text, as channels send them."""
        if self.state == "over":
            return f"over: {self.words()}"[:MOST_SUBJECT], f"{self.note or 'closed'}\n"
        again = f", found by {self.runs} runs" if self.runs > 1 else ""
        lines = [f"Alert {self.id}, open since {self.opened_utc}{again}.", f"Head {self.head}: {self.subject}", ""]
        lines += [f"- {line}" for line in self.lines[:MOST_LINES]]
        if self.run:
            lines += ["", f"Acknowledge: python experiments/benchmarks.py alerts acknowledge --alert={self.id}"]
        return self.words()[:MOST_SUBJECT], "\n".join(lines) + "\n"


class Book:
    """The alerts stored in a history."""

    def __init__(self, folder: Path):
        """Args: folder: the history's folder."""
        self.path = folder / EVENTS

    def alerts(self) -> list[Alert]:
        """Return all alerts, oldest first.

        Raises:
          ValueError: a line of the file is no event.
        """
        found: dict[str, Alert] = {}
        for number, line in enumerate(store.rows(self.path), start=1):
            try:
                event = json.loads(line)
                found[event["id"]] = _after(found.get(event["id"]), event)
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise ValueError(f"{self.path} line {number} is no event ({error!r}); remove it") from error
        return list(found.values())

    def find(self, id: str) -> Alert:
        """Find an alert by its id or a prefix of it.

        Raises:
          ValueError: no alert, or several, match.
        """
        all_ = self.alerts()
        found = [each for each in all_ if each.id.startswith(id)]
        if len(found) != 1 or not id:
            known = ", ".join(each.id for each in all_[-5:]) or "none: there is no alert"
            raise ValueError(f"alerts: {id!r} names {len(found)}; wanted one of {known}")
        return found[0]

    def note(self, record: Mapping[str, Any], run: str, *, now: datetime.datetime) -> list[Alert]:
        """Update alerts from a run: open new ones, add to those found again, end those not found; return the changed.

        Taking in the same run again changes nothing.
        """
        with store.locked(self.path):  # another run may end at the same time
            if any(event.get("run") == run for event in self._events()):
                return []
            events = list(_events_of(record, run, self.alerts()))
            self._append(events, now)
        changed = {event["id"] for event in events}
        return [each for each in self.alerts() if each.id in changed]

    def settle(self, id: str, state: Literal["acknowledged", "over"], *, note: str, now: datetime.datetime) -> Alert:
        """Acknowledge or close an alert.

        Raises:
          ValueError: there is no such alert, or it is over.
        """
        self.find(id)  # raises before anything is written
        with store.locked(self.path):
            alert = self.find(id)
            if alert.state == "over":
                raise ValueError(f"alerts: {alert.id} is over; there is nothing to do")
            self._append([{"event": state, "id": alert.id, "note": note}], now)
        return self.find(alert.id)

    def send(
        self, config: Alerts, deliver: Callable[[AnyChannel, Alert, str], tuple[bool, str]], *, now: datetime.datetime
    ) -> list[tuple[str, str, bool, str]]:
        """Send what is due to every channel; return (alert, channel, was sent, reference or reason) for each.

        A failure is reported in the result, never raised.

        Args:
          deliver: sends one alert to one channel, with the channel's reference of an earlier message ("" = none).
        """
        said = []
        if not self.path.exists():
            return said
        with store.locked(self.path):  # so that no other process sends the same
            for alert in self.alerts():
                for channel in config.channels:
                    if not is_due(alert, channel, config, now):
                        continue
                    before = alert.sent.get(channel.name)
                    went, detail = deliver(channel, alert, before.reference if before else "")
                    event = {"event": SENT if went else FAILED, "id": alert.id, "channel": channel.name}
                    self._append([event | {"detail": detail, "state": alert.state, "level": alert.level}], now)
                    said.append((alert.id, channel.name, went, detail))
        return said

    def _events(self) -> Iterable[Mapping[str, Any]]:
        return (json.loads(line) for line in store.rows(self.path))

    def _append(self, events: Sequence[Mapping[str, Any]], now: datetime.datetime) -> None:
        if events:
            time = now.astimezone(datetime.UTC).isoformat(timespec="seconds")
            store.append(self.path, [{"time_utc": time, **event} for event in events])


def is_due(alert: Alert, channel: AnyChannel, config: Alerts, now: datetime.datetime) -> bool:
    """True if a channel must be sent an alert now."""
    last = alert.sent.get(channel.name)
    if alert.state == "over":
        return last is not None and last.state != "over"  # channels that were told are also told that it is over
    if channel.least == "critical" and alert.level != "critical":
        return False
    if channel.escalation and _repeats(alert, config, now) < config.escalate_after:
        return False
    if config.quiet_hours is not None and alert.level != "critical" and config.quiet_hours.holds(now):
        return False
    if last is None:
        return alert.state == "open"
    if last.level == "warning" and alert.level == "critical":
        return True
    waited = now - datetime.datetime.fromisoformat(last.time_utc)
    return alert.state == "open" and waited >= datetime.timedelta(hours=config.repeat_hours)


def _repeats(alert: Alert, config: Alerts, now: datetime.datetime) -> int:
    """Return the number of whole repeat intervals since an alert was opened; 0 if it is no longer open."""
    if alert.state != "open":
        return 0
    hours = (now - datetime.datetime.fromisoformat(alert.opened_utc)).total_seconds() / 3600
    return int(hours // config.repeat_hours)


def _events_of(record: Mapping[str, Any], run: str, alerts: Sequence[Alert]) -> Iterable[dict[str, Any]]:
    """Yield the events that a run causes."""
    sides = record["sides"]
    if "base" not in sides or not record["findings"]:
        return
    worse: dict[str, list[Any]] = {}
    findings = report.findings_of(record)
    for each in findings:
        if each.verdict == "regression":
            worse.setdefault(each.series.partition(".")[0], []).append(each)
    fine = {each.series for each in findings if each.verdict in ("no change", "improvement")}
    key = (record["host"], record["device"], record.get("suite_id", ""), sides["base"]["commit"])
    mine = [alert for alert in alerts if alert.state != "over" and alert.key() == key]
    for alert in mine:
        held = [name for name in alert.cases if name in worse]
        if held:
            yield _described(AGAIN, alert.id, record, run, {name: worse[name] for name in held})
        elif fine.issuperset(alert.series):
            yield {"event": OVER, "id": alert.id, "run": run, "note": f"run {run} no longer finds it"}
    known = {name for alert in mine for name in alert.cases}
    if new := {name: each for name, each in worse.items() if name not in known}:
        id = hashlib.sha256(repr((key, run)).encode()).hexdigest()[:8]
        yield _described(OPENED, id, record, run, new)


def _described(event: str, id: str, record: Mapping[str, Any], run: str, worse: Mapping[str, list]) -> dict[str, Any]:
    """Build an event with everything that its message contains."""
    found = [each for several in worse.values() for each in several]
    sides = record["sides"]
    confirmed = any(record.get("confirmed", {}).get(each.series) for each in found)
    lines = [f"{each.series}: {report.verdict(each)}, {report.interval(each)}" for each in found]
    lines += [line for line in report.explanation(record) if line.partition(":")[0] in (*worse, "packages")]
    return {
        "event": event, "id": id, "run": run, "level": _level(found), "confirmed": confirmed, "host": record["host"],
        "device": record["device"], "suite_id": record.get("suite_id", ""), "base": sides["base"]["commit"],
        "head": sides["head"]["commit"], "subject": sides["head"].get("subject", ""), "cases": list(worse),
        "lines": lines, "series": [each.series for each in found],
    }  # fmt: skip


def _level(found: Sequence[Any]) -> str:
    return "critical" if any(each.level == "critical" for each in found) else "warning"


def _after(alert: Alert | None, event: Mapping[str, Any]) -> Alert:
    """Return an alert's state after one more event."""
    kind = event["event"]
    if kind == OPENED:
        fields = {name: event[name] for name in ("id", "level", "confirmed", "host", "device", "suite_id", "base")}
        fields |= {name: event[name] for name in ("head", "subject", "run")}
        return Alert(
            state="open", opened_utc=event["time_utc"], runs=1, cases=tuple(event["cases"]),
            lines=tuple(event["lines"]), sent={}, note="", series=tuple(event.get("series", ())), **fields,
        )  # fmt: skip
    if alert is None:
        raise ValueError(f"{event['id']} was never opened")
    if kind == AGAIN:
        level = "critical" if "critical" in (alert.level, event["level"]) else "warning"
        return alert._replace(
            runs=alert.runs + 1, level=level, confirmed=alert.confirmed or event["confirmed"], head=event["head"],
            lines=tuple(event["lines"]), series=tuple(dict.fromkeys((*alert.series, *event.get("series", ())))),
        )  # fmt: skip
    if kind in (ACKNOWLEDGED, OVER):
        return alert._replace(state=kind, note=event["note"] or alert.note)
    if kind == SENT:
        before = alert.sent.get(event["channel"])
        reference = event["detail"] or (before.reference if before else "")
        last = Sent(event["state"], event["level"], event["time_utc"], reference)
        return alert._replace(sent={**alert.sent, event["channel"]: last})
    if kind == FAILED:
        return alert
    raise ValueError(f"event {kind!r} is unknown")
