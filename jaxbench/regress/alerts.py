"""Regressions that somebody should know of: opened, said, acknowledged, over (S file).

Data's way: a run's record -> alerts, one a cause -> events, appended to HISTORY/alerts.jsonl -> what is due -> channels
(channels.py). The events are the truth and are never changed; an alert is what they add up to. What became worse
between the same two commits has one cause until somebody finds out more: a run's regressions are one alert, and a later
run that finds them again beside the same base adds to it. It is over when a run beside that base no longer finds any of
them, or when somebody closes it: a run beside another base proves nothing, for both of its sides may be slow.
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

    state: State  # the alert's when it was sent
    level: Literal["warning", "critical"]
    time_utc: str
    reference: str  # the channel's own, such as an issue's number; "" = it has none


class Alert(NamedTuple):
    """What the events of one alert add up to."""

    id: str
    state: State
    level: Literal["warning", "critical"]
    confirmed: bool  # fresh launches found it again
    opened_utc: str
    host: str
    device: str
    suite_id: str
    base: str  # commits
    head: str
    subject: str  # of head
    run: str  # id of the run that found it
    runs: int  # how many have
    cases: tuple[str, ...]
    lines: tuple[str, ...]  # what became worse, and why
    sent: Mapping[str, Sent]  # by channel
    note: str  # of who acknowledged or closed it

    def key(self) -> tuple[str, ...]:
        """Machine, suite and base that a later run has to have to say anything of it."""
        return (self.host, self.device, self.suite_id, self.base)

    def words(self) -> str:
        """One line."""
        held = ", confirmed by fresh launches" if self.confirmed else ""
        return f"{self.level} performance regression{held}: {', '.join(self.cases)} at {self.head} beside {self.base}"

    def message(self) -> tuple[str, str]:
        """Subject and text, as channels send them."""
        if self.state == "over":
            return f"over: {self.words()}"[:MOST_SUBJECT], f"{self.note or 'closed'}\n"
        again = f", found by {self.runs} runs" if self.runs > 1 else ""
        lines = [f"Alert {self.id}, open since {self.opened_utc}{again}.", f"Head {self.head}: {self.subject}", ""]
        lines += [f"- {line}" for line in self.lines[:MOST_LINES]]
        if self.run:
            lines += ["", f"Acknowledge: python experiments/benchmarks.py alerts acknowledge --alert={self.id}"]
        return self.words()[:MOST_SUBJECT], "\n".join(lines) + "\n"


class Book:
    """The alerts of a history."""

    def __init__(self, folder: Path):
        """Args: folder: of the history."""
        self.path = folder / EVENTS

    def alerts(self) -> list[Alert]:
        """All of them, oldest first.

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
        """An alert by its id or the beginning of it.

        Raises:
          ValueError: there is none, or there are several.
        """
        all_ = self.alerts()
        found = [each for each in all_ if each.id.startswith(id)]
        if len(found) != 1 or not id:
            known = ", ".join(each.id for each in all_[-5:]) or "none: there is no alert"
            raise ValueError(f"alerts: {id!r} names {len(found)}; wanted one of {known}")
        return found[0]

    def note(self, record: Mapping[str, Any], run: str, *, now: datetime.datetime) -> list[Alert]:
        """Take in a run: open what is new, add to what is found again, end what is no longer found; what changed.

        A run that is taken in again changes nothing.
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
        self.find(id)  # nothing is written where there is none
        with store.locked(self.path):
            alert = self.find(id)
            if alert.state == "over":
                raise ValueError(f"alerts: {alert.id} is over; there is nothing to do")
            self._append([{"event": state, "id": alert.id, "note": note}], now)
        return self.find(alert.id)

    def send(
        self, config: Alerts, deliver: Callable[[AnyChannel, Alert, str], tuple[bool, str]], *, now: datetime.datetime
    ) -> list[tuple[str, str, bool, str]]:
        """Say what is due to every channel; (alert, channel, whether it went, reference or reason), none raised.

        Args:
          deliver: sends one alert to one channel, with the channel's reference of an earlier message ("" = none).
        """
        said = []
        if not self.path.exists():
            return said
        with store.locked(self.path):  # so that no other process says the same
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
    """True where a channel has to hear of an alert now."""
    last = alert.sent.get(channel.name)
    if alert.state == "over":
        return last is not None and last.state != "over"  # who heard of it hears that it is over
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
    """Whole pauses between repeats since an alert was opened, which nobody acknowledged."""
    if alert.state != "open":
        return 0
    hours = (now - datetime.datetime.fromisoformat(alert.opened_utc)).total_seconds() / 3600
    return int(hours // config.repeat_hours)


def _events_of(record: Mapping[str, Any], run: str, alerts: Sequence[Alert]) -> Iterable[dict[str, Any]]:
    """Events that a run causes."""
    sides = record["sides"]
    if "base" not in sides or not record["findings"]:
        return
    worse: dict[str, list[Any]] = {}
    for each in report.findings_of(record):
        if each.verdict == "regression":
            worse.setdefault(each.series.partition(".")[0], []).append(each)
    key = (record["host"], record["device"], record.get("suite_id", ""), sides["base"]["commit"])
    mine = [alert for alert in alerts if alert.state != "over" and alert.key() == key]
    for alert in mine:
        held = [name for name in alert.cases if name in worse]
        if held:
            yield _described(AGAIN, alert.id, record, run, {name: worse[name] for name in held})
        else:
            yield {"event": OVER, "id": alert.id, "run": run, "note": f"run {run} no longer finds it"}
    known = {name for alert in mine for name in alert.cases}
    if new := {name: each for name, each in worse.items() if name not in known}:
        id = hashlib.sha256(repr((key, run)).encode()).hexdigest()[:8]
        yield _described(OPENED, id, record, run, new)


def _described(event: str, id: str, record: Mapping[str, Any], run: str, worse: Mapping[str, list]) -> dict[str, Any]:
    """An event with everything that a message says."""
    found = [each for several in worse.values() for each in several]
    sides = record["sides"]
    confirmed = any(record.get("confirmed", {}).get(each.series) for each in found)
    lines = [f"{each.series}: {report.verdict(each)}, {report.interval(each)}" for each in found]
    lines += [line for line in report.explanation(record) if line.partition(":")[0] in (*worse, "packages")]
    return {
        "event": event, "id": id, "run": run, "level": _level(found), "confirmed": confirmed, "host": record["host"],
        "device": record["device"], "suite_id": record.get("suite_id", ""), "base": sides["base"]["commit"],
        "head": sides["head"]["commit"], "subject": sides["head"].get("subject", ""), "cases": list(worse),
        "lines": lines,
    }  # fmt: skip


def _level(found: Sequence[Any]) -> str:
    return "critical" if any(each.level == "critical" for each in found) else "warning"


def _after(alert: Alert | None, event: Mapping[str, Any]) -> Alert:
    """An alert after one more event."""
    kind = event["event"]
    if kind == OPENED:
        fields = {name: event[name] for name in ("id", "level", "confirmed", "host", "device", "suite_id", "base")}
        fields |= {name: event[name] for name in ("head", "subject", "run")}
        return Alert(
            state="open", opened_utc=event["time_utc"], runs=1, cases=tuple(event["cases"]),
            lines=tuple(event["lines"]), sent={}, note="", **fields,
        )  # fmt: skip
    if alert is None:
        raise ValueError(f"{event['id']} was never opened")
    if kind == AGAIN:
        level = "critical" if "critical" in (alert.level, event["level"]) else "warning"
        return alert._replace(
            runs=alert.runs + 1, level=level, confirmed=alert.confirmed or event["confirmed"], head=event["head"],
            lines=tuple(event["lines"]),
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
