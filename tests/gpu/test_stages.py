"""Stages of configs/gpu: what a command line becomes, and what of a file is refused."""

import importlib.util
import os
import re
import shlex
import subprocess
import sys

import pydantic
import pytest

from jaxbench import config
from jaxbench.gpu import stages
from jaxbench.gpu.stages import Stage, Stages
from tests.structure import ROOT

ALWAYS_SMALL = ("proof_packed", "compressor_packed")
FILES = sorted((ROOT / "configs" / "gpu").glob("*.yaml"))


def stage(name="a", command="python -V", **fields):
    return Stage(name=name, about="x", command=command, limit_s=1, **fields)


def words(each, is_rehearsal=False, device="gpu"):
    return each.words(work="/w", device=device, is_rehearsal=is_rehearsal, python="/py")


def test_a_command_is_split_as_a_shell_does_and_its_places_are_filled():
    each = stage(command="python -c 'print(1, 2)' --at={work}/x --on={device}")
    assert words(each) == ["/py", "-c", "print(1, 2)", "--at=/w/x", "--on=gpu"]


def test_a_place_with_blanks_stays_one_word():
    each = stage(command="ls {work}")
    assert each.words(work="/a b", device="gpu", is_rehearsal=False, python="/py") == ["ls", "/a b"]


def test_only_a_first_word_python_becomes_this_python():
    assert words(stage(command="sh -c python")) == ["sh", "-c", "python"]
    assert words(stage(command="python python")) == ["/py", "python"]


def test_a_rehearsal_puts_its_words_behind_the_command():
    each = stage(command="ls -a", rehearsal="-b {device}")
    assert words(each) == ["ls", "-a"]
    assert words(each, is_rehearsal=True, device="cpu") == ["ls", "-a", "-b", "cpu"]


def test_double_braces_are_braces():
    assert words(stage(command="echo '{{1: {device}}}'")) == ["echo", "{1: gpu}"]


def test_settings_of_the_environment_have_their_places_filled():
    each = stage(environment={"FLAGS": "--to={work}", "ON": "{device}", "PLAIN": "1"})
    assert each.settings(work="/w", device="cpu") == {"FLAGS": "--to=/w", "ON": "cpu", "PLAIN": "1"}


@pytest.mark.parametrize("place", ["{wrok}", "{}", "{0}", "{work", "work}", "{work.x}", "{work[x]}", "{device!z}"])
@pytest.mark.parametrize("field", ["command", "rehearsal", "environment"])
def test_a_file_with_an_unknown_place_in_braces_is_refused(field, place):
    fields = {"environment": {"A": place}} if field == "environment" else {field: f"ls {place}"}
    each = stage("odd", **fields)
    with pytest.raises(pydantic.ValidationError, match=r"stage odd: .*\{work\}, \{device\} and \{data\} are known"):
        Stages(stages=(stage(), each))


@pytest.mark.parametrize("name", ["", "a/b", "../a", ".hidden"])
def test_a_returned_file_lies_in_the_stages_own_folder(name):
    with pytest.raises(pydantic.ValidationError, match="is no name of a file of its folder"):
        Stages(stages=(stage(returned=(name,)),))


@pytest.mark.parametrize(("command", "reason"), [("", "has no words"), ("  ", "has no words"), ("ls 'a", "No closing")])
def test_a_file_with_a_command_that_is_none_is_refused(command, reason):
    with pytest.raises(pydantic.ValidationError, match=f"stage odd: .*{reason}"):
        Stages(stages=(stage("odd", command),))


def test_a_name_that_stands_twice_is_refused():
    with pytest.raises(pydantic.ValidationError, match="a name stands twice among a, b, a"):
        Stages(stages=(stage("a"), stage("b"), stage("a")))


def test_a_file_without_stages_is_refused():
    with pytest.raises(pydantic.ValidationError, match="at least 1"):
        Stages(stages=())


@pytest.mark.parametrize("name", ["", "A", "a-b", "a/b", "..", "a b"])
def test_a_name_that_is_no_folder_of_its_own_is_refused(name):
    with pytest.raises(pydantic.ValidationError, match="name"):
        stage(name)


def test_chosen_stages_keep_the_order_of_the_file():
    found = Stages(stages=tuple(map(stage, "dbca")))
    assert [each.name for each in found.chosen(None)] == ["d", "b", "c", "a"]
    assert [each.name for each in found.chosen(["a", "c", "d"])] == ["d", "c", "a"]
    assert [each.name for each in found.chosen(["a", "b", "a"])] == ["b", "a"]


@pytest.mark.parametrize(("names", "named"), [(["a", "z"], "'z'"), (["A"], "'A'"), ([""], "''"), ([], "''")])
def test_an_unknown_name_is_refused_with_the_known_ones(names, named):
    found = Stages(stages=(stage("a"), stage("b")))
    with pytest.raises(ValueError, match=f"--stage={named} is unknown, wanted some of a, b"):
        found.chosen(names)


def test_missing_packages_are_listed_in_their_order():
    wanted = ("no-such-package", "numpy", "no.such.module", "orbax-checkpoint", "", "rich")
    assert stages.missing(wanted) == ["no-such-package", "no.such.module", ""]
    assert stage(needs=wanted).missing() == ["no-such-package", "no.such.module", ""]
    assert stages.missing(()) == []


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_stage_of_the_files_names_scripts_and_configurations_that_are_there(path):
    found = config.load(path, (), Stages)
    assert stages.missing(found.needs) == []
    for each in found.stages:
        python, *rest = words(each, is_rehearsal=True, device="cpu")
        assert python == "/py" and (each.rehearsal or each.name in ALWAYS_SMALL), each.name
        if rest[0] == "-m":
            assert importlib.util.find_spec(rest[1]), each.name
        else:
            assert (ROOT / rest[0]).is_file(), each.name
        named = [name for word in rest for name in re.findall(r"configs/[\w./-]+", word)]
        assert [name for name in named if not (ROOT / name).is_file()] == [], each.name


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_stage_of_the_files_writes_in_its_own_folder_and_runs_where_it_is_told(path):
    for each in config.load(path, (), Stages).stages:
        whole = shlex.split(each.command)
        assert any(word.startswith(("--output={work}/", "--workdir={work}")) for word in whole), each.name
        assert "--device={device}" in whole or each.name == "compressor_packed", each.name  # it only rewrites a file


PRODUCT = "import jax, jax.numpy as jnp; x = jnp.ones((2, 2)); print(jax.jit(jnp.matmul).lower(x, x).as_text())"


def test_products_of_float32_are_no_tf32_where_they_stand_beside_those_of_pytorch():
    (each,) = (each for each in config.load(FILES[-1], (), Stages).stages if each.name == "memory_cost")
    settings = os.environ | each.settings(work="/w", device="cpu")
    done = subprocess.run([sys.executable, "-c", PRODUCT], capture_output=True, text=True, env=settings)
    assert "HIGHEST" in done.stdout, done.stderr


def test_what_comes_back_of_all_stages_is_no_more_files_than_a_lent_machine_gives():
    found = config.load(FILES[-1], (), Stages).stages
    own = ("results.jsonl", "figures.csv", "environment.json", "log.txt")
    assert len(own) + sum(len(each.returned) for each in found) <= 8
