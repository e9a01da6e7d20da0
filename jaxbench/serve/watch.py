"""Alert rules over what a server measured in the last minutes, and delivery of their incidents (S file).

Data flow: observations -> the figures of a window -> rules, judged every second -> an incident, open until its rule
holds again -> channels of configs/alerts. A figure with fewer observations than a rule wants is not judged: an idle
server is neither slow nor healthy. If nothing at all was observed for a window, an open incident is over.
"""

from __future__ import annotations

import collections
import datetime
import secrets
from typing import Any, Literal, NamedTuple

import numpy as np
import pydantic

from jaxbench.config import Base
from jaxbench.measure.records import now_utc

TIMES = ("first_token_s", "between_tokens_s", "answer_s", "detect_s")  # judged by a quantile
FIGURES = (*TIMES, "error_share", "tokens_per_s", "texts_per_s", "waiting", "memory_mib")
RATES = ("tokens_per_s", "texts_per_s")
MOST_OBSERVATIONS = 100_000  # per figure; the oldest are dropped


class Rule(Base):
    """A bound on one figure over a sliding window."""

    name: str = pydantic.Field(pattern=r"^[a-z0-9][a-z0-9_-]*$", max_length=60)
    # seconds: first_token, between_tokens, answer, detect; share of responses that are errors of the server; generated
    # tokens a second while answers are in progress; texts a second that are checked; requests that wait; resident MiB
    # of the server's process and the engine's
    figure: Literal[FIGURES]
    quantile: float | None = pydantic.Field(default=None, gt=0, lt=1)  # of seconds; None = 0.95
    most: float | None = None  # either this or least
    least: float | None = None
    window_s: float = pydantic.Field(default=60.0, ge=1, le=3600)
    least_count: int = pydantic.Field(default=20, ge=1)  # observations of the window; of rates: seconds of work
    level: Literal["warning", "critical"] = "warning"

    @pydantic.model_validator(mode="after")
    def _check(self) -> Rule:
        if (self.most is None) == (self.least is None):
            raise ValueError(f"rule {self.name}: most={self.most}, least={self.least}; wanted one of the two")
        if self.quantile is not None and self.figure not in TIMES:
            raise ValueError(f"rule {self.name}: quantile={self.quantile} is for {', '.join(TIMES)} alone")
        return self

    @property
    def words(self) -> str:
        """The bound in words."""
        part = f" p{100 * (self.quantile or 0.95):g}" if self.figure in TIMES else ""
        bound = f"at most {self.most:g}" if self.least is None else f"at least {self.least:g}"
        return f"{self.figure}{part} {bound} over {self.window_s:g} s"


class WatchConfig(Base):
    """Alert rules of a server."""

    rules: tuple[Rule, ...] = ()
    send: str | None = None  # where to: a file of channels, or its name in configs/alerts; None = only the log
    every_s: float = pydantic.Field(default=1.0, gt=0, le=60)

    @pydantic.model_validator(mode="after")
    def _check(self) -> WatchConfig:
        names = [rule.name for rule in self.rules]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"rules: {twice[0]} is there {names.count(twice[0])} times; a rule needs its own name")
        if self.send is not None and not self.rules:
            raise ValueError(f"send={self.send} has nothing to send without rules")
        return self


class _Seen(NamedTuple):
    """One observation, or for a rate those of a second."""

    moment: float
    value: float  # of several: their sum
    count: int


class Incident(NamedTuple):
    """A rule that is or was broken; has the fields that channels need of an alert."""

    id: str
    state: Literal["open", "over"]
    level: Literal["warning", "critical"]
    rule: str
    wanted: str  # in words
    value: float  # of the figure
    count: int  # of observations
    opened_utc: str

    def message(self) -> tuple[str, str]:
        """Subject and text, as channels send them."""
        found = f"{self.value:.4g} of {self.count} observations"
        subject = f"{self.level}: server rule {self.rule} is broken: {found}; wanted {self.wanted}"
        text = f"Incident {self.id}, open since {self.opened_utc}."
        return (subject, f"{text}\n") if self.state == "open" else (f"over: {subject}", f"{text} It holds again.\n")


class Watch:
    """Recent observations, and the rules over them. Used by one thread."""

    def __init__(self, rules: tuple[Rule, ...]):
        """Args: rules: of the configuration."""
        self._rules, self._open = rules, dict[str, Incident]()
        self._holds_since: dict[str, float] = {}  # of a rule with an open incident that holds at the moment
        self._longest = max((rule.window_s for rule in rules), default=0.0)
        used = {rule.figure for rule in rules}
        self._seen = {name: collections.deque[_Seen](maxlen=MOST_OBSERVATIONS) for name in used}
        self._busy = collections.deque[_Seen](maxlen=MOST_OBSERVATIONS)

    def observe(self, figure: str, value: float, now: float) -> None:
        """Record an observation; now: from time.monotonic. Those of a rate within a second become one entry."""
        if (held := self._seen.get(figure)) is None:
            return
        if figure in RATES and held and now - held[-1].moment < 1.0:
            last = held.pop()
            held.append(_Seen(last.moment, last.value + value, last.count + 1))
        else:
            held.append(_Seen(now, value, 1))

    def worked(self, seconds: float, now: float) -> None:
        """Record that answers were in progress for `seconds` before now."""
        if "tokens_per_s" in self._seen:
            self._busy.append(_Seen(now, seconds, 1))

    @property
    def is_broken(self) -> dict[str, bool]:
        """Whether each rule is broken, by name."""
        return {rule.name: rule.name in self._open for rule in self._rules}

    def judge(self, now: float) -> list[Incident]:
        """Return incidents that opened since the last call, and those over: held, or nothing seen, for a window."""
        for held in (*self._seen.values(), self._busy):
            while held and held[0].moment < now - self._longest - 1.0:
                held.popleft()
        changed = []
        for rule in self._rules:
            value, count = self._figure(rule, now)
            if value is None and count:  # too few: an incident that is open stays so
                continue
            if value is not None and (value > rule.most if rule.least is None else value < rule.least):
                self._holds_since.pop(rule.name, None)
                if rule.name not in self._open:
                    self._open[rule.name] = _incident(rule, value, count)
                    changed.append(self._open[rule.name])
            elif rule.name in self._open:
                since = self._holds_since.setdefault(rule.name, now)
                if not count or now - since >= rule.window_s:  # nothing was seen for a window, or it held for one
                    del self._holds_since[rule.name]
                    changed.append(self._open.pop(rule.name)._replace(state="over"))
        return changed

    def _figure(self, rule: Rule, now: float) -> tuple[float | None, int]:
        """Return the value of a rule's figure in its window, None if too little was seen, and the observation count."""
        since = now - rule.window_s
        seen = [each for each in self._seen[rule.figure] if each.moment >= since]
        count, total = sum(each.count for each in seen), sum(each.value for each in seen)
        if rule.figure == "tokens_per_s":
            busy = sum(each.value for each in self._busy if each.moment >= since)
            return (total / busy if busy >= min(rule.least_count, rule.window_s / 2) else None), count
        if count < rule.least_count:
            return None, count
        if rule.figure in TIMES:
            return float(np.quantile([each.value for each in seen], rule.quantile or 0.95)), count
        if rule.figure == "texts_per_s":  # over the time since the first text: earlier time is no part of the rate
            span = now - seen[0].moment
            return (total / span if span >= rule.window_s / 2 else None), count
        return total / count, count


def _incident(rule: Rule, value: float, count: int) -> Incident:
    return Incident(secrets.token_hex(4), "open", rule.level, rule.name, rule.words, value, count, now_utc())


def channels_of(name: str) -> Any:
    """Read channels from a file, or by a name in configs/alerts, with their secrets filled in.

    Raises:
      ValueError: the file cannot be read, a variable that it names is not set, or a channel checks commits.
    """
    from jaxbench.regress.alert_commands import named

    found = named(name, "alerts.send")
    odd = [each.name for each in found.channels if getattr(each, "mode", None) == "check"]
    if odd:
        raise ValueError(f"send={name}: channel {odd[0]} checks commits, and a server has none; use mode: issue")
    return found


class Messenger:
    """Sends incidents to channels: once when an incident opens, and to those that got it, once when it is over.

    It blocks: call it in its own thread, one incident after another.
    """

    def __init__(self, name: str):
        """Args: name: see `channels_of`."""
        self._config, self._references = channels_of(name), dict[tuple[str, str], str]()

    def send(self, incident: Incident) -> list[str]:
        """Send it; return channels that failed, with the reason. A warning that opens in quiet hours is only logged."""
        from jaxbench.regress import channels

        failed = []
        for channel in self._config.channels:
            key = (incident.id, channel.name)
            if not (key in self._references if incident.state == "over" else self._hears(channel, incident)):
                continue
            went, said = channels.deliver(channel, incident, self._references.pop(key, ""), self._config)
            if not went:
                failed.append(f"{channel.name}: {said}")
            elif incident.state == "open":
                self._references[key] = said
        return failed

    def _hears(self, channel: Any, incident: Incident) -> bool:
        """Return whether a channel gets an incident that opens."""
        if channel.escalation:
            return False
        quiet, is_warning = self._config.quiet_hours, incident.level == "warning"
        is_quiet = quiet is not None and quiet.holds(datetime.datetime.now(datetime.UTC))
        return not (is_warning and (channel.least == "critical" or is_quiet))
