"""Text files, and prompts of exact lengths."""

import gzip
import hashlib
import json

import pytest

from jaxbench.pretrained import assets, tokenizer
from jaxbench.text import packing


class Letters:
    """A tokenizer whose tokens are characters."""

    eos_id = 0

    def encode(self, text: str) -> list[int]:
        return [ord(character) for character in text]


# --- files


def test_default_text_is_its_documents():
    documents = packing.load_text()
    assert len(documents) == 48
    assert "\f".join(documents) == assets.default_text()
    assert packing.text_sha256() == hashlib.sha256(assets.default_text().encode()).hexdigest()


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_text_files_are_parted_by_form_feeds(tmp_path, suffix):
    path, content = tmp_path / f"a.txt{suffix}", "Ünë.\n\ntwo\fthree\f \n".encode()
    path.write_bytes(gzip.compress(content) if suffix else content)
    assert packing.load_text(path) == ["Ünë.\n\ntwo", "three"]
    assert packing.text_sha256(path) == hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_jsonl_files_have_a_document_in_each_line(tmp_path, suffix):
    path, texts = tmp_path / f"a.jsonl{suffix}", ["one\u2028still one", "two", ""]
    content = "".join(json.dumps({"text": t, "id": 1}, ensure_ascii=False) + "\r\n" for t in texts).encode()
    path.write_bytes(gzip.compress(content) if suffix else content)
    assert packing.load_text(str(path)) == texts[:2]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"", r"a\.txt has no text in its 0 bytes"),
        ("a.txt", b" \n\f\n", r"a\.txt has no text in its 4 bytes"),
        ("a.txt", b"fine\nfine\nbad \xff", r"a\.txt line 3 is not UTF-8 \(byte 0xff\)"),
        ("a.jsonl", b'{"text": "x"}\n{"text": \n', r"a\.jsonl line 2 is not JSON"),
        ("a.jsonl", b'{"text": "x"}\n\n["text"]\n', r'a\.jsonl line 3 has no "text" string: \["text"\]'),
        ("a.jsonl", b'{"text": 7}\n', r'a\.jsonl line 1 has no "text" string'),
        ("a.jsonl", b'{"text": "x"}\n\xe9', r"a\.jsonl line 2 is not UTF-8"),
        ("a.jsonl", b'{"text": "x"}\n{"text": "a\\ud800"}', r'a\.jsonl line 2: "text" holds a lone surrogate'),
        ("a.txt.gz", b"plain", r"cannot read .*a\.txt\.gz"),
        ("a.jsonl.gz", gzip.compress(b'{"text": "x"}', mtime=0)[:-9], r"cannot read .*a\.jsonl\.gz"),
        ("a.csv", b"x", r"a\.csv has an unknown suffix, wanted one of \.txt, \.txt\.gz, \.jsonl, \.jsonl\.gz"),
        ("a.txt", None, r"cannot read .*a\.txt .*No such file"),
    ],
)
def test_bad_files_are_one_error_with_file_and_line(tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message) as raised:
        packing.load_text(tmp_path / name)
    assert "\n" not in str(raised.value)


# --- prompts


def test_prompts_have_the_wanted_lengths_and_are_prose_from_paragraph_starts():
    core, documents = tokenizer.load_tokenizer(), packing.load_text()
    lengths = [8, 512, 1, 64, 2000]
    prompts = packing.real_prompts(core, lengths, documents)
    assert [len(prompt) for prompt in prompts] == lengths
    starts = {part for document in documents for part in document.split("\n\n")}
    for prompt in prompts:
        text = core.decode(prompt)
        assert any(start.startswith(text.split("\n\n")[0]) for start in starts)
    assert len({tuple(prompt[:1]) + tuple(prompt[1:8]) for prompt in prompts}) == len(prompts)
    assert prompts == packing.real_prompts(core, lengths, documents)


def test_prompt_reads_on_from_the_last_paragraph_to_the_first():
    prompts = packing.real_prompts(Letters(), [2, 8], ["ab\n\ncd", "ef"])
    assert ["".join(map(chr, prompt)) for prompt in prompts] == ["ab", "cd\n\nef\n\n"]


@pytest.mark.parametrize(
    ("lengths", "message"), [([3, 0], r"\[3, 0\] must be at least 1"), ([9], "has 6 tokens, a prompt of 9")]
)
def test_prompts_that_cannot_be_made_are_errors(lengths, message):
    with pytest.raises(ValueError, match=message):
        packing.real_prompts(Letters(), lengths, ["ab", "cd"])
