"""The workflows: least permissions, pinned actions, nothing interpolated into a shell, commands that exist."""

import re
import subprocess
import sys
import typing

import pytest
import yaml

from jaxbench import config
from jaxbench.regress.alert_config import Alerts, AnyChannel, QuietHours
from jaxbench.regress.suite import AnyCase, Requires, Suite
from tests.structure import ROOT
from tests.test_cli import shell_environment

FILES = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
PINNED = re.compile(r"[\w.-]+/[\w./-]+@[0-9a-f]{40}")
NIGHTLY, PERFORMANCE = (ROOT / ".github" / "workflows" / f"{name}.yml" for name in ("nightly", "performance"))
CALL = re.compile(r"experiments/benchmarks\.py (run|history \w+|alerts \w+)((?:[ \\\n]+(?:--\S+|\"\$\{\w+\[@\]\}\"))*)")


def workflow(path) -> dict:
    """Return a workflow; YAML 1.1 reads its key `on` as true."""
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def steps(path) -> list[dict]:
    """Return the steps of all jobs of a workflow."""
    return [step for job in workflow(path)["jobs"].values() for step in job["steps"]]


def test_the_workflows_are_those_of_tests_pull_requests_nights_and_mornings():
    assert [path.stem for path in FILES] == ["alerts", "nightly", "performance", "tests"]
    assert "pull_request" in workflow(PERFORMANCE)[True] and "pull_request_target" not in workflow(PERFORMANCE)[True]
    for path in FILES[:2]:
        [daily] = workflow(path)[True]["schedule"]
        assert re.fullmatch(r"\d+ \d+ \* \* \*", daily["cron"])


def test_what_sends_alerts_has_every_secret_that_a_channel_may_name():
    """A night that cannot reach its channels would end before it measures."""
    files = (config.load(path, (), Alerts) for path in (ROOT / "configs/alerts").glob("*.yaml"))
    wanted = {name for file in files for channel in file.channels for name in channel.secrets()}
    assert "JAXBENCH_WEBHOOK_URL" in wanted
    for path in FILES[:2]:
        [environment] = [step["env"] for step in steps(path) if "ALERTS" in step.get("env", {})]
        assert wanted <= environment.keys(), path.stem


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_workflow_may_read_and_no_more_and_its_jobs_end(path):
    made = workflow(path)
    assert made["permissions"] == {"contents": "read"}
    for job in made["jobs"].values():
        assert "permissions" not in job and job["timeout-minutes"] <= 360 and job["runs-on"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_actions_are_pinned_with_their_version_beside_and_keep_no_credentials(path):
    used = [step["uses"] for step in steps(path) if "uses" in step]
    assert used and [name for name in used if not PINNED.fullmatch(name)] == []
    lines = [line for line in path.read_text().splitlines() if "uses:" in line]
    assert [line for line in lines if not re.search(r"@[0-9a-f]{40} # v\d+\.\d+\.\d+$", line)] == []
    checkouts = [step for step in steps(path) if step.get("uses", "").startswith("actions/checkout@")]
    assert checkouts and all(step["with"]["persist-credentials"] is False for step in checkouts)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_no_expression_reaches_a_shell(path):
    assert [step["run"] for step in steps(path) if "${{" in step.get("run", "")] == []


@pytest.mark.parametrize("path", [NIGHTLY, PERFORMANCE], ids=lambda path: path.stem)
def test_what_compares_commits_has_the_whole_history(path):
    [checkout] = [step for step in steps(path) if step.get("uses", "").startswith("actions/checkout@")]
    assert checkout["with"]["fetch-depth"] == 0


def test_the_commands_of_the_workflows_and_their_flags_exist():
    calls: dict[str, set[str]] = {}
    for path in FILES[:3]:
        for step in steps(path):
            for command, given in CALL.findall(step.get("run", "")):
                calls.setdefault(command, set()).update(re.findall(r"--(\w+)", given))
    assert calls.keys() == {"run", "history prune", "history verify", "history backup", "alerts send"}
    assert {"suite", "compare_with", "alerts", "history", "detailed_report"} <= calls["run"]
    for command, names in calls.items():
        words = [sys.executable, "experiments/benchmarks.py", *command.split(), "--help"]
        done = subprocess.run(words, cwd=ROOT, env=shell_environment(), capture_output=True, text=True, timeout=120)
        known = set(re.findall(r"--(?:\[no\])?(\w+)", done.stdout))
        assert done.returncode == 0 and names <= known, (command, names - known)


def test_a_configuration_of_alerts_is_tried_by_the_command_at_its_head():
    for path in sorted((ROOT / "configs" / "alerts").glob("*.yaml")):
        commands = re.findall(r"experiments/benchmarks\.py (alerts try[^,\n]*|run[^,\n]*)", path.read_text())
        assert f"--alerts={path.stem}" in commands[0], (path.name, commands)
    words = [sys.executable, "experiments/benchmarks.py", "alerts", "try", "--alerts=team"]
    named = ("JAXBENCH_", "GITHUB_")  # what its channels ask for, which may be set here
    variables = {name: value for name, value in shell_environment().items() if not name.startswith(named)}
    done = subprocess.run(words, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "JAXBENCH_WEBHOOK_URL" in done.stderr


def test_the_page_names_every_key_of_a_suite_of_its_cases_and_of_alerts():
    text = (ROOT / "docs" / "performance_history.md").read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if line.startswith("|") or line.startswith("Keys of such a file")]
    named = set(re.findall(r"\w+", " ".join(re.findall(r"`([^`]*)`", "\n".join(rows)))))
    kinds = [Suite, Alerts, QuietHours, Requires, *typing.get_args(typing.get_args(AnyCase)[0])]
    kinds += typing.get_args(typing.get_args(AnyChannel)[0])
    assert {name for kind in kinds for name in kind.model_fields} - named == set()
    words = {field.annotation for kind in kinds for name, field in kind.model_fields.items() if name == "workload"}
    assert {typing.get_args(word)[0] for word in words} <= named


def test_the_suites_and_the_alerts_of_the_workflows_are_there():
    [night] = workflow(NIGHTLY)["jobs"].values()
    text = NIGHTLY.read_text() + PERFORMANCE.read_text()
    suites = {night["env"]["SUITE"], *re.findall(r"--suite=(\w+)", text)}
    assert [name for name in suites if not (ROOT / "configs" / "benchmarks" / f"{name}.yaml").is_file()] == []
    [alerts] = re.findall(r"PERFORMANCE_ALERTS \|\| '(\w+)'", text)
    assert (ROOT / "configs" / "alerts" / f"{alerts}.yaml").is_file()


def test_every_hook_runs_a_command_of_this_repository():
    made = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))
    hooks = {hook["id"]: hook for repository in made["repos"] for hook in repository["hooks"]}
    assert all(repository["repo"] == "local" for repository in made["repos"])
    assert {"counts", "parity", "zizmor", "workflow-schema"} <= hooks.keys()
    assert {name for name, hook in hooks.items() if hook.get("stages") == ["pre-push"]} == {"counts", "parity"}
    assert made["default_install_hook_types"] == ["pre-commit", "pre-push"]
    pinned = [line for hook in hooks.values() for line in hook.get("additional_dependencies", ())]
    assert pinned and all(line.count("==") == 1 for line in pinned)
