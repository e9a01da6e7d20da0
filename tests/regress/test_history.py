"""Runs that are kept: found again, named, pruned by age, copied; a damaged one is named and the others are read."""

import datetime
import json
import sqlite3
import types

import pytest

from jaxbench import cli
from jaxbench.regress import advice, history, history_commands, report, run_file
from jaxbench.regress.judge import Finding

NOW = datetime.datetime(2026, 11, 26, 12, tzinfo=datetime.UTC)


def record(days=0, median=10.0, **changes):
    """A run of so many days ago."""
    time = (NOW - datetime.timedelta(days=days)).isoformat(timespec="seconds")
    finding = Finding("decode.tokens_per_s", "regression", "critical", 0.4, 0.3, 0.5, 14.0, median, 5, 0)
    return {
        "schema": 1, "time_utc": time, "host": "abc", "device": "cpu", "suite": {}, "suite_id": "s1", "launches": 5,
        "sides": {"head": {"commit": f"c{days}", "subject": "a"}, "base": {"commit": "b", "subject": "of | before"}},
        "series": {"decode.tokens_per_s": {"head": {"median": median, "launches": [median] * 5}}},
        "findings": [finding._asdict()], "confirmed": {}, "notes": [], "machine": {"cpu": "A", "threads": 2},
    } | changes  # fmt: skip


@pytest.fixture
def kept(tmp_path):
    found = history.History(tmp_path / "h")
    for days in (400, 100, 1):
        found.add(record(days, median=10.0 + days))
    return found


def test_runs_are_listed_oldest_first_and_found_by_id_tag_and_latest(kept):
    rows = kept.list()
    assert [row.head for row in rows] == ["c400", "c100", "c1"]
    assert kept.load(rows[0].id[:12])["sides"]["head"]["commit"] == "c400"
    assert kept.load("latest")["sides"]["head"]["commit"] == "c1"
    kept.tag(rows[1].id, "v1")
    assert kept.load("v1")["tag"] == "v1" and kept.list()[1].tag == "v1"
    for id, words in (("2", "names 3 runs"), ("zz", "names 0 runs")):
        with pytest.raises(ValueError, match=words):
            kept.load(id)
    with pytest.raises(ValueError, match="tag 'v1' is run"):
        kept.tag(rows[0].id, "v1")
    for name in (rows[-1].id, "latest", "newest"):
        kept.tag(name, "newest")  # the same run by whatever name, again
    assert kept.load("newest")["time_utc"] == rows[-1].time_utc
    for name in ("v2", "v3"):
        kept.tag(rows[0].id, name)  # as long as the one before
        assert kept.load(name)["tag"] == name and kept.list()[0].tag == name
    with pytest.raises(ValueError, match="tag 'latest' is the newest run, whichever that is"):
        kept.tag(rows[0].id, "latest")


def test_a_run_that_is_added_twice_is_there_once(kept):
    kept.add(record(1, median=11.0))
    assert len(kept.files()) == 3


def test_the_same_launches_judged_anew_are_the_same_run_and_keep_its_tag(kept):
    id = kept.files()[-1].stem
    kept.tag(id, "v1")
    assert kept.add(kept.load("v1") | {"limits": ["another"]}) != id
    assert len(kept.files()) == 3 and kept.load("v1")["limits"] == ["another"]
    kept.add(record(1, median=11.0) | {"sides": {"head": {"commit": "another"}}})
    assert len(kept.files()) == 4


def test_a_tag_is_no_id_and_an_id_is_its_own_run(kept):
    first, second = (path.stem for path in kept.files()[:2])
    for name in (second, second[:6]):
        with pytest.raises(ValueError, match=f"tag '{name}' is the id of run"):
            kept.tag(first, name)
    path = kept.find(first)
    path.write_text(path.read_text().replace('"schema"', f'"tag": "{second}", "schema"'))  # by an older version
    assert kept.load(second)["sides"] == run_file.read(kept.find(second))["sides"] and kept.find(second).stem == second


def test_an_index_that_cannot_be_written_is_made_in_memory(kept):
    (kept.folder / history.INDEX).mkdir()
    assert [row.head for row in kept.list()] == ["c400", "c100", "c1"]
    assert (kept.folder / history.INDEX).is_dir()


DAMAGES = [
    ({"sides": []}, "sides: .*dictionary"),
    ({"sides": {"base": {"commit": "b"}}}, "there is no head"),
    ({"series": {"decode.tokens_per_s": {"head": {}}}}, "decode.tokens_per_s.head.median: Field required"),
    ({"series": {"decode.tokens_per_s": {"front": {"median": 1}}}}, "front"),
    ({"schema": "1"}, "schema '1' is no whole number"),
    ({"time_utc": "yesterday"}, "time_utc"),
    ({"time_utc": "2026-11-26T12:00:00"}, "time_utc: .*timezone"),
    ({"findings": [{"series": "a"}]}, "findings.0.verdict"),
    ({"parity": [{"case": "a"}]}, "parity.0.backend"),
]


@pytest.mark.parametrize("changes, said", DAMAGES)
def test_a_damaged_run_is_named_and_hides_no_other(changes, said, kept):
    path = kept.files()[0]
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(ValueError, match=f"is damaged or no run .*{said}"):
        run_file.read(path)
    assert list(kept.verify()) == [str(path.relative_to(kept.folder))] and len(kept.list()) == 2
    assert kept.prune(now=datetime.datetime(2030, 1, 1, tzinfo=datetime.UTC), dry_run=True)


def test_a_median_that_is_not_finite_is_left_out(kept):
    broken = record(2)
    broken["series"]["bits.bits_per_byte"] = {"head": {"median": float("nan"), "launches": [float("nan")]}}
    path = kept.find(kept.add(broken))
    assert "NaN" not in path.read_text() and "bits.bits_per_byte" not in run_file.read(path)["series"]
    path.write_text(path.read_text().replace("null", "NaN"))  # by an older version
    assert kept.verify() == {} and "bits.bits_per_byte" not in run_file.read(path)["series"]


def test_a_qualification_that_says_nothing_is_damaged(kept):
    path = kept.folder / history.QUALIFIED / "h-cpu-quick.json"
    path.parent.mkdir()
    path.write_text('{"about": {}, "real": [0, 1], "power": {}}')
    assert kept.qualifications() == [] and list(kept.verify()) == ["qualified/h-cpu-quick.json"]


def test_a_changed_suite_keeps_its_own_qualification_and_one_without_an_id_is_not_used(kept):
    shares = {"real": [0, 3], "drawn": [0, 3], "power": {}, "smallest": {}}
    about = {"machine": {"host": "h"}, "device": "cpu", "suite": "quick"}
    for id in ("named", "changed"):  # of one name, as `qualify --set=...` stores it
        kept.qualify({"about": about | {"suite_id": id}, **shares, "launches": len(id)})
    found = [kept.qualification("h", "cpu", id) for id in ("named", "changed", "other")]
    assert [each and each["launches"] for each in found] == [5, 7, None]
    (kept.folder / history.QUALIFIED / "h-cpu-old.json").write_text(json.dumps({"about": about, **shares}))
    assert kept.verify() == {} and kept.qualification("h", "cpu", "quick") is None and len(kept.qualifications()) == 3


def test_an_empty_name_is_no_run(kept):
    assert not kept.has("") and len(kept.files()) > 0
    assert kept.has("latest") and not history.History(kept.folder / "none").has("latest")
    with pytest.raises(ValueError, match="history: '' names no run; wanted an id"):
        kept.find("")


@pytest.mark.parametrize("inside", ["", "runs"])
def test_a_backup_into_the_history_itself_or_of_none_is_refused(inside, kept, monkeypatch):
    values = {"history": str(kept.folder), "backup": str(kept.folder / inside)}
    monkeypatch.setattr(history_commands, "VALUES", types.SimpleNamespace(**values))
    with pytest.raises(ValueError, match="name a folder outside"):
        history_commands.backup()
    monkeypatch.setattr(
        history_commands, "VALUES", types.SimpleNamespace(**values | {"history": str(kept.folder / "none")})
    )
    with pytest.raises(ValueError, match="there is nothing to copy"):
        history_commands.backup()


def test_a_damaged_line_of_alerts_is_found(kept, monkeypatch, capsys):
    (kept.folder / history.EVENTS).write_text("{}\n")
    monkeypatch.setattr(history_commands, "VALUES", types.SimpleNamespace(history=str(kept.folder)))
    with pytest.raises(cli.GateFailed, match="1 files cannot be read"):
        history_commands.verify()
    assert "line 1 is no event" in capsys.readouterr().out


def test_a_misspelt_folder_is_not_called_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(history_commands, "VALUES", types.SimpleNamespace(history=str(tmp_path / "hisotry")))
    with pytest.raises(ValueError, match="hisotry does not exist"):
        history_commands.verify()


def test_points_of_a_series_are_those_of_one_machine(kept):
    kept.add(record(2, host="other"))
    points = kept.points("decode.tokens_per_s", host="abc", device="cpu")
    assert [point.median for point in points] == [410.0, 110.0, 11.0] and points[0].commit == "c400"


def test_old_runs_lose_their_launches_and_then_go_and_tagged_ones_stay(kept):
    kept.tag(kept.list()[0].id, "release")
    planned = kept.prune(now=NOW, dry_run=True)
    assert [change.what for change in planned] == ["raw launches removed"] and len(kept.files()) == 3
    assert kept.prune(now=NOW, dry_run=False) == planned
    assert "launches" not in kept.load(planned[0].id)["series"]["decode.tokens_per_s"]["head"]
    assert kept.prune(now=NOW, dry_run=False) == []
    later = kept.prune(now=NOW + datetime.timedelta(days=300), dry_run=False)
    assert {change.what for change in later} == {"removed", "raw launches removed"} and len(kept.files()) == 2


def test_a_file_cut_in_half_or_of_a_newer_schema_is_named_and_the_others_are_read(kept):
    first, second, _ = kept.files()
    first.write_bytes(first.read_bytes()[:40])
    second.write_text(second.read_text().replace('"schema": 1', '"schema": 2'))
    assert [row.head for row in kept.list()] == ["c1"]
    damaged = kept.verify()
    assert "is damaged or no run" in damaged[f"runs/2025-10/{first.name}"]
    assert "has schema 2; this version reads up to 1" in damaged[f"runs/2026-08/{second.name}"]
    with pytest.raises(ValueError, match="has schema 2"):
        kept.load(second.stem)


def test_the_index_is_made_again_where_it_is_damaged_or_stale(kept):
    kept.list()
    index = kept.folder / history.INDEX
    for content in (b"no database", b""):
        index.write_bytes(content)
        assert len(kept.list()) == 3
    kept.files()[0].unlink()
    assert len(kept.list()) == 2
    with sqlite3.connect(index) as opened:
        assert opened.execute("SELECT count(*) FROM points").fetchone() == (2,)


def test_a_backup_brings_back_what_was_lost_and_changes_nothing_that_is_there(kept, tmp_path):
    copy = tmp_path / "copy"
    assert kept.backup(copy).count == 3 and kept.backup(copy).count == 0
    lost, kept_file = kept.files()[0], kept.files()[1]
    lost.unlink()
    kept_file.write_text(kept_file.read_text().replace("of | before", "changed"))
    assert kept.restore(copy) == history.Copied(1, ()) and len(kept.list()) == 3
    assert "changed" in kept_file.read_text()
    with pytest.raises(ValueError, match="holds no runs; wanted a folder that `history backup` wrote"):
        kept.restore(tmp_path / "none")


def test_a_damaged_run_never_replaces_its_copy_and_is_put_aside_for_it(kept, tmp_path):
    copy, (first, second, _) = tmp_path / "copy", kept.files()
    kept.backup(copy)
    whole = first.read_bytes()
    first.write_bytes(whole[:40])
    (copy / second.relative_to(kept.folder)).write_text("{")  # damaged there: the one here is whole
    name = str(first.relative_to(kept.folder))
    assert kept.backup(copy) == history.Copied(1, (name,)) and (copy / name).read_bytes() == whole
    assert kept.restore(copy) == history.Copied(1, (name,)) and first.read_bytes() == whole
    assert first.with_name(f"{first.name}.damaged").read_bytes() == whole[:40] and kept.verify() == {}
    second.unlink()
    (copy / second.relative_to(kept.folder)).write_text("{")
    assert kept.restore(copy).count == 0 and not second.exists()


def test_what_became_of_regressions_and_what_verdicts_are_worth_are_copied_and_lose_nothing(kept, tmp_path):
    copy, events = tmp_path / "copy", kept.folder / history.EVENTS
    events.write_text("one\ntwo\n")
    about = {"machine": {"host": "h"}, "device": "cpu", "suite": "quick", "suite_id": "s1"}
    qualified = kept.qualify({"about": about, "real": [0, 3], "drawn": [0, 3], "power": {}, "smallest": {}})
    assert kept.backup(copy).count == 5
    events.write_text("one\n")
    assert kept.backup(copy) == history.Copied(0, (history.EVENTS,))
    qualified.write_text("{")
    assert kept.restore(copy) == history.Copied(2, (f"qualified/{qualified.name}",))
    assert events.read_text() == "one\ntwo\n" and kept.verify() == {}
    events.write_text("one\ntwo\nthree\n")
    assert kept.restore(copy).count == 0 and kept.backup(copy).count == 1
    assert (copy / history.EVENTS).read_text() == "one\ntwo\nthree\n"


def test_a_torn_event_is_not_copied_and_spoils_no_later_backup(kept, tmp_path):
    copy, events = tmp_path / "copy", kept.folder / history.EVENTS
    events.write_text("one\ntw")
    kept.backup(copy)
    assert (copy / history.EVENTS).read_text() == "one\n"
    (copy / history.EVENTS).write_text("one\ntw")  # as an older version copied it
    events.write_text("one\nthree\n")  # the next event replaced the torn one
    assert kept.backup(copy) == history.Copied(1, ()) and kept.backup(copy) == history.Copied(0, ())
    events.write_text("one\nth")
    assert kept.restore(copy).count == 1 and events.read_text() == "one\nthree\n"


def test_raw_launches_that_were_pruned_here_stay_in_the_copy(kept, tmp_path):
    copy = tmp_path / "copy"
    kept.backup(copy)
    whole = {path.name: path.read_text() for path in history.History(copy).files()}
    [pruned] = [change.id for change in kept.prune(now=NOW, dry_run=False) if change.what == "raw launches removed"]
    assert kept.backup(copy).count == 1
    path = history.History(copy).find(pruned)
    assert not run_file.has_raw(run_file.read(path)) and kept.backup(copy).count == 0
    assert path.with_name(f"{path.name}.before").read_text() == whole[path.name]


def test_a_report_says_the_same_in_every_form(tmp_path):
    undecided = Finding("decode.load_s", "undecided", "", 0.1, -0.2, 0.4, 0.5, 0.6, 5, 12)
    run = record(1, findings=[undecided._asdict(), *record(1)["findings"]], notes=["case x of base: it failed"])
    assert report.write(run, tmp_path) == ["report.csv", "report.md", "report.xml", "report.json"]
    text = (tmp_path / "report.md").read_text()
    assert "### Performance: 1 regression, 1 undecided; 1 of the regressions critical" in text
    assert "+40.0 [+30.0, +50.0] %" in text and "Undecided: decode.load_s." in text and "it failed" in text
    xml = (tmp_path / "report.xml").read_text()
    assert 'tests="2" failures="1" skipped="1"' in xml and 'name="decode.tokens_per_s"' in xml
    assert (tmp_path / "report.csv").read_text().splitlines()[1].startswith("decode.tokens_per_s,regression,critical")
    assert report.table(run).row_count == 2


def test_the_json_report_has_what_the_page_says_and_no_number_that_json_lacks(tmp_path):
    risen = Finding("decode.recompilations", "regression", "critical", *[float("inf")] * 3, 0.0, 1.0, 3, 0)
    run = record(1, findings=[risen._asdict()])
    report.write(run, tmp_path)

    def refuse(word):
        raise AssertionError(f"{word} is no JSON")

    found = json.loads((tmp_path / "report.json").read_text(), parse_constant=refuse)
    assert found["findings"][0]["worse"] is None and found["findings"][0]["head"] == 1.0
    assert found["summary"] == report.summary(run) == "1 regression; 1 of the regressions critical"
    assert found["recommendations"] == advice.recommendations(run)
    assert "decode.recompilations" in found["recommendations"][0] and found["worth"] == report.worth(run)
    points = {each["what"]: each["is_done"] for each in found["checklist"]}
    assert points["no critical regression"] is False and points["the base is named"] is True


def test_a_report_has_the_forms_that_the_suite_asks_for_and_says_what_verdicts_are_worth(tmp_path):
    qualified = {
        "real": [0, 60],
        "drawn": [3, 300],
        "power": {"1.2": [9, 10]},
        "smallest": {"decode.tokens_per_s": 0.15},
    }
    run = record(1, suite={"reports": ["csv", "xml"]}, qualified=qualified)
    assert report.write(run, tmp_path) == ["report.csv", "report.xml"]
    header, row = (tmp_path / "report.csv").read_text().splitlines()
    assert (header.split(",")[-1], row.split(",")[-1]) == ("smallest_effect", "0.15")
    xml = (tmp_path / "report.xml").read_text()
    assert "<properties>" in xml and "false alarms in 0.0 % (0 of 60" in xml and "20 % slower in 90.0 %" in xml


def test_a_run_without_a_base_lists_what_was_measured(tmp_path):
    run = record(1, findings=[], sides={"head": {"commit": "c", "subject": "a"}})
    assert report.summary(run) == "1 series measured, no base to compare with" and report.table(run).row_count == 1
    report.write(run, tmp_path)
    assert "decode.tokens_per_s" in (tmp_path / "report.csv").read_text()


@pytest.mark.parametrize(
    "value, unit, said",
    [
        (0.0123, "s", "12.3 ms"),
        (2.5, "s", "2.5 s"),
        (3e6, "bytes", "3.0 MB"),
        (7.0, "count", "7"),
        (5605.2, "tokens/s", "5,605 tokens/s"),
    ],
)
def test_numbers_are_said_with_their_units(value, unit, said):
    assert report.number(value, unit) == said


@pytest.fixture
def command(kept):
    """Return a function that calls a command of the history with flags."""

    def call(name, **values):
        given = types.SimpleNamespace(history=str(kept.folder), **values)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(history_commands, "VALUES", given)
            return history_commands.COMMANDS[name].main()

    return call


def test_an_export_replaces_no_file_unasked_and_never_one_of_the_history(kept, command, tmp_path):
    output = tmp_path / "points.csv"
    output.write_text("mine")
    with pytest.raises(ValueError, match="points.csv exists; .* --overwrite"):
        command("export", output=str(output), overwrite=False)
    run = kept.files()[0]
    content = run.read_text()
    for path in (run, kept.folder / "new.csv"):
        with pytest.raises(ValueError, match="is in --history=.*, among the runs"):
            command("export", output=str(path), overwrite=True)
    assert output.read_text() == "mine" and run.read_text() == content
    assert command("export", output=str(output), overwrite=True) == 0
    assert output.read_text().startswith("run,time_utc,")


def test_a_list_says_how_many_runs_cannot_be_read(kept, command, capsys):
    assert command("list") == 0 and "cannot be read" not in capsys.readouterr().out
    kept.files()[1].write_text("{")
    assert command("list") == 0
    assert "1 of 3 run files cannot be read: see history verify" in capsys.readouterr().out


def test_an_import_of_nothing_is_said_to_be_that_and_keeps_no_other_input(kept, command, tmp_path):
    there = tmp_path / "figures.json"
    there.write_text('{"rate_per_s": 2.0}')
    before = kept.files()
    missing = str(tmp_path / "results.jsonl")
    for given in ([missing], [str(there), missing]):
        with pytest.raises(ValueError, match="--input=.*results.jsonl does not exist; name a file"):
            command("import", input=given, format="comparison" if len(given) == 1 else "figures")
    assert kept.files() == before
