"""The command attack on files: what it writes, keeps, leaves out and refuses."""

from __future__ import annotations

import gzip
import json

import pytest

from jaxbench.watermark import commands
from jaxbench.watermark.attack import attacks


def test_an_attacked_file_keeps_the_original_beside_it(tmp_path):
    path, out = tmp_path / "a.txt", tmp_path / "b.jsonl"
    path.write_text("Some words of one text here.\nAnd these are the words of another one.\n")
    attack = attacks.parse_attack({"attack": "case", "strength": 1.0})
    total, edits = commands.attack_file(str(path), str(out), attack, seed=1)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert total == len(rows) == 2 and edits > 0
    assert [row["original"] for row in rows] == path.read_text().splitlines()
    assert all(row["text"].lower() == row["original"].lower() != row["text"] for row in rows)


def test_an_attack_leaves_out_what_detection_leaves_out_and_says_so(tmp_path):
    path, out, said = tmp_path / "a.jsonl", tmp_path / "b.jsonl", []
    text = '{"text": "Some words."}\n{"text": "?"}\n{"text": [1, 2]}\n\n{"text": "And others."}\n{broken\n'
    path.write_bytes(text.encode().replace(b"?", b"\xff"))
    total, _ = commands.attack_file(str(path), str(out), attacks.parse_attack("case:1.0"), seed=1, say=said.append)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert total == 2 and [row["original"] for row in rows] == ["Some words.", "And others."]
    assert said[0] == "3 bad lines were left out:" and [line.partition(": ")[0] for line in said[1:]] == [
        f"  {path} line {number}" for number in (2, 3, 6)
    ]
    path.write_text('{"text": [1, 2]}\n')
    with pytest.raises(ValueError, match=r"holds no text in its 1 files \(1 bad; .*a.jsonl line 1: token ids"):
        commands.attack_file(str(path), str(out), attacks.parse_attack("case:1.0"), seed=1, overwrite=True)


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz"])
def test_an_attack_keeps_the_other_keys_of_a_row_but_those_of_its_old_tokens(tmp_path, suffix):
    path, out = tmp_path / f"marked{suffix}", tmp_path / "attacked.jsonl"
    row = {"row": 3, "id": 7, "run": "ab", "mark": "a", "scheme": "kgw", "prompt": "Tell", "prompt_ids": [1]}
    tokens = {"continuation_ids": [2, 3], "ids": [1, 2, 3], "prompt_tokens": 1}
    lines = [json.dumps(row | tokens | {"text": "Some words of one text."}), '{"text": "Others.", "x": "\\ud800"}']
    content = ("\ufeff" + "\n".join(lines)).encode()
    path.write_bytes(gzip.compress(content) if suffix.endswith("gz") else content)
    commands.attack_file(str(path), str(out), attacks.parse_attack("case:1.0"), seed=1)
    first, second = (json.loads(line) for line in out.read_text().splitlines())
    assert first == row | {name: first[name] for name in ("text", "original", "word_edits")}  # the id stays a number
    assert first["original"] == "Some words of one text." != first["text"]
    assert second["x"] == "\ud800" and second["id"] is None


def test_an_attack_never_writes_over_a_file_unasked_nor_over_an_input(tmp_path):
    path, there = tmp_path / "a.jsonl", tmp_path / "there.jsonl"
    path.write_text('{"text": "Some words of one text here."}\n')
    there.write_text("mine\n")
    (tmp_path / "soft.jsonl").symlink_to(path)
    before, attack = path.read_bytes(), attacks.parse_attack("case:1.0")
    with pytest.raises(ValueError, match="there.jsonl exists; name another --output, or pass --overwrite"):
        commands.attack_file(str(path), str(there), attack, seed=1)
    assert there.read_text() == "mine\n"
    for output in ("a.jsonl", "soft.jsonl"):
        with pytest.raises(ValueError, match="is the input .*a.jsonl, which would be lost"):
            commands.attack_file(str(path), str(tmp_path / output), attack, seed=1, overwrite=True)
    assert path.read_bytes() == before
    assert commands.attack_file(str(path), str(there), attack, seed=1, overwrite=True)[0] == 1
    assert sorted(one.name for one in tmp_path.iterdir()) == ["a.jsonl", "soft.jsonl", "there.jsonl"]


@pytest.mark.parametrize("field", ["original", "word_edits", "id"])
def test_a_field_that_attack_writes_itself_is_refused(tmp_path, field):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({field: "Some words here"}) + "\n")
    with pytest.raises(ValueError, match=f"--field={field}: attack writes id, original, word_edits itself"):
        commands.attack_file(
            str(path), str(tmp_path / "b.jsonl"), attacks.parse_attack("case:1.0"), seed=1, field=field
        )
    assert not (tmp_path / "b.jsonl").exists()


def test_an_attacked_text_stands_under_the_key_it_came_from(tmp_path):
    path, out = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    path.write_text(json.dumps({"answer": "Some words here", "text": "the question", "id": "q"}) + "\n")
    commands.attack_file(str(path), str(out), attacks.parse_attack("case:1.0"), seed=1, field="answer")
    row = json.loads(out.read_text())
    assert row["text"] == "the question" and row["original"] == "Some words here"
    assert row["answer"] != row["original"] and row["answer"].lower() == row["original"].lower()


def test_attacks_of_the_command_chain_and_bring_their_own_tools(tmp_path):
    chosen = commands.read_attacks(["copy_paste:0.5", "typo"], strength=0.2, changes=[])
    assert [(step.attack, step.strength) for step in chosen.steps] == [("copy_paste", 0.5), ("typo", 0.2)]
    token = commands.read_attacks(["delete:0.5"], strength=0.2, changes=["unit=token"])
    assert token.unit == "token"
    assert [commands.read_attacks([name]).strength for name in ("typo", "paraphrase", "back_translate:0.3")] == [
        0.1,
        1,
        0.3,
    ]
    with pytest.raises(ValueError, match="spans is 3"):
        commands.read_attacks(["typo"], strength=0.2, changes=["spans=3"])
    with pytest.raises(ValueError, match="strength is 'x'"):
        commands.read_attacks(["typo:x"], strength=0.2)
    with pytest.raises(ValueError, match="--attack=chain: several --attack are a chain"):
        commands.read_attacks(["chain"], changes=["steps=[{attack: typo, strength: 0.1}]"])
    with pytest.raises(ValueError, match="--set 'strength=0.5': the strength of typo is given as 0.3 too"):
        commands.read_attacks(["typo:0.3"], changes=["strength=0.5"])
    typo = commands.read_attacks(["typo"], strength=0.2)
    for how in ({"human": "none.txt", "model": None}, {"human": None, "model": "none.gguf"}):
        with pytest.raises(ValueError, match="=none.* would do nothing with the attack typo; leave it out"):
            commands.attack_tools(typo, **how)
    path, out, human = tmp_path / "a.txt", tmp_path / "b.jsonl", tmp_path / "human.txt"
    path.write_text("Some words of one text here.\n")
    human.write_text("Nobody marked this sentence, which goes on for a good while.\n")
    for attack in (chosen, token):
        commands.attack_file(
            str(path), str(out), attack, seed=1, overwrite=True,
            tools=commands.attack_tools(attack, human=str(human) if attack is chosen else None, model=None),
        )  # fmt: skip
        row = json.loads(out.read_text())
        assert row["text"] != row["original"]
