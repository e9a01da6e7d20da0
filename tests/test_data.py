"""Text files, prompts of exact lengths, and packed batches that any step can be asked of."""

import gzip
import hashlib
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxbench import assets, data, tokenizer


class Letters:
    """A tokenizer whose tokens are characters."""

    eos_id = 0

    def encode(self, text: str) -> list[int]:
        return [ord(character) for character in text]


# --- files


def test_default_text_is_its_documents():
    documents = data.load_text()
    assert len(documents) == 48
    assert "\f".join(documents) == assets.default_text()
    assert data.text_sha256() == hashlib.sha256(assets.default_text().encode()).hexdigest()


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_text_files_are_parted_by_form_feeds(tmp_path, suffix):
    path, content = tmp_path / f"a.txt{suffix}", "Ünë.\n\ntwo\fthree\f \n".encode()
    path.write_bytes(gzip.compress(content) if suffix else content)
    assert data.load_text(path) == ["Ünë.\n\ntwo", "three"]
    assert data.text_sha256(path) == hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_jsonl_files_have_a_document_in_each_line(tmp_path, suffix):
    path, texts = tmp_path / f"a.jsonl{suffix}", ["one\u2028still one", "two", ""]
    content = "".join(json.dumps({"text": t, "id": 1}, ensure_ascii=False) + "\r\n" for t in texts).encode()
    path.write_bytes(gzip.compress(content) if suffix else content)
    assert data.load_text(str(path)) == texts[:2]


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
        ("a.txt.gz", b"plain", r"cannot read .*a\.txt\.gz"),
        ("a.jsonl.gz", gzip.compress(b'{"text": "x"}')[:-9], r"cannot read .*a\.jsonl\.gz"),
        ("a.csv", b"x", r"a\.csv has an unknown suffix, wanted one of \.txt, \.txt\.gz, \.jsonl, \.jsonl\.gz"),
        ("a.txt", None, r"cannot read .*a\.txt .*No such file"),
    ],
)
def test_bad_files_are_one_error_with_file_and_line(tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message) as raised:
        data.load_text(tmp_path / name)
    assert "\n" not in str(raised.value)


# --- prompts


def test_prompts_have_the_wanted_lengths_and_are_prose_from_paragraph_starts():
    core, documents = tokenizer.load_tokenizer(), data.load_text()
    lengths = [8, 512, 1, 64, 2000]
    prompts = data.real_prompts(core, lengths, documents)
    assert [len(prompt) for prompt in prompts] == lengths
    starts = {part for document in documents for part in document.split("\n\n")}
    for prompt in prompts:
        text = core.decode(prompt)
        assert any(start.startswith(text.split("\n\n")[0]) for start in starts)
    assert len({tuple(prompt[:1]) + tuple(prompt[1:8]) for prompt in prompts}) == len(prompts)
    assert prompts == data.real_prompts(core, lengths, documents)


def test_prompt_reads_on_from_the_last_paragraph_to_the_first():
    prompts = data.real_prompts(Letters(), [2, 8], ["ab\n\ncd", "ef"])
    assert ["".join(map(chr, prompt)) for prompt in prompts] == ["ab", "cd\n\nef\n\n"]


@pytest.mark.parametrize(
    ("lengths", "message"), [([3, 0], r"\[3, 0\] must be at least 1"), ([9], "has 6 tokens, a prompt of 9")]
)
def test_prompts_that_cannot_be_made_are_errors(lengths, message):
    with pytest.raises(ValueError, match=message):
        data.real_prompts(Letters(), lengths, ["ab", "cd"])


# --- batches

DOCUMENTS = [list(range(10, 15)), list(range(20, 32)), [], [40], list(range(50, 57))]  # 25 tokens
DOCUMENT_OF = {token: i for i, document in enumerate(DOCUMENTS) for token in document}


def test_documents_end_with_the_end_token():
    assert data.encode_documents(Letters(), ["a", "bc"]) == [[97, 0], [98, 99, 0]]


def test_one_epoch_by_hand():
    packed = data.PackedBatches([[1, 2, 3], [4, 5]], batch=2, seq_len=4, seed=0)
    batch = packed(0)
    first_is_long = batch.tokens[0, 0] == 1
    expected = {
        True: ([[1, 2, 3, 4], [5, 0, 0, 0]], [[2, 3, -1, 5], [-1, -1, -1, -1]], [[1, 1, 1, 2], [1, 0, 0, 0]],
               [[0, 1, 2, 0], [0, -1, -1, -1]]),
        False: ([[4, 5, 1, 2], [3, 0, 0, 0]], [[5, -1, 2, 3], [-1, -1, -1, -1]], [[1, 1, 2, 2], [1, 0, 0, 0]],
                [[0, 1, 0, 1], [0, -1, -1, -1]]),
    }[bool(first_is_long)]  # fmt: skip
    for found, wanted in zip(batch, expected, strict=True):
        assert found.dtype == np.int32
        np.testing.assert_array_equal(found, wanted)


@given(batch=st.integers(1, 4), seq_len=st.integers(1, 30), seed=st.integers(0, 2**64 - 1), step=st.integers(0, 50))
def test_batch_depends_on_seed_and_step_only(batch, seq_len, seed, step):
    packed = data.PackedBatches(DOCUMENTS, batch, seq_len, seed=seed)
    packed(step + 3), packed(0)
    for found, wanted in zip(packed(step), data.batches(DOCUMENTS, batch, seq_len, seed=seed, step=step), strict=True):
        assert found.shape == (batch, seq_len)
        np.testing.assert_array_equal(found, wanted)


@given(seq_len=st.integers(1, 30), seed=st.integers(0, 2**64 - 1), epoch=st.integers(0, 3))
def test_an_epoch_has_every_token_and_every_target_once(seq_len, seed, epoch):
    packed = data.PackedBatches(DOCUMENTS, 1, seq_len, seed=seed)
    rows = [packed(epoch * packed.rows_per_epoch + r) for r in range(packed.rows_per_epoch)]
    tokens, targets, segments, positions = (np.concatenate([row[i][0] for row in rows]) for i in range(4))
    real = segments > 0
    assert sorted(tokens[real]) == sorted(token for document in DOCUMENTS for token in document)
    wanted = [token for document in DOCUMENTS for token in document[1:]]
    assert sorted(targets[targets != -1]) == sorted(wanted)
    np.testing.assert_array_equal(targets[targets != -1], tokens[targets != -1] + 1)  # documents count upwards
    assert (positions[~real] == -1).all()
    assert (targets[~real] == -1).all()


@given(seq_len=st.integers(1, 30), seed=st.integers(0, 2**64 - 1), step=st.integers(0, 9))
def test_segments_are_documents_and_positions_count_within_them(seq_len, seed, step):
    for tokens, _, segments, positions in zip(*data.batches(DOCUMENTS, 2, seq_len, seed=seed, step=step), strict=True):
        for segment in range(1, segments.max() + 1):
            inside = segments == segment
            assert len({DOCUMENT_OF[token] for token in tokens[inside]}) == 1
            np.testing.assert_array_equal(positions[inside], np.arange(inside.sum()))
        assert (np.diff(segments[segments > 0]) >= 0).all()


def test_epochs_and_seeds_differ_in_order():
    documents = [[i] for i in range(50)]
    orders = {tuple(data.batches(documents, 1, 50, seed=s, step=e).tokens[0]) for s in range(3) for e in range(3)}
    assert len(orders) == 9


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([[]], 1, 4, 0), "the 1 documents have no tokens"),
        (([[1]], 0, 4, 0), "batch=0 and seq_len=4 must be at least 1"),
        (([[1]], 1, -4, 0), "batch=1 and seq_len=-4"),
        (([[1]], 1, 4, -1), "step=-1 must not be negative"),
    ],
)
def test_sizes_that_make_no_batch_are_errors(arguments, message):
    *sizes, step = arguments
    with pytest.raises(ValueError, match=message):
        data.batches(*sizes, seed=0, step=step)
