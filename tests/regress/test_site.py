"""The pages of a history: written whole, opened from a folder without a network, with the keyboard, dark and light."""

import datetime
import json
import math
import re

import pytest

from jaxbench.regress import html_report
from jaxbench.regress.alerts import Book
from jaxbench.regress.history import History
from jaxbench.regress.judge import Finding
from jaxbench.regress.run_file import without_raw
from jaxbench.regress.site import content, primary, write
from tests.browser import Browser, needs_browser
from tests.regress import records

START = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
NASTY = "</script><script>window.broken = 1</script> <b>&"
TICKS = "[...document.querySelectorAll('#chart .xtick text')]"


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
        id = history.add(run(day))
        if day == 5:
            history.tag(id, "release 1")
    last = run(19, level="critical", worse=0.4, value=60.0)
    Book(history.folder).note(last, history.add(last), now=START)
    share = [0, 59]
    machine = {"host": "abc", "cpu": "A CPU", "threads": 2, "commit": "c"}
    about = {"machine": machine, "device": "cpu", "suite": "quick", "suite_id": "s1"}
    smallest = {"case1.tokens_per_s": 0.3, "case0.tokens_per_s": 0.18, "case2.load_s": math.inf}
    history.qualify({"about": about, "launches": 177, "real": share, "drawn": [1, 300], "power": {"1.2": [9, 10]},
                     "smallest": smallest})  # fmt: skip
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


def test_a_tile_says_how_much_worse_a_primary_series_is_with_its_interval_and_verdict():
    found = [
        records.finding(records.RATE, "regression", "critical", 0.4),
        records.finding(records.LOAD, "improvement", worse=-0.3),
    ]
    [tile] = primary.tiles(records.record(found))
    assert tile.series == records.RATE and tile.value == "14 tokens/s" and tile.shade == "slower"
    assert tile.said == "worse by +40.0 [+38.0, +42.0] %" and tile.verdict == "regression, critical"


def test_a_tile_of_a_run_without_a_base_says_how_far_its_launches_lie_apart():
    alone = records.record(records.quiet(), findings=[])
    [tile] = primary.tiles(alone)
    assert tile == (records.RATE, "10 tokens/s", "9 tokens/s to 11 tokens/s in 3 launches", "", "")
    assert primary.tiles(without_raw(alone))[0].said == "its launches are no longer kept"
    del alone["series"][records.RATE]
    assert primary.tiles(alone)[0].value == "not measured"


def test_regressions_are_the_first_tiles_and_a_suite_of_other_keys_has_tiles_too():
    record = run(0)
    record["findings"][2] |= {"verdict": "regression", "level": "warning", "worse": 0.2}
    assert [each.series for each in primary.tiles(record)] == [f"case{i}.tokens_per_s" for i in (2, 0, 1)]
    record["suite"]["primary"] = ["case1.tokens_per_s", "gone.tokens_per_s"]
    assert [each.series for each in primary.tiles(record)] == ["case1.tokens_per_s"]
    assert primary.tiles(record | {"suite": {}, "findings": []}) == []


def test_names_of_series_on_tiles_are_escaped(tmp_path):
    history, record, name = History(tmp_path), run(0), f"{NASTY}.tokens_per_s"
    record["suite"]["primary"], record["series"][name] = [name], record["series"]["case0.tokens_per_s"]
    history.add(record)
    texts = write.texts(content.gather(history))
    for page in ("index.html", "machine.html"):
        assert "&lt;b&gt;&amp;.tokens_per_s" in texts[page] and "<script>window" not in texts[page]


def test_the_spread_of_launches_is_a_standard_deviation_of_logarithms():
    record = run(0)
    for index, sides in enumerate(([1.0, math.exp(0.1)], [2.0], [1.0, 1.0])):
        record["series"][f"case{index}.tokens_per_s"]["head"]["launches"] = sides
    record["series"]["case0.tokens_per_s"]["base"] = {"median": 1.0, "launches": [1.0, math.exp(0.2)]}
    found = primary.spreads(record)
    assert [each.series.partition(".")[0] for each in found] == ["case0", "case2", "case1"]
    assert found[0].head == pytest.approx(0.1 / math.sqrt(2)) and found[0].base == pytest.approx(0.2 / math.sqrt(2))
    assert found[1].head == 0.0 and found[2] == ("case1.tokens_per_s", 1, None, None)


def test_the_overview_and_the_machine_show_tiles_spreads_and_the_smallest_slow_downs(made):
    texts = write.texts(content.gather(made[0]))
    tiles = re.search(r'<div class="cards primary">(.*?)\n</div>\n', texts["index.html"], re.DOTALL)[1]
    assert tiles.count('class="card"') == 3 and tiles.count("worse by +40.0 [+39.0, +41.0] %<br>regression") == 3
    machine = texts["machine.html"]
    places = [machine.index(f"<td>{words}</td>") for words in ("18 %", "30 %", "none")]
    assert places == sorted(places) and machine.index("case0.tokens_per_s") < places[0]
    spread = machine[machine.index('id="spread"') :]
    assert spread.count("<td>1.5 %</td><td>–</td>") == 3  # of 0.99, 1 and 1.02


def test_runs_with_notes_or_a_tag_are_marked_and_long_notes_are_cut(tmp_path):
    history = History(tmp_path)
    plain, tagged, long = (
        history.add(run(day) | {"notes": notes}) for day, notes in ((0, []), (1, []), (2, ["a" * 1000] * 9))
    )
    history.tag(tagged, "release 1")
    found = content.gather(history).notes
    assert plain not in found and found[tagged] == {"tag": "release 1", "notes": []}
    assert len(found[long]["notes"]) == 6 and len(found[long]["notes"][0]) < 400 and found[long]["notes"][5] == "4 more"


def test_the_margins_shown_are_those_that_judged(tmp_path):
    history, record = History(tmp_path), run(0)
    names = ("case0.parity_error", "case1.parity_error", "case0.tokens_per_s", "case1.tokens_per_s", "case0.load_s")
    record["findings"] = [records.finding(name)._asdict() for name in names]
    margin = {"warning": 0.3, "critical": 0.6}
    record["suite"]["margins"] = {"case1.parity_error": margin, "tokens_per_s": margin}
    id = history.add(record)
    rows = content.gather(history).records[id]["rows"]
    assert {row[0]: tuple(row[-2:]) for row in rows} == {
        names[0]: (9.0, 999.0), names[1]: (0.3, 0.6), names[2]: (0.3, 0.6), names[3]: (0.3, 0.6),
        names[4]: (0.15, 0.25),
    }  # fmt: skip


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


def test_a_run_with_a_launch_that_was_infinite_is_kept_and_shown(tmp_path):
    history, name, infinite = History(tmp_path), "case0.tokens_per_s", [100.0, 100.0, math.inf]
    broken = run(0, num_series=1)
    broken["series"][name] = {side: {"median": 100.0, "launches": infinite} for side in ("head", "base")}
    id = history.add(broken)
    history.tag(id, "kept")
    record = history.load(id)
    assert record["series"][name]["head"]["launches"] == infinite  # null in the file, which is JSON
    assert [each.head for each in primary.spreads(record)] == [None]
    assert (name, *["100 tokens/s"] * 2, "100 tokens/s to inf tokens/s", "3") in html_report.series_rows(record)
    assert write.texts(content.gather(history))


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
def test_trends_stand_by_commit_too_with_labels_that_fit(made, browser):
    opened(browser, made[1], "trends.html", "document.querySelectorAll('#chart .scatterlayer .trace').length >= 3")
    assert "c19" not in browser.run(f"{TICKS}.map(each => each.textContent)")
    press(browser, "c")
    for width in (1200, 500):
        browser.call("Emulation.setDeviceMetricsOverride", width=width, height=800, deviceScaleFactor=1, mobile=False)
        browser.wait(f"at('chart').clientWidth < {width} && {TICKS}.at(-1)?.textContent === 'c19'")
        browser.wait(f"{TICKS}.length {'> 6' if width == 1200 else '< 6'}")
        edges = browser.run(f"{TICKS}.map(each => each.getBoundingClientRect()).map(each => [each.left, each.right])")
        assert all(left[1] < right[0] for left, right in zip(edges, edges[1:]))
    browser.call("Emulation.clearDeviceMetricsOverride")
    assert browser.run("at('chart').data[2].x") == list(range(20))
    assert browser.run("at('axis').getAttribute('aria-pressed')") == "true"
    browser.run("at('axis').click()")
    browser.wait("at('chart').data[2].x[0].startsWith('2026-01-01')")
    assert not browser.problems


@needs_browser
def test_notes_and_tags_of_runs_are_marks_that_say_them_as_they_are(made, browser):
    opened(browser, made[1], "trends.html", "document.querySelectorAll('#chart .xy2 .point').length === 20")
    assert browser.run("at('chart').data[3].marker.symbol.filter(each => each === 'diamond').length") == 1
    x, y = browser.run(
        "(box => [box.x + box.width / 2, box.y + box.height / 2])"
        "((at('chart').scrollIntoView(), document.querySelectorAll('#chart .xy2 .point')[5].getBoundingClientRect()))"
    )
    browser.call("Input.dispatchMouseEvent", type="mouseMoved", x=x - 3, y=y - 3)
    browser.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
    browser.wait("document.querySelector('#chart .hoverlayer').textContent.includes('tag release 1')")
    said = browser.run("document.querySelector('#chart .hoverlayer').textContent")
    assert said.startswith("c5") and NASTY in said
    browser.run("document.querySelector('#notes summary').click()")
    press(browser, "c")
    browser.wait("at('chart').data[3].x[5] === 5")
    assert browser.run("document.querySelector('#notes details').open")
    told = browser.run("at('notes').innerText")
    assert told.count(NASTY) == 20 and "tag release 1" in told
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
