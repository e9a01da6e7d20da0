"""Keys stay hidden, have one value a passphrase, and live in files that only their owner may read."""

import copy
import hashlib
import pickle
import re

import pytest

from jaxbench.watermark.keys import Key, read_key_file, write_key_file
from tests.structure import ROOT


def test_a_key_file_that_is_not_there_says_how_one_is_made(tmp_path):
    with pytest.raises(
        ValueError, match="k cannot be read: No such file.*make one with `watermark.py keygen --output="
    ):
        read_key_file(tmp_path / "k")


def test_every_command_and_configuration_names_one_key_file():
    named = set()
    documents = [path for path in ROOT.glob("docs/*.md") if path.name != "lab_log.md"]
    for path in (*ROOT.glob("configs/watermark/*.yaml"), *documents, ROOT / "README.md"):
        text = path.read_text(encoding="utf-8")
        named |= set(re.findall(r"keygen --output=([^\s`]+)|key_file[:=] ?([\w.]+)", text))
    assert {name for pair in named for name in pair if name} == {"secret.key"}


def test_halves_are_the_low_and_the_high_word():
    assert Key(0x0123456789ABCDEF).halves == (0x89ABCDEF, 0x01234567)


def test_no_text_form_shows_the_value():
    key = Key(1234567890123456789)
    shown = f"{key} {key!r} {[key]} {{'key': {key}}}"
    assert "1234567890123456789" not in shown and hex(1234567890123456789)[2:] not in shown


def test_keys_are_equal_by_value_and_survive_copies_and_other_processes():
    assert Key(5) == Key(5) != Key(6) and len({Key(5), Key(5), Key(6)}) == 2
    assert pickle.loads(pickle.dumps(Key(7))) == copy.deepcopy(Key(7)) == Key(7)


def test_a_passphrase_has_one_key():
    by_hand = hashlib.scrypt(b"correct horse", salt=b"jaxbench/watermark/key/v1", n=2**14, r=8, p=1, dklen=8)
    assert Key.from_passphrase("correct horse") == Key(int.from_bytes(by_hand, "big"))
    assert Key.from_passphrase("correct horsf") != Key.from_passphrase("correct horse")
    with pytest.raises(ValueError, match="0 characters"):
        Key.from_passphrase("")


def test_derived_keys_follow_vllms_rule():
    digest = hashlib.sha256(b"key_a" + (42).to_bytes(8, "big")).digest()
    assert Key(42).derive("key_a") == Key(int.from_bytes(digest[:8], "big"))


def test_fresh_keys_differ():
    assert Key.random() != Key.random()


@pytest.mark.parametrize("bad", [-1, 2**64, 1.0, "5", True, None])
def test_other_values_are_refused_without_being_shown(bad):
    with pytest.raises(ValueError, match=r"wanted an integer in \[0, 2\*\*64\).*not shown"):
        Key(bad)


def test_a_key_file_is_for_its_owner_only_and_reads_back(tmp_path):
    path = tmp_path / "key"
    write_key_file(path, Key(255))
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.read_text() == "jaxbench-key 00000000000000ff\n"
    assert read_key_file(path) == Key(255)
    with pytest.raises(ValueError, match="File exists"):
        write_key_file(path, Key(1))
    assert read_key_file(path) == Key(255)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660])
def test_a_file_that_others_may_use_is_refused_with_the_cure(tmp_path, mode):
    path = tmp_path / "key"
    write_key_file(path, Key(1))
    path.chmod(mode)
    with pytest.raises(ValueError, match=rf"mode {mode:03o}\); run chmod 600"):
        read_key_file(path)


@pytest.mark.parametrize(
    "content", ["", "00000000000000ff", "jaxbench-key 00ff", "jaxbench-key 0000000000000 ff", "x" * 99]
)
def test_other_files_are_refused_without_showing_what_they_hold(tmp_path, content):
    path = tmp_path / "key"
    path.write_text(content)
    path.chmod(0o600)
    with pytest.raises(ValueError, match="holds no key") as caught:
        read_key_file(path)
    assert not content or content not in str(caught.value)


def test_missing_files_and_folders_are_named(tmp_path):
    with pytest.raises(ValueError, match="nowhere cannot be read"):
        read_key_file(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="is no file"):
        read_key_file(tmp_path)
    with pytest.raises(ValueError, match="cannot be made"):
        write_key_file(tmp_path / "no" / "key", Key(1))
