"""Suites: every file loads, the matrix is what the file says, ids change with what is measured and nothing else."""

from pathlib import Path

import pytest
import yaml

from jaxbench import config
from jaxbench.bench.suite import Suite, config_id

FOLDER = Path(__file__).resolve().parents[2] / "configs" / "suites"
SHA = {"model_sha256": "a" * 64, "text_sha256": "b" * 64}


@pytest.mark.parametrize("name", ["aa", "default", "full", "lengths", "training", "training_gpu", "tiny"])
def test_every_suite_loads_and_opens_with_its_command(name):
    path = FOLDER / f"{name}.yaml"
    suite = config.load(path, [], Suite)
    head = [line for line in path.read_text().splitlines() if line.startswith("#")]
    assert suite.workloads()
    assert any("Command:" in line for line in head) and any("Expected time:" in line for line in head)
    assert any("Expected result:" in line for line in head)


def test_the_default_suite_is_the_decided_matrix():
    suite = config.load(FOLDER / "default.yaml", [], Suite)
    labels = [workload.label() for workload in suite.workloads()]
    assert suite.rounds.launches >= 5 and suite.rounds.budget_s <= 600
    assert suite.arms == ("flax", "equinox", "flax_native", "torch_eager", "torch_compile", "transformers")
    assert [label for label in labels if label.startswith("prefill")] == [
        f"prefill {dtype} b1 p{tokens}" for dtype in ("float32", "bfloat16") for tokens in (37, 512)
    ]
    decode = {(workload.dtype, workload.batch) for workload in suite.workloads() if workload.kind == "decode"}
    assert decode == {(dtype, batch) for dtype in ("float32", "bfloat16") for batch in (1, 8)}
    assert suite.sample_s("train") > suite.sample_s("decode") == suite.rounds.sample_s
    assert Suite().sample_s("train") == Suite().rounds.sample_s
    assert suite.train.num_layers == 4 and labels[-1].startswith("train float32")


def test_the_training_suite_measures_the_run_s_step_and_nothing_else():
    suite = config.load(FOLDER / "training.yaml", [], Suite)
    assert suite.arms == ("flax", "torch_eager", "torch_compile") and suite.train.form == "run"
    assert [workload.label() for workload in suite.workloads()] == ["train float32 b4 p128", "train bfloat16 b4 p128"]
    assert suite.rounds.launches >= 3 and suite.rounds.budget_s <= 600


@pytest.mark.parametrize("arms", [["equinox"], ["flax", "transformers"]])
def test_arms_without_a_training_run_are_refused(arms):
    with pytest.raises(ValueError, match=f"form=run with arms .'{arms[-1]}'.*has flax, torch_eager, torch_compile"):
        Suite.model_validate({"arms": arms, "train": {"form": "run"}})


@pytest.mark.parametrize(
    ("change", "same"),
    [
        ({"arms": ["flax"], "verdicts": {"baseline": "flax"}}, True),
        ({"rounds": {"launches": 9, "rounds": 5, "budget_s": 9.0}}, True),
        ({"tpu": {"topologies": ["v6e:2x4"]}}, True),
        ({"model": "/another/place/of/the/same/file.gguf"}, True),
        ({"decode": {"new_tokens": 7}}, False),
        ({"rounds": {"warmup": 2}}, False),
        ({"rounds": {"competing": 2}}, False),
        ({"rounds": {"sample_s": 0.1}}, False),
        ({"seed": 1}, False),
    ],
)
def test_config_id_changes_exactly_with_what_is_measured(change, same):
    assert (config_id(Suite.model_validate(change), **SHA) == config_id(Suite(), **SHA)) is same


def test_config_id_takes_in_model_and_text():
    ids = {config_id(Suite(), **{**SHA, name: "c" * 64}) for name in SHA} | {config_id(Suite(), **SHA)}
    assert len(ids) == 3


def test_a_workload_longer_than_the_context_is_named():
    with pytest.raises(ValueError, match=r"prefill float32 b1 p512 takes 512 positions, the model's context is 256"):
        Suite().check_context(256)


@pytest.mark.parametrize("arms", [["flax"], ["flax", "transformers"]])
def test_a_baseline_that_is_no_arm_is_refused_with_its_cure(arms):
    with pytest.raises(ValueError, match=r"verdicts.baseline=torch_eager is not among .*verdicts.baseline=flax"):
        Suite.model_validate({"arms": arms})
    assert Suite.model_validate({"arms": arms, "verdicts": {"baseline": "flax"}}).verdicts.baseline == "flax"


@pytest.mark.parametrize("change", [{"arms": []}, {"arms": ["flax", "flax"]}, {"arms": ["jaxx"]},
                                    {"decode": {"batches": [0]}}, {"prefill": {"prompt_tokens": [0]}},
                                    {"train": {"num_layers": -1}}, {"nonsense": 1}])  # fmt: skip
def test_impossible_suites_are_refused(change):
    with pytest.raises(ValueError, match="arms|batches|prompt_tokens|num_layers|nonsense"):
        Suite.model_validate(change)


def test_tables_in_yaml_and_defaults_agree_on_field_names():
    keys = {key for path in FOLDER.glob("*.yaml") for key in yaml.safe_load(path.read_text())}
    assert keys <= set(Suite.model_fields)


def test_micro_batches_and_attention_kernels_are_those_of_a_run_s_step():
    with pytest.raises(
        ValueError, match="train.accumulation=2, train.kernels=xla: train.form=run is needed, got plain"
    ):
        Suite.model_validate({"train": {"accumulation": 2, "kernels": "xla"}})
    with pytest.raises(ValueError, match="train.batch=2 is not a multiple of accumulation=4"):
        Suite.model_validate({"arms": ["flax"], "train": {"form": "run", "accumulation": 4}})
