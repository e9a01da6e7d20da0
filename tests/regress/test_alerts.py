"""Alerts: one a cause, said once, again while nobody acknowledges it, over when a run beside the same base says so."""

import datetime
import json
import types

import pydantic
import pytest

from jaxbench.regress import alert_commands
from jaxbench.regress.alert_config import Alerts
from jaxbench.regress.alerts import Book
from jaxbench.regress.judge import Finding

NOON = datetime.datetime(2026, 11, 26, 12, 0, tzinfo=datetime.UTC)
LOG = {"name": "log", "kind": "file", "path": "alerts.jsonl"}
SERIES = ("decode.tokens_per_s", "decode.token_p50_s", "train.step.flops", "words.tokens_per_s", "bits.bits_per_byte")


def record(*worse, base="aaaa", head="bbbb", level="warning", confirmed=(), **more):
    findings = [Finding(name, "regression", level, 0.3, 0.2, 0.4, 1.0, 1.3, 3, 0)._asdict() for name in worse]
    rest = [name for name in SERIES if name not in worse]
    findings += [Finding(name, "no change", "", 0.0, 0.0, 0.0, 1.0, 1.0, 3, 0)._asdict() for name in rest]
    sides = {"head": {"commit": head, "subject": "Faster"}, "base": {"commit": base, "subject": "Before"}}
    return {
        "host": "h", "device": "cpu", "suite_id": "s", "sides": sides, "findings": findings,
        "confirmed": dict.fromkeys(confirmed, True), **more,
    }  # fmt: skip


@pytest.fixture
def book(tmp_path):
    return Book(tmp_path)


def config(*channels, **settings):
    return Alerts(channels=channels or (LOG,), **settings)


class Post:
    """Takes messages; what it is told to lose fails."""

    def __init__(self):
        self.taken, self.lost = [], set()

    def __call__(self, channel, alert, reference):
        if channel.name in self.lost:
            return False, "nobody there"
        self.taken.append((channel.name, alert.state, reference))
        return True, str(len(self.taken))


def hours(count):
    return NOON + datetime.timedelta(hours=count)


def test_the_regressions_of_a_run_are_one_alert_and_a_run_taken_in_again_changes_nothing(book):
    [alert] = book.note(record("decode.tokens_per_s", "decode.token_p50_s", "train.step.flops"), "r1", now=NOON)
    assert alert.cases == ("decode", "train") and alert.state == "open" and alert.head == "bbbb"
    assert alert.lines[0] == "decode.tokens_per_s: regression, warning, +30.0 [+20.0, +40.0] %"
    assert book.note(record("decode.tokens_per_s"), "r1", now=NOON) == [] and book.alerts() == [alert]
    assert book.note(record(), "r0", now=NOON)[0].state == "over"  # beside the same base none of them


def test_a_later_run_adds_to_an_alert_of_its_base_and_opens_one_for_what_is_new(book):
    first = record("decode.tokens_per_s")
    [opened] = book.note(first, "r1", now=NOON)
    later = record("decode.tokens_per_s", "words.tokens_per_s", head="cccc", level="critical",
                   confirmed=["decode.tokens_per_s"])  # fmt: skip
    again, new = book.note(later, "r2", now=hours(1))
    assert again.id == opened.id and (again.runs, again.level, again.head, again.confirmed) == (
        2,
        "critical",
        "cccc",
        True,
    )
    assert new.cases == ("words",) and not new.confirmed
    assert {each.state for each in book.alerts()} == {"open"}
    assert book.note(record(base="bbbb"), "r3", now=hours(2)) == []  # another base: both of its sides may be slow
    assert [each.state for each in book.note(record(), "r4", now=hours(3))] == ["over", "over"]
    [third] = book.note(first, "r5", now=hours(4))
    assert third.state == "open" and third.id not in (opened.id, new.id)


def test_a_run_that_leaves_a_series_undecided_or_unmeasured_ends_no_alert_of_it(book):
    book.note(record("decode.tokens_per_s"), "r1", now=NOON)
    fine = record()["findings"]
    others = [each for each in fine if each["series"] != "decode.tokens_per_s"]
    [rate] = [each for each in fine if each not in others]
    for run, findings in (("r2", [rate | {"verdict": "undecided"}, *others]), ("r3", others)):
        assert book.note(record() | {"findings": findings}, run, now=hours(1)) == []
        assert book.alerts()[0].state == "open"
    book.note(record("decode.token_p50_s"), "r4", now=hours(2))  # the same cause
    later = [rate, *(each for each in others if each["series"] != "decode.token_p50_s")]
    assert book.note(record() | {"findings": later}, "r5", now=hours(3)) == []
    better = [rate | {"verdict": "improvement"}, *others]
    assert book.note(record() | {"findings": better}, "r6", now=hours(4))[0].state == "over"


def test_an_alert_of_a_version_that_named_no_series_ends_with_a_run_without_its_regressions(book):
    book.note(record("decode.tokens_per_s"), "r1", now=NOON)
    [event] = [json.loads(line) for line in book.path.read_text().splitlines()]
    del event["series"]
    book.path.write_text(json.dumps(event) + "\n")
    assert book.note(record() | {"findings": record()["findings"][-1:]}, "r2", now=hours(1))[0].state == "over"


def test_a_run_without_a_base_says_nothing(book):
    alone = record()
    del alone["sides"]["base"]
    assert book.note(alone, "r1", now=NOON) == [] and not book.path.exists()


def test_an_alert_is_said_once_and_again_until_it_is_acknowledged_and_when_it_is_over(book):
    [alert] = book.note(record("decode.tokens_per_s"), "r1", now=NOON)
    post, settings = Post(), config(repeat_hours=24)
    for after in (0, 1, 23):
        book.send(settings, post, now=hours(after))
    assert post.taken == [("log", "open", "")]
    book.send(settings, post, now=hours(24))
    assert post.taken[1:] == [("log", "open", "1")]  # the channel's reference of its first message
    assert book.settle(alert.id[:4], "acknowledged", note="mine", now=hours(25)).note == "mine"
    book.send(settings, post, now=hours(100))
    assert len(post.taken) == 2
    book.note(record(), "r2", now=hours(101))
    for _ in range(2):
        book.send(settings, post, now=hours(102))
    assert post.taken[2:] == [("log", "over", "2")]
    with pytest.raises(ValueError, match=f"alerts: {alert.id} is over"):
        book.settle(alert.id, "over", note="", now=hours(103))


def test_a_channel_that_fails_is_tried_again_and_the_others_are_not_told_twice(book):
    book.note(record("decode.tokens_per_s"), "r1", now=NOON)
    post, settings = Post(), config(LOG, LOG | {"name": "other"})
    post.lost = {"log"}
    said = book.send(settings, post, now=NOON)
    assert [(channel, went, detail) for _, channel, went, detail in said] == [
        ("log", False, "nobody there"), ("other", True, "1")
    ]  # fmt: skip
    post.lost = set()
    assert [each[1] for each in book.send(settings, post, now=hours(1))] == ["log"]
    assert [name for name, _, _ in post.taken] == ["other", "log"]


def test_a_warning_waits_for_the_end_of_quiet_hours_and_a_critical_one_does_not(book):
    quiet = {"start": "22:00", "end": "07:00", "timezone": "Europe/Berlin"}  # an hour ahead of UTC in November
    settings, post = config(quiet_hours=quiet), Post()
    book.note(record("decode.tokens_per_s"), "r1", now=NOON)
    night = datetime.datetime(2026, 11, 26, 21, 0, tzinfo=datetime.UTC)
    assert book.send(settings, post, now=night) == []
    book.note(record("train.step.flops", base="cccc", level="critical"), "r2", now=night)
    assert [each[1] for each in book.send(settings, post, now=night)] == ["log"]
    assert book.send(settings, post, now=night.replace(hour=20)) != []  # 21:00 in Berlin


def test_what_became_critical_is_said_again_and_a_channel_for_critical_ones_hears_nothing_else(book):
    settings = config(LOG, LOG | {"name": "pager", "least": "critical"})
    post = Post()
    book.note(record("decode.tokens_per_s"), "r1", now=NOON)
    book.send(settings, post, now=NOON)
    assert post.taken == [("log", "open", "")]
    book.note(record("decode.tokens_per_s", level="critical"), "r2", now=hours(1))
    book.send(settings, post, now=hours(1))
    assert [name for name, _, _ in post.taken] == ["log", "log", "pager"]


def test_a_channel_of_escalation_hears_of_what_nobody_acknowledged(book):
    settings = config(LOG | {"name": "boss", "escalation": True}, repeat_hours=24, escalate_after=2)
    post = Post()
    [alert] = book.note(record("decode.tokens_per_s"), "r1", now=NOON)
    for after in (0, 24, 47):
        assert book.send(settings, post, now=hours(after)) == []
    assert len(book.send(settings, post, now=hours(48))) == 1
    other = book.note(record("words.tokens_per_s", base="cccc"), "r2", now=NOON)[0]
    book.settle(other.id, "acknowledged", note="", now=hours(1))
    assert alert.id != other.id and book.send(settings, post, now=hours(60)) == []


def test_a_file_of_events_that_was_cut_short_is_read_and_one_with_another_line_is_named(book):
    [alert] = book.note(record("decode.tokens_per_s"), "r1", now=NOON)
    with open(book.path, "a", encoding="utf-8") as file:
        file.write('{"event": "ov')
    assert book.alerts() == [alert]
    book.settle(alert.id, "over", note="", now=NOON)
    assert book.alerts()[0].state == "over" and len(book.path.read_text().splitlines()) == 2
    for line in ("{}", '{"id": "x", "event": "sent"}', '{"id": "' + alert.id + '", "event": "flew"}', "[1]"):
        kept = book.path.read_text()
        book.path.write_text(kept + line + "\n")
        with pytest.raises(ValueError, match=r"alerts.jsonl line 3 is no event"):
            book.alerts()
        book.path.write_text(kept)
    for name in ("", "zz"):
        with pytest.raises(ValueError, match=f"'{name}' names"):
            book.find(name)


def test_a_configuration_that_contradicts_itself_is_refused(monkeypatch):
    smtp = {"name": "mail", "kind": "smtp", "host": "h", "sender": "a@b", "recipients": ["c@d"]}
    for channels, words in [
        ([], "at least 1"),
        ([LOG, LOG], "channels.name=log is there twice"),
        ([smtp | {"user_variable": "USER"}], "wanted both or none"),
        ([smtp | {"user_variable": "U", "password_variable": "P", "security": "none"}], "password in clear"),
        ([smtp | {"sender": "nobody"}], "sender"),
        ([{"name": "x", "kind": "webhook", "url_variable": "https://secret"}], "url_variable"),
        ([{"name": "x", "kind": "pigeon"}], "pigeon"),
    ]:
        with pytest.raises(pydantic.ValidationError, match=words):
            Alerts(channels=channels)
    with pytest.raises(pydantic.ValidationError, match="timezone=Mars/Olympus"):
        config(quiet_hours={"start": "22:00", "end": "07:00", "timezone": "Mars/Olympus"})
    for start, end, words in [
        (1320, "07:00", 'has the time 1320; wanted "HH:MM" in quotes'),  # as YAML reads 22:00 without quotes
        ("22:00", "07:00Z", "has the time '07:00Z'"),
        ("22:00", "22:00", "start=22:00 is quiet_hours.end too"),
    ]:
        with pytest.raises(pydantic.ValidationError, match=words):
            config(quiet_hours={"start": start, "end": end})
    monkeypatch.delenv("JAXBENCH_TEST_HOOK", raising=False)
    hook = config({"name": "chat", "kind": "webhook", "url_variable": "JAXBENCH_TEST_HOOK"})
    with pytest.raises(ValueError, match="chat wants the variable JAXBENCH_TEST_HOOK, which is not set"):
        hook.check_secrets()
    monkeypatch.setenv("JAXBENCH_TEST_HOOK", "http://x")
    hook.check_secrets()


def test_a_name_of_the_repositorys_channels_is_found_from_any_folder(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(alert_commands, "VALUES", types.SimpleNamespace(alerts="local"))
    assert [each.name for each in alert_commands.config().channels] == ["terminal", "log"]
    (tmp_path / "configs" / "alerts").mkdir(parents=True)
    (tmp_path / "configs" / "alerts" / "local.yaml").write_text("channels: [{name: mine, kind: terminal}]")
    assert [each.name for each in alert_commands.config().channels] == ["mine"]
    monkeypatch.setattr(alert_commands, "VALUES", types.SimpleNamespace(alerts="none"))
    with pytest.raises(ValueError, match="--alerts=none: .*none.yaml is no file; wanted one of local, team, or a YAML"):
        alert_commands.config()
