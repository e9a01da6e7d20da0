"""What a run starts from: ids that no tokenizer has, texts that lie elsewhere."""

import numpy as np
import pytest

from jaxbench.pretrained.small_tokenizers import ByteTokenizer
from jaxbench.training import train_inputs
from jaxbench.training.train_config import TrainConfig

SHAPE = {"d_model": 8, "d_ff": 16, "num_layers": 1, "num_heads": 1, "num_kv_heads": 1, "head_dim": 8, "max_seq_len": 8}


def settings(*, vocab_size=None, **data):
    return TrainConfig(
        model=SHAPE | {"vocab_size": vocab_size}, data={"seq_len": 8} | data, batch_size=2, steps=1, learning_rate=1e-2
    )


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


def test_a_run_is_the_same_wherever_its_texts_lie():
    here, there = (settings(path=f"{where}/a.txt", validation_path=f"{where}/b.txt") for where in ("here", "there"))
    assert here.identity() == there.identity()
    assert here.identity() != settings(path="here/a.txt", validation_fraction=0.2).identity()
