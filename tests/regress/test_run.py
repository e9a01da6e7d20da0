"""Runs end to end on random weights: a planted slow-down is found, a broken base is left out, runs go on."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from jaxbench import initial, process_environment
from jaxbench.measure import environment
from jaxbench.pretrained import weights
from jaxbench.regress import case_series, judge, pairs, run, tiny, trees
from jaxbench.regress.pairs import BASE, HEAD, Launches, Plan
from jaxbench.regress.suite import Suite

DECODE = {"name": "decode", "workload": "generation", "prompt_tokens": 16, "new_tokens": 6}
WORDS = {"name": "words", "workload": "tokenizing", "characters": 2000}
SUITE = Suite(
    model="tiny", cases=[DECODE, WORDS], looks=[2], rounds=2, sample_s=0.05, confirm=0, threads=1,
    requires={"memory_bytes": 0},
)  # fmt: skip
PAIRS = 4  # launches with three degrees of freedom: a busy machine's spread leaves a primary's ratio of 100 decided
SLOWER_S = 0.02  # a token of the slow head; without, 0.2 ms
DECODE_HEAD = "    def decode(self, state: DecodeState, max_new_tokens: int) -> DecodeState:\n"


def changed_tree(folder: Path, file: str, before: str, after: str) -> trees.Tree:
    """A copy of this tree with one change."""
    shutil.copytree(trees.ROOT / "jaxbench", folder / "jaxbench", ignore=shutil.ignore_patterns("__pycache__"))
    path = folder / file
    text = path.read_text(encoding="utf-8")
    assert text.count(before) == 1
    path.write_text(text.replace(before, after), encoding="utf-8")
    return trees.Tree(folder, Path(sys.executable), "changed", "")


def plan_of(tmp_path: Path, **sides: trees.Tree) -> Plan:
    tiny.save(tmp_path / "tiny")
    return Plan(SUITE, str(tmp_path / "tiny"), sides, "cpu", 1, tmp_path / "work")


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """A head whose every token takes 20 ms longer, beside this tree."""
    folder = tmp_path_factory.mktemp("compared")
    slow = DECODE_HEAD.rstrip("\n") + f"  # slow\n        import time\n\n        time.sleep({SLOWER_S})\n"
    head = changed_tree(folder / "head", "jaxbench/sample.py", DECODE_HEAD, slow)
    plan, said = plan_of(folder, base=trees.here(), head=head), []
    launches = Launches(plan, said.append)
    launches.until(PAIRS)
    return plan, launches, said


def findings(plan):
    return {each.series: each for each in judge.judge(pairs.pairs_of(plan.workdir / pairs.SAMPLES), plan.suite)}


def test_a_planted_slow_down_is_found_where_it_is_and_counts_stay(compared):
    found = findings(compared[0])
    assert not compared[1].lost
    assert found["decode.tokens_per_s"].level == "critical" and found["decode.tokens_per_s"].worse > 2
    # Its alpha is a twentieth of a primary's, so that a busy machine's spread may leave it open (test_judge.py has the
    # verdicts): that the planted time arrives in it is certain, since nobody sleeps for less.
    assert found["decode.token_p50_s"].head >= SLOWER_S and found["decode.token_p50_s"].verdict != "improvement"
    exact = [each for name, each in found.items() if name.startswith("decode.") and each.low == each.high]
    assert len(exact) > 10 and {each.verdict for each in exact} == {"no change"}
    assert found["words.tokens_per_s"].level != "critical"


def test_finished_launches_are_not_made_again_and_one_that_was_cut_off_is(compared, tmp_path):
    plan, _, said = compared
    count = len(said)
    again = Launches(plan, said.append)
    again.until(PAIRS)
    assert len(said) == count and again.finished() == PAIRS
    path = tmp_path / pairs.SAMPLES
    rows = (plan.workdir / pairs.SAMPLES).read_text().splitlines(keepends=True)
    path.write_text("".join(rows[:-1])[:-10])
    assert Launches(plan._replace(workdir=tmp_path), said.append).finished() == PAIRS - 1
    path.write_text("{}\n")
    with pytest.raises(ValueError, match=r"samples.jsonl line 1 is no row of samples"):
        list(pairs.read(path))


def test_a_base_that_lacks_something_loses_that_case_and_the_rest_goes_on(tmp_path):
    base = changed_tree(tmp_path / "base", "jaxbench/sample.py", "    def compile(\n", "    def compile_before(\n")
    launches = Launches(plan_of(tmp_path, base=base, head=trees.here()), lambda text: None)
    launches.until(1)
    assert list(launches.lost) == [(BASE, "decode")] and "has no attribute 'compile'" in launches.lost[BASE, "decode"]
    medians = pairs.launch_medians(tmp_path / "work" / pairs.SAMPLES)
    assert set(medians["decode.tokens_per_s"]) == {HEAD} and set(medians["words.tokens_per_s"]) == {BASE, HEAD}


def test_a_count_that_head_has_no_longer_is_named(compared, tmp_path):
    plan = compared[0]._replace(workdir=tmp_path)
    rows = (compared[0].workdir / pairs.SAMPLES).read_text().splitlines(keepends=True)
    kept = [row for row in rows if not ('"head"' in row and ("decode.prefill.flops" in row or "decode.load_s" in row))]
    (tmp_path / pairs.SAMPLES).write_text("".join(kept))
    assert run._gone(compared[0], None) == [] and run._gone(plan, None) == ["decode.prefill.flops"]


def test_a_count_that_is_not_the_same_in_every_launch_is_named():
    """Programs that one launch of three compiles under the clock are not in the median."""
    counts = {BASE: {1: 0.0, 2: 0.0, 3: 0.0}, HEAD: {1: 0.0, 2: 2.0, 3: 0.0}}
    [said] = run._unequal({"decode.recompilations": counts, "decode.load_s": counts})
    assert said == "decode.recompilations of head is not the same in every launch (0, 2, 0); its median is judged"


def test_a_base_that_cannot_be_imported_is_left_out_and_a_head_is_refused(tmp_path):
    broken = changed_tree(tmp_path / "base", "jaxbench/sample.py", "from __future__ import annotations\n", "broken\n")
    launches = Launches(plan_of(tmp_path, base=broken, head=trees.here()), lambda text: None)
    launches.until(1)
    assert list(launches.lost) == [(BASE, "start")] and "'broken' is not defined" in launches.lost[BASE, "start"]
    assert set(pairs.launch_medians(tmp_path / "work" / pairs.SAMPLES)["words.tokens_per_s"]) == {HEAD}
    with pytest.raises(ValueError, match="this tree cannot be imported: head: start: NameError"):
        Launches(plan_of(tmp_path / "other", head=broken), lambda text: None).until(1)


def test_each_side_starts_with_the_variables_that_its_own_commit_sets_beside_the_users(tmp_path, monkeypatch):
    before, after = '"MALLOC_TRIM_THRESHOLD_": MALLOC_BYTES,', '"MALLOC_TRIM_THRESHOLD_": "12345",'
    base = changed_tree(tmp_path / "base", "jaxbench/process_environment.py", before, after)
    set_here = {**process_environment.environment("cpu"), "MALLOC_MMAP_THRESHOLD_": "1000"}  # the second by the user
    for name, value in set_here.items():
        monkeypatch.setenv(name, value)
    theirs = dict.fromkeys(set_here) | {"MALLOC_MMAP_THRESHOLD_": "1000"}
    monkeypatch.setenv(process_environment.INHERITED, json.dumps(theirs))
    old, new = base.environment("cpu", 1), trees.here().environment("cpu", 1)
    names = {name for name in old.keys() | new.keys() if old.get(name) != new.get(name)}
    assert names == {"PYTHONPATH", "MALLOC_TRIM_THRESHOLD_"} and old["MALLOC_TRIM_THRESHOLD_"] == "12345"
    assert old["MALLOC_MMAP_THRESHOLD_"] == new["MALLOC_MMAP_THRESHOLD_"] == "1000"
    plan = plan_of(tmp_path, base=base, head=trees.here())
    (said,) = run._variables(plan)
    assert said.endswith("other variables: MALLOC_TRIM_THRESHOLD_ 12345 -> 8589934592")
    assert run._variables(plan._replace(sides={BASE: trees.here(), HEAD: trees.here()})) == []
    (tmp_path / "base" / "jaxbench" / "measure" / "process.py").unlink()  # a commit from before it
    assert base.environment("cpu", 1)["MALLOC_TRIM_THRESHOLD_"] == "8589934592"
    (said,) = run._variables(plan)
    assert said == "base cannot report the environment variables that it sets; it starts with this version's"


def test_every_kind_of_case_runs(tmp_path):
    kinds = [
        {"name": "marked", "workload": "generation", "watermark": "kgw", "prompt_tokens": 16, "new_tokens": 3},
        {"name": "detect", "workload": "detection", "batch": 2, "tokens": 16, "marked": 2, "marked_tokens": 4},
        {"name": "train", "workload": "training", "batch": 1, "seq_len": 8, "num_layers": 1},
        {"name": "bits", "workload": "quality", "windows": 1, "seq_len": 16},
        {"name": "answers", "workload": "answers"},  # of the second file of cases; the others: test_workload_cases.py
    ]
    suite = Suite(**SUITE.model_dump() | {"cases": kinds})
    launches = Launches(plan_of(tmp_path, head=trees.here())._replace(suite=suite), lambda text: None)
    launches.until(1)
    assert launches.lost == {}
    medians = pairs.launch_medians(tmp_path / "work" / pairs.SAMPLES)
    measured = {*(f"{kind['name']}.tokens_per_s" for kind in kinds[:3]), "bits.bits_per_byte", "answers.answer_nll"}
    measured |= {"detect.detection_rate", "marked.decode.flops"} | {f"{kind['name']}.utilisation" for kind in kinds}
    assert measured <= medians.keys()
    for series in medians:  # the suite knows every series that is measured
        case_series.check(series, {case.name: case for case in suite.cases}, key=series)


def test_a_compression_runs_on_the_default_model(tmp_path):
    case = {"name": "compress", "workload": "compression", "tokens": 100}
    suite = Suite(**SUITE.model_dump() | {"cases": [case]})
    plan = plan_of(tmp_path, head=trees.here())._replace(suite=suite, model=None)
    launches = Launches(plan, lambda text: None)
    launches.until(1)
    assert launches.lost == {}
    found = pairs.launch_medians(tmp_path / "work" / pairs.SAMPLES)
    assert found["compress.tokens_per_s"] and 7.5 < found["compress.tokens_per_vector"][HEAD][1] <= 8
    for series in found:
        case_series.check(series, {case.name: case for case in suite.cases}, key=series)


def test_a_run_without_a_base_is_recorded_and_another_suites_folder_refused(tmp_path):
    suite = SUITE.model_copy(update={"cases": SUITE.cases[1:]})
    found = run.run_suite(suite, compare_with=None, device="cpu", workdir=tmp_path, say=lambda text: None)
    assert found.findings == [] and found.record["launches"] == 2
    assert found.record["series"]["words.tokens_per_s"][HEAD]["median"] > 0
    assert json.loads((tmp_path / run.RECORD).read_text()) == json.loads(json.dumps(found.record))
    own = found.record["series"]["words.recompilations"][HEAD]
    stored = found.record | {"series": found.record["series"] | {"words.recompilations": {HEAD: own}}}
    context = run.Context(stored=stored)
    beside = run.run_suite(
        suite, compare_with=None, device="cpu", workdir=tmp_path, context=context, say=lambda text: None
    )
    assert [each.series for each in beside.findings] == ["words.executables", "words.recompilations"]
    assert beside.record["gone"] == []
    more = {
        "words.step.flops": {HEAD: own},
        "words.tokens_of_another_tool": {HEAD: own},
    }
    more = stored | {"series": stored["series"] | more | {"decode.step.flops": {HEAD: own}}}
    context = run.Context(stored=more, stored_id="20261126T201617Z-7c0c7674")
    lacking = run.run_suite(
        suite, compare_with=None, device="cpu", workdir=tmp_path, context=context, say=lambda text: None
    )
    assert lacking.record["gone"] == ["words.step.flops"] and beside.record["notes"] == []
    assert lacking.record["notes"][0].startswith("the base is run 20261126T201617Z-7c0c7674 of the history: what is")
    for commit, again in (
        ("abc123abc123", "; for times, --compare_with=abc123abc123 measures it again"),
        ("abc1+", ""),
    ):
        said = run._no_times("r", {"sides": {HEAD: {"commit": commit}}})
        assert said == f"the base is run r of the history: what is counted is compared, no times{again}"
    assert "not compared, because head has them no longer: words.step.flops" in lacking.record["notes"]
    changed = {**stored["suite"], "cases": [stored["suite"]["cases"][0] | {"characters": 999}]}
    threads, plan = {**stored["machine"], "threads": 7}, run.planned(suite, {HEAD: trees.here()}, "cpu", tmp_path)
    for change, words in [
        ({"suite": changed}, "not compared, because case or model differ in the run beside it: words"),
        ({"model_sha256": "another"}, "not compared, because case or model differ in the run beside it: words"),
        (
            {"machine": threads},
            "nothing is compared: the run beside it was on cpu with 7 threads, this one on cpu with 1",
        ),
        ({"device": "gpu"}, "nothing is compared: the run beside it was on gpu with 1 threads"),
    ]:
        findings, [note] = run._beside_stored(plan, stored | change)
        assert findings == [] and note.startswith(words)
    older = {**stored["machine"], "versions": stored["machine"]["versions"] | {"jax": "0.1"}}
    findings, [note] = run._beside_stored(plan, stored | {"machine": older})
    assert len(findings) == 2 and note.startswith("packages differ from those of the run beside it: jax 0.1 -> ")
    findings, [note] = run._beside_stored(plan, stored | {"case_code": "00000000"})
    assert len(findings) == 2 and note.startswith("the run beside it ran another code of the cases")
    with pytest.raises(ValueError, match="holds the work of configuration"):
        run.run_suite(
            suite.model_copy(update={"rounds": 3}), compare_with=None, device="cpu", workdir=tmp_path,
            say=lambda text: None,
        )  # fmt: skip


@pytest.mark.parametrize("changed", ["packages", "threads", "weights"])
def test_launches_of_other_packages_threads_or_weights_are_not_continued(tmp_path, monkeypatch, changed):
    tiny.save(tmp_path / "model")
    suite = SUITE.model_copy(update={"model": str(tmp_path / "model"), "threads": None})
    for _ in range(2):
        run.planned(suite, {HEAD: trees.here()}, "cpu", tmp_path / "work")
    if changed == "packages":
        versions = environment.versions() | {"jax": "0.1"}
        monkeypatch.setattr(environment, "versions", lambda: versions)
    elif changed == "threads":
        monkeypatch.setattr(environment, "usable_cores", lambda: 77)
    else:
        shutil.rmtree(tmp_path / "model")
        params = initial.initial_params(tiny.SHAPE, 1)
        weights.save_checkpoint(tmp_path / "model", tiny.SHAPE, params, tokenizer=tiny.TOKENIZER)
    with pytest.raises(ValueError, match="holds the work of configuration"):
        run.planned(suite, {HEAD: trees.here()}, "cpu", tmp_path / "work")


def test_a_run_that_has_ended_is_followed_by_one_of_its_own(tmp_path):
    assert run.unfinished(tmp_path, "quick-1") == tmp_path / "quick-1"
    for name in ("quick-1", "quick-1-2"):
        (tmp_path / name).mkdir()
        assert run.unfinished(tmp_path, "quick-1") == tmp_path / name
        (tmp_path / name / run.RECORD).touch()
    assert run.unfinished(tmp_path, "quick-1") == tmp_path / "quick-1-3"


def test_a_model_of_a_relative_path_is_found_from_a_workers_own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plan = run.planned(SUITE, {HEAD: trees.here()}, "cpu", Path("w"))
    assert plan.model == str(tmp_path / "w" / "tiny") and Path(plan.model).is_dir()
    named = SUITE.model_copy(update={"model": "w/tiny"})
    assert run.planned(named, {HEAD: trees.here()}, "cpu", Path("v")).model == plan.model


def test_two_model_folders_of_one_shape_are_two_series(tmp_path):
    plan = plan_of(tmp_path, head=trees.here())
    other = tmp_path / "other"
    shutil.copytree(plan.model, other)
    same, text = run._model_sha256(plan._replace(model=str(other))), (other / "config.json").read_text()
    assert len(same) == 64 and same == run._model_sha256(plan)
    (other / "config.json").write_text(text + " ")
    assert run._model_sha256(plan._replace(model=str(other))) != same


def test_what_a_machine_lacks_is_said_before_anything_runs(tmp_path):
    for needs, words in (({"memory_bytes": 2**60}, "are free here"), ({"device": "tpu"}, "pass --device=tpu")):
        suite = Suite(**SUITE.model_dump() | {"requires": needs})
        with pytest.raises(ValueError, match=words):
            run.run_suite(suite, compare_with=None, device="cpu", workdir=tmp_path / "w", say=lambda text: None)
    assert not (tmp_path / "w").exists()


def test_a_look_that_would_pass_the_time_limit_is_left_out_and_said():
    limited = Suite(**SUITE.model_dump() | {"looks": [2, 4], "requires": {"memory_bytes": 0, "time_s": 10}})
    assert run._late(limited, 2, 0, 0.0, 2) == "" and run._late(limited, 4, 2, 4.0, 4) == ""
    assert "the look after 4 launches is left out: 2 took 6 s" in run._late(limited, 4, 2, 6.0, 4)
    assert run._late(limited, 4, 0, 0.0, 0) == ""  # a run that goes on, all of whose launches are there
    assert run._late(SUITE.model_copy(update={"looks": (2, 4)}), 4, 2, 1e6, 4) == ""


@pytest.mark.skipif(not (trees.ROOT / ".git").exists(), reason="a copy without git")
def test_a_commit_becomes_a_worktree_and_an_unknown_one_is_named(tmp_path):
    half = tmp_path / "trees" / trees.resolved("HEAD")[:12] / "jaxbench"
    half.mkdir(parents=True)
    (half / "a.py").touch()
    tree = trees.of_commit("HEAD", tmp_path / "trees")
    assert not (half / "a.py").exists()
    try:
        assert (tree.root / "jaxbench" / "sample.py").is_file() and tree.python == Path(sys.executable)
        assert trees.of_commit("HEAD", tmp_path / "trees") == tree
    finally:
        trees.remove(tree)
    assert not tree.root.exists()
    with pytest.raises(ValueError, match="--compare_with=no-such: git knows no such commit"):
        trees.of_commit("no-such", tmp_path / "trees")


@pytest.mark.skipif(not (trees.ROOT / ".git").exists(), reason="a copy without git")
def test_two_runs_that_make_the_worktree_of_one_commit_at_once_share_a_whole_one(tmp_path):
    code = (
        "import sys; from pathlib import Path; from jaxbench.regress import trees\n"
        "tree = trees.of_commit('HEAD', Path(sys.argv[1]))\n"
        "print(tree.root, trees._git('-C', str(tree.root), 'status', '--porcelain'))"
    )
    command, variables = [sys.executable, "-c", code, str(tmp_path)], os.environ | {"PYTHONPATH": str(trees.ROOT)}
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=variables) for _ in range(2)]
    said = [each.communicate(timeout=120)[0].strip() for each in both]
    root = tmp_path / trees.resolved("HEAD")[:12]
    try:
        assert said == [str(root)] * 2  # and git finds no file changed or missing
    finally:
        trees._git("worktree", "remove", "--force", str(root))


@pytest.mark.skipif(not (trees.ROOT / ".git").exists(), reason="a copy without git")
def test_a_checkout_that_was_killed_is_made_again(tmp_path, monkeypatch):
    git = trees._git

    def killed(*arguments):
        if arguments[:2] != ("worktree", "add"):
            return git(*arguments)
        Path(arguments[-2]).mkdir(parents=True)
        (Path(arguments[-2]) / "pyproject.toml").touch()
        raise KeyboardInterrupt

    monkeypatch.setattr(trees, "_git", killed)
    with pytest.raises(KeyboardInterrupt):
        trees.of_commit("HEAD", tmp_path)
    monkeypatch.setattr(trees, "_git", git)
    tree = trees.of_commit("HEAD", tmp_path)
    try:
        assert (tree.root / "jaxbench" / "sample.py").is_file()
    finally:
        trees.remove(tree)


@pytest.mark.skipif(not (trees.ROOT / ".git").exists(), reason="a copy without git")
def test_a_commit_whose_packages_cannot_be_installed_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(trees, "_pins", lambda root: str(root))
    tree = tmp_path / "trees" / trees.resolved("HEAD")[:12]
    tree.mkdir(parents=True)
    (tree / "pyproject.toml").touch()
    with pytest.raises(trees.NotBuilt, match="pins other packages and has no .ci/environment"):
        trees.of_commit("HEAD", tmp_path / "trees")
    (tree / ".ci").mkdir()
    (tree / ".ci" / "environment").write_text("#!/bin/sh\necho no network >&2\nexit 3\n")
    (tree / ".ci" / "environment").chmod(0o755)
    with pytest.raises(trees.NotBuilt, match=r"its packages cannot be installed \(no network\)"):
        trees.of_commit("HEAD", tmp_path / "trees")
