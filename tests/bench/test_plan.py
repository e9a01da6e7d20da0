"""Plans: what cannot run is refused before anything is measured; prompts are equal for equal seeds."""

import numpy as np
import pytest

from jaxbench import config, process_environment
from jaxbench.bench import estimate, plan
from jaxbench.bench.suite import Suite
from jaxbench.config import TransformerConfig
from jaxbench.measure import flops
from jaxbench.measure.records import Workload
from jaxbench.pretrained import assets, weights
from jaxbench.training.train_config import TrainConfig
from tests.structure import ROOT

SMOLLM = TransformerConfig(
    vocab_size=49152, d_model=576, d_ff=1536, num_layers=30, num_heads=9, num_kv_heads=3, head_dim=64, max_seq_len=8192
)
TINY_SUITE = Suite.model_validate(
    {
        "model": "tiny",
        "arms": ["flax"],
        "prefill": {"dtypes": ["float32"], "prompt_tokens": [32]},
        "decode": {"dtypes": ["float32"], "batches": [2], "prompt_tokens": [8], "new_tokens": 4},
        "train": {"num_layers": 1, "seq_len": 16},
        "tpu": {"topologies": []},
        "parity": [],
        "verdicts": {"baseline": "flax"},
    }
)


def test_a_plan_of_the_tiny_suite_has_inputs_of_the_stated_shapes(tmp_path):
    work = plan.make_plan(TINY_SUITE, device="cpu", workdir=tmp_path)
    shapes = {workload.kind: np.shape(rows) for workload, rows in work.inputs.items()}
    assert shapes == {"prefill": (1, 32), "decode": (2, 8), "train": (2, 17)}
    again = plan.make_plan(TINY_SUITE, device="cpu", workdir=tmp_path)
    assert again.inputs == work.inputs and again.config_id == work.config_id
    other = plan.make_plan(TINY_SUITE.model_copy(update={"seed": 5}), device="cpu", workdir=tmp_path)
    assert other.inputs != work.inputs and other.config_id != work.config_id


def test_the_decoder_of_a_training_configuration_is_a_model_with_random_weights(tmp_path):
    path = tmp_path / "run.yaml"
    config.dump(config.load(ROOT / "configs/lm/tiny.yaml", ["model.vocab_size=64"], TrainConfig), path)
    made = [plan.find_model(Suite(model=str(path)), tmp_path) for _ in range(2)]
    assert made[0] == made[1] and made[0].config.vocab_size == 64 and made[0].tokenizer is None
    assert weights.load_checkpoint(made[0].folder).config.d_model == made[0].config.d_model == 32
    assert plan.find_model(TINY_SUITE, tmp_path).folder != made[0].folder
    with pytest.raises(ValueError, match="leaves model.vocab_size to its tokenizer"):
        plan.find_model(Suite(model=str(ROOT / "configs/lm/tiny.yaml")), tmp_path)


def test_a_bad_text_is_refused_before_a_gguf_file_is_converted(tmp_path, monkeypatch):
    file = assets.fetch_default_model()
    monkeypatch.setattr(process_environment, "cache_dir", lambda: tmp_path / "cache")
    (tmp_path / "x.jsonl").write_text('{"no": 1}\n')
    suite = TINY_SUITE.model_copy(update={"model": str(file), "data": str(tmp_path / "x.jsonl")})
    with pytest.raises(ValueError, match=r"x\.jsonl line 1"):
        plan.make_plan(suite, device="cpu", workdir=tmp_path)
    assert not (tmp_path / "cache" / "checkpoints").exists()


def test_records_of_a_plan_carry_their_origin(tmp_path):
    record = plan.make_plan(TINY_SUITE, device="cpu", workdir=tmp_path).record("load_s", value=1.0, unit="s")
    assert len(record.config_id) == 12 and len(record.host) == 12 and record.device == "cpu"
    assert len(record.model_sha256) == len(record.text_sha256) == 64 and record.time_utc.endswith("+00:00")


def test_rows_are_distinct_windows_of_the_text():
    workload = Workload(kind="decode", dtype="float32", batch=4, prompt_tokens=6, new_tokens=2)
    rows = plan.draw(np.arange(100), workload, seed=3)
    assert len({tuple(row) for row in rows}) == 4
    assert all(np.diff(row).tolist() == [1] * 5 for row in rows)


def test_an_empty_prompt_and_a_short_text_are_errors():
    workload = Workload(kind="decode", dtype="float32", batch=4, prompt_tokens=0, new_tokens=2)
    with pytest.raises(ValueError, match="empty prompt"):
        plan.draw(np.arange(100), workload, seed=0)
    with pytest.raises(ValueError, match=r"needs 4 rows of 99 tokens, the text has 100"):
        plan.draw(np.arange(100), workload.model_copy(update={"prompt_tokens": 99}), seed=0)


def test_a_batch_that_cannot_fit_is_refused_from_the_configuration_alone():
    suite = Suite.model_validate({"decode": {"batches": [100_000]}})
    with pytest.raises(ValueError, match=r"decode \w+ b100000 p64 n32 with 6 arms needs about [\d.]+ GiB"):
        estimate.check_fits(suite, SMOLLM, available=24 * 2**30)


def test_the_default_suite_is_estimated_under_eight_gib():
    needed, where = estimate.needed_bytes(Suite(), SMOLLM)
    assert 3 * 2**30 < needed < 8 * 2**30, where
    assert estimate.check_fits(Suite(), SMOLLM, available=8 * 2**30) == needed


@pytest.mark.parametrize("field", ["batch", "prompt_tokens"])
def test_estimates_grow_with_batch_and_length(field):
    workload = Workload(kind="decode", dtype="float32", batch=2, prompt_tokens=64, new_tokens=8)
    larger = workload.model_copy(update={field: 4 * getattr(workload, field)})
    assert estimate.inference_bytes(SMOLLM, larger) > estimate.inference_bytes(SMOLLM, workload)
    assert estimate.inference_bytes(SMOLLM, workload) > flops.parameter_bytes(SMOLLM, "float32")
    train = workload.model_copy(update={"kind": "train"})
    wider = larger.model_copy(update={"kind": "train"})
    assert estimate.train_bytes(SMOLLM, wider) > estimate.train_bytes(SMOLLM, train)
    assert estimate.train_bytes(SMOLLM, train) > 4 * flops.parameter_bytes(SMOLLM, "float32")


def test_more_threads_than_cores_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"threads=4096, this process may use \d+ cores"):
        plan.make_plan(TINY_SUITE.model_copy(update={"threads": 4096}), device="cpu", workdir=tmp_path)
