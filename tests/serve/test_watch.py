"""Rules over a server's last minutes: what breaks them, what is over, what is not judged; and who hears of it."""

from __future__ import annotations

import json

import pytest

from jaxbench.serve import watch
from jaxbench.serve.watch import Incident, Rule, Watch, WatchConfig


def watched(**fields) -> Watch:
    return Watch((Rule(name="r", **{"least_count": 4, "window_s": 10} | fields),))


def states(found: list[Incident]) -> list[str]:
    return [each.state for each in found]


def test_a_rule_breaks_once_stays_broken_and_is_over_once():
    held = watched(figure="first_token_s", quantile=0.5, most=1.0)
    for moment in range(4):
        held.observe("first_token_s", 2.0, moment)
    (opened,) = held.judge(4)
    assert (opened.state, opened.value, opened.count, opened.level) == ("open", 2.0, 4, "warning")
    assert held.judge(5) == [] and held.is_broken == {"r": True}
    for moment in range(5, 12):
        held.observe("first_token_s", 0.1, moment)
    (over,) = held.judge(12)
    assert over == opened._replace(state="over") and held.is_broken == {"r": False} and held.judge(13) == []


def test_too_few_observations_are_not_judged_and_end_no_incident():
    held = watched(figure="answer_s", most=1.0)
    for moment in range(3):
        held.observe("answer_s", 5.0, moment)
    assert held.judge(3) == []
    held.observe("answer_s", 5.0, 3)
    assert states(held.judge(3)) == ["open"]
    held.observe("answer_s", 0.1, 11)
    assert held.judge(12) == [], "two are left in the window"
    assert states(held.judge(30)) == ["over"], "nothing is"


@pytest.mark.parametrize(("quantile", "breaks"), [(0.5, False), (0.9, False), (0.99, True)])
def test_seconds_are_judged_by_their_quantile(quantile, breaks):
    held = watched(figure="between_tokens_s", quantile=quantile, most=0.5, window_s=1000)
    for moment in range(100):
        held.observe("between_tokens_s", 1.0 if moment >= 97 else 0.1, moment)
    assert bool(held.judge(100)) == breaks


def test_the_share_of_errors_is_their_mean():
    held = watched(figure="error_share", most=0.2)
    for moment, value in enumerate([0, 0, 0, 1, 0]):
        held.observe("error_share", value, moment)
    assert held.judge(5) == []
    held.observe("error_share", 1.0, 5)
    (opened,) = held.judge(6)
    assert opened.value == pytest.approx(2 / 6)


def test_an_engine_that_hangs_breaks_its_rate_and_one_without_work_does_not():
    held = watched(figure="tokens_per_s", least=5.0)
    assert held.judge(20) == [], "nobody asked for anything"
    for moment in range(21, 31):
        held.worked(1.0, moment)
    (opened,) = held.judge(31)
    assert (opened.value, opened.state) == (0.0, "open")
    for moment in range(31, 42):
        held.worked(1.0, moment)
        for _ in range(9):
            held.observe("tokens_per_s", 1.0, moment)
    assert states(held.judge(42)) == ["over"]


def test_a_rate_of_texts_is_over_its_window():
    held = watched(figure="texts_per_s", least=1.0)
    for moment in range(5):
        held.observe("texts_per_s", 1.0, moment)
    (opened,) = held.judge(5)
    assert opened.value == 0.5


def test_figures_that_no_rule_asks_for_are_not_kept():
    held = watched(figure="waiting", most=3)
    held.observe("answer_s", 1.0, 0)
    assert set(held._seen) == {"waiting"}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"figure": "waiting"}, "most=None, least=None"),
        ({"figure": "waiting", "most": 1, "least": 1}, "wanted one of the two"),
        ({"figure": "waiting", "most": 1, "quantile": 0.5}, "quantile=0.5 is for first_token_s"),
        ({"figure": "heat", "most": 1}, "figure"),
        ({"figure": "waiting", "most": float("nan")}, "finite"),
    ],
)
def test_rules_that_say_nothing_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        Rule(name="r", **fields)


def channels(tmp_path, *more: str) -> str:
    lines = [f"  - {{name: log, kind: file, path: {tmp_path / 'said.jsonl'}}}", *more]
    (tmp_path / "channels.yaml").write_text("\n".join(["channels:", *lines]) + "\n")
    return str(tmp_path / "channels.yaml")


def broken(level: str = "warning") -> Incident:
    held = watched(figure="waiting", most=3, level=level)
    for moment in range(4):
        held.observe("waiting", 9.0, moment)
    (opened,) = held.judge(4)
    return opened


def test_channels_hear_of_an_incident_as_it_opens_and_as_it_is_over(tmp_path):
    messenger, opened = watch.Messenger(channels(tmp_path)), broken()
    for incident in (opened, opened._replace(state="over")):
        assert messenger.send(incident) == []
    said = [json.loads(line) for line in (tmp_path / "said.jsonl").read_text().splitlines()]
    assert [each["state"] for each in said] == ["open", "over"]
    assert said[0]["subject"] == (
        "warning: server rule r is broken: 9 of 4 observations; wanted waiting at most 3 over 10 s"
    )


def test_a_channel_of_what_is_critical_hears_nothing_else_and_one_that_fails_is_said(tmp_path, monkeypatch):
    monkeypatch.setenv("HOOK", "http://127.0.0.1:9/x")
    name = channels(tmp_path, "  - {name: chat, kind: webhook, url_variable: HOOK, least: critical}", "tries: 1")
    messenger = watch.Messenger(name)
    assert messenger.send(broken()) == []
    (failed,) = messenger.send(broken("critical"))
    assert failed.startswith("chat: 1 tries")


def test_channels_that_cannot_be_used_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"alerts\.send=none"):
        watch.channels_of("none")
    check = "  - {name: c, kind: github, repository: a/b, mode: check, token_variable: HOME}"
    with pytest.raises(ValueError, match="channel c checks commits"):
        watch.channels_of(channels(tmp_path, check))
    with pytest.raises(ValueError, match="nothing to send without rules"):
        WatchConfig(send="local")
