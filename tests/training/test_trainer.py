"""A whole run on both backends: learns, resumes bit for bit, stops early, refuses, and says what broke."""

import fcntl
import functools
import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from jaxbench import cli, config
from jaxbench.memory.decoder_config import DecoderMemory
from jaxbench.memory.train_config import MemoryTrainConfig
from jaxbench.parity import cases
from jaxbench.training import engine, observe, trainer
from jaxbench.training.checkpoint import TEMPORARY
from jaxbench.training.train_config import TrainConfig
from tests.structure import ROOT
from torch_ref.memory import decoder
from torch_ref.training import engine as torch_engine

pytestmark = pytest.mark.filterwarnings("ignore")  # Orbax's own, of several kinds
ENGINES = {"flax": engine.Engine, "torch": torch_engine.Engine}
BACKENDS = pytest.mark.parametrize("backend", ENGINES)
SHAPE = {"vocab_size", "d_model", "d_ff", "num_layers", "num_heads", "num_kv_heads", "head_dim", "max_seq_len"}
TEXT = "the cat sat on the mat and the dog sat on the log; " * 40


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("JAXBENCH_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(TEXT)
    return str(path)


def settings(**update):
    base = {
        "model": cases.LLAMA.model_dump(include=SHAPE) | {"dropout": 0.1, "vocab_size": None},
        "data": {"tokenizer": "character", "seq_len": 16, "validation_fraction": 0.2},
        "batch_size": 4, "steps": 12, "learning_rate": 1e-2,
        "evaluation": {"every_steps": 6, "batches": 2}, "checkpoints": {"every_steps": 4, "keep": 2},
        "logging": {"every_steps": 3, "peak_tflops": 1.0}, "step": {"accumulation": 2},
    }  # fmt: skip
    return (MemoryTrainConfig if "memory" in update else TrainConfig)(**(base | update))


def train(workdir, text, backend="flax", make=None, **update):
    make = make or ENGINES[backend]
    return trainer.run(settings(**update), make, workdir=workdir, backend=backend, data_path=text)


def with_memory(memory):
    """Return the PyTorch engine of a decoder with memory."""
    return functools.partial(ENGINES["torch"], extension=decoder.extension(DecoderMemory(**memory)))


def outcome(workdir):
    return (workdir / "records.jsonl").read_text(), (workdir / "export" / "model.safetensors").read_bytes()


class Interrupted:
    """An engine whose run is cut off before a step, once."""

    def __init__(self, backend, at):
        self.backend, self.at = backend, at

    def __call__(self, *args, **kwargs):
        made, taken = ENGINES[self.backend](*args, **kwargs), []
        step = made.step

        def limited(batch, rate):
            taken.append(rate)
            if len(taken) > self.at:
                raise KeyboardInterrupt
            return step(batch, rate)

        made.step = limited
        return made


@BACKENDS
def test_a_run_learns_records_every_step_and_resumes_bit_for_bit(backend, tmp_path, text):
    whole = train(tmp_path / "whole", text, backend)
    records = [json.loads(line) for line in (tmp_path / "whole" / "records.jsonl").read_text().splitlines()]
    losses = [record["loss"] for record in records if "loss" in record]
    assert [record["step"] for record in records if "loss" in record] == list(range(1, 13))
    assert losses[-1] < losses[0] - 0.3 and losses[0] == pytest.approx(np.log(14), rel=0.05)
    assert [record["step"] for record in records if "validation_loss" in record] == [6, 12]
    assert whole.steps == 12 and whole.validation_loss == records[-1]["validation_loss"]
    # One byte a character, so bits per byte are the loss in bits.
    assert whole.bits_per_byte == pytest.approx(whole.validation_loss / np.log(2))
    assert records[-1]["validation_perplexity"] == pytest.approx(np.exp(whole.validation_loss))
    summary = json.loads((tmp_path / "whole" / "summary.json").read_text())
    assert summary["backend"] == backend and summary["best_step"] == 12
    assert any((tmp_path / "whole" / "tensorboard").iterdir())
    for at in (2, 9):  # before the first checkpoint, and after the second
        cut = tmp_path / f"cut-{at}"
        with pytest.raises(KeyboardInterrupt):
            train(cut, text, backend, make=Interrupted(backend, at))
        train(cut, text, backend)
        assert outcome(cut) == outcome(tmp_path / "whole")
    again = train(tmp_path / "whole", text, backend)  # finished already
    assert again.validation_loss == whole.validation_loss and again.tokens_per_s == 0.0


def test_the_backends_follow_the_same_curve_on_the_same_data(tmp_path, text):
    curves = []
    for backend in ENGINES:
        train(tmp_path / backend, text, backend, steps=6)
        lines = (tmp_path / backend / "records.jsonl").read_text().splitlines()
        curves.append([value for line in lines for value in json.loads(line).values() if value is not None])
    np.testing.assert_allclose(curves[0], curves[1], rtol=2e-4)


def test_transformers_loads_the_export_with_equal_logits(tmp_path, text):
    import torch
    from transformers import AutoModelForCausalLM

    from jaxbench import transformer
    from jaxbench.pretrained import weights

    train(tmp_path, text, steps=2)
    checkpoint = weights.load_checkpoint(tmp_path / "export")
    tokens = np.random.default_rng(0).integers(0, checkpoint.config.vocab_size, (2, 9), dtype=np.int32)
    positions = np.tile(np.arange(9, dtype=np.int32), (2, 1))
    ours = transformer.build(checkpoint.config, checkpoint.params)(tokens, positions)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "export")(torch.tensor(tokens)).logits.detach().numpy()
    assert np.linalg.norm(ours - theirs) <= 1e-5 * np.linalg.norm(theirs)


def test_a_run_stops_early_when_the_held_out_loss_stops_falling(tmp_path, text):
    evaluation = {"every_steps": 3, "batches": 1, "patience": 1, "min_gain": 100.0}
    found = train(tmp_path, text, evaluation=evaluation)
    assert found.steps == 6
    assert train(tmp_path, text, evaluation=evaluation).steps == 6


def test_a_folder_in_use_is_refused(tmp_path, text):
    (tmp_path / ".lock").write_text("4711\n")
    with open(tmp_path / ".lock") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(ValueError, match="is in use by process 4711"):
            train(tmp_path, text)


def test_another_model_seed_or_text_is_refused_and_more_steps_are_not(tmp_path, text):
    train(tmp_path, text, steps=4)
    deeper = settings().model.model_dump() | {"num_layers": 3}
    with pytest.raises(ValueError, match=r"another model or optimiser; \d+ missing in it: moments\.0\.mu\.layers\.2"):
        train(tmp_path, text, model=deeper)
    with pytest.raises(ValueError, match=r"holds another run: config\.seed was 0, is 5"):
        train(tmp_path, text, seed=5)
    other = tmp_path / "other.txt"
    other.write_text(TEXT[::-1])
    with pytest.raises(ValueError, match="holds another run: text_sha256 was"):
        train(tmp_path, str(other))
    with pytest.raises(ValueError, match="holds another run: backend was flax, is torch; use another --workdir$"):
        train(tmp_path, text, backend="torch")  # whose moments have other names
    assert train(tmp_path, text, steps=6).steps == 6


def test_a_bank_grows_and_shrinks_between_starts_and_nothing_else_of_it_changes(tmp_path, text):
    sizes = {name: getattr(cases.LLAMA, name) for name in ("d_model", "num_heads", "head_dim")}

    def go_on(steps, **bank):
        parts = {"block_size": 4, "memory_slots": 4, "ratio": 2} | bank
        memory = {"kind": "bank", "layers": [1], "window": 4, "bank": sizes | parts, "max_documents": 4}
        less = {"step": {}, "batch_size": 1, "evaluation": {"every_steps": 9, "batches": 1}}
        return train(tmp_path, text, backend="torch", make=with_memory(memory), steps=steps, memory=memory, **less)

    go_on(1)
    for steps, slots in ((2, 16), (3, 2)):
        assert go_on(steps, memory_slots=slots).steps == steps
    with pytest.raises(ValueError, match=r"holds another run: config\.memory\.bank\.mass_decay was 0\.9, is 0\.5"):
        go_on(4, mass_decay=0.5)


def test_held_out_rows_of_more_documents_than_the_memory_reads_are_refused(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("\f".join([(TEXT * 2)[:800], *50 * ["cats"]]))
    sizes = {name: getattr(cases.LLAMA, name) for name in ("d_model", "num_heads", "head_dim")}
    bank = sizes | {"block_size": 4, "memory_slots": 4, "ratio": 2}
    memory = {"kind": "bank", "layers": [1], "window": 4, "bank": bank}
    less = {"step": {}, "batch_size": 1, "evaluation": {"every_steps": 1, "batches": 1}}
    with pytest.raises(ValueError, match="4 documents"):
        how = {"backend": "torch", "make": with_memory(memory)}
        train(tmp_path / "run", str(path), **how, steps=1, memory=memory, **less)


@BACKENDS
def test_a_loss_that_is_not_finite_names_the_module_and_saves_nothing_of_it(backend, tmp_path, text):
    def make(*args, **kwargs):
        made = ENGINES[backend](*args, **kwargs)
        step, count = made.step, []

        def poisoned(batch, rate):
            count.append(rate)
            if len(count) == 6:  # large enough for a product in the MLP to overflow
                arrays = {name: np.array(value) for name, value in made.arrays().items()}
                arrays["params.layers.1.mlp_norm.scale"][:] = 1e37
                made.load(arrays)
            return step(batch, rate)

        made.step = poisoned
        return made

    with pytest.raises(cli.GateFailed, match=r"step 6: loss .*: the output of module layers\.1\.mlp\.\w+ is the first"):
        train(tmp_path, text, backend, make=make)
    records = [json.loads(line) for line in (tmp_path / "records.jsonl").read_text().splitlines()]
    assert records[-1]["step"] == 6 and records[-1]["loss"] is None
    assert [path.name for path in (tmp_path / "checkpoints").iterdir() if path.name.isdigit()] == ["4"]


def test_a_decoder_too_small_for_its_data_is_refused(tmp_path, text):
    small = settings().model.model_dump() | {"vocab_size": 5}
    with pytest.raises(ValueError, match="vocab_size=5 does not hold the tokenizer's 14 tokens"):
        train(tmp_path, text, model=small)
    np.save(tmp_path / "ids.npy", np.arange(200, dtype=np.uint16))
    data = {"tokenizer": "byte", "seq_len": 16, "path": str(tmp_path / "ids.npy")}
    with pytest.raises(ValueError, match=r"ids.npy has token id 64 at place 64, wanted 0 to 63"):
        train(tmp_path / "w", None, data=data, model=small | {"vocab_size": 64})
    with pytest.raises(ValueError, match="batch_size=4 is not a multiple of step.accumulation=3"):
        settings(step={"accumulation": 3})
    with pytest.raises(ValueError, match="warmup_steps=20 and a decay over 1 do not fit in steps=12"):
        settings(schedule={"warmup_steps": 20})
    with pytest.raises(ValueError, match="learning_rate_scaling=sqrt with base_batch=None"):
        settings(learning_rate_scaling="sqrt")
    with pytest.raises(ValueError, match="seq_len=65 is over model.max_seq_len=64"):
        settings(data={"seq_len": 65})


def test_rows_without_a_document_mask_are_for_one_device():
    data = settings().data.model_dump() | {"document_mask": False}
    assert not settings(data=data).data.document_mask
    with pytest.raises(ValueError, match=r"data\.document_mask=false works on one device, got parallel\.mesh=.*data=2"):
        settings(data=data, parallel={"mesh": {"data": 2}})


@BACKENDS
def test_steps_can_be_traced_without_changing_the_run(backend, tmp_path, text):
    found = [trainer.run(settings(steps=5), ENGINES[backend], workdir=tmp_path / str(i), backend=backend,
                           data_path=text, profile_steps=steps) for i, steps in enumerate((None, (1, 3)))]  # fmt: skip
    assert outcome(tmp_path / "0") == outcome(tmp_path / "1") and found[0].validation_loss == found[1].validation_loss
    assert any(path.is_file() for path in (tmp_path / "1" / "profile").rglob("*"))


@BACKENDS
def test_a_trace_begins_where_a_run_goes_on_and_ends_where_it_stops_early(backend, tmp_path, text):
    """Each trace in a process of its own, as a user's: the third in a process of many tests once ended it in XLA."""
    train(tmp_path / "on", text, backend, steps=4)

    def trace(name, traced, **update):
        (tmp_path / f"{name}.yaml").write_text(json.dumps(settings(**update).model_dump(mode="json")))
        command = [
            sys.executable, "experiments/train.py", f"--config={tmp_path / name}.yaml", f"--backend={backend}",
            f"--workdir={tmp_path / name}", f"--data={text}", f"--profile_steps={traced}",
        ]  # fmt: skip
        done = subprocess.run(command, cwd=ROOT, env=os.environ, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        return " ".join(done.stderr.split())

    files = lambda name: [path for path in (tmp_path / name / "profile").rglob("*") if path.is_file()]
    assert "no trace: steps 2 to 3 were taken before" in trace("on", "1:3", steps=5) and not files("on")
    assert "no trace" not in trace("on", "3:6", steps=6) and files("on")
    rising = {"learning_rate": 1e2, "evaluation": {"every_steps": 2, "batches": 1, "patience": 1}}
    trace("early", "1:11", schedule={"kind": "constant"}, **rising)
    assert json.loads((tmp_path / "early" / "summary.json").read_text())["steps"] < 11 and files("early")


def test_a_finished_run_that_is_started_again_keeps_its_rates_and_its_steps(tmp_path, text, capsys):
    train(tmp_path, text, steps=4)
    before = (tmp_path / "summary.json").read_text()
    assert json.loads(before)["tokens_per_s"] > 0
    capsys.readouterr()
    train(tmp_path, text, steps=4)
    assert (tmp_path / "summary.json").read_text() == before and "0 tokens/s" not in capsys.readouterr().err
    (tmp_path / "summary.json").unlink()
    train(tmp_path, text, steps=4)
    assert json.loads((tmp_path / "summary.json").read_text())["tokens_per_s"] is None
    before = (tmp_path / "config.yaml").read_text()
    with pytest.raises(ValueError, match="has 4 steps, and steps=2; wanted 4 or more, or another --workdir"):
        train(tmp_path, text, steps=2)
    assert (tmp_path / "config.yaml").read_text() == before


def test_a_held_out_loss_that_is_not_finite_is_never_the_best_and_a_finished_run_starts_again(tmp_path, text):
    sgd = {"kind": "sgd", "momentum": 0.0, "weight_decay": 0.0}
    update = {
        "learning_rate": 1e15, "schedule": {"kind": "constant"}, "evaluation": {"every_steps": 2, "batches": 1},
        "step": {"nonfinite": "skip", "clip_norm": None, "optimizer": sgd},
    }  # fmt: skip
    for _ in range(2):  # the second start finds it finished
        assert np.isnan(train(tmp_path, text, steps=4, **update).validation_loss)
        constants: list[str] = []
        summary = json.loads((tmp_path / "summary.json").read_text(), parse_constant=constants.append)
        assert not constants and summary["validation_loss"] is None and summary["best_loss"] is None


# On a mesh


def test_a_run_goes_on_from_one_device_to_a_mesh_and_to_another_mesh(tmp_path, text):
    still = {"dropout": 0.0}  # dropout's masks are drawn by row of a micro-batch wherever it lies; off, to be quick
    model = settings().model.model_dump() | still
    common = {"model": model, "batch_size": 16, "checkpoints": {"every_steps": 2, "keep": 2}}
    train(tmp_path / "one", text, steps=8, **common, schedule={"kind": "constant"})
    meshes = [
        None,
        {"mesh": {"data": 2, "fsdp": 4}},
        {"mesh": {"data": 1, "fsdp": 2, "model": 2, "sequence": 2}},
        {"mesh": {"stage": 2, "data": 2, "fsdp": 2}, "micro_batches": 2},
    ]
    for steps, parallel in zip((2, 4, 6, 8), meshes):
        train(tmp_path / "many", text, steps=steps, parallel=parallel, **common, schedule={"kind": "constant"})
    runs = [(tmp_path / name / "records.jsonl").read_text().splitlines() for name in ("one", "many")]
    losses = [{r["step"]: r["loss"] for r in map(json.loads, lines) if "loss" in r} for lines in runs]
    assert losses[0].keys() == losses[1].keys() == set(range(1, 9))
    np.testing.assert_allclose(list(losses[0].values()), list(losses[1].values()), rtol=1e-6)
    for name, devices in (("one", 1), ("many", 8)):  # each of 1 TFLOP/s, by settings()
        summary = json.loads((tmp_path / name / "summary.json").read_text())
        work = observe.flops_per_token(settings(**common).model.resolved(14), 16, is_causal=False)
        assert summary["mfu"] == pytest.approx(summary["tokens_per_s"] * work / (devices * 1e12))
        assert 0 < summary["mfu_causal"] < summary["mfu"]


# Killed for real


def command(workdir):
    settings = ["steps=120", "checkpoints.every_steps=15", "batch_size=16", "evaluation.every_steps=60"]
    flags = [f"--config={ROOT / 'configs/lm/tiny.yaml'}", f"--workdir={workdir}", *(f"--set={s}" for s in settings)]
    return [sys.executable, str(ROOT / "experiments" / "train.py"), *flags]


def lines_in(workdir):
    path = workdir / "records.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def is_saving(workdir):
    folder = workdir / "checkpoints"
    return folder.is_dir() and any(TEMPORARY in name for name in os.listdir(folder))


def test_a_run_killed_at_any_moment_ends_like_one_that_was_not(tmp_path):
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "env": os.environ, "cwd": ROOT}
    subprocess.run(command(tmp_path / "whole"), check=True, timeout=120, **quiet)
    cut = tmp_path / "cut"
    moments = [
        ("before the first checkpoint", lambda: lines_in(cut) >= 5),
        ("during a save", lambda: lines_in(cut) >= 15 and is_saving(cut)),
        ("between checkpoints", lambda: lines_in(cut) >= 70),
    ]
    for name, is_time in moments:
        process = subprocess.Popen(command(cut), **quiet)
        deadline = time.monotonic() + 120
        while not is_time() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.0005)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL, f"the run ended before it could be killed {name}"
        assert not (cut / "summary.json").exists()
    subprocess.run(command(cut), check=True, timeout=120, **quiet)
    assert outcome(cut) == outcome(tmp_path / "whole")
    assert lines_in(cut) == 122


@BACKENDS
def test_skipped_steps_are_counted_in_the_last_line_and_the_summary_and_most_of_them_are_warned_of(
    backend, tmp_path, text, capsys
):
    update = {"learning_rate": 1e30, "steps": 6, "step": {"nonfinite": "skip"}, "schedule": {"kind": "constant"}}
    result = train(tmp_path, text, backend, **update)
    said = " ".join(capsys.readouterr().err.split())
    records = [json.loads(line) for line in (tmp_path / "records.jsonl").read_text().splitlines()]
    skipped = [record["skipped"] for record in records if "skipped" in record][-1]
    assert 3 < skipped == result.skipped == json.loads((tmp_path / "summary.json").read_text())["skipped"]
    assert f"finished 6 steps, {skipped} of them skipped: held-out loss" in said
    assert f"warning: most steps changed nothing, since their loss or gradient was not finite ({skipped} of 6)" in said
    assert train(tmp_path, text, backend, **update).skipped == skipped  # finished already: the records say it


def test_a_run_without_skipped_steps_says_nothing_of_them(tmp_path, text, capsys):
    assert train(tmp_path, text, steps=2).skipped == 0
    said = capsys.readouterr().err
    assert "finished 2 steps: held-out loss" in " ".join(said.split()) and "warning: most" not in said


def test_the_saved_configuration_loads_again(tmp_path, text):
    train(tmp_path, text, steps=1)
    assert config.load(tmp_path / "config.yaml", (), TrainConfig) == settings(steps=1)
