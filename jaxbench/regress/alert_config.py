"""Schema of configs/alerts/*.yaml, which say who is told of a regression (S file).

Secrets are only in the environment: a configuration names the variable, and never prints or stores its value.
"""

from __future__ import annotations

import datetime
import os
import re
import zoneinfo
from typing import Annotated, Any, Literal

import pydantic

from jaxbench.config import Base

Level = Literal["warning", "critical"]
HOURS = re.compile(r"([01]\d|2[0-3]):[0-5]\d")  # a time of day; YAML reads one without quotes as a number
Variable = Annotated[str, pydantic.Field(pattern=r"^[A-Z][A-Z0-9_]*$")]


class Channel(Base):
    """Fields that all channels have."""

    name: str = pydantic.Field(pattern=r"^[a-z0-9][a-z0-9_-]*$", max_length=40)
    least: Level = "warning"  # alerts below this level are not sent here
    escalation: bool = False  # send only alerts that nobody acknowledged after `escalate_after` repeats

    def secrets(self) -> list[str]:
        """Return the names of the environment variables that must be set."""
        return [value for name, value in self if name.endswith("_variable") and value]


class Terminal(Channel):
    """Print lines on stderr."""

    kind: Literal["terminal"]


class File(Channel):
    """Append one JSON line per message to a file."""

    kind: Literal["file"]
    path: str = pydantic.Field(min_length=1)


class Webhook(Channel):
    """POST JSON with `text`, as Slack, Mattermost and Discord's /slack expect, and `alert` with all fields."""

    kind: Literal["webhook"]
    url_variable: Variable  # the address is the secret


class Smtp(Channel):
    """Send mail."""

    kind: Literal["smtp"]
    host: str = pydantic.Field(min_length=1)
    port: int = pydantic.Field(default=587, ge=1, le=65535)
    security: Literal["starttls", "tls", "none"] = "starttls"
    sender: str = pydantic.Field(pattern=r"^[^@\s]+@[^@\s]+$")
    recipients: tuple[Annotated[str, pydantic.Field(pattern=r"^[^@\s]+@[^@\s]+$")], ...] = pydantic.Field(min_length=1)
    user_variable: Variable | None = None  # None = no login
    password_variable: Variable | None = None

    @pydantic.model_validator(mode="after")
    def _check(self) -> Smtp:
        if (self.user_variable is None) != (self.password_variable is None):
            raise ValueError(
                f"alerts: channel {self.name}: user_variable={self.user_variable}, password_variable="
                f"{self.password_variable}; wanted both or none"
            )
        if self.user_variable and self.security == "none":
            raise ValueError(f"alerts: channel {self.name}: security={self.security} would send a password in clear")
        return self


class Github(Channel):
    """One issue per alert, commented on repeats and closed when the alert is over; or a check on the commit."""

    kind: Literal["github"]
    repository: str = pydantic.Field(pattern=r"^[\w.-]+/[\w.-]+$")
    mode: Literal["issue", "check"] = "issue"
    labels: tuple[str, ...] = ()
    api_url: str = "https://api.github.com"
    token_variable: Variable = "GITHUB_TOKEN"


class Apprise(Channel):
    """Any service that apprise supports, by its apprise URL (extra `alerts`)."""

    kind: Literal["apprise"]
    url_variable: Variable


AnyChannel = Annotated[
    Terminal | File | Webhook | Smtp | Github | Apprise, pydantic.Field(discriminator="kind")
]  # fmt: skip


class QuietHours(Base):
    """Hours in which warnings wait; critical regressions do not."""

    start: datetime.time
    end: datetime.time  # if before start, on the next day
    timezone: str = "UTC"

    @pydantic.field_validator("start", "end", mode="before")
    @classmethod
    def _check_time(cls, value: Any) -> Any:
        if isinstance(value, datetime.time) or (isinstance(value, str) and HOURS.fullmatch(value)):
            return value
        raise ValueError(f'alerts: quiet_hours has the time {value!r}; wanted "HH:MM" in quotes, without a zone')

    @pydantic.model_validator(mode="after")
    def _check(self) -> QuietHours:
        if self.start == self.end:
            raise ValueError(
                f"alerts: quiet_hours.start={self.start:%H:%M} is quiet_hours.end too; wanted another time"
            )
        try:
            zoneinfo.ZoneInfo(self.timezone)
        except (zoneinfo.ZoneInfoNotFoundError, ValueError, OSError) as error:
            raise ValueError(
                f"alerts: quiet_hours.timezone={self.timezone} is none; wanted one such as Europe/Berlin"
            ) from error
        return self

    def holds(self, now: datetime.datetime) -> bool:
        """True if `now` is within the quiet hours."""
        local = now.astimezone(zoneinfo.ZoneInfo(self.timezone)).time()
        if self.start <= self.end:
            return self.start <= local < self.end
        return local >= self.start or local < self.end


class Alerts(Base):
    """Channels, and when alerts are sent and repeated."""

    channels: tuple[AnyChannel, ...] = pydantic.Field(min_length=1)
    quiet_hours: QuietHours | None = None
    repeat_hours: float = pydantic.Field(default=24.0, gt=0)  # time after which an open alert is repeated
    escalate_after: int = pydantic.Field(default=2, ge=1)  # repeats after which escalation channels are told
    tries: int = pydantic.Field(default=3, ge=1, le=10)  # per message; the pause doubles after each failure
    pause_s: float = pydantic.Field(default=1.0, ge=0, le=60)
    timeout_s: float = pydantic.Field(default=10.0, gt=0, le=300)  # per try

    @pydantic.model_validator(mode="after")
    def _check(self) -> Alerts:
        names = [channel.name for channel in self.channels]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"alerts: channels.name={twice[0]} is there twice; a channel needs a name of its own")
        return self

    def check_secrets(self) -> None:
        """Check that every variable that a channel names is set.

        Raises:
          ValueError: a variable is not set.
        """
        for channel in self.channels:
            for variable in channel.secrets():
                if not os.environ.get(variable, "").strip():
                    raise ValueError(f"alerts: channel {channel.name} wants the variable {variable}, which is not set")
