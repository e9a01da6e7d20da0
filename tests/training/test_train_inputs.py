"""What a run starts from: ids that no tokenizer has, texts that lie elsewhere."""

import numpy as np
import pytest

from jaxbench import initial
from jaxbench.pretrained import weights
from jaxbench.pretrained.small_tokenizers import ByteTokenizer
from jaxbench.pretrained.tokenizer import load_tokenizer
from jaxbench.training import train_inputs
from jaxbench.training.train_config import TrainConfig

SHAPE = {"d_model": 8, "d_ff": 16, "num_layers": 1, "num_heads": 1, "num_kv_heads": 1, "head_dim": 8, "max_seq_len": 8}


def settings(*, vocab_size=None, start=None, **data):
    return TrainConfig(
        model=SHAPE | {"vocab_size": vocab_size}, data={"seq_len": 8} | data, batch_size=2, steps=1,
        learning_rate=1e-2, start=start,
    )  # fmt: skip


@pytest.mark.parametrize("place", [0, 99])
def test_an_id_that_the_tokenizer_has_not_is_refused_before_the_first_step(place, tmp_path):
    (tmp_path / "tokenizer").mkdir()
    ByteTokenizer().save(tmp_path / "tokenizer")
    ids = np.full(100, 97)
    ids[place] = 300  # inside the decoder's vocabulary, which is padded
    np.save(tmp_path / "ids.npy", ids)
    run = settings(vocab_size=400, tokenizer=str(tmp_path / "tokenizer"))
    part = "training" if place == 0 else "held-out"
    with pytest.raises(ValueError, match=f"the {part} part of .*ids.npy has token id 300, and data.tokenizer has 257"):
        train_inputs.prepare(run, str(tmp_path / "ids.npy"))
    without = settings(vocab_size=400)  # whose ids are of no tokenizer
    assert train_inputs.prepare(without, str(tmp_path / "ids.npy"))[0].byte_lengths is None


def test_a_held_out_text_beside_ids_of_an_unknown_tokenizer_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXBENCH_CACHE", str(tmp_path / "cache"))
    (tmp_path / "held_out.txt").write_text("the cat sat on the mat; " * 30)
    ids = str(tmp_path / "ids.npy")
    np.save(ids, np.arange(200) % 300)
    run = settings(vocab_size=300, validation_path=str(tmp_path / "held_out.txt"))
    with pytest.raises(ValueError, match=r"held_out\.txt is a text, and .*ids\.npy holds token ids of a tok"):
        train_inputs.prepare(run, ids)
    train_inputs.prepare(settings(vocab_size=300, validation_path=ids), ids)


def test_a_run_is_the_same_wherever_its_texts_lie():
    here, there = (settings(path=f"{where}/a.txt", validation_path=f"{where}/b.txt") for where in ("here", "there"))
    assert here.identity() == there.identity()
    assert here.identity() != settings(path="here/a.txt", validation_fraction=0.2).identity()


# What a checkpoint to start from has learned


@pytest.fixture
def text(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXBENCH_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "text.txt"
    path.write_text("the cat sat on the mat; " * 30)
    return str(path)


def checkpoint(folder, tokenizer, vocab_size):
    config = settings(vocab_size=vocab_size).decoder(None)
    weights.save_checkpoint(folder, config, initial.initial_params(config, 3), tokenizer=tokenizer)
    return str(folder)


@pytest.mark.parametrize("other", ["byte", "character"])
def test_a_checkpoint_that_was_trained_on_other_token_ids_is_refused(other, tmp_path, text):
    tokenizer = train_inputs.prepare(settings(tokenizer="character"), text)[0].tokenizer
    made = {"byte": ByteTokenizer(), "character": tokenizer}
    start = checkpoint(tmp_path / "start", made.pop(other), 257)
    (ours,) = made
    message = f"trained on other token ids than data.tokenizer={ours} gives: 0 of its .* pass --set=data.tokenizer="
    with pytest.raises(ValueError, match=message):
        train_inputs.prepare(settings(vocab_size=257, start=start, tokenizer=ours), text)
    for same in (other, start):  # the kind that it was trained with, or its own
        _, _, params = train_inputs.prepare(settings(vocab_size=257, start=start, tokenizer=same), text)
        assert np.array_equal(params["embed.embedding"], weights.load_checkpoint(start).params["embed.embedding"])


def test_a_checkpoint_without_a_tokenizer_and_ids_without_one_are_not_compared(tmp_path, text):
    bare = checkpoint(tmp_path / "bare", None, 257)
    train_inputs.prepare(settings(vocab_size=257, start=bare, tokenizer="character"), text)
    np.save(tmp_path / "ids.npy", np.arange(200) % 257)
    byte = checkpoint(tmp_path / "start", ByteTokenizer(), 257)
    train_inputs.prepare(settings(vocab_size=257, start=byte), str(tmp_path / "ids.npy"))


def test_a_tokenizer_that_gained_tokens_still_gives_a_checkpoint_s_ids(tmp_path, text):
    start = checkpoint(tmp_path / "start", ByteTokenizer(), 260)
    grown = load_tokenizer(start)
    grown.core.add_tokens(["the"])
    (tmp_path / "grown").mkdir()
    grown.save(tmp_path / "grown")
    train_inputs.prepare(settings(vocab_size=260, start=start, tokenizer=str(tmp_path / "grown")), text)
