"""Rules over a server's last minutes: what breaks them, what is over, what is not judged; and who hears of it."""

from __future__ import annotations

import json

import numpy as np
import pytest

from jaxbench.serve import watch
from jaxbench.serve.watch import Incident, Rule, Watch, WatchConfig


def watched(**fields) -> Watch:
    return Watch((Rule(name="r", **{"least_count": 4, "window_s": 10} | fields),))


def states(found: list[Incident]) -> list[str]:
    return [each.state for each in found]


def test_a_rule_breaks_once_stays_broken_and_is_over_once_it_held_for_a_window():
    held = watched(figure="first_token_s", quantile=0.5, most=1.0)
    for moment in range(4):
        held.observe("first_token_s", 2.0, moment)
    (opened,) = held.judge(4)
    assert (opened.state, opened.value, opened.count, opened.level) == ("open", 2.0, 4, "warning")
    assert held.judge(5) == [] and held.is_broken == {"r": True}
    found = []
    for moment in range(5, 40):
        held.observe("first_token_s", 0.1, moment)
        found += [(moment, each) for each in held.judge(moment)]
    ((moment, over),) = found
    assert over == opened._replace(state="over") and held.is_broken == {"r": False}
    assert 8 + 10 <= moment <= 9 + 10, "the median was well from the eighth second on"


def test_a_figure_that_swings_about_its_bound_is_few_incidents():
    random = np.random.default_rng(0)
    held, found = watched(figure="first_token_s", quantile=0.95, most=1.0, window_s=60, least_count=20), []
    for moment in range(3600):
        held.observe("first_token_s", random.lognormal(-1.645 * 0.5, 0.5), moment)  # whose quantile is the bound
        found += held.judge(moment)
    assert 1 <= len(found) <= 30, f"{len(found)}; without waiting for a window it is 93"


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
    found = []
    for moment in range(31, 60):
        held.worked(1.0, moment)
        for _ in range(9):
            held.observe("tokens_per_s", 1.0, moment)
        found += held.judge(moment)
    assert states(found) == ["over"]


def test_many_tokens_a_second_over_an_hour_are_all_counted():
    held = watched(figure="tokens_per_s", least=50.0, window_s=3600, least_count=20)
    for step in range(200 * 1000):
        held.observe("tokens_per_s", 1.0, step / 200)
        if step % 200 == 0:
            held.worked(1.0, step / 200)
    value, count = held._figure(held._rules[0], 1000.0)
    assert count == 200_000 and value == pytest.approx(200, rel=0.01)


def test_a_rate_of_texts_counts_from_the_first_of_them_and_is_judged_once_there_is_half_a_window():
    held = watched(figure="texts_per_s", least=2.5)
    for step in range(20):  # ten a second, after an idle time
        held.observe("texts_per_s", 1.0, 100 + step / 10)
    assert held.judge(102) == [], "traffic that begins is no slow traffic"
    for moment in range(103, 109, 3):
        held.observe("texts_per_s", 1.0, moment)
    (opened,) = held.judge(109)
    assert opened.state == "open" and opened.value == pytest.approx(22 / 9)


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


def test_who_heard_of_an_incident_hears_that_it_is_over_and_nobody_else(tmp_path):
    messenger, opened = watch.Messenger(channels(tmp_path)), broken()
    never_opened = broken()._replace(state="over")
    for incident in (never_opened, opened, opened._replace(state="over"), opened._replace(state="over")):
        assert messenger.send(incident) == []
    said = [json.loads(line) for line in (tmp_path / "said.jsonl").read_text().splitlines()]
    assert [(each["alert"], each["state"]) for each in said] == [(opened.id, "open"), (opened.id, "over")]
    assert said[0]["subject"] == (
        "warning: server rule r is broken: 9 of 4 observations; wanted waiting at most 3 over 10 s"
    )
    assert messenger._references == {}


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
