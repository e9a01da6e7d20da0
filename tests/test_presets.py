"""Presets: every flag is one that the installed JAX knows, the user's own settings win, what is exported is quoted."""

import re
import subprocess

import pydantic
import pytest

from jaxbench import presets
from tests.structure import ROOT

SETTING = {"name": "A_B", "kind": "variable", "value": "1", "framework": "jax", "about": "a", "source": "https://x"}


@pytest.mark.parametrize("name", presets.names())
def test_the_installed_jax_knows_every_flag(name):
    assert presets.unknown_flags(presets.load(name)) == []


def test_a_flag_that_no_jax_knows_is_named():
    flags = [
        SETTING | {"name": "xla_no_such_flag", "kind": "xla"},
        SETTING | {"name": "xla_dump_hlo_as_text", "kind": "xla"},
    ]
    found = presets.unknown_flags(presets.Preset(device="cpu", about="a", settings=flags))
    assert found == ["--xla_no_such_flag=1"]


def test_a_jax_that_does_not_start_in_time_is_one_error(monkeypatch):
    monkeypatch.setattr(presets, "TRIAL_S", 0.01)
    with pytest.raises(ValueError, match=r"JAX did not start within 0.01 s"):
        presets.unknown_flags(presets.load("intel"))


def test_what_the_user_has_set_wins(monkeypatch):
    settings = [SETTING, SETTING | {"name": "xla_a", "kind": "xla"}, SETTING | {"name": "xla_b", "kind": "xla"}]
    rare = SETTING | {"name": "RARE", "is_default": False}
    preset = presets.Preset(device="cpu", about="a", settings=[*settings, rare])
    monkeypatch.setenv("A_B", "mine")
    monkeypatch.setenv("XLA_FLAGS", "--xla_b=2 --xla_c=3")
    assert presets.variables(preset) == {"A_B": "mine", "XLA_FLAGS": "--xla_b=2 --xla_c=3 --xla_a=1"}
    assert presets.variables(preset, everything=True)["RARE"] == "1"


def test_a_shell_reads_what_is_exported_as_it_is():
    value = "a 'b' $HOME `x` \\"
    lines = presets.exported({"A_B": value})
    said = subprocess.run(["sh", "-c", lines + 'printf %s "$A_B"'], capture_output=True, text=True, check=True)
    assert said.stdout == value


def test_every_setting_says_who_says_so():
    for name in presets.names():
        for setting in presets.load(name).settings:
            assert setting.source and (setting.measured == "" or setting.measured.startswith("docs/"))
    with pytest.raises(pydantic.ValidationError, match="source"):
        presets.Setting(**SETTING | {"source": "hearsay"})
    with pytest.raises(pydantic.ValidationError, match="A_B is there twice"):
        presets.Preset(device="cpu", about="a", settings=[SETTING, SETTING])


def test_what_makes_products_less_exact_comes_only_when_all_is_asked_for():
    less = {"JAX_DEFAULT_MATMUL_PRECISION", "torch.set_float32_matmul_precision", "ONEDNN_DEFAULT_FPMATH_MODE"}
    settings = [(name, setting) for name in presets.names() for setting in presets.load(name).settings]
    found = [(name, each) for name, each in settings if each.name in less or "not for proofs" in each.about]
    assert len(found) >= 5 and [(name, each.name) for name, each in found if each.is_default] == []


def test_the_documented_numbers_of_settings_are_those_of_the_files():
    text = (ROOT / "docs" / "presets.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| (\d+) \| (\d+|none)", text, re.MULTILINE)
    settings = {name: presets.load(name).settings for name in presets.names()}
    found = {
        name: (str(len(each)), str(sum(bool(s.measured) for s in each) or "none")) for name, each in settings.items()
    }
    assert {name: numbers for name, *numbers in map(list, rows)} == {name: list(pair) for name, pair in found.items()}
