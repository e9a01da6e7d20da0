"""Runs of marked generation: rows with marks of their own, records, going on after a stop, bad input."""

import json
import shutil

import pytest

from jaxbench import config, initial
from jaxbench.config import TransformerConfig
from jaxbench.pretrained import weights
from jaxbench.watermark import generate
from jaxbench.watermark.keys import Key, write_key_file

MODEL = TransformerConfig(
    vocab_size=300, d_model=32, d_ff=48, num_layers=1, num_heads=2, num_kv_heads=2, head_dim=16, max_seq_len=64
)
MARKS = [
    {"name": "kgw", "scheme": {"scheme": "kgw", "delta": 4.0}},
    {"name": "gumbel", "scheme": {"scheme": "gumbel", "payload_bits": 3}, "payload": 5},
    {"name": "plain"},
]
KEYS = [Key(1), Key(2), None]


class Letters:
    """A tokenizer of bytes."""

    eos_id, bos_id, end_ids = None, None, ()

    def encode(self, text, *, add_special=True):
        return list(text.encode())

    def decode(self, ids, *, skip_special=False):
        return "".join(chr(i) for i in ids)


@pytest.fixture
def tiny(monkeypatch):
    params = initial.initial_params(MODEL, 0, distinct=True)
    checkpoint = weights.Checkpoint(config=MODEL, params=params, tokenizer=None, source="tiny", sha256="0")
    monkeypatch.setattr(weights, "load_checkpoint", lambda spec: checkpoint)
    monkeypatch.setattr(weights, "read_config", lambda spec: MODEL)
    monkeypatch.setattr(generate, "load_tokenizer", lambda spec: Letters())


def settings(**changes):
    given = {"marks": MARKS, "num_prompts": 7, "prompt_tokens": 9, "new_tokens": 12, "batch_size": 4, **changes}
    return generate.GenerateConfig.model_validate(given)


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_rows_take_marks_in_turn_and_records_hold_no_key(tiny, tmp_path):
    path = generate.run(settings(), tmp_path / "new" / "out.jsonl", keys=KEYS)
    records = lines(path)
    assert [record["mark"] for record in records] == ["kgw", "gumbel", "plain"] * 2 + ["kgw"]
    assert [record["row"] for record in records] == list(range(7))
    for record in records:
        assert record["ids"] == record["prompt_ids"] + record["continuation_ids"]
        assert record["prompt_tokens"] == 9 and len(record["continuation_ids"]) == 12
        assert not [name for name in record if "key" in name]
    assert records[2]["scheme"] is None


def test_tokens_do_not_depend_on_the_batch_and_a_stopped_run_goes_on(tiny, tmp_path):
    whole = lines(generate.run(settings(), tmp_path / "whole.jsonl", keys=KEYS))
    path = tmp_path / "parts.jsonl"
    shutil.copy(tmp_path / "whole.jsonl.run.json", tmp_path / "parts.jsonl.run.json")
    path.write_text("".join(json.dumps(record) + "\n" for record in whole[:2]) + '{"torn')
    assert lines(generate.run(settings(batch_size=2), path, keys=KEYS)) == whole
    before = path.stat().st_mtime_ns
    generate.run(settings(), path, keys=KEYS)  # nothing left to do
    assert path.stat().st_mtime_ns == before


def test_rows_of_another_run_are_not_touched(tiny, tmp_path):
    path = generate.run(settings(num_prompts=1), tmp_path / "out.jsonl", keys=KEYS)
    before = path.read_bytes()
    others = [("seed", {"seed": 1}), ("sampling", {"sampling": {"top_k": 3}}), ("marks", {"marks": MARKS[::-1]})]
    others += [("new_tokens", {"new_tokens": 3}), ("dtype", {"dtype": "bfloat16"})]
    for name, changed in others:
        keys = KEYS[::-1] if name == "marks" else KEYS
        with pytest.raises(ValueError, match=f"out.jsonl holds rows made with other {name}.*; name another file"):
            generate.run(settings(**{"num_prompts": 1, **changed}), path, keys=keys)
    with pytest.raises(ValueError, match="holds rows made with other backend"):
        generate.run(settings(num_prompts=1), path, keys=KEYS, device="gpu")
    assert path.read_bytes() == before
    generate.run(settings(num_prompts=1, seed=1), path, keys=KEYS, overwrite=True)
    assert len(lines(path)) == 1 and path.read_bytes() != before


def test_rows_under_another_key_are_not_gone_on_with_and_no_key_is_given_away(tiny, tmp_path):
    path = generate.run(settings(num_prompts=2), tmp_path / "out.jsonl", keys=KEYS)
    with pytest.raises(ValueError, match="out.jsonl holds rows made with other keys; name another file"):
        generate.run(settings(num_prompts=2), path, keys=[Key(1), Key(0x1234567890ABCDEF), None])
    path = generate.run(settings(num_prompts=2), path, keys=[Key(1), Key(0x1234567890ABCDEF), None], overwrite=True)
    record = (tmp_path / "out.jsonl.run.json").read_text().lower()
    assert "1234567890abcdef" not in record and str(0x1234567890ABCDEF) not in record


def test_a_key_file_may_move_while_its_rows_go_on(tiny, tmp_path):
    write_key_file(tmp_path / "key", Key(1))
    marks = [{**MARKS[0], "key_file": str(tmp_path / "key")}]
    path = generate.run(settings(marks=marks, num_prompts=1), tmp_path / "out.jsonl")
    (tmp_path / "key").rename(tmp_path / "moved")
    marks = [{**MARKS[0], "key_file": str(tmp_path / "moved")}]
    said = []
    generate.run(settings(marks=marks, num_prompts=1), path, say=said.append)
    assert said == [f"{path} has all 1 rows"]


@pytest.mark.parametrize("content", ["my notes, without a line end", "one\ntwo\n", '{"text": "mine"}\n'])
def test_a_file_that_is_no_output_of_generate_is_not_touched(content, tiny, tmp_path):
    path = tmp_path / "mine.jsonl"
    path.write_text(content)
    with pytest.raises(ValueError, match="mine.jsonl exists, and mine.jsonl.run.json, .* does not"):
        generate.run(settings(), path, keys=KEYS)
    assert path.read_text() == content and [one.name for one in tmp_path.iterdir()] == ["mine.jsonl"]


def test_a_broken_row_is_named_by_file_and_line(tiny, tmp_path):
    path = generate.run(settings(num_prompts=2), tmp_path / "out.jsonl", keys=KEYS)
    path.write_text(path.read_text().splitlines()[0] + "\n{broken\n")
    with pytest.raises(ValueError, match="out.jsonl line 2 is no row of generate"):
        generate.run(settings(num_prompts=2), path, keys=KEYS)


def test_two_runs_never_write_the_same_rows(tiny, tmp_path):
    path = tmp_path / "out.jsonl"

    def second(line):
        with pytest.raises(ValueError, match="another process writes .*out.jsonl; wait for its end"):
            generate.run(settings(), path, keys=KEYS)

    generate.run(settings(), path, keys=KEYS, say=second)
    assert [record["row"] for record in lines(path)] == list(range(7))
    assert {one.name for one in tmp_path.iterdir()} == {"out.jsonl", "out.jsonl.run.json"}


def test_rows_of_another_tokenizer_in_the_models_folder_are_not_gone_on_with(tiny, tmp_path):
    folder = weights.save_checkpoint(tmp_path / "model", MODEL, initial.initial_params(MODEL, 0))
    (folder / "tokenizer.json").write_text("{}")
    given = {"model": str(folder), "num_prompts": 1}
    path = generate.run(settings(**given), tmp_path / "out.jsonl", keys=KEYS)
    generate.run(settings(**given), path, keys=KEYS)
    (folder / "tokenizer.json").write_text('{"version": "2"}')
    with pytest.raises(ValueError, match="rows made with other model_sha256"):
        generate.run(settings(**given), path, keys=KEYS)


def test_rows_out_of_order_are_named_and_not_gone_on_with(tiny, tmp_path):
    path = generate.run(settings(), tmp_path / "out.jsonl", keys=KEYS)
    rows = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*rows[:2], rows[1], *rows[2:]]))
    with pytest.raises(ValueError, match="out.jsonl line 3 holds row 1, wanted row 2; name another file"):
        generate.run(settings(), path, keys=KEYS)


def test_the_prompts_and_the_keys_are_never_written_over(tiny, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"text": "Some prompt that is long enough."}\n')
    before = prompts.read_text()
    (tmp_path / "link.jsonl").symlink_to(prompts)
    for output in (prompts, tmp_path / "link.jsonl", tmp_path / "." / ".." / tmp_path.name / "prompts.jsonl"):
        with pytest.raises(ValueError, match="is the input .*prompts.jsonl, which would be lost"):
            generate.run(settings(prompts=str(prompts)), output, keys=KEYS, overwrite=True)
    assert prompts.read_text() == before


def of_file(path, content, **changes):
    """Return settings of a run over a file of prompts, which say nothing of their number or length."""
    path.write_text(content)
    return generate.GenerateConfig.model_validate({"marks": MARKS, "prompts": str(path), "new_tokens": 12} | changes)


def test_all_prompts_of_a_file_are_taken_whole_and_their_rows_have_ids(tiny, tmp_path):
    texts = [f"Prompt {i} " + "x" * 30 for i in range(20)]
    content = "".join(
        json.dumps({"text": text} | ({"id": f"q{i}"} if i < 2 else {})) + "\n" for i, text in enumerate(texts)
    )
    said = []
    chosen = of_file(tmp_path / "prompts.jsonl", content, new_tokens=2)
    records = lines(generate.run(chosen, tmp_path / "out.jsonl", keys=KEYS, say=said.append))
    assert [record["prompt"] for record in records] == texts and "prompts.jsonl" not in "".join(said)
    assert [record["id"] for record in records] == ["q0", "q1", *map(str, range(3, 21))]
    chosen = of_file(tmp_path / "prompts.txt", "One prompt\fAnother\f \f", new_tokens=2)
    records = lines(generate.run(chosen, tmp_path / "two.jsonl", keys=KEYS))
    assert [(record["id"], record["prompt"]) for record in records] == [("1", "One prompt"), ("2", "Another")]


def test_what_is_cut_or_left_out_of_a_file_is_said_in_one_line(tiny, tmp_path):
    texts = ["", "a" * 60, "b" * 52, " ", "c"]
    path, said = tmp_path / "prompts.jsonl", []
    content = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    found = generate.read_prompts(of_file(path, content), Letters(), say=said.append)
    assert [(prompt.id, len(prompt.ids)) for prompt in found] == [("2", 52), ("3", 52), ("5", 1)]
    given = of_file(path, content, num_prompts=2, prompt_tokens=9)
    assert [len(prompt.ids) for prompt in generate.read_prompts(given, Letters(), say=said.append)] == [9, 9]
    assert said == [
        f"{path}: 2 empty texts are left out (line 1, 4); 1 are cut to 52 tokens (the model's context of 64 less "
        "new_tokens=12)",
        f"{path}: 2 empty texts are left out (line 1, 4); 2 of 3 prompts are taken (num_prompts=2); 2 are cut to "
        "9 tokens (prompt_tokens=9)",
    ]
    said.clear()
    found = generate.read_prompts(of_file(tmp_path / "x.txt", "a\f \f\fb\f\n"), Letters(), say=said.append)
    assert [prompt.id for prompt in found] == ["1", "4"]  # the numbers that they have in the file
    assert said == [f"{tmp_path}/x.txt: 2 empty texts are left out (prompt 2, 3)"]
    with pytest.raises(ValueError, match="new_tokens=64 leaves no room for a prompt in the model's context of 64"):
        generate.read_prompts(of_file(path, content, new_tokens=64), Letters())


def test_a_prompt_that_is_too_long_as_a_chat_is_named(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(Letters, "chat", lambda self, turns: f"[{turns[0]['content']}]", raising=False)
    given = of_file(tmp_path / "prompts.jsonl", '{"text": "short"}\n{"text": "%s"}\n' % ("x" * 51), chat=True)
    with pytest.raises(ValueError, match="prompts.jsonl line 2 has 53 tokens as a chat, .* takes 52; shorten it"):
        generate.read_prompts(given, Letters())
    assert len(generate.read_prompts(given.model_copy(update={"num_prompts": 1}), Letters())[0].ids) == 7


def test_the_default_text_gives_as_many_prompts_of_one_length_as_ever(tiny):
    plain = generate.GenerateConfig.model_validate({"marks": MARKS})
    assert plain == generate.GenerateConfig.model_validate({"marks": MARKS, "num_prompts": 8, "prompt_tokens": 32})
    found = generate.read_prompts(plain, Letters())
    assert [(prompt.id, len(prompt.ids)) for prompt in found] == [(None, 32)] * 8


def test_keys_come_from_their_files(tiny, tmp_path):
    write_key_file(tmp_path / "key", Key(1))
    one = [{**MARKS[0], "key_file": str(tmp_path / "key")}]
    by_file = lines(generate.run(settings(marks=one, num_prompts=1), tmp_path / "a.jsonl"))
    by_key = lines(generate.run(settings(marks=MARKS[:1], num_prompts=1), tmp_path / "b.jsonl", keys=[Key(1)]))
    assert by_file[0]["ids"] == by_key[0]["ids"]


def test_missing_keys_are_named(tiny, tmp_path):
    with pytest.raises(ValueError, match="mark 'kgw' names no key_file; make one with"):
        generate.run(settings(), tmp_path / "out.jsonl")
    with pytest.raises(ValueError, match="2 keys for 3 marks"):
        generate.run(settings(), tmp_path / "out.jsonl", keys=KEYS[:2])


def test_unknown_schemes_and_fields_are_named(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("marks: [{name: a, scheme: {scheme: kgw, gama: 0.5}}]\n")
    with pytest.raises(ValueError, match="gama"):
        config.load(path, (), generate.GenerateConfig)
