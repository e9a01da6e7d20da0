"""The evaluation end to end on a tiny model: killed and resumed, its figures, its report, its refusals."""

import csv
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from jaxbench import config
from jaxbench.pretrained import tokenizer
from jaxbench.watermark.study import (
    evaluate,
    evaluate_data,
    evaluate_figures,
    evaluate_models,
    evaluate_report,
    evaluate_summary,
)
from jaxbench.watermark.study.evaluate_config import Evaluate
from tests.structure import ROOT

SHARED = Path(os.environ.get("JAXBENCH_WATERMARK_DATA", ""))
SMALL = ("generate.prompts=4", "generate.batch_size=4", "detect.human_texts=40", "attacks=[delete:0.1, copy_paste:0.5]")
SCRIPT = """
import sys
from jaxbench import config
from jaxbench.watermark.study import evaluate
from jaxbench.watermark.study.evaluate_config import Evaluate
evaluate.run(config.load(sys.argv[1], sys.argv[3:], Evaluate), sys.argv[2])
"""


def settings(*overrides):
    return config.load(ROOT / "configs/watermark/evaluate-tiny.yaml", (*SMALL, *overrides), Evaluate)


def stages(workdir):
    return {path: path.stat().st_mtime_ns for name in evaluate.FOLDERS for path in (workdir / name).rglob("*.json")}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Return a finished evaluation's folder, its content, and the stages there were when a first run was killed."""
    workdir = tmp_path_factory.mktemp("evaluate")
    path = str(ROOT / "configs/watermark/evaluate-tiny.yaml")
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    first = subprocess.Popen([sys.executable, "-c", SCRIPT, path, str(workdir), *SMALL], env=environment)
    deadline = time.monotonic() + 120
    while not list(workdir.glob("generate/kgw/*.json")) and first.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    first.send_signal(signal.SIGKILL)
    first.wait()
    killed = stages(workdir)
    content = evaluate.run(settings(), workdir)
    return workdir, content, killed


def test_a_killed_run_goes_on_where_it_was(finished):
    workdir, _, killed = finished
    assert any("generate/kgw" in str(path) for path in killed)
    assert not any("spoof/gumbel" in str(path) for path in killed)
    now = stages(workdir)
    assert {path: now[path] for path in killed} == killed
    assert len(now) > len(killed) and not [path for path in workdir.rglob(".*.json.*")]


def test_a_finished_run_computes_nothing_again_and_a_lost_stage_comes_back_the_same(finished):
    workdir, content, _ = finished
    before = stages(workdir)
    lost = [
        workdir / "attack/kgw/delete-10-000.json",
        workdir / "detect/kgw.json",
        workdir / "generate/gumbel/000.json",
    ]
    texts = [path.read_bytes() for path in lost]
    for path in lost:
        path.unlink()
    again = evaluate.run(settings(), workdir)
    now = stages(workdir)
    assert [path.read_bytes() for path in lost] == texts
    assert all(now[path] == stamp for path, stamp in before.items() if path not in lost)
    assert again["summary"] == content["summary"]


def test_the_plan_counts_the_stages(finished):
    workdir, _, _ = finished
    seen = []
    evaluation = evaluate.Evaluation(settings(), workdir, on_stage=lambda name, is_new: seen.append((name, is_new)))
    evaluation.run()
    assert len(seen) == evaluate.num_stages(settings()) == len(set(seen)) and not any(is_new for _, is_new in seen)


def test_marked_text_is_found_and_human_text_is_not(finished):
    for name, own in finished[1]["summary"]["schemes"].items():
        longest = own["lengths"]["100"]
        assert longest["tpr"]["0.001"]["value"] == 1 and longest["auroc"] > 0.99, name
        assert own["tokens_needed"]["0.01"] <= 50
        assert longest["human_fpr"]["0.01"]["value"] < 0.1 and longest["human_fpr"]["0.01"]["keys"] == 2
        assert own["attacks"]["none"]["tpr"]["0.001"]["value"] == 1
        assert own["attacks"]["copy-paste-50-marked"]["word_edits"] == pytest.approx(1, abs=0.02)
        assert 0 < own["attacks"]["delete-10"]["word_edits"] < 0.3
        assert own["spoof"]["guesses"][0]["corrected_p"] > 1e-3
        assert own["spoof"]["longest_copied"] == np.median(own["spoof"]["forged"]["longest_copied"]) > 0


def test_texts_that_continue_one_prompt_have_its_intervals_and_a_line_that_says_so(finished):
    workdir, content, _ = finished
    results = evaluate.Evaluation(settings(), workdir).run()
    assert content["summary"]["num_prompts"] == results["num_prompts"] == 4
    assert "different prompts" not in (workdir / "report.html").read_text()
    fewer = content | {"summary": evaluate_summary.summarize(settings(), results | {"num_prompts": 1})}
    for part, name in (("lengths", "50"), ("attacks", "none"), ("attacks", "delete-10")):
        own, other = (each["summary"]["schemes"]["kgw"][part][name]["tpr"]["0.01"] for each in (content, fewer))
        assert (own["value"], own["count"]) == (other["value"], other["count"]) and other["low"] < own["low"] < 1
    assert "which continue 1 different prompts" in evaluate_report.render(fewer, {})


def test_every_kind_of_stage_has_its_time_once_however_often_it_was_begun(finished):
    workdir, content, _ = finished
    rows = {row["stage"]: row for row in json.loads((workdir / "results.json").read_text())["times"]}
    attacked = ["attack delete-10", "attack copy-paste-50-marked"]
    assert {"generate", *attacked, "detect", "show", "quality, judge", "quality, own model", "end to end"} <= set(rows)
    assert rows["generate"]["texts"] in (4 * 3, 4 * 2), "the killed process may not have written its last line"
    assert rows["attack delete-10"]["texts"] == 4 * 2
    assert rows["detect"]["texts"] == 2 * (4 * 2 + 4 * 3 + 40 * 2)
    whole = rows.pop("end to end")
    assert whole["seconds"] == pytest.approx(sum(row["seconds"] for row in rows.values()))
    assert all(row["texts_per_s"] is None or row["texts_per_s"] > 0 for row in rows.values())
    assert "From end to end" in (workdir / "report.html").read_text()


def test_quality_is_that_of_the_tiny_model(finished):
    summary = finished[1]["summary"]
    assert 500 < summary["unmarked"]["quality"]["perplexity"] < 2000  # nearly uniform over 1,024 words
    assert summary["schemes"]["kgw"]["generation"]["divergence"] > 0.1
    assert summary["schemes"]["gumbel"]["generation"]["divergence"] is None
    assert summary["schemes"]["kgw"]["ending"]["mean_tokens"] <= 100


def test_results_are_strict_json_and_one_line_a_figure(finished):
    workdir, content, _ = finished

    def refuse(name):
        raise ValueError(name)

    stored = json.loads((workdir / "results.json").read_text(), parse_constant=refuse)
    assert stored["environment"].keys() == content["environment"].keys()  # whose load average changes
    varying = {"environment": {}, "times": []}  # of a stage that another test computed again
    assert {**stored, **varying} == {**content, **varying}
    rows = list(csv.DictReader((workdir / "results.csv").read_text().splitlines()))
    assert tuple(rows[0]) == evaluate_summary.CSV_COLUMNS
    found = [row for row in rows if (row["scheme"], row["metric"], row["attack"]) == ("kgw", "tpr", "delete 10 %")]
    assert {row["fpr"] for row in found} == {"0.01", "0.001"}
    assert {row["config_id"] for row in rows} == {content["config_id"]}


def test_two_levels_never_look_alike_in_the_report():
    assert [evaluate_figures.level_text(fpr) for fpr in ("0.01", "0.015", "0.02", 1e-5)] == [
        "1e-02", "1.5e-02", "2e-02", "1e-05"
    ]  # fmt: skip


def test_the_report_opens_offline_and_shows_every_part(finished):
    text = (finished[0] / "report.html").read_text()
    assert "<th>median perplexity</th>" in text and "<th>perplexity</th>" not in text
    own = re.sub(r"<script>/\*.*?</script>|<script>!?function.*?</script>", "", text, count=1, flags=re.DOTALL)
    assert not re.findall(r"""<(?:script|link|img|iframe)[^>]*(?:src|href)\s*=\s*["']?(?:https?:)?//""", text)
    assert "@import" not in own and "fetch(" not in own
    for name in ("tradeoff", "power", "robustness", "quality", "spoofing", "tokens", "settings"):
        assert f'<section id="{name}">' in text
    for chart in ("chart-pareto", "chart-length", "chart-roc", "chart-robustness"):
        assert f'id="{chart}"' in text and f'"{chart}":' in text
    assert finished[1]["config_id"] in text and "Plotly" in text


def test_the_token_view_shades_scored_tokens_and_escapes_them(finished):
    shown = {"kind": "marked", "text": 0, "p_value": 1e-5, "num_scored": 2, "tokens": ["<b>", " a", "&"],
             "shades": [1.0, 0.0, None]}  # fmt: skip
    page = evaluate_report.render(finished[1], {"kgw": [shown]})
    html = page[page.index('<div class="text"><b>marked text 1: ') :].partition("</details>")[0]
    assert "&lt;b&gt;" in html and "<b>, " not in html and html.endswith("&amp;</div>")
    assert html.count("<i ") == 2 and "hsla(140" in html and "hsla(0," in html and "p = 1e-05" in html


def test_pieces_of_a_text_are_the_text_even_within_a_character(monkeypatch):
    own = tokenizer.load_tokenizer()
    text = "A caf\u00e9, \U0001f600 and \u4e16\u754c."
    ids = own.encode(text, add_special=False)
    pieces = evaluate.pieces(own, ids)
    assert "".join(pieces) == text and len(pieces) == len(ids) and "\ufffd" not in "".join(pieces)
    assert " and" in pieces


def test_the_seed_and_a_rows_own_number_decide_which_of_two_keys_marks_a_step():
    seen, made = [], SimpleNamespace(tokens=np.zeros((2, 3), int), lengths=[0, 0])
    end = SimpleNamespace(end_ids=(0,), decode=str)
    parts = SimpleNamespace(key=lambda arm, row: (arm, row), tokenizer=end)
    own = SimpleNamespace(settings=Evaluate(schemes={"a": "gumbel"}, seed=9), parts=parts)
    own.material = SimpleNamespace(prompts=[[row] for row in range(6)])
    processor = SimpleNamespace(state=lambda keys, **how: seen.append((keys, how)))
    evaluate.Evaluation._generate(own, lambda prompts, **how: made, processor, "a", range(4, 6))
    assert seen == [([("a", 4), ("a", 5)], {"seed": 9, "row_ids": [4, 5]})]


def test_another_configuration_in_the_same_folder_is_refused(finished):
    with pytest.raises(ValueError, match="holds the stages of configuration .* --noresume"):
        evaluate.prepare(settings("seed=1"), finished[0])


def test_starting_over_throws_stages_away_and_nothing_else(tmp_path):
    evaluate.prepare(settings(), tmp_path)
    (tmp_path / "generate").mkdir()
    (tmp_path / "generate/x.json").write_text("1")
    (tmp_path / "notes.txt").write_text("mine")
    evaluate.prepare(settings("seed=1"), tmp_path, resume=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["evaluate.json", "notes.txt"]


# Data


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "tiny"
    evaluate_models.make_tiny(folder)
    return tokenizer.load_tokenizer(folder)


SIZES = {"prompts": 3, "prompt_tokens": 5, "natural_tokens": 20, "human_texts": 4}


def write_folder(folder, prompts, documents):
    (folder / "some_prompts.json").write_text(json.dumps(prompts))
    (folder / "some_documents.json").write_text(json.dumps(documents))


def test_a_folder_gives_prompts_continuations_and_documents(tmp_path, words):
    prompts = [{"prompt": "the name of the object is a list", "natural_text": f"and so on {i}"} for i in range(4)]
    write_folder(tmp_path, prompts, [{"text": f"the value {i}"} for i in range(9)])
    found = evaluate_data.load(str(tmp_path), words, **SIZES)
    assert found.prompts == [words.encode("of the object is a list")[-5:]] * 3
    assert found.natural == ["and so on 0", "and so on 1", "and so on 2"] and len(found.human) == 4
    assert found.sha256 == evaluate_data.fingerprint(str(tmp_path))
    (tmp_path / "some_documents.json").write_text(json.dumps([{"text": "other"}]))
    assert found.sha256 != evaluate_data.fingerprint(str(tmp_path))


def test_running_text_is_cut_into_prompts_and_what_follows(words):
    found = evaluate_data.load(None, words, **SIZES)
    assert [len(ids) for ids in found.prompts] == [5] * 3 and len(found.human) == 4
    assert all(len(words.encode(text)) <= 20 for text in found.natural) and all(found.natural)


@pytest.mark.parametrize(
    ("prompts", "documents", "message"),
    [
        ([{"prompt": "a", "natural_text": "b"}], [{"text": "c"}], "has 1 prompts, 3 are wanted"),
        ([{"prompt": "a"}] * 3, [{"text": "c"}], "entry 0 has no 'natural_text' string"),
        ([{"prompt": "", "natural_text": "b"}] * 3, [{"text": "c"}], "entry 0 has an empty prompt"),
        ({}, [{"text": "c"}], "wanted a list"),
    ],
)
def test_wrong_data_are_refused_with_file_and_entry(tmp_path, words, prompts, documents, message):
    write_folder(tmp_path, prompts, documents)
    with pytest.raises(ValueError, match=message):
        evaluate_data.load(str(tmp_path), words, **SIZES)


def test_missing_data_are_refused(tmp_path, words):
    with pytest.raises(ValueError, match=r"must have one file \*prompts\*.json, it has none"):
        evaluate_data.load(str(tmp_path), words, **SIZES)
    with pytest.raises(ValueError, match="neither a file nor a folder"):
        evaluate_data.fingerprint(str(tmp_path / "nothing"))


@pytest.mark.skipif(
    not SHARED.is_dir() or not SHARED.name, reason="JAXBENCH_WATERMARK_DATA names no folder of C4 texts"
)
def test_the_c4_folder_has_enough_prompts_and_documents():
    found = evaluate_data.load(str(SHARED), tokenizer.load_tokenizer(), prompts=100, prompt_tokens=32,
                               natural_tokens=200, human_texts=1000)  # fmt: skip
    assert len(found.prompts) == 100 and len(found.human) == 1000
    assert np.mean([len(ids) for ids in found.prompts]) > 30
