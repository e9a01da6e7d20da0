"""The parity command: exit codes, files, and what it says about a broken twin."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_cli import command, refused

ROOT = Path(__file__).resolve().parents[2]
INJECTED = """
import runpy, sys
from jaxbench.parity import mutation
sys.argv = ["parity.py", "--case=transformer/llama-grouped", "--quick", "--workdir={workdir}"]
[bug] = [bug for bug in mutation.MUTATIONS if bug.name == "rope-base"]
with bug.injected():
    runpy.run_path("experiments/parity.py", run_name="__main__")
"""


def run(*arguments):
    command = [sys.executable, "experiments/parity.py", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--case=transformer/smollm"], "nearest: transformer/smollm2"),
        (["--case=transformer/llama-grouped,transformer/smollm"], "nearest: transformer/smollm2"),
        (["--case=transformer/llama-grouped,transformer/gpt2", "--all"], "llama-grouped,transformer/gpt2 and --all"),
        (["--case="], "--case='' is not a parity case"),
        ([], "name a case with --case=ID, or pass --all"),
        (["--case=transformer/gpt2", "--all"], "--case=transformer/gpt2 and --all exclude each other"),
        (["--case=transformer/gpt2", "--backend=torch"], "flax|equinox"),
        (["--cases=transformer/gpt2"], "nearest is --case"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(arguments, message):
    done = run(*arguments)
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1 and message in done.stderr


def test_an_equal_case_ends_with_0_and_writes_its_result_and_page(tmp_path):
    done = run("--case=transformer/llama-grouped", "--quick", f"--workdir={tmp_path}")
    assert done.returncode == 0, done.stderr
    assert "equal, worst float64 error" in done.stdout and "layers.1.attention.q_proj" in done.stdout
    (result,) = json.loads((tmp_path / "parity.json").read_text())
    assert result["passed"] and result["case"] == "transformer/llama-grouped"
    assert "layers.1.attention.q_proj" in (tmp_path / "parity.html").read_text()


def test_several_cases_are_proved_one_after_another(tmp_path):
    names = ["transformer/llama-grouped", "transformer/llama-multi-query"]
    done = run(f"--case={','.join(names)}", "--quick", f"--workdir={tmp_path}")
    assert done.returncode == 0, done.stderr
    assert "1 of 2" in done.stdout and "2 of 2" in done.stdout
    results = json.loads((tmp_path / "parity.json").read_text())
    assert [(result["case"], result["passed"]) for result in results] == [(name, True) for name in names]


def test_a_broken_twin_ends_with_1_and_the_module_is_named(tmp_path):
    from jaxbench import process_environment

    environment = os.environ | process_environment.environment(
        "cpu"
    )  # so that the command need not start anew and lose the bug
    command = [sys.executable, "-c", INJECTED.format(workdir=tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 1, done.stdout + done.stderr
    said = " ".join(done.stdout.split())
    assert "NOT equal" in said and "the cause is in model (input of layers.0" in said
    (result,) = json.loads((tmp_path / "parity.json").read_text())
    assert result["blame"]["module"] == "model" and not result["passed"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A Hugging Face folder that transformers itself made, with random weights."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=61, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, max_position_embeddings=24, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("hf") / "tiny"
    transformers.Qwen3ForCausalLM(config).save_pretrained(path)
    return path


def test_a_users_checkpoint_is_proved_against_transformers_and_between_all_backends(folder, tmp_path):
    done = run(f"--model={folder}", f"--workdir={tmp_path}")
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads((tmp_path / "parity.json").read_text())
    assert [result["backend"] for result in results] == ["transformers", "flax", "equinox"]
    assert all(result["case"] == "model/tiny" and result["passed"] and result["worst"] < 1e-12 for result in results)
    modules = [{row["module"] for row in result["layers"]} for result in results]
    assert modules[1] == modules[2] and {"layers.0.attention.q_norm", "layers.1.mlp.down_proj", "model"} <= modules[0]


def test_a_bug_that_all_backends_share_is_found_in_a_users_checkpoint_and_named(folder, tmp_path, monkeypatch):
    from jaxbench.parity import mutation, own_model
    from jaxbench.parity import run as proof
    from jaxbench.pretrained import weights

    [bug] = [bug for bug in mutation.MUTATIONS if bug.name == "rotary-frequencies-times-1.5"]
    checkpoint = weights.load_checkpoint(folder)
    case = own_model.case_of(folder, checkpoint)
    with bug.injected():
        twins = proof.run(case, model=str(folder), quick=True)
        found = own_model.against_transformers(case, folder, checkpoint)
    assert twins["passed"] and not found["passed"]
    assert found["first_divergence"] == "layers.0.attention.o_proj"  # the first module behind the rotation


def test_a_model_that_transformers_does_not_read_is_not_compared_with_it(folder, tmp_path):
    from jaxbench.parity import own_model
    from jaxbench.pretrained import weights

    (tmp_path / "config.json").write_text('{"model_type": "no-such-model"}')
    checkpoint = weights.load_checkpoint(folder)
    case = own_model.case_of(folder, checkpoint)
    said = own_model.against_transformers(case, tmp_path, checkpoint)
    assert said.startswith("model/tiny is not compared with transformers, which does not read it: ValueError: ")


def test_a_quantised_folder_is_not_compared_with_transformers_and_says_why(folder, tmp_path):
    from jaxbench.parity.oracles import transformers_model

    values = json.loads((folder / "config.json").read_text())
    values["quantization_config"] = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert transformers_model.why_unread(folder) == ""
    assert "quantization_config.quant_method=compressed-tensors" in transformers_model.why_unread(tmp_path)


def test_what_transformers_cannot_load_fails_its_gate_in_one_line(folder, monkeypatch):
    from jaxbench.parity import own_model
    from jaxbench.parity.oracles import transformers_model
    from jaxbench.pretrained import weights

    def broken(path):
        raise RuntimeError("Error(s) in loading state_dict:\n\tMissing key(s)")

    monkeypatch.setattr(transformers_model, "_of_folder", broken)
    checkpoint = weights.load_checkpoint(folder)
    found = own_model.against_transformers(own_model.case_of(folder, checkpoint), folder, checkpoint)
    [gate] = found["gates"]
    assert not found["passed"] and gate["where"]
    assert gate["note"].endswith("cannot be loaded: RuntimeError: Error(s) in loading state_dict: Missing key(s)")


def test_a_model_too_large_for_its_proof_is_refused_with_numbers(folder, monkeypatch):
    from jaxbench.measure import environment
    from jaxbench.parity import own_model
    from jaxbench.pretrained import weights

    monkeypatch.setattr(environment, "available_memory_bytes", lambda: 2**10)
    with pytest.raises(ValueError, match=r"tiny has [\d,]+ parameters; its proof in float64 takes about 0.0 GiB"):
        own_model.case_of(folder, weights.load_checkpoint(folder))


def test_a_full_disk_names_the_file_and_no_finished_case_where_there_is_none(tmp_path):
    words = ("--case=transformer/llama-grouped", "--quick", f"--workdir={tmp_path}")
    done = command("parity.py", *words, limit_bytes=100, JAX_ENABLE_COMPILATION_CACHE="false")
    assert "kept" not in refused(done, f"cannot write {tmp_path}/parity.json: File too large; free some space")
