"""The folder of a run: another run's files and the user's are refused, and folders are replaced whole."""

import shutil

import pytest
import yaml

from jaxbench.training import run_folder, trainer
from jaxbench.training.train_config import TrainConfig
from torch_ref.training import engine

# warnings: Orbax's own, of several kinds
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("own_cache")]
SHAPE = {"d_model": 8, "d_ff": 16, "num_layers": 1, "num_heads": 1, "num_kv_heads": 1, "head_dim": 8, "max_seq_len": 8}


def settings(**update):
    base = {"model": SHAPE, "data": {"seq_len": 8}, "batch_size": 2, "steps": 2, "learning_rate": 1e-2}
    return TrainConfig(**(base | {"evaluation": {"batches": 1}, "logging": {"peak_tflops": 1.0}} | update))


def train(workdir, text, **update):
    trainer.run(settings(**update), engine.Engine, workdir=workdir, backend="torch", data_path=str(text))


def contents(folder):
    """Every file of a folder but the lock, with what it holds."""
    files = [path for path in folder.rglob("*") if path.is_file() and not path.name.startswith(".")]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@pytest.mark.parametrize("name", ["export/thesis.txt", "adapters/a", "records.jsonl", "summary.json", "config.yaml"])
def test_the_user_s_files_are_neither_removed_nor_replaced(name, tmp_path, text):
    own = tmp_path / "w" / name
    own.parent.mkdir(parents=True)
    own.write_text("{}")
    before = contents(tmp_path / "w")
    with pytest.raises(ValueError, match=f"no checkpoint, and {name.split('/')[0]} of another run or of yours"):
        train(tmp_path / "w", text)
    assert contents(tmp_path / "w") == before


def test_a_finished_run_without_checkpoints_is_replaced_by_itself_only(tmp_path, text):
    workdir, other = tmp_path / "w", tmp_path / "other.txt"
    train(workdir, text)
    shutil.rmtree(workdir / "checkpoints")
    before = contents(workdir)
    with pytest.raises(ValueError, match=r"config\.learning_rate was 0\.01, is 0\.1; use another --workdir"):
        train(workdir, text, learning_rate=0.1)
    other.write_text("a dog lay under the table; " * 30)
    with pytest.raises(ValueError, match="text_sha256 was"):
        train(workdir, other)
    assert contents(workdir) == before
    train(workdir, text, steps=3)
    assert settings(steps=3) == run_folder.saved_config(workdir, settings()) and (workdir / "summary.json").exists()


def test_a_run_that_ended_before_its_first_checkpoint_goes_on_with_the_same_command(tmp_path, text, monkeypatch):
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(trainer._Trainer, "_save", lambda run, done: (_ for _ in ()).throw(KeyboardInterrupt))
        train(tmp_path / "w", text)
    assert (tmp_path / "w" / "records.jsonl").exists() and not (tmp_path / "w" / "summary.json").exists()
    train(tmp_path / "w", text)
    train(tmp_path / "whole", text)
    found = [(tmp_path / name / "records.jsonl").read_bytes() for name in ("w", "whole")]
    assert found[0] == found[1]


def test_a_configuration_that_the_user_wrote_into_the_folder_stays_as_it_is(tmp_path, text):
    own = tmp_path / "w" / "config.yaml"
    own.parent.mkdir()
    own.write_text(written := "# my own\n" + yaml.safe_dump(settings().model_dump(mode="json", exclude_defaults=True)))
    train(tmp_path / "w", text)
    assert own.read_text() == written
    train(tmp_path / "w", text, steps=3)  # of this run by now
    assert run_folder.saved_config(tmp_path / "w", settings()).steps == 3


def test_a_failed_export_keeps_the_one_before(tmp_path, text, monkeypatch):
    train(tmp_path / "w", text)
    before = contents(tmp_path / "w" / "export")

    def full(run, folder, *rest):
        (folder / "model.safetensors").write_text("half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(TrainConfig, "export", full)
    with pytest.raises(OSError, match="No space left"):
        train(tmp_path / "w", text, steps=3)
    assert contents(tmp_path / "w" / "export") == before and before.keys() >= {"model.safetensors", "config.json"}


def test_a_folder_is_replaced_once_it_is_whole_and_leaves_nothing_beside_it(tmp_path):
    folder = tmp_path / "export"
    (tmp_path / ".export.new").mkdir()  # of a process that was killed
    (tmp_path / ".export.new" / "half").write_text("half")
    for number in range(2):
        with run_folder.replaced(folder) as made:
            assert not any(made.iterdir()) and folder.exists() == bool(number)
            (made / f"{number}").write_text("whole")
        assert [path.name for path in folder.iterdir()] == [f"{number}"]
    assert [path.name for path in tmp_path.iterdir()] == ["export"]
