"""Verdicts on files: every kind of file, number of processes and engine says the same; stopped runs go on."""

import datetime
import json
import os
import signal
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jaxbench import store
from jaxbench.hallucination import detect
from jaxbench.hallucination.bulk import row_files, run
from tests.hallucination import small
from tests.structure import ROOT
from tests.test_cli import command, refused, shell_environment

# A process of its own: Ray starts others, which JAX in the tests' process warns about.
CODE = """
import sys
from jaxbench.hallucination import detect
from jaxbench.hallucination.bulk import run

if __name__ == "__main__":
    source, output, path, model, engine, processes = sys.argv[1:]
    wanted = run.Outputs.of(output=output)
    part, _ = run.check(source, path, wanted)
    detector = detect.HallucinationDetector(path, model=model)
    for verdicts in run.detect(detector, source, part, processes=int(processes), results=run.ENGINES[engine]):
        print(len(verdicts), flush=True)
    run.finish(source, part, wanted, detector)
"""


def rows(folder):
    """Return seven rows, of which neighbours 0 to 2 and 4 to 5 share context and question."""
    contexts = {key: (context, question or "") for key, (_, question, context) in small.CONTEXTS.items()}
    found = [(*contexts[source], response) for _, source, _, response, _ in small.RESPONSES]
    found += [
        found[0],
        found[1],
        (*contexts["s2"], "Rain: 'fell' </script><script>alert(1)</script> & \u2028 so it was."),
    ]
    return [dict(zip(row_files.TEXTS, row), id=f"r{i}", n={"i": i}) for i, row in enumerate(found)]


def write(path, content):
    """Write rows as JSON lines or Parquet, the latter in row groups of two."""
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(content), path, row_group_size=2)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in content))
    return path


def lines(path):
    """Return the objects of a file of JSON lines; some of its texts hold U+2028, which ends no line."""
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]]


def judge(made, source, output, *, steps=None, **how):
    """Run over a file, or only the first steps of it; return the numbers of verdicts a step and the number flagged."""
    path, model = made[2], made[4]
    wanted = run.Outputs.of(output=str(output), sentences=how.pop("sentences", None), page=how.pop("page", None))
    part, _ = run.check(str(source), str(path), wanted)
    detector = detect.HallucinationDetector(path, model=model)
    found = run.detect(detector, source, part, **how)
    if steps is not None:
        done = [len(next(found)) for _ in range(steps)]
        found.close()
        return done, part
    return [len(each) for each in found], run.finish(source, part, wanted, detector)


@pytest.fixture(scope="module")
def judged(made, tmp_path_factory):
    """Return a folder with rows.jsonl and verdicts.jsonl, and these verdicts."""
    folder = tmp_path_factory.mktemp("rows")
    source = write(folder / "rows.jsonl", rows(made[0]))
    steps, flagged = judge(made, source, folder / "verdicts.jsonl")
    found = lines(folder / "verdicts.jsonl")
    assert steps == [3, 1, 2, 1] and flagged == sum(row["is_hallucinated"] for row in found)
    return folder, found


def test_verdicts_are_those_of_the_library_beside_the_other_keys(made, judged):
    _, found = judged
    detector = detect.HallucinationDetector(made[2], model=made[4])
    assert [(row["id"], row["n"]) for row in found] == [(f"r{i}", {"i": i}) for i in range(7)]
    for row, verdict in zip(rows(made[0]), found, strict=True):
        alone = detector.detect(*(row[name] for name in row_files.TEXTS)).to_dict()
        assert verdict["probability"] == pytest.approx(alone["probability"], abs=1e-5)
        assert [each["text"] for each in verdict["sentences"]] == [each["text"] for each in alone["sentences"]]
    assert {row["is_hallucinated"] for row in found} == {True, False}


@pytest.mark.parametrize("kinds", ["jsonl parquet", "parquet parquet", "parquet jsonl"])
def test_every_kind_of_file_says_the_same(made, judged, tmp_path, kinds, monkeypatch):
    monkeypatch.setattr(row_files, "BATCH_ROWS", 3)
    (read, written), (_, wanted) = kinds.split(), judged
    source = write(tmp_path / f"rows.{read}", rows(made[0]))
    output, sentences = tmp_path / f"verdicts.{written}", tmp_path / f"sentences.{written}"
    judge(made, source, output, sentences=str(sentences))
    load = {"parquet": lambda path: pq.read_table(path).to_pylist(), "jsonl": lines}[written]
    assert load(output) == wanted
    own = [{"row": i, "id": row["id"]} | each for i, row in enumerate(wanted, 1) for each in row["sentences"]]
    assert load(sentences) == own


def test_columns_of_parquet_keep_their_types_and_dates_are_no_json(made, tmp_path):
    day = datetime.date(2026, 1, 2)
    content = [{"context": "The mill is old.", "question": "", "response": "It is old.", "day": day}]
    source = write(tmp_path / "rows.parquet", content)
    judge(made, source, tmp_path / "verdicts.parquet")
    table = pq.read_table(tmp_path / "verdicts.parquet")
    assert table.schema.field("day").type == pa.date32() and table["day"].to_pylist() == [day]
    with pytest.raises(ValueError, match="row 1 cannot be a line of JSON .*date.*name a .parquet output"):
        judge(made, source, tmp_path / "verdicts.jsonl")


def test_blank_lines_are_no_rows_and_numbers_that_json_has_not_are_null(made, judged, tmp_path):
    content = [json.dumps(row | {"n": float("nan"), "m": [1.5, float("-inf")]}) for row in rows(made[0])]
    source = tmp_path / "rows.jsonl"
    source.write_text("\ufeff\n" + "\n \n".join(content) + "\n\n")
    output, sentences = tmp_path / "verdicts.jsonl", tmp_path / "sentences.jsonl"
    judge(made, source, output, sentences=str(sentences))
    assert "NaN" not in output.read_text() and "Infinity" not in output.read_text()
    assert lines(output) == [row | {"n": None, "m": [1.5, None]} for row in judged[1]]
    assert [line["row"] for line in lines(sentences)][-1] == 7
    source.write_text("\n".join(content[:2]) + "\n\n" + json.dumps(rows(made[0])[2] | {"response": "long " * 20}))
    with pytest.raises(ValueError, match=r"rows.jsonl line 4: response: 100 tokens"):
        judge(made, source, tmp_path / "other.jsonl")


def test_two_processes_say_the_same_in_the_same_order(made, judged, tmp_path):
    folder, _ = judged
    judge(made, folder / "rows.jsonl", tmp_path / "two.jsonl", processes=2)
    assert (tmp_path / "two.jsonl").read_bytes() == (folder / "verdicts.jsonl").read_bytes()


def test_results_that_come_out_of_order_are_written_in_order(made, judged, tmp_path):
    def backwards(worker, items, *, processes):
        yield from [worker(item) for item in items][::-1]

    folder, _ = judged
    steps, _ = judge(made, folder / "rows.jsonl", tmp_path / "back.jsonl", processes=2, results=backwards)
    assert steps == [3, 1, 2, 1]
    assert (tmp_path / "back.jsonl").read_bytes() == (folder / "verdicts.jsonl").read_bytes()


def test_a_run_that_was_stopped_goes_on_and_writes_every_row_once(made, judged, tmp_path):
    folder, _ = judged
    output = tmp_path / "new" / "verdicts.jsonl"
    done, part = judge(made, folder / "rows.jsonl", output, steps=2)
    with open(part, "a") as file:
        file.write('[{"torn')
    assert done == [3, 1] and not output.exists()
    steps, flagged = judge(made, folder / "rows.jsonl", output)
    assert steps == [2, 1] and flagged == sum(row["is_hallucinated"] for row in judged[1])
    assert output.read_bytes() == (folder / "verdicts.jsonl").read_bytes() and not part.exists()


def test_a_run_of_one_backend_or_device_does_not_go_on_with_what_another_read(made, judged, tmp_path):
    source, wanted = str(judged[0] / "rows.jsonl"), run.Outputs.of(output=str(tmp_path / "verdicts.jsonl"))
    _, part = judge(made, judged[0] / "rows.jsonl", wanted.output, steps=2)
    ways = [{}, {"package": "torch_ref"}, {"device": "gpu"}, {"package": "torch_ref", "device": "gpu"}]
    parts = [run.check(source, str(made[2]), wanted, **way)[0] for way in ways]
    assert parts[0] == part and len(set(parts)) == 4
    words = ("hallucination.py", "detect", f"--detector={made[2]}", f"--model={made[4]}", f"--input={source}")
    done = command(*words, f"--output={wanted.output}", "--backend=torch")
    assert "(7 verdicts, 7 of them now;" in done.stdout, done.stderr


def test_a_run_that_was_stopped_behind_its_first_group_keeps_it(made, judged, tmp_path):
    done, part = judge(made, judged[0] / "rows.jsonl", tmp_path / "verdicts.jsonl", steps=1)
    assert done == [3] and part.read_text().count("\n") == 1


def test_a_run_that_goes_on_replaces_its_own_page_and_no_other_file(made, judged, tmp_path):
    source, output, page = judged[0] / "rows.jsonl", tmp_path / "verdicts.jsonl", tmp_path / "page.html"
    page.write_text("the user's own")
    _, part = judge(made, source, output, steps=2)
    os.utime(page, ns=(0, part.stat().st_mtime_ns - 1))
    with pytest.raises(ValueError, match=f"--page={page} exists"):
        judge(made, source, output, page=str(page))
    os.utime(page, ns=(0, part.stat().st_mtime_ns))  # as a run leaves it that is killed between its outputs
    wanted, detector = (
        run.Outputs.of(output=str(output), page=str(page)),
        detect.HallucinationDetector(made[2], model=made[4]),
    )
    list(run.detect(detector, source, part))
    os.utime(page, ns=(0, part.stat().st_mtime_ns))
    assert list(run.detect(detector, source, part)) == []  # killed once more, before it wrote the page again
    assert run.check(str(source), str(made[2]), wanted)[0] == part
    judge(made, source, output, page=str(page))
    assert "<html" in page.read_text() and not part.exists()


def start(made, source, output, engine, processes):
    """Start a run as a process of its own."""
    script = output.with_name("script.py")
    script.write_text(CODE)
    words = [sys.executable, str(script), str(source), str(output), str(made[2]), made[4], engine, str(processes)]
    environment = shell_environment(PYTHONPATH=str(ROOT), RAY_USAGE_STATS_ENABLED="0")
    return subprocess.Popen(words, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_an_input_that_is_written_anew_meanwhile_gets_no_verdicts_of_its_former_rows(made, tmp_path):
    source, output = write(tmp_path / "in.jsonl", rows(made[0])), tmp_path / "out.jsonl"
    wanted = run.Outputs.of(output=str(output))
    part, _ = run.check(str(source), str(made[2]), wanted)
    found = run.detect(detect.HallucinationDetector(made[2], model=made[4]), source, part)
    next(found)
    other = write(tmp_path / "other.jsonl", [row | {"id": f"other {row['id']}"} for row in rows(made[0])])
    os.replace(other, source)
    with pytest.raises(ValueError, match=r"--input=.*in\.jsonl changed while it was judged"):
        list(found)
    assert not part.exists() and not output.exists()


def test_a_killed_process_leaves_whole_groups(made, judged, tmp_path):
    folder, _ = judged
    source = write(tmp_path / "rows.jsonl", rows(made[0]) * 40)
    output = tmp_path / "verdicts.jsonl"
    process = start(made, source, output, "local", 1)
    assert process.stdout.readline() == "3\n"
    os.kill(process.pid, signal.SIGKILL)
    process.communicate(timeout=60)
    (part,) = tmp_path.glob("*.part")
    kept = part.read_text().count("\n")
    assert kept >= 1 and not output.exists()
    steps, _ = judge(made, source, output)
    assert len(steps) == 160 - kept
    assert output.read_text() == (folder / "verdicts.jsonl").read_text() * 40


def test_two_ray_actors_say_what_one_process_says(made, judged, tmp_path):
    pytest.importorskip("ray")
    folder, _ = judged
    process = start(made, folder / "rows.jsonl", tmp_path / "ray.jsonl", "ray", 2)
    _, errors = process.communicate(timeout=200)
    assert process.returncode == 0, errors
    assert (tmp_path / "ray.jsonl").read_bytes() == (folder / "verdicts.jsonl").read_bytes()


LONG = {
    "response": ({"question": "", "response": "long " * 20}, "response: 100 tokens, and the window of 128 takes 64"),
    "question": ({"question": "why " * 30, "response": "old"}, "context: 132 tokens around it leave no room"),
}


@pytest.mark.parametrize("what", LONG)
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_row_that_is_too_long_is_named_before_the_first_verdict(made, tmp_path, monkeypatch, kind, what):
    change, problem = LONG[what]
    source = write(tmp_path / f"rows.{kind}", [*rows(made[0])[:4], {"context": "a"} | change])
    monkeypatch.setattr(detect.HallucinationDetector, "detect_group", None)  # no row is judged
    place = {"jsonl": "rows.jsonl line 5", "parquet": "rows.parquet row 5"}[kind]
    with pytest.raises(ValueError, match=f"{place}: {problem}"):
        judge(made, source, tmp_path / "verdicts.jsonl")
    assert [path.name for path in tmp_path.iterdir()] == [source.name]


@pytest.mark.parametrize("processes", [1, 2])
def test_a_row_that_cannot_be_judged_is_named_by_every_engine(made, tmp_path, monkeypatch, processes):
    monkeypatch.setattr(run, "check_lengths", lambda detector, source: None)
    content = rows(made[0])[:4] + [{"context": "a", "question": "", "response": "long " * 20}]
    source = write(tmp_path / "rows.jsonl", content)
    with pytest.raises(ValueError, match="row 5: response: 100 tokens, and the window of 128 takes 64"):
        judge(made, source, tmp_path / "verdicts.jsonl", processes=processes)
    if processes == 1:
        source = write(tmp_path / "long.jsonl", content[:3] + [content[0] | {"response": "long " * 20}])
        with pytest.raises(ValueError, match="one of rows 1 to 4: response: 100 tokens"):
            judge(made, source, tmp_path / "long_verdicts.jsonl")
        assert list(tmp_path.glob("long_verdicts*")) == []  # nothing to go on with


def test_long_runs_of_one_prompt_are_several_groups(tmp_path):
    row = {"context": "The mill is old.", "question": "", "response": "It is."}
    source = write(tmp_path / "rows.jsonl", [row] * (run.GROUP_ROWS + 3))
    found = [(group.number, group.first_row, len(group.responses)) for group in run.groups(source)]
    assert found == [(0, 1, run.GROUP_ROWS), (1, run.GROUP_ROWS + 1, 3)]


def test_a_group_waits_for_no_more_rows_than_it_has(tmp_path, monkeypatch):
    taken = []
    row = {"context": "The mill is old.", "question": "", "response": "It is."}

    def endless(path, columns=None):
        for number in range(10**9):
            taken.append(number)
            yield row | {"question": str(number // 3)}

    monkeypatch.setattr(row_files, "rows", endless)
    found = run.groups(tmp_path)
    assert [next(found).first_row, next(found).first_row] == [1, 4] and len(taken) <= 7


def test_an_output_that_appeared_meanwhile_is_not_replaced(made, tmp_path):
    source, output = write(tmp_path / "rows.jsonl", rows(made[0])[:1]), tmp_path / "out.jsonl"
    _, part = judge(made, source, output, steps=1)
    output.write_text("mine")
    detector = detect.HallucinationDetector(made[2], model=made[4])
    with pytest.raises(ValueError, match=r"out\.jsonl exists"):
        run.finish(source, part, run.Outputs.of(output=str(output)), detector)
    assert output.read_text() == "mine" and part.exists()
    with store.alone(output):
        words = (f"--detector={made[2]}", f"--model={made[4]}", f"--input={source}", f"--output={output}")
        refused(command("hallucination.py", "detect", *words, "--overwrite"), f"another process writes {output}; wait")
