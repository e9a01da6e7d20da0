"""Send one message of an alert to one channel: failures are retried and reported, never raised (S file).

A service's answer is not trusted: at most 64 KB of it are read, and a reason that is stored never contains a secret.
"""

from __future__ import annotations

import contextlib
import email.message
import importlib
import json
import os
import queue
import re
import smtplib
import ssl
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from jaxbench import store
from jaxbench.regress import trees
from jaxbench.regress.alert_config import Alerts, AnyChannel, Apprise, File, Github, Smtp, Terminal, Webhook

MOST_BYTES = 2**16
MOST_REASON = 300  # characters
TRANSIENT = {408, 425, 429, 500, 502, 503, 504}  # HTTP statuses after which a retry may succeed


class Told(Protocol):
    """What a message is about: an alert of the benchmarks, an incident of a server."""

    id: str
    state: str  # open, acknowledged or over
    level: str  # warning or critical

    def message(self) -> tuple[str, str]:
        """Return subject and text."""

    def _asdict(self) -> dict[str, Any]:
        """Return all fields."""


class Refused(Exception):
    """The service rejects the message permanently."""


def deliver(
    channel: AnyChannel, alert: Told, reference: str, config: Alerts, *, sleep: Callable[[float], Any] = time.sleep
) -> tuple[bool, str]:
    """Send an alert; return (True, the channel's reference of the message) or (False, the reason).

    Args:
      reference: of an earlier message of this alert on this channel; "" = none.
    """
    if isinstance(channel, Apprise):
        with contextlib.suppress(ImportError):  # `_apprise` says so
            # Seconds that are not the service's: a try that ran out of time in them would still send, beside the next
            importlib.import_module("apprise")
    for turn in range(config.tries):
        try:
            return True, _within(
                config.timeout_s, lambda: SENDERS[type(channel)](channel, alert, reference, config.timeout_s)
            )
        except Refused as error:
            return False, _without_secrets(channel, str(error))
        except Exception as error:  # a service's answer may break anything: the run continues
            reason = f"{type(error).__name__}: {error}"
        if turn + 1 < config.tries:
            sleep(config.pause_s * 2**turn)
    return False, _without_secrets(channel, f"{config.tries} tries; {reason}")


def _within(seconds: float, call: Callable[[], str]) -> str:
    """Run a call with a total time limit; a library's own limit is per read, so a slow-dripping service never ends.

    Raises:
      OSError: it takes longer; its thread is abandoned, and ends with the process.
    """
    done: queue.SimpleQueue[tuple[str, Exception | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            done.put((call(), None))
        except Exception as error:  # noqa: BLE001 - raised again by the caller
            done.put(("", error))

    threading.Thread(target=run, daemon=True).start()
    try:
        answer, error = done.get(timeout=seconds)
    except queue.Empty:
        raise OSError(f"no answer within {seconds:g} s") from None
    if error is not None:
        raise error
    return answer


def _terminal(channel: Terminal, alert: Told, reference: str, timeout_s: float) -> str:
    subject, text = alert.message()
    print(f"{subject}\n{text}", file=sys.stderr)
    return ""


def _file(channel: File, alert: Told, reference: str, timeout_s: float) -> str:
    subject, text = alert.message()
    path = Path(channel.path)
    path.parent.mkdir(parents=True, exist_ok=True)
    store.append(
        path, [{"alert": alert.id, "state": alert.state, "level": alert.level, "subject": subject, "text": text}]
    )
    return ""


def _webhook(channel: Webhook, alert: Told, reference: str, timeout_s: float) -> str:
    subject, text = alert.message()
    about = {name: value for name, value in alert._asdict().items() if name != "sent"}
    _request("POST", os.environ[channel.url_variable], {"text": f"{subject}\n{text}", "alert": about}, {}, timeout_s)
    return ""


def _smtp(channel: Smtp, alert: Told, reference: str, timeout_s: float) -> str:
    subject, text = alert.message()
    mail = email.message.EmailMessage()
    mail["Subject"], mail["From"], mail["To"] = " ".join(subject.split()), channel.sender, ", ".join(channel.recipients)
    mail.set_content(text)
    context = ssl.create_default_context()
    if channel.security == "tls":
        client = smtplib.SMTP_SSL(channel.host, channel.port, timeout=timeout_s, context=context)
    else:
        client = smtplib.SMTP(channel.host, channel.port, timeout=timeout_s)
    with client:
        if channel.security == "starttls":
            client.starttls(context=context)
        try:
            if channel.user_variable:
                client.login(os.environ[channel.user_variable], os.environ[channel.password_variable])
            refused = client.send_message(mail)
        except (smtplib.SMTPAuthenticationError, smtplib.SMTPRecipientsRefused) as error:
            raise Refused(f"{type(error).__name__}: {error}") from error
    if refused:
        raise Refused(f"refused for {', '.join(refused)}, the others were sent it: {refused}")
    return ""


def _github(channel: Github, alert: Told, reference: str, timeout_s: float) -> str:
    subject, text = alert.message()
    headers = {
        "Authorization": f"Bearer {os.environ[channel.token_variable]}", "Accept": "application/vnd.github+json",
        "X-GitHub-Api-Version": "2022-11-28",
    }  # fmt: skip
    api = f"{channel.api_url.rstrip('/')}/repos/{channel.repository}"
    if channel.mode == "check":
        passed = alert.state == "over" or alert.level == "warning"
        body = {
            "name": "performance", "head_sha": _full_sha(getattr(alert, "head", "")), "status": "completed",
            "conclusion": "neutral" if passed else "failure", "output": {"title": subject, "summary": text},
        }  # fmt: skip
        return str(_request("POST", f"{api}/check-runs", body, headers, timeout_s).get("id", ""))
    if not reference:
        body = {"title": subject, "body": text, "labels": list(channel.labels)}
        number = _request("POST", f"{api}/issues", body, headers, timeout_s).get("number")
        if not isinstance(number, int):
            raise ValueError(f"answer without an issue's number, got {number!r}")
        return str(number)
    if alert.state == "over":  # close first: after a failure it is retried, which would post a comment twice
        _request("PATCH", f"{api}/issues/{reference}", {"state": "closed"}, headers, timeout_s)
    _request("POST", f"{api}/issues/{reference}/comments", {"body": f"{subject}\n\n{text}"}, headers, timeout_s)
    return reference


def _full_sha(commit: str) -> str:
    """Return all 40 digits of a commit, as the checks API requires; unchanged if git does not know it."""
    commit = commit.partition("+")[0]
    with contextlib.suppress(ValueError):
        return trees.resolved(commit)
    return commit


def _apprise(channel: Apprise, alert: Told, reference: str, timeout_s: float) -> str:
    try:
        import apprise
    except ImportError as error:
        raise Refused(f"apprise is not installed ({error}): pip install -e '.[alerts]'") from error
    subject, text = alert.message()
    service = apprise.Apprise()
    if not service.add(os.environ[channel.url_variable]):
        raise Refused(f"{channel.url_variable} is no address that apprise knows")
    if not service.notify(title=subject, body=text):
        raise OSError(f"apprise could not send to channel {channel.name}")
    return ""


SENDERS: Mapping[type, Callable[[Any, Told, str, float], str]] = {
    Terminal: _terminal, File: _file, Webhook: _webhook, Smtp: _smtp, Github: _github, Apprise: _apprise,
}  # fmt: skip


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Refuse redirects: they would carry the token, and the alert, to another host."""

    def redirect_request(self, *_: Any) -> None:
        return None


def _request(
    method: str, url: str, body: Mapping[str, Any], headers: Mapping[str, str], timeout_s: float
) -> dict[str, Any]:
    """Send JSON to a URL; return the JSON object of the answer, {} if the answer is anything else.

    Raises:
      Refused: the HTTP status is permanent, or the URL is neither http nor https.
      OSError: the service cannot be reached, or the HTTP status is transient.
    """
    try:
        scheme = urlsplit(url).scheme
    except ValueError as error:
        raise Refused(f"the address is no URL ({error}); wanted http or https") from error
    if scheme not in ("http", "https"):
        raise Refused(f"scheme {scheme!r} of the address; wanted http or https")
    data = json.dumps(body, ensure_ascii=False).encode()
    sent = urllib.request.Request(
        url, data=data, method=method, headers={"Content-Type": "application/json", "User-Agent": "jaxbench", **headers}
    )
    try:
        with urllib.request.build_opener(_NoRedirect).open(sent, timeout=timeout_s) as answer:
            content = answer.read(MOST_BYTES)
    except urllib.error.HTTPError as error:
        with error:
            said = error.read(MOST_BYTES).decode(errors="replace")
        if error.code in TRANSIENT:
            raise OSError(f"HTTP {error.code} {said}") from None
        raise Refused(f"HTTP {error.code} {said}") from None
    try:
        found = json.loads(content)
    except (ValueError, RecursionError):  # the message was delivered, whatever the answer says
        return {}
    return found if isinstance(found, dict) else {}


def _without_secrets(channel: AnyChannel, text: str) -> str:
    """Return the beginning of a reason in one line, with every secret of the channel removed before it is cut."""
    for variable in channel.secrets():
        secret = os.environ.get(variable, "").strip()
        try:
            url = urlsplit(secret)
            parts = {secret, url.netloc, *url.path.split("/"), *url.query.split("&")}
        except ValueError:  # no URL
            parts = {secret, *re.split(r"[/?&]", secret)}
        for part in sorted(parts, key=len, reverse=True):  # an answer may quote any part of a URL
            if len(part) > 3:
                text = text.replace(part, f"${variable}")
    # Cut first: an answer of spaces must not bring what stands where its reading ended.
    return " ".join(text[:MOST_REASON].split())
