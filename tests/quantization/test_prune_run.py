"""The pruning command's work: norms of inputs, held-out loss, folders that are whole or not there."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxbench import cli, outputs, transformer
from jaxbench.parity import cases
from jaxbench.pretrained import assets, weights
from jaxbench.pretrained import tokenizer as tokenizers
from jaxbench.quantization import prune_run, pruning, pruning_text
from jaxbench.training import engine, trainer
from jaxbench.training.train_config import TrainConfig
from tests.generation import tiny
from torch_ref.training import engine as torch_engine

SMALL = {"batches": 2, "batch_size": 2, "seq_len": 32}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(tiny.make(tmp_path_factory.mktemp("models") / "tiny"))


@pytest.fixture(scope="module")
def wanda(model, tmp_path_factory):
    """Return the result of Wanda's 2:4 with a short training."""
    settings = prune_run.Settings("wanda-2:4", finetune_steps=12, learning_rate=1e-2, **SMALL)
    return prune_run.run(model, tmp_path_factory.mktemp("pruned") / "wanda", settings)


# Norms of inputs


@pytest.mark.parametrize("name", ["transformer/llama-grouped", "transformer/gpt2", "transformer/llama-packed"])
def test_norms_of_inputs_are_those_of_the_tokens_that_reach_each_kernel(name):
    case = cases.find(name)
    config, params = cases.load(case)
    batches = [cases.arrays(case, config, step=i) for i in range(2)]
    found = pruning_text.input_norms(config, params, batches)
    assert set(found) == set(pruning.prunable(params))
    assert all(found[name].shape == params[name].shape[:1] for name in found)
    first = "layers.0.attention.q_proj.kernel"
    wanted = np.zeros(config.d_model)
    model = transformer.build(config, params)
    for arrays in batches:
        hidden = model.embed(jnp.asarray(arrays.tokens))
        if model.position is not None:
            hidden = hidden + model.position(jnp.maximum(arrays.positions, 0))
        normed = np.asarray(model.layers[0].attention_norm(hidden))
        wanted += np.square(normed[arrays.positions >= 0]).sum(axis=0)
    np.testing.assert_allclose(found[first], np.sqrt(wanted), rtol=1e-5)
    for other in ("k_proj", "v_proj"):
        np.testing.assert_array_equal(found[first], found[f"layers.0.attention.{other}.kernel"])


def test_padding_changes_no_norm():
    case = cases.find("transformer/llama-grouped")
    config, params = cases.load(case)
    arrays = cases.arrays(case, config)
    loud = np.where(arrays.positions < 0, (arrays.tokens + 7) % config.vocab_size, arrays.tokens)
    assert (loud != arrays.tokens).any()
    one, other = (pruning_text.input_norms(config, params, [a]) for a in (arrays, arrays._replace(tokens=loud)))
    for name in one:
        np.testing.assert_array_equal(one[name], other[name])


def test_the_held_out_loss_is_the_mean_over_targets_of_all_batches():
    case = cases.find("transformer/llama-grouped")
    config, params = cases.load(case)
    batches = [cases.arrays(case, config, step=i) for i in range(3)]
    total, count = 0.0, 0
    model = transformer.build(config, params)
    for arrays in batches:
        logits = jax.nn.log_softmax(model(jnp.asarray(arrays.tokens), jnp.asarray(arrays.positions)))
        picked = np.take_along_axis(np.asarray(logits), arrays.targets[..., None], axis=-1)[..., 0]
        total, count = total - picked[arrays.mask].sum(), count + arrays.mask.sum()
    assert pruning_text.mean_loss(config, params, batches) == pytest.approx(total / count, rel=1e-5)
    with pytest.raises(ValueError, match="has 0 targets"):
        pruning_text.mean_loss(config, params, [batches[0]._replace(mask=np.zeros_like(batches[0].mask))])


# Longer training, by the command for training runs


@pytest.mark.parametrize("where", ["flax", "flax on a mesh", "torch"])
def test_a_training_run_that_starts_from_a_pruned_folder_holds_its_zeros_through_a_resume(wanda, tmp_path, where):
    made = {"flax": engine.Engine, "torch": torch_engine.Engine}[where.split()[0]]
    config = wanda.config.model_dump()
    content = {"model": config, "start": str(wanda.path), "data": {"seq_len": 32}, "batch_size": 4, "steps": 2}
    content |= {"learning_rate": 1e-2, "step": {"hold_zeros": True}, "evaluation": {"batches": 1}}
    content |= {"parallel": {"mesh": {"fsdp": 2, "model": 2}}} if "mesh" in where else {}
    for steps in (2, 4):
        settings = TrainConfig.model_validate(content | {"steps": steps})
        result = trainer.run(settings, made, workdir=tmp_path / "run", backend=where.split()[0])
    assert result.steps == 4
    before, after = (weights.load_checkpoint(path).params for path in (wanda.path, tmp_path / "run" / "export"))
    for name in pruning.prunable(before):
        assert ((after[name] == 0) == (before[name] == 0)).all(), name
        assert np.abs(after[name] - before[name]).max() > 1e-3


# What is written


def test_the_folder_is_a_model_with_two_of_four_weights_zero_after_training(model, wanda):
    read, dense = weights.load_checkpoint(wanda.path), weights.load_checkpoint(model)
    assert read.config == dense.config and pruning.count(read.params) == wanda.zeros
    assert wanda.zeros.share == 0.5
    for name in pruning.prunable(read.params):
        groups = (read.params[name] != 0).reshape(-1, 4, read.params[name].shape[1])
        assert (groups.sum(axis=1) == 2).all(), name
    assert tokenizers.load_tokenizer(wanda.path).encode("abc") == tokenizers.load_tokenizer(model).encode("abc")


def test_training_mends_a_part_of_what_pruning_broke(wanda):
    assert set(wanda.losses) == {"dense", "pruned", "finetuned"}
    assert wanda.losses["finetuned"] < wanda.losses["pruned"] - 0.5


def test_the_record_says_what_was_done_and_the_line_too(model, wanda):
    record = json.loads((wanda.path / prune_run.RECORD).read_text())
    assert record["sha256"] == weights.load_checkpoint(model).sha256 and record["settings"]["method"] == "wanda-2:4"
    assert record["text_sha256"] == assets.TEXT_SHA256  # of the default text, which --data= would replace
    assert record["zeros"] == wanda.zeros._asdict() and record["held_out_nats_per_token"] == wanda.losses
    assert record["held_out_tokens"] == wanda.held_out_tokens > 0
    line = prune_run.summary(wanda, prune_run.Settings("wanda-2:4", finetune_steps=12))
    assert "5,120 of 10,240 weights of 7 matrices are zero (50.0%)" in line and "after 12 steps" in line


def test_the_same_settings_give_the_same_bytes(model, tmp_path):
    settings = prune_run.Settings("wanda", fraction=0.6, **SMALL)
    one, other = (prune_run.run(model, tmp_path / name, settings).path for name in ("a", "b"))
    assert (one / "model.safetensors").read_bytes() == (other / "model.safetensors").read_bytes()


def test_a_smaller_model_is_written_with_its_own_sizes(model, tmp_path):
    settings = prune_run.Settings("wanda-structured", keep_kv_heads=1, keep_d_ff=20, **SMALL)
    result = prune_run.run(model, tmp_path / "smaller", settings)
    read = weights.load_checkpoint(result.path)
    assert (read.config.num_heads, read.config.num_kv_heads, read.config.d_ff) == (1, 1, 20)
    assert result.parameters[1] == sum(value.size for value in read.params.values()) < result.parameters[0]
    assert "1 heads on 1 key-value heads, d_ff 20" in prune_run.summary(result, settings)


def test_a_smaller_model_s_training_holds_the_zeros_that_it_already_had(wanda, tmp_path):
    results = {}
    for steps in (0, 3):
        settings = prune_run.Settings("structured", keep_d_ff=20, finetune_steps=steps, learning_rate=1e-2, **SMALL)
        results[steps] = prune_run.run(str(wanda.path), tmp_path / str(steps), settings)
    assert results[3].zeros == results[0].zeros and results[0].zeros.share > 0.4
    before, after = (weights.load_checkpoint(result.path).params for result in results.values())
    for name in pruning.prunable(before):
        np.testing.assert_array_equal(after[name] == 0, before[name] == 0, err_msg=name)
        assert np.abs(after[name] - before[name]).max() > 1e-4, name


def test_without_text_nothing_is_tokenised(model, tmp_path):
    settings = prune_run.Settings("magnitude", fraction=0.3, batches=0)
    result = prune_run.run(model, tmp_path / "plain", settings, data_path="no/such/text.txt")
    assert result.losses == {} and result.zeros.share == pytest.approx(0.3, abs=1e-3)


def test_a_model_without_a_tokenizer_is_pruned_without_text_and_else_refused(tmp_path):
    config, params = cases.load(cases.find("transformer/llama-grouped"))
    folder = weights.save_checkpoint(tmp_path / "bare", config, params)
    said = []
    result = prune_run.run(folder, tmp_path / "out", prune_run.Settings("2:4", batches=0), say=said.append)
    assert pruning.count(weights.load_checkpoint(result.path).params).share == 0.5
    assert said == [f"{folder} has no tokenizer.json: the folder gets no tokenizer and no ids of begin and end"]
    with pytest.raises(ValueError, match="has no tokenizer.json for the text; pass --batches=0"):
        prune_run.run(folder, tmp_path / "other", prune_run.Settings("2:4", seq_len=32))
    assert not (tmp_path / "other").exists()


def test_a_training_that_breaks_writes_nothing(model, tmp_path):
    settings = prune_run.Settings("2:4", finetune_steps=3, learning_rate=1e30, **SMALL)
    with pytest.raises(cli.GateFailed, match="steps were not taken, .*lower --learning_rate=1e.30; nothing was writ"):
        prune_run.run(model, tmp_path / "broken", settings)
    assert list(tmp_path.iterdir()) == []


def test_a_write_that_breaks_leaves_nothing(model, tmp_path, monkeypatch):
    def full(path, value):
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(outputs, "write_json", full)
    with pytest.raises(OSError, match="No space left"):
        prune_run.run(model, tmp_path / "out", prune_run.Settings("2:4", batches=0))
    assert list(tmp_path.iterdir()) == []


def test_gpt2_keeps_its_heads_and_the_error_comes_before_any_work(tmp_path):
    config, params = cases.load(cases.find("transformer/gpt2"))
    folder = weights.save_checkpoint(tmp_path / "gpt2", config, params)
    with pytest.raises(ValueError, match="no Hugging Face architecture has .*num_heads=2"):
        prune_run.run(folder, tmp_path / "out", prune_run.Settings("structured", keep_kv_heads=2, batches=0))
    narrow = prune_run.run(folder, tmp_path / "narrow", prune_run.Settings("structured", keep_d_ff=20, batches=0))
    assert weights.load_checkpoint(narrow.path).config.d_ff == 20
