"""Corpora tokenised once, and packed rows that depend on nothing but (seed, step)."""

import gzip
import json
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from jaxbench.pretrained import small_tokenizers
from jaxbench.text import dataset


class Words:
    """One id a word of a fixed list; 0 ends a document."""

    eos_id, vocab_size = 0, 50

    class core:  # noqa: N801  what tokenizer_id reads of a tokenizer
        to_str = staticmethod(lambda: "words")

    calls = 0

    def encode(self, text):
        Words.calls += 1
        return [int(word) for word in text.split()]


DOCUMENTS = [list(range(1, 8)), list(range(11, 14)), [21], list(range(31, 43))]


def corpus_of(documents, end=True):
    parts = [ids + [0] if end else ids for ids in documents]
    starts = np.cumsum([0] + [len(part) for part in parts])
    return dataset.Corpus(np.concatenate(parts).astype(np.uint16), starts, Words(), "sha")


def jsonl(path, texts):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return path


# Tokenised once


def test_a_text_is_tokenised_once_and_read_back_equal(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", [" ".join(map(str, ids)) for ids in DOCUMENTS])
    Words.calls, seen = 0, []
    first = dataset.prepare(path, tokenizer=Words(), cache=tmp_path / "c", progress=lambda *at: seen.append(at))
    assert Words.calls == len(DOCUMENTS) and seen[-1] == (path.stat().st_size,) * 2
    again = dataset.prepare(path, tokenizer=Words(), cache=tmp_path / "c")
    assert Words.calls == len(DOCUMENTS) and isinstance(again.ids, np.memmap)
    wanted = np.concatenate([ids + [0] for ids in DOCUMENTS])
    np.testing.assert_array_equal(first.ids, wanted)
    np.testing.assert_array_equal(again.ids, wanted)
    np.testing.assert_array_equal(again.starts, [0, 8, 12, 14, 27])


def test_a_tokenizer_that_ends_texts_itself_ends_them_once(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", ["1 2 0", "3"])
    corpus = dataset.prepare(path, tokenizer=Words(), cache=tmp_path / "c")
    np.testing.assert_array_equal(corpus.ids, [1, 2, 0, 3, 0])
    np.testing.assert_array_equal(corpus.starts, [0, 3, 5])


def test_another_text_or_tokenizer_has_a_cache_of_its_own(tmp_path):
    path, cache = tmp_path / "a.txt", tmp_path / "c"
    path.write_text("1 2 3")
    dataset.prepare(path, tokenizer=Words(), cache=cache)
    assert list(dataset.prepare(path, tokenizer="byte", cache=cache).ids) == [*b"1 2 3", 256]
    path.write_text("1 2 4")
    assert list(dataset.prepare(path, tokenizer=Words(), cache=cache).ids) == [1, 2, 4, 0]
    assert len(list(cache.iterdir())) == 3


@pytest.mark.parametrize(
    ("name", "left"), [("ids.bin", 3), ("ids.bin", 0), ("starts.npy", -8), ("starts.npy", 0), ("meta.json", 0)]
)
def test_a_cache_that_lost_its_end_is_built_anew(tmp_path, name, left):
    path, cache = tmp_path / "a.txt", tmp_path / "c"
    path.write_text("1 2 3")
    dataset.prepare(path, tokenizer=Words(), cache=cache)
    file = next(cache.rglob(name))
    file.write_bytes(file.read_bytes()[:left])
    corpus = dataset.prepare(path, tokenizer=Words(), cache=cache)
    assert list(corpus.ids) == [1, 2, 3, 0] and list(corpus.starts) == [0, 4]


def test_a_build_that_fails_leaves_nothing_behind(tmp_path):
    path, cache = tmp_path / "a.jsonl", tmp_path / "c"
    path.write_bytes(b'{"text": "1 2"}\n{"text": "\xff"}\n')
    with pytest.raises(ValueError, match=r"a.jsonl line 2 is not UTF-8 \(byte 0xff at offset 26\)"):
        dataset.prepare(path, tokenizer=Words(), cache=cache)
    assert list(cache.iterdir()) == []


def test_plain_and_compressed_text_and_form_feeds_give_the_same_documents(tmp_path):
    (tmp_path / "a.txt").write_text("ab\fc\f \f")
    with gzip.open(tmp_path / "a.txt.gz", "wt") as file:
        file.write("ab\fc\f \f")
    for name in ("a.txt", "a.txt.gz"):
        corpus = dataset.prepare(tmp_path / name, tokenizer="byte", cache=tmp_path / "c")
        assert list(corpus.ids) == [97, 98, 256, 99, 256] and list(corpus.starts) == [0, 3, 5]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"", r"a\.txt has no text in its 0 bytes"),
        ("a.txt", b" \f\n", "has no text in its 3 bytes"),
        ("a.txt", b"ab\ncd\xe9e", r"line 2 is not UTF-8 \(byte 0xe9 at offset 5\)"),
        ("a.jsonl", b'{"text": "a"}\n{"txt": 1}\n', 'line 2 has no "text" string'),
        ("a.jsonl", b'{"text": "a"\n', "line 1 is not JSON"),
        ("a.txt.gz", b"no gzip", r"cannot read .*a\.txt\.gz"),
        ("a.csv", b"a", "unknown suffix"),
        ("a.npy", b"a", r"cannot read .*a\.npy as token ids"),
        ("a.npy", b"", r"cannot read .*a\.npy as token ids \(EOF: reading magic string"),
    ],
)
@pytest.mark.parametrize("tokenizer", ["byte", "character"])
def test_bad_text_is_named(tmp_path, name, content, message, tokenizer):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        dataset.prepare(tmp_path / name, tokenizer=tokenizer, cache=tmp_path / "c")


def test_a_character_that_the_tokenizer_does_not_know_is_named_with_its_file_and_document(tmp_path):
    known = small_tokenizers.CharacterTokenizer("abc")
    path = jsonl(tmp_path / "held_out.jsonl", ["ab", "cab", "az"])
    with pytest.raises(ValueError, match=r"dataset: .*held_out\.jsonl document 3: .*character 'z' at place 1"):
        dataset.prepare(path, tokenizer=known, cache=tmp_path / "c")


def test_token_files_are_read_where_they_lie_and_cut_at_end_tokens(tmp_path):
    ids = np.array([5, 6, 0, 7, 0, 8], np.uint16)
    np.save(tmp_path / "a.npy", ids)
    ids.tofile(tmp_path / "a.bin")
    for name in ("a.npy", "a.bin"):
        corpus = dataset.prepare(tmp_path / name, tokenizer=Words())
        assert list(corpus.starts) == [0, 3, 5, 6] and isinstance(corpus.ids, np.memmap)
        np.testing.assert_array_equal(corpus.ids, ids)
        assert list(dataset.prepare(tmp_path / name).starts) == [0, 6]
    whole = (tmp_path / "a.npy").read_bytes()
    with open(tmp_path / "archive.npy", "wb") as file:
        np.savez(file, ids=ids)
    for name, content in (("archive", None), ("zip", b"PK\x03\x04"), ("head", whole.replace(b"), }", b"(, }"))):
        if content is not None:
            (tmp_path / f"{name}.npy").write_bytes(content)
        with pytest.raises(ValueError, match=rf"cannot read .*{name}\.npy as token ids"):
            dataset.prepare(tmp_path / f"{name}.npy")
    np.save(tmp_path / "b.npy", np.zeros((2, 3)))
    with pytest.raises(ValueError, match=r"float64 of shape \(2, 3\)"):
        dataset.prepare(tmp_path / "b.npy")


def test_characters_are_numbered_by_code_point_and_counted_in_bytes(tmp_path):
    (tmp_path / "a.txt").write_text("bañ a", encoding="utf-8")
    corpus = dataset.prepare(tmp_path / "a.txt", tokenizer="character", cache=tmp_path / "c")
    assert corpus.tokenizer.characters == " abñ" and list(corpus.ids) == [2, 1, 3, 0, 1]
    assert corpus.tokenizer.decode(corpus.ids) == "bañ a"
    assert small_tokenizers.byte_lengths(corpus.tokenizer)[corpus.ids].sum() == len("bañ a".encode())
    with pytest.raises(ValueError, match="character 'z' at place 1 is none of the 4"):
        corpus.tokenizer.encode("az")


def test_byte_lengths_of_a_byte_level_bpe_add_up_to_the_text(tmp_path):
    from tokenizers import Tokenizer as Core
    from tokenizers import decoders, models, pre_tokenizers, trainers

    from jaxbench.pretrained.tokenizer import Tokenizer

    core = Core(models.BPE())
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    text = "the thin thing, déjà vu 🙂 the end"
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    core.train_from_iterator([text], trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, special_tokens=["<end>"], show_progress=False))  # fmt: skip  # noqa: E501
    tokenizer = Tokenizer(core, eos_id=0, bos_id=None, chat_template=None)
    lengths = small_tokenizers.byte_lengths(tokenizer)
    ids = tokenizer.encode(text)
    assert len(ids) < len(text) and lengths[ids].sum() == len(text.encode()) and lengths[0] == 0


def test_a_split_loses_no_token_and_keeps_document_ends():
    corpus = corpus_of(DOCUMENTS)
    train, validation = dataset.split(corpus, 0.4)  # 27 tokens: cut at 16, inside the last document
    np.testing.assert_array_equal(np.concatenate([train.ids, validation.ids]), corpus.ids)
    assert list(train.starts) == [0, 8, 12, 14, 16] and list(validation.starts) == [0, 11]
    for fraction in (0.0, 1.0, 0.99):
        with pytest.raises(ValueError, match="leaves nothing"):
            dataset.split(corpus, fraction)


# Rows


def pairs(batch):
    """Return every (token, target) that counts."""
    return sorted((int(a), int(b)) for a, b in zip(batch.tokens[batch.mask], batch.targets[batch.mask]))


@pytest.mark.parametrize("seq_len", [1, 4, 5, 27, 40])
@pytest.mark.parametrize("epoch", [0, 3])
def test_an_epoch_holds_every_token_and_every_target_once(seq_len, epoch):
    rows = dataset.PackedDataset(corpus_of(DOCUMENTS), seq_len, seed=3)
    batch = rows.rows(epoch * rows.rows_per_epoch, rows.rows_per_epoch)
    held = batch.positions >= 0
    assert sorted(batch.tokens[held]) == sorted(corpus_of(DOCUMENTS).ids)
    wanted = sorted((a, b) for ids in DOCUMENTS for a, b in zip([*ids], [*ids[1:], 0]))
    assert pairs(batch) == wanted
    assert not batch.mask[~held].any() and (batch.segments[~held] == 0).all() and (batch.targets[~held] == 0).all()


def test_positions_restart_with_every_segment_and_segments_are_documents():
    batch = dataset.PackedDataset(corpus_of(DOCUMENTS), 10, seed=1).rows(0, 3)
    for tokens, positions, segments in zip(batch.tokens, batch.positions, batch.segments):
        for segment in set(segments) - {0}:
            inside = segments == segment
            np.testing.assert_array_equal(positions[inside], np.arange(inside.sum()))
            ids = [i for i in tokens[inside] if i]  # of one document: consecutive numbers
            assert ids == list(range(ids[0], ids[0] + len(ids))) if ids else True
        assert (np.diff(segments[segments > 0]) >= 0).all()


@pytest.mark.parametrize(("seq_len", "count"), [(1, 9), (5, 40), (10, 3), (40, 2)])
def test_documents_are_counted_without_packing_a_row(seq_len, count):
    rows = dataset.PackedDataset(corpus_of(DOCUMENTS), seq_len, seed=3)
    counts = np.concatenate(list(rows.num_documents(count)))
    np.testing.assert_array_equal(counts, rows.rows(0, count).segments.max(axis=1))


def test_without_shuffling_rows_are_the_text_in_order():
    rows = dataset.PackedDataset(corpus_of(DOCUMENTS, end=False), 6, seed=0, shuffle=False)
    np.testing.assert_array_equal(rows.rows(0, 4).tokens.reshape(-1)[:23], np.concatenate(DOCUMENTS))


def test_a_step_is_the_same_in_any_order_and_differs_between_seeds_and_epochs():
    corpus = corpus_of([list(range(1, 50))] * 8)
    one, other = (dataset.PackedDataset(corpus, 8, seed=5) for _ in range(2))
    forward = [one.batch(step, 7) for step in range(20)]
    for step in (19, 3, 11, 0):
        for a, b in zip(forward[step], other.batch(step, 7)):
            np.testing.assert_array_equal(a, b)
    shuffled = dataset.PackedDataset(corpus, 8, seed=6)
    assert (shuffled.batch(0, 7).tokens != forward[0].tokens).any()
    first = one.rows(0, one.rows_per_epoch).tokens
    assert (one.rows(one.rows_per_epoch, one.rows_per_epoch).tokens != first).any()


@pytest.mark.parametrize("hosts", [1, 2, 3, 6])
def test_any_number_of_hosts_reads_the_same_global_batch(hosts):
    corpus = corpus_of(DOCUMENTS)
    whole = dataset.PackedDataset(corpus, 4, seed=2)
    for step in range(6):
        share = 6 // hosts
        parts = [dataset.PackedDataset(corpus, 4, seed=2).batch(step, 6, first=h * share, count=share)
                 for h in range(hosts)]  # fmt: skip
        for wanted, found in zip(whole.batch(step, 6), zip(*parts)):
            np.testing.assert_array_equal(np.concatenate(found), wanted)


def test_two_threads_may_read_rows_of_different_epochs():
    rows = dataset.PackedDataset(corpus_of([list(range(1, 24))]), 8, seed=0)  # three rows an epoch
    wanted = rows.rows(0, 60).tokens

    def read(offset):
        places = [(7 * i + offset) % 57 for i in range(1500)]
        return all(np.array_equal(rows.rows(place, 3).tokens, wanted[place : place + 3]) for place in places)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # threads take turns as often as they can
    try:
        with ThreadPoolExecutor(2) as threads:
            assert all(threads.map(read, (0, 31)))
    finally:
        sys.setswitchinterval(before)


def test_bad_sizes_are_refused():
    corpus = corpus_of(DOCUMENTS)
    with pytest.raises(ValueError, match="seq_len=0"):
        dataset.PackedDataset(corpus, 0, seed=0)
    rows = dataset.PackedDataset(corpus, 4, seed=0)
    for step, first, count in ((-1, 0, 2), (0, 2, 2), (0, 0, 0)):
        with pytest.raises(ValueError, match=f"step={step}"):
            rows.batch(step, 3, first=first, count=count)
