"""Reading, writing and naming configurations."""

from __future__ import annotations

import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxbench import config


class Inner(config.Base):
    """A nested configuration."""

    new_tokens: int = pydantic.Field(default=8, gt=0)
    rate: float = 0.5
    batches: tuple[int, ...] = (1,)


class Outer(config.Base):
    """A configuration with one level below."""

    name: str = "default"
    decode: Inner = Inner()
    extra: Inner | None = None
    enabled: bool = True
    limit: int | None = None


@pytest.fixture
def write(tmp_path):
    def write(text: str):
        path = tmp_path / "file.yaml"
        path.write_text(text)
        return path

    return write


def error(path, overrides=(), model=Outer) -> str:
    with pytest.raises(ValueError) as caught:
        config.load(path, overrides, model)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_values_come_from_the_file_then_from_overrides_in_order(write):
    path = write("name: a\ndecode: {new_tokens: 2, rate: 1e-4}\n")
    loaded = config.load(path, ["decode.new_tokens=3", "decode.new_tokens=4", "extra.batches=[1, 8]"], Outer)
    assert loaded.decode == Inner(new_tokens=4, rate=1e-4)
    assert loaded.extra == Inner(batches=(1, 8))
    assert loaded.name == "a"


def test_override_values_are_read_as_yaml(write):
    path = write("")
    assert config.load(path, ["limit=null", "enabled=false", "name=7 of 9", "decode.rate=2"], Outer) == Outer(
        enabled=False, name="7 of 9", decode=Inner(rate=2.0)
    )
    assert config.load(path, ["name=a=b"], Outer).name == "a=b"


def test_dump_reads_back_and_leaves_no_temporary_file(tmp_path):
    model = Outer(name="x: [y", decode=Inner(batches=(3, 1)), limit=4)
    text = config.dump(model, tmp_path / "folder" / "out.yaml")
    assert config.load(tmp_path / "folder" / "out.yaml", (), Outer) == model
    assert [path.name for path in (tmp_path / "folder").iterdir()] == ["out.yaml"]
    assert config.dump(model) == text


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("decode: {new_tokns: 2}", ("decode.new_tokns", "nearest is decode.new_tokens")),
        ("new_tokens: 2", ("'new_tokens'", "nearest is decode.new_tokens")),
        ("xyz: 2", ("'xyz'", "wanted one of name, decode, extra, enabled, limit")),
        ("decode: {new_tokens: 0}", ("decode.new_tokens", "is 0", "greater than 0")),
        ("decode: {new_tokens: two}", ("'two'", "valid integer")),
        ("decode: {batches: [true]}", ("batches", "true", "number")),
        ("limit: true", ("limit", "true", "number")),
        ("name: a\nname: b", ("line 2", "'name'", "twice")),
        ("name: [", ("line 1", "not YAML")),
        ("name: !!bool x", ("not YAML", "tag", "'x'")),
        ("name: !!timestamp x", ("not YAML", "tag")),
        ("!!map [name]", ("line 1", "not YAML", "expected a mapping")),
        ("- name", ("list", "mapping")),
        ("decode: 3", ("'decode'", "3")),
    ],
)
def test_a_bad_file_is_one_line_with_file_key_and_what_was_wanted(write, text, words):
    path = write(text)
    message = error(path)
    assert [word for word in (str(path), *words) if word not in message] == []


def test_a_bad_override_is_blamed_on_itself(write):
    path = write("name: a\n")
    assert error(path, ["decode.new_tokens=-1"]).startswith("--set decode.new_tokens=-1: key 'decode.new_tokens' is -1")
    assert "'name' is 'a'" not in error(path, ["name.x=1"]) and "which has no keys below it" in error(
        path, ["name.x=1"]
    )
    assert "a.b=value" in error(path, ["decode"])
    assert "not a YAML value" in error(path, ["name=[1"])


def test_many_errors_are_counted_not_listed(write):
    message = error(write("a: 1\nb: 2\nc: 3\nd: 4\ne: 5\n"))
    assert message.endswith("; and 2 more")


def test_an_absent_file_names_its_nearest_neighbour(write):
    path = write("")
    assert str(path) in error(path.with_name("fil.yaml"))


def test_an_absent_file_without_a_near_one_gets_no_suggestion(write, monkeypatch):
    path = write("")
    path.with_name(".pre-commit-config.yaml").write_text("")
    monkeypatch.chdir(path.parent)
    assert error("another.yaml") == "config: another.yaml is no file"
    assert error("pre-commit.yaml") == "config: pre-commit.yaml is no file"
    assert error("configs/shakespere_char.yaml").endswith("configs/lm/shakespeare_char.yaml")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("? [a, b]\n: 1\n", ("line 1 column 3", "a sequence cannot be a key")),
        ("decode: {{a: 1}: 2}\n", ("line 1 column 10", "a mapping cannot be a key")),
        ("[" * 5000, ("nested too deeply",)),
        ("limit: 2026-02-30\n", ("day is out of range",)),
        ("decode: {rate: .inf}\n", ("decode.rate", "finite number")),
        ("decode: {rate: nan}\n", ("decode.rate", "finite number")),
    ],
)
def test_what_yaml_takes_and_a_configuration_cannot_be_is_one_line_with_its_place(write, text, words):
    path = write(text)
    message = error(path)
    assert [word for word in (str(path), *words) if word not in message] == []


def test_a_value_of_billions_of_aliases_is_shown_cut_short(write):
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12)]
    assert len(error(write("\n".join([*lines, "name: *a11"])))) < 2000


@pytest.mark.parametrize("text", ["limit={[1]: 2}", "limit=[1, [2]: 3]", "limit={a: 1, a: 2}", "limit=2026-02-30"])
def test_overrides_are_as_strict_as_files(write, text):
    assert error(write(""), [text]).startswith(f"--set {text!r}: ")


def test_id_ignores_spelling_and_exclusions_and_follows_everything_else(write):
    plain, spelled = config.load(write("{}"), (), Outer), config.load(write("decode: {new_tokens: 8}"), (), Outer)
    assert config.config_id(plain) == config.config_id(spelled)
    changed = Outer(limit=3)
    assert config.config_id(changed) != config.config_id(plain)
    assert config.config_id(changed, exclude=["limit"]) == config.config_id(plain, exclude=["limit"])
    nested = Outer(decode=Inner(rate=0.1))
    assert config.config_id(nested, exclude=["decode.rate"]) == config.config_id(plain, exclude=["decode.rate"])
    assert config.config_id(plain, extra={"model_sha256": "a"}) != config.config_id(plain, extra={"model_sha256": "b"})
    with pytest.raises(ValueError, match="'decode.rat'"):
        config.config_id(plain, exclude=["decode.rat"])


def test_id_is_the_same_in_every_release():
    assert config.config_id(Outer()) == "066cc2eb5fca"


def test_keys_reach_into_nested_and_optional_models():
    assert "decode.rate" in config.keys(Outer) and "extra.batches" in config.keys(Outer)


@given(st.builds(Inner, new_tokens=st.integers(1, 10**9), rate=st.floats(allow_nan=False, allow_infinity=False)))
def test_any_configuration_survives_being_written(model):
    import yaml

    assert Inner.model_validate(yaml.safe_load(config.dump(model))) == model
    assert len(config.config_id(model)) == 12


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_kv_heads": 3}, ("num_heads=4", "num_kv_heads=3")),
        ({"head_dim": 7}, ("head_dim=7",)),
        ({"d_model": -1}, ("greater than 0",)),
        ({"sliding_window": 0}, ("greater than 0",)),
    ],
)
def test_impossible_model_shapes_are_refused(change, words):
    shape = dict(vocab_size=8, d_model=8, d_ff=8, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=2, max_seq_len=8)
    config.TransformerConfig(**shape)
    with pytest.raises(ValueError) as caught:
        config.TransformerConfig(**(shape | change))
    assert [word for word in words if word not in str(caught.value)] == []
