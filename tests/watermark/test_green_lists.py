"""Green lists of MarkLLM and transformers; golden/markllm.json comes from MarkLLM itself (golden/make_markllm.py)."""

import json
import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from jaxbench.watermark import green_lists, reference, significance
from jaxbench.watermark.config import MarkLlmKgw, TransformersKgw
from jaxbench.watermark.keys import Key
from tests.watermark import vocabulary

GOLDEN = json.loads((Path(__file__).parent / "golden" / "markllm.json").read_text())
FIELDS = ("gamma", "hash_key", "f_scheme", "window_scheme", "prefix_length")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """Keep tables of tests out of the user's cache."""
    monkeypatch.setenv("JAXBENCH_CACHE", str(tmp_path))
    return tmp_path / "watermark"


def markllm_flags(lists: green_lists.GreenLists, ids: np.ndarray) -> list[int]:
    """Return MarkLLM's flags: 1 green, 0 red, -1 without context."""
    return np.where(lists.seeds(ids) < 0, -1, lists.green(ids))[0].tolist()


def green_after(lists: green_lists.GreenLists, contexts: np.ndarray) -> np.ndarray:
    """Return the green list that follows each context [B n], bool [B V]."""
    size = lists.vocab_size
    return vocabulary.words(lists.scheme, Key(0), contexts, vocab_size=size, green_lists=lists) == 0


# The permutation


@pytest.mark.parametrize(("size", "steps"), [(2, 1), (3, 0), (7, 7), (100, 25), (4099, 2000)])
@pytest.mark.parametrize("seed", [0, 1, 15485863, 2**32 - 1, 2**32 + 7, 2**63 - 1])
def test_permutation_is_torchs(size, steps, seed):
    torch = pytest.importorskip("torch")
    wanted = torch.randperm(size, generator=torch.Generator().manual_seed(seed)).numpy()
    assert np.array_equal(green_lists.permutation(seed, size), wanted)
    early = green_lists.Shuffle(size, steps).is_early(seed)
    assert np.flatnonzero(early).tolist() == sorted(wanted[:steps].tolist())


def test_a_shuffle_used_again_gives_the_same_list():
    shuffle = green_lists.Shuffle(1000, 250)
    first = shuffle.is_early(3)
    shuffle.is_early(4)
    assert np.array_equal(shuffle.is_early(3), first)
    assert np.array_equal(np.unpackbits(shuffle.packed(3), count=1000, bitorder="little").astype(bool), first)
    assert first.sum() == 250


# MarkLLM


@pytest.mark.parametrize("window_scheme", ["left", "self"])
@pytest.mark.parametrize("f_scheme", ["time", "additive", "skip", "min"])
def test_lists_and_flags_are_markllms(f_scheme, window_scheme):
    rows = [row for row in GOLDEN if row["f_scheme"] == f_scheme and row["window_scheme"] == window_scheme]
    assert len(rows) >= 12
    for row in rows:
        lists = green_lists.GreenLists(MarkLlmKgw(**{name: row[name] for name in FIELDS}), vocab_size=row["vocab_size"])
        ids = np.array([row["ids"]])
        assert markllm_flags(lists, ids) == row["flags"]
        assert np.flatnonzero(green_after(lists, ids[:, -row["prefix_length"] :])[0]).tolist() == row["green"]


def test_evidence_counts_what_markllm_counts_where_nothing_repeats():
    row = next(row for row in GOLDEN if row["window_scheme"] == "left" and row["vocab_size"] == 600)
    scheme, ids = MarkLlmKgw(**{name: row[name] for name in FIELDS}), np.array([row["ids"]])
    lists = green_lists.GreenLists(scheme, vocab_size=600)
    arguments = {"vocab_size": 600, "green_lists": lists, "deduplicate": False}
    found = reference.evidence(scheme, Key(0), ids, np.array([len(row["ids"])]), **arguments)
    detected = significance.score(scheme, found, vocab_size=600)
    assert detected.num_green.tolist() == [row["flags"].count(1)]
    assert detected.num_scored.tolist() == [len(row["ids"]) - row["flags"].count(-1)]
    assert detected.score[0] == pytest.approx(row["z"], abs=1e-12)


# transformers


@pytest.mark.parametrize("key", [15485863, 2**40 + 12345])
@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("seeding", ["lefthash", "selfhash"])
def test_lists_are_those_of_transformers(seeding, width, key):
    torch = pytest.importorskip("torch")
    from transformers.generation.logits_process import WatermarkLogitsProcessor

    scheme = TransformersKgw(seeding_scheme=seeding, context_width=width, hashing_key=key)
    lists = green_lists.GreenLists(scheme, vocab_size=311)
    processor = WatermarkLogitsProcessor(311, "cpu", 0.25, 2.0, key, seeding, width)
    ids = np.random.default_rng(width).integers(0, 311, (2, 24))
    found, seeds = lists.green(ids), lists.seeds(ids)
    is_self = seeding == "selfhash"
    for row, place in np.ndindex(*ids.shape):
        if place < width - is_self:
            assert seeds[row, place] == -1 and not found[row, place]
            continue
        window = torch.tensor(ids[row, place - width + is_self : place + is_self])
        assert found[row, place] == (int(ids[row, place]) in processor._get_greenlist_ids(window).tolist())


def test_lefthash_bits_bias_what_transformers_biases():
    torch = pytest.importorskip("torch")
    from transformers.generation.logits_process import WatermarkLogitsProcessor

    lists = green_lists.GreenLists(TransformersKgw(context_width=2), vocab_size=311)
    processor = WatermarkLogitsProcessor(311, "cpu", 0.25, 2.0, context_width=2)
    contexts = np.array([[5, 7], [310, 0]])
    biased = processor(torch.tensor(contexts), torch.zeros(2, 311)).numpy() > 0
    assert np.array_equal(green_after(lists, contexts), biased)


@pytest.mark.parametrize("seeding", ["lefthash", "selfhash"])
def test_counts_are_those_of_transformers_detector(seeding):
    torch = pytest.importorskip("torch")
    from transformers import WatermarkDetector, WatermarkingConfig

    ids = np.random.default_rng(0).integers(0, 40, (3, 60))
    watermarking = WatermarkingConfig(seeding_scheme=seeding, context_width=2)
    model = SimpleNamespace(vocab_size=311, bos_token_id=310, is_encoder_decoder=False)
    detector = WatermarkDetector(model, "cpu", watermarking, ignore_repeated_ngrams=False)
    wanted = detector(torch.tensor(ids), return_dict=True)
    scheme = TransformersKgw(seeding_scheme=seeding, context_width=2)
    lists = green_lists.GreenLists(scheme, vocab_size=311)
    arguments = {"vocab_size": 311, "green_lists": lists, "deduplicate": False}
    found = reference.evidence(scheme, Key(0), ids, np.full(3, 60), **arguments)
    detected = significance.score(scheme, found, vocab_size=311)
    assert detected.num_green.tolist() == wanted.num_green_tokens.tolist()
    assert detected.num_scored.tolist() == wanted.num_tokens_scored.tolist()


# Tables


@pytest.mark.parametrize("scheme", [MarkLlmKgw(f_scheme="min", prefix_length=3), TransformersKgw(context_width=2)])
def test_rows_computed_one_by_one_and_the_whole_table_agree(scheme):
    ids = np.random.default_rng(1).integers(0, 203, (4, 50))
    lazily = green_lists.GreenLists(scheme, vocab_size=203)
    one_by_one = lazily.green(ids)
    whole = green_lists.GreenLists(scheme, vocab_size=203)
    bits = whole.bits()
    assert bits.shape == (203, 26) and isinstance(bits, np.memmap)
    assert np.array_equal(whole.green(ids), one_by_one)
    index = whole.row_index(ids)
    looked_up = (bits[index, ids >> 3] >> (ids & 7).astype(np.uint8)) & 1
    assert np.array_equal((looked_up == 1) & (index >= 0), one_by_one)


def test_detection_holds_the_lists_of_its_texts_and_not_those_of_the_whole_vocabulary():
    scheme, size = TransformersKgw(), 600_000  # all of its lists are 42 GiB
    lists = green_lists.GreenLists(scheme, vocab_size=size)
    shuffle = green_lists.Shuffle(size, lists.list_size)
    for ids in ([5, 7, 599_999, 5], [7, 5, 11, 599_999], [5, 7]):
        found = lists.green(np.array([ids]))[0]
        seeds = [scheme.hashing_key * token % (2**64 - 1) for token in ids]
        wanted = [False, *(shuffle.is_early(seed)[token] for seed, token in zip(seeds, ids[1:]))]
        assert found.tolist() == wanted


def test_what_lies_behind_a_text_does_not_count():
    scheme = MarkLlmKgw(prefix_length=2)
    lists = green_lists.GreenLists(scheme, vocab_size=203)
    ids = np.array([[3, 9, 1, 4, 999], [3, 9, -1, -1, -1]])
    found = reference.evidence(scheme, Key(0), ids, np.array([4, 2]), vocab_size=203, green_lists=lists)
    assert found.scored.tolist() == [[False, False, True, True, False], [False] * 5]
    assert np.array_equal(found.words[:1, :4] == 0, lists.green(ids[:1, :4]))


def test_rows_follow_from_values_as_a_device_computes_them():
    lists = green_lists.GreenLists(MarkLlmKgw(prefix_length=2), vocab_size=203)
    ids = np.array([[3, 9, 1]])
    value = lists.rule.values[3] * lists.rule.values[9] % 203
    assert lists.row_index(ids)[0].tolist() == [-1, -1, lists.rule.rows[value]]


def test_a_table_is_built_once_and_a_damaged_one_again(cache):
    scheme = TransformersKgw()
    green_lists.GreenLists(scheme, vocab_size=101).bits()
    (path,) = cache.iterdir()
    wanted, written = path.read_bytes(), path.stat().st_mtime_ns
    green_lists.GreenLists(scheme, vocab_size=101).bits()
    assert path.stat().st_mtime_ns == written
    for damaged in (wanted[:-200], wanted[:-1] + bytes([wanted[-1] ^ 1]), b"no table"):
        path.write_bytes(damaged)
        lists = green_lists.GreenLists(scheme, vocab_size=101)
        assert np.array_equal(lists.bits()[100], green_lists.Shuffle(101, 25).packed(int(lists.rule.row_seeds[100])))
        assert path.read_bytes() == wanted
    assert [found.name for found in cache.iterdir()] == [path.name]


def test_an_interrupted_build_leaves_nothing(cache, monkeypatch):
    def stop(shuffle: green_lists.Shuffle, seed: int) -> np.ndarray:
        assert len(list(cache.iterdir())) == 1, "it is being written"
        raise KeyboardInterrupt

    monkeypatch.setattr(green_lists.Shuffle, "packed", stop)
    with pytest.raises(KeyboardInterrupt):
        green_lists.GreenLists(TransformersKgw(), vocab_size=101).bits()
    assert list(cache.iterdir()) == []


def test_the_name_of_a_table_tells_parameters_apart():
    seeds = np.arange(10)
    names = {
        green_lists.table_path(seeds, 10, 5),
        green_lists.table_path(seeds, 10, 4),
        green_lists.table_path(seeds + 1, 10, 5),
    }
    assert len(names) == 3 and all(os.environ["JAXBENCH_CACHE"] in str(name) for name in names)


# Bad input


@pytest.mark.parametrize(
    ("scheme", "vocab_size", "message"),
    [
        (SimpleNamespace(scheme="kgw"), 100, "scheme='kgw' has no list tables"),
        (MarkLlmKgw(), 1, r"vocab_size=1 is outside \[2, "),
    ],
)
def test_bad_parameters_are_named(scheme, vocab_size, message):
    with pytest.raises(ValueError, match=message):
        green_lists.GreenLists(scheme, vocab_size=vocab_size)


@pytest.mark.parametrize("scheme", [MarkLlmKgw(), TransformersKgw(seeding_scheme="selfhash")])
def test_a_token_outside_the_vocabulary_is_named(scheme):
    with pytest.raises(ValueError, match=r"token 100 \(row 0, position 1\) is outside \[0, 100\)"):
        green_lists.GreenLists(scheme, vocab_size=100).green(np.array([[1, 100]]))


def test_selfhash_of_transformers_has_no_table():
    with pytest.raises(ValueError, match="selfhash has 2"):
        green_lists.GreenLists(TransformersKgw(seeding_scheme="selfhash"), vocab_size=100).bits()
