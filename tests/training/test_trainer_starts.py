"""A run that is started again: where its texts lie now, and what its best loss was."""

import gc
import hashlib
import json
import shutil
import types
import weakref

import pytest
import tokenizers

from jaxbench.pretrained.tokenizer import Tokenizer
from jaxbench.training import checkpoint, trainer
from jaxbench.training.train_config import TrainConfig
from torch_ref.training import engine

# warnings: Orbax's own, of several kinds
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("own_cache")]
SHAPE = {"d_model": 8, "d_ff": 16, "num_layers": 1, "num_heads": 1, "num_kv_heads": 1, "head_dim": 8, "max_seq_len": 8}


def train(
    workdir,
    text,
    *,
    steps=4,
    validation_path=None,
    tokenizer="byte",
    save_every=250,
    make=engine.Engine,
    profile_steps=None,
    **evaluation,
):
    data = {"seq_len": 8, "validation_path": validation_path, "tokenizer": tokenizer}
    run = TrainConfig(
        model=SHAPE, data=data, batch_size=2, steps=steps,
        learning_rate=1e-2, evaluation={"every_steps": 1, "batches": 1} | evaluation, schedule={"kind": "constant"},
        checkpoints={"export": False, "every_steps": save_every}, logging={"peak_tflops": 1.0},
    )  # fmt: skip
    trainer.run(run, make, workdir=workdir, backend="torch", data_path=str(text), profile_steps=profile_steps)
    return json.loads((workdir / "summary.json").read_text())


class Slow(engine.Engine):
    """An engine whose device is done with a step when its metrics are fetched, and that counts those it is not."""

    queued, at_start = 0, None

    def step(self, batch, learning_rate):
        self.queued += 1
        return super().step(batch, learning_rate)

    def fetch(self, metrics):
        self.queued -= 1
        return super().fetch(metrics)

    def start_profile(self, folder):
        Slow.at_start = self.queued

    def stop_profile(self):
        pass


def losses(workdir):
    records = map(json.loads, (workdir / "records.jsonl").read_text().splitlines())
    return [record["validation_loss"] for record in records if "validation_loss" in record]


def test_the_best_loss_is_the_lowest_one_though_no_gain_of_it_counts(tmp_path, text):
    summary = train(tmp_path / "w", text, min_gain=10.0)
    found = losses(tmp_path / "w")
    assert summary["best_loss"] == min(found) < found[0]
    assert summary["best_step"] == 1 + found.index(min(found)) and summary["without_gain"] == 3


def test_the_text_is_named_by_its_checksum_in_the_summary_and_in_what_is_printed(tmp_path, text, capfd):
    other = tmp_path / "other.txt"
    other.write_text("a dog lay under the table; " * 30)
    sums = [hashlib.sha256(path.read_bytes()).hexdigest() for path in (text, other)]
    assert train(tmp_path / "one", text, steps=1)["text_sha256"] == sums[0]
    assert f"text sha256 {sums[0]}\n" in capfd.readouterr().err
    assert train(tmp_path / "two", text, steps=1, validation_path=str(other))["text_sha256"] == "".join(sums)
    assert f"text sha256 {sums[0]}, held out {sums[1]}\n" in capfd.readouterr().err


def test_small_gains_add_up_to_one_that_counts_and_patience_ends_a_run_without(tmp_path, text):
    assert train(tmp_path / "w", text, patience=2, min_gain=10.0)["steps"] == 3
    falls = losses(tmp_path / "w")
    gain = 0.75 * (falls[0] - falls[2])  # more than either fall, less than both
    assert gain > max(falls[0] - falls[1], falls[1] - falls[2])
    summary = train(tmp_path / "again", text, steps=3, patience=2, min_gain=gain)
    assert (summary["steps"], summary["without_gain"]) == (3, 0)


def test_a_held_out_text_may_be_moved_between_starts(tmp_path, text):
    first, moved = tmp_path / "a.txt", tmp_path / "b.txt"
    first.write_text("a dog sat on the log; " * 9)
    train(tmp_path / "w", text, steps=1, validation_path=str(first))
    shutil.move(first, moved)
    assert train(tmp_path / "w", text, steps=2, validation_path=str(moved))["steps"] == 2
    moved.write_text("another text altogether, " * 9)
    with pytest.raises(ValueError, match="holds another run: text_sha256 was"):
        train(tmp_path / "w", text, steps=3, validation_path=str(moved))


def test_a_run_that_goes_no_further_than_its_checkpoint_reports_the_held_out_loss_of_that_step(
    tmp_path, text, monkeypatch, capfd
):
    class Killed(Exception):
        pass

    def stopping(run, done):
        if done == 4:
            raise Killed
        return after_step(run, done)

    after_step = trainer._Trainer._after_step
    with monkeypatch.context() as patched, pytest.raises(Killed):  # evaluated after step 2, saved after step 3
        patched.setattr(trainer._Trainer, "_after_step", stopping)
        train(tmp_path / "w", text, steps=9, every_steps=2, save_every=3)
    whole = train(tmp_path / "whole", text, steps=3, every_steps=2, save_every=3)
    capfd.readouterr()
    for _ in range(2):  # measured, then read from the records
        summary = train(tmp_path / "w", text, steps=3, every_steps=2, save_every=3)
        names = ("validation_loss", "bits_per_byte", "best_loss", "best_step", "without_gain")
        assert {name: summary[name] for name in names} == {name: whole[name] for name in names}
    assert losses(tmp_path / "w") == losses(tmp_path / "whole")
    assert f"finished 3 steps: held-out loss {whole['validation_loss']:.4f}" in (said := capfd.readouterr().err)
    assert " 0 tokens/s" not in said


def permuted(folder, order):
    """A tokenizer of the text's characters with their ids in this order."""
    folder.mkdir(exist_ok=True)
    vocabulary = {character: i for i, character in enumerate(sorted(set("the cat sat on the mat; "))[::order])}
    core = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary))
    core.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), behavior="isolated")
    Tokenizer(core, eos_id=None, bos_id=None, chat_template=None).save(folder)
    return str(folder)


def test_a_tokenizer_that_gives_other_ids_is_another_run_s_though_it_lies_at_the_same_place(tmp_path, text):
    train(tmp_path / "w", text, steps=1, tokenizer=permuted(tmp_path / "t", 1))
    with pytest.raises(ValueError, match=r"holds another run: tokenizer was \w+, is \w+; use another --workdir"):
        train(tmp_path / "w", text, steps=2, tokenizer=permuted(tmp_path / "t", -1))
    assert train(tmp_path / "w", text, steps=2, tokenizer=permuted(tmp_path / "t", 1))["steps"] == 2


def test_a_checkpoint_older_than_the_tokenizer_s_identity_is_gone_on_from(tmp_path, text, monkeypatch):
    save = checkpoint.Checkpoints.save

    def older(self, step, arrays, meta, **metric):
        save(self, step, arrays, meta | {"identity": {k: v for k, v in meta["identity"].items() if k != "tokenizer"}})

    with monkeypatch.context() as patched:
        patched.setattr(checkpoint.Checkpoints, "save", older)
        train(tmp_path / "w", text, steps=1)
    assert train(tmp_path / "w", text, steps=2)["steps"] == 2


def test_initial_values_are_let_go_once_the_engine_has_its_own(tmp_path, text):
    kept: list[weakref.ref] = []

    def make(settings, model, params):
        kept.extend(weakref.ref(value) for value in params.values())
        return types.SimpleNamespace(arrays=stop)

    def stop():  # a run's first question, for the checkpoint that it goes on from
        gc.collect()
        raise RuntimeError(f"{sum(reference() is not None for reference in kept)} of {len(kept)} arrays are held")

    with pytest.raises(RuntimeError, match=r"^0 of \d\d arrays are held"):
        train(tmp_path / "run", text, make=make)


def test_a_trace_begins_when_the_device_has_finished_the_steps_before_it(tmp_path, text):
    train(tmp_path / "w", text, steps=6, make=Slow, every_steps=6, profile_steps=(4, 6))  # logged after the sixth
    assert Slow.at_start == 0
    records = (tmp_path / "w" / "records.jsonl").read_text().splitlines()
    assert [json.loads(record)["step"] for record in records] == [1, 2, 3, 4, 5, 6, 6]
