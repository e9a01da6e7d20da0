"""The pages of a history: written whole, opened from a folder without a network, with the keyboard, dark and light."""

import datetime
import json

import pytest

from jaxbench.regress.alerts import Book
from jaxbench.regress.history import History
from jaxbench.regress.judge import Finding
from jaxbench.regress.site import content, write
from tests.browser import Browser, needs_browser

START = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
NASTY = "</script><script>window.broken = 1</script> <b>&"


def run(day, *, level="", worse=0.02, num_series=3, value=None):
    """A run beside its base, `day` days after the first."""
    verdict = "regression" if level else "no change"
    series, findings = {}, []
    for index in range(num_series):
        name = f"case{index}.tokens_per_s"
        median = (value or 100.0) + 0.5 * ((7 * day + index) % 5)
        series[name] = {"head": {"median": median, "launches": [median * each for each in (0.99, 1.0, 1.02)]}}
        findings.append(Finding(name, verdict, level, worse, worse - 0.01, worse + 0.01, 100.0, median, 3, 0)._asdict())
    series["case0.decode.flops"] = {"head": {"median": 1000.0 if day < 10 else 1200.0, "launches": [1.0]}}
    return {
        "schema": 1, "time_utc": (START + datetime.timedelta(days=day)).isoformat(timespec="seconds"), "host": "abc",
        "device": "cpu", "suite": {"cases": [{"name": f"case{i}"} for i in range(num_series)]}, "suite_name": "quick",
        "suite_id": "s1", "launches": 3, "series": series, "findings": findings, "confirmed": {}, "notes": [NASTY],
        "sides": {"head": {"commit": f"c{day}", "subject": NASTY}, "base": {"commit": "b", "subject": ""}},
        "machine": {"cpu": "A CPU", "threads": 2},
        "why": {"packages": {}, "cases": {"case0": {"stages": {"run": worse}}} if level else {}},
    }  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Twenty days, of which the last brought a regression and the counts rose on the tenth."""
    history = History(tmp_path_factory.mktemp("kept") / "history")
    for day in range(19):
        history.add(run(day))
    last = run(19, level="critical", worse=0.4, value=60.0)
    Book(history.folder).note(last, history.add(last), now=START)
    share = [0, 59]
    about = {"machine": {"host": "abc", "cpu": "A CPU", "threads": 2, "commit": "c"}, "device": "cpu", "suite": "quick"}
    history.qualify({"about": about, "launches": 177, "real": share, "drawn": [1, 300], "power": {"1.2": [9, 10]},
                     "smallest": {"case0.tokens_per_s": 0.18}})  # fmt: skip
    folder = tmp_path_factory.mktemp("site") / "pages"
    write.write(folder, history)
    return history, folder


def test_a_history_is_told_by_machine_and_suite_with_its_changes(made):
    found = content.gather(made[0])
    assert (
        len(found.runs) == 20
        and found.runs[0].critical == 3
        and [each.id for each, _ in found.newest] == [found.runs[0].id]
    )
    flops = next(each for each in found.series if each.name == "case0.decode.flops")
    assert found.points[flops.file]["changes"] == [[10, 1000.0, 1200.0]] and found.points[flops.file]["low"][0] is None
    rate = next(each for each in found.series if each.name == "case0.tokens_per_s")
    low, median, high = (found.points[rate.file][name][0] for name in ("low", "median", "high"))
    assert low < median < high and found.alerts[0].cases == ("case0", "case1", "case2")


def test_a_case_that_was_changed_is_another_series(tmp_path):
    history = History(tmp_path)
    for day, tokens in ((0, 16), (1, 32)):
        record = run(day)
        record["suite"]["cases"][0]["new_tokens"] = tokens
        history.add(record)
    found = content.gather(history)
    assert sum(each.name == "case0.tokens_per_s" for each in found.series) == 2
    assert sum(each.name == "case1.tokens_per_s" for each in found.series) == 1


def test_a_damaged_run_is_said_and_the_others_are_shown(tmp_path):
    history = History(tmp_path)
    history.add(run(0))
    path = history.runs / "2026-01" / "20260102T000000Z-x.json"
    path.write_text('{"schema": 1')
    found = content.gather(history)
    assert len(found.runs) == 1 and list(found.damaged) == [path.name]
    assert "1 files cannot be read" in write.texts(found)["index.html"]


def test_a_site_replaces_a_site_and_nothing_else(made, tmp_path):
    folder = tmp_path / "pages"
    write.write(folder, made[0])
    before = sorted(path.name for path in folder.iterdir())
    (folder / "stale.html").touch()
    write.write(folder, made[0])
    assert sorted(path.name for path in folder.iterdir()) == before and sorted(tmp_path.iterdir()) == [folder]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").touch()
    for place in (tmp_path / "mine", tmp_path / "mine" / "thesis.txt"):
        with pytest.raises(ValueError, match="is there and no site of ours"):
            write.write(place, made[0])
    with pytest.raises(ValueError, match="holds no run that can be read"):
        write.write(tmp_path / "none", History(tmp_path / "empty"))
    assert not (tmp_path / "none").exists() and (tmp_path / "mine" / "thesis.txt").exists()


def test_nothing_of_a_run_becomes_markup_and_no_page_asks_for_the_network(made):
    for path in made[1].glob("*.html"):
        text = path.read_text(encoding="utf-8")
        assert "window.broken" not in text.replace("&lt;script&gt;window.broken", "")
        assert "http://" not in text and "https://" not in text and 'src="//' not in text


@pytest.fixture(scope="module")
def browser():
    opened = Browser()
    yield opened
    opened.end()


def opened(browser, folder, page, wanted):
    """Open a page from the folder, with the network off."""
    browser.call("Network.enable")
    browser.call("Network.emulateNetworkConditions", offline=True, latency=0, downloadThroughput=0, uploadThroughput=0)
    browser.call("Page.navigate", url=f"{folder.as_uri()}/{page}")
    browser.wait(
        f"location.pathname.endsWith({json.dumps(page.partition('#')[0])}) && document.readyState === 'complete'"
    )
    browser.wait(wanted)


def press(browser, key):
    browser.call("Input.dispatchKeyEvent", type="keyDown", key=key, text=key if len(key) == 1 else "")
    browser.call("Input.dispatchKeyEvent", type="keyUp", key=key)


@needs_browser
def test_trends_are_drawn_and_driven_by_the_keyboard(made, browser):
    opened(browser, made[1], "trends.html", "document.querySelectorAll('#chart .scatterlayer .trace').length >= 3")
    assert browser.run("document.getElementById('series').length") == 4
    before = browser.run("document.getElementById('about').textContent")
    press(browser, "j")
    browser.wait(f"document.getElementById('about').textContent !== {json.dumps(before)}")
    press(browser, "k")
    browser.wait(f"document.getElementById('about').textContent === {json.dumps(before)}")
    press(browser, "/")
    for letter in "flops":
        press(browser, letter)
    browser.wait("document.getElementById('series').length === 1")
    browser.wait("document.getElementById('changes').textContent.includes('c10: 1000 FLOP to 1200 FLOP')")
    assert not browser.problems and browser.run("window.broken") is None


@needs_browser
def test_a_run_beside_its_base_is_a_forest_with_its_margins(made, browser):
    opened(browser, made[1], "compare.html", "document.querySelectorAll('#chart .point').length >= 9")
    assert browser.run("document.querySelectorAll('#table tbody tr').length") == 3
    assert "slower in run (+40 %)" in browser.run("document.getElementById('why').textContent")
    other = browser.run("document.getElementById('run').options[5].value")
    opened(browser, made[1], f"compare.html#{other}", "true")
    browser.run("location.reload()")
    browser.wait(f"document.getElementById('run')?.value === {json.dumps(other)}")
    assert not browser.problems


@needs_browser
@pytest.mark.parametrize("scheme", ["dark", "light"])
def test_every_page_opens_dark_and_light(made, browser, scheme):
    browser.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
    for page in (*write.PAGES, "index"):
        if page != "overview":
            opened(browser, made[1], f"{page}.html", "!!document.querySelector('h1')")
            back = browser.run("getComputedStyle(document.body).backgroundColor")
            assert back == ("rgb(13, 17, 23)" if scheme == "dark" else "rgb(255, 255, 255)")
            assert browser.run("document.querySelector('nav [aria-current]').textContent")
    assert not browser.problems


@needs_browser
def test_a_thousand_runs_of_two_hundred_series_are_painted_at_once(tmp_path, browser):
    history = History(tmp_path / "history")
    for day in range(1000):
        history.add(run(day, num_series=200))
    write.write(tmp_path / "pages", history)
    paints = []
    for page in ("index.html", "trends.html"):
        opened(browser, tmp_path / "pages", page, "performance.getEntriesByName('first-contentful-paint').length > 0")
        paints.append(browser.run("performance.getEntriesByName('first-contentful-paint')[0].startTime"))
    sizes = {path.name: path.stat().st_size for path in (tmp_path / "pages").glob("*.html")}
    assert max(sizes.values()) < 1e6 and (tmp_path / "pages" / "data" / "index.js").stat().st_size < 1e5
    print(f"first paint of the overview and the trends after {paints} ms")
