"""Checkpoints: values arrive under our names, transposed and un-permuted; anything odd is one error with names."""

import hashlib
import json
import shutil
from pathlib import Path

import huggingface_hub
import numpy as np
import pytest
import safetensors.numpy
import torch
import transformers

from jaxbench import parameters, transformer
from jaxbench.config import TransformerConfig
from jaxbench.eqx import transformer as eqx_transformer
from jaxbench.initial import initial_params
from jaxbench.pretrained import assets, weights
from torch_ref import transformer as torch_transformer

SIZES = {"vocab_size": 40, "d_model": 32, "d_ff": 64, "num_layers": 2, "num_heads": 4, "head_dim": 8, "max_seq_len": 64}
GROUPED = TransformerConfig(**SIZES, num_kv_heads=2, tie_embeddings=False)
GPT2 = TransformerConfig(
    **SIZES, num_kv_heads=4, norm="layernorm", activation="gelu", position="learned", use_bias=True
)


QWEN3 = TransformerConfig(**SIZES | {"head_dim": 16}, num_kv_heads=2, qk_norm=True, rope_theta=1e6, norm_eps=1e-6)


def _params(config: TransformerConfig) -> dict[str, np.ndarray]:
    return {name: value.astype(np.float32) for name, value in initial_params(config, 1, distinct=True).items()}


def _assert_equal(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> None:
    assert list(found) == list(wanted)
    for name, value in wanted.items():
        assert found[name].dtype == value.dtype, name
        np.testing.assert_array_equal(found[name], value, err_msg=name)


@pytest.fixture
def llama_folder(tmp_path):
    return weights.save_checkpoint(tmp_path / "llama", GROUPED, _params(GROUPED))


def _rewrite(folder: Path, change) -> None:
    """Change the tensors of a folder's model.safetensors."""
    tensors = safetensors.numpy.load_file(folder / "model.safetensors")
    change(tensors)
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")


# --- the default model


def test_default_model_has_its_shape_and_finite_float32_values():
    checkpoint = weights.load_checkpoint()
    config = checkpoint.config
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.d_model) == (30, 9, 3, 576)
    assert (config.rope_theta, config.norm_eps, config.tie_embeddings) == (1e5, 1e-5, True)
    assert checkpoint.sha256 == assets.MODEL_SHA256
    assert sum(value.size for value in checkpoint.params.values()) == 134_515_008
    assert all(value.dtype == np.float32 and value.flags.c_contiguous for value in checkpoint.params.values())


def test_default_model_has_the_values_that_transformers_reads_from_the_same_file():
    # All 272 tensors were compared bit for bit with transformers 5.23's own GGUF reader, which needs accelerate 1.x;
    # this digest of theirs stands in for it.
    params, digest = weights.load_checkpoint().params, hashlib.sha256()
    for name in sorted(params):
        digest.update(params[name].data)
    assert digest.hexdigest() == "0fa4e858c7d88014f57e84bd5d73cb986a25c0de9049dbf380ec3c56b18e0042"


@pytest.mark.parametrize("backend", [transformer, eqx_transformer], ids=["flax", "equinox"])
def test_jax_models_hold_a_float32_checkpoint_without_a_copy(backend, llama_folder):
    checkpoint = weights.load_checkpoint(llama_folder)
    _, held = parameters.split(backend.build(checkpoint.config, checkpoint.params))
    for name, value in checkpoint.params.items():
        assert held[name].unsafe_buffer_pointer() == value.ctypes.data, name


def test_a_tensor_that_was_read_leaves_no_page_of_its_file_in_memory(llama_folder):
    maps = Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("this system does not list a process's mapped files")
    tensors, *_ = weights.open_folder(llama_folder)
    found = {name: tensors.read(name) for name in tensors.shapes}
    assert found and str(llama_folder) not in maps.read_text()


def test_nobody_can_write_into_a_checkpoint_that_a_model_may_hold(llama_folder):
    for name, value in weights.load_checkpoint(llama_folder).params.items():
        with pytest.raises(ValueError, match="read-only"):
            value[...] = 0
        assert not value.flags.writeable, name


def test_pytorch_models_train_on_a_copy_of_a_checkpoint(llama_folder):
    checkpoint = weights.load_checkpoint(llama_folder)
    model = torch_transformer.build(checkpoint.config, checkpoint.params)
    before = checkpoint.params["head.kernel"].copy()
    with torch.no_grad():
        model.head.kernel.zero_()
    np.testing.assert_array_equal(checkpoint.params["head.kernel"], before)


# --- Hugging Face folders


@pytest.mark.parametrize("bias", [False, True])
def test_llama_kernels_are_those_of_transformers_transposed(tmp_path, bias):
    torch.manual_seed(0)
    settings = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    flags = {"attention_bias": bias, "mlp_bias": bias}
    config = transformers.LlamaConfig(vocab_size=40, num_key_value_heads=2, **settings, **flags)
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(tmp_path / "hf")
    params, state = weights.load_checkpoint(tmp_path / "hf").params, model.state_dict()
    theirs = state["model.layers.1.self_attn.k_proj.weight"].numpy()
    np.testing.assert_array_equal(params["layers.1.attention.k_proj.kernel"], theirs.T)
    np.testing.assert_array_equal(params["head.kernel"], state["lm_head.weight"].numpy().T)
    np.testing.assert_array_equal(params["embed.embedding"], state["model.embed_tokens.weight"].numpy())
    assert len(params) == len(state)
    assert ("layers.0.mlp.up_proj.bias" in params) is bias


@pytest.mark.parametrize("has_prefix", [True, False])
def test_gpt2_attention_is_split_in_three_with_and_without_prefix(tmp_path, has_prefix):
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=40, n_embd=32, n_layer=2, n_head=4, n_positions=64, eos_token_id=0,
                                     bos_token_id=0)  # fmt: skip
    model = transformers.GPT2LMHeadModel(config)
    (model if has_prefix else model.transformer).save_pretrained(tmp_path / "hf")
    params, state = weights.load_checkpoint(tmp_path / "hf").params, model.state_dict()
    fused = state["transformer.h.1.attn.c_attn.weight"].numpy()
    parts = [params[f"layers.1.attention.{name}_proj.kernel"] for name in "qkv"]
    np.testing.assert_array_equal(np.concatenate(parts, axis=1), fused)
    assert parts[0].shape == (32, 32)
    assert "head.kernel" not in params


def test_sharded_folder_equals_the_single_file(tmp_path):
    torch.manual_seed(0)
    settings = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=40, **settings))
    model.save_pretrained(tmp_path / "one")
    model.save_pretrained(tmp_path / "many", max_shard_size="20KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    one, many = weights.load_checkpoint(tmp_path / "one"), weights.load_checkpoint(tmp_path / "many")
    _assert_equal(many.params, one.params)
    assert many.sha256 != one.sha256
    next((tmp_path / "many").glob("model-00002*.safetensors")).unlink()
    with pytest.raises(ValueError, match=r"missing model-00002"):
        weights.load_checkpoint(tmp_path / "many")


@pytest.mark.parametrize("kind", ["F16", "BF16"])
def test_half_precision_is_widened_exactly(llama_folder, kind):
    import ml_dtypes

    narrow = {"F16": np.float16, "BF16": ml_dtypes.bfloat16}[kind]
    wanted = {name: value.astype(narrow).astype(np.float32) for name, value in _params(GROUPED).items()}
    _rewrite(llama_folder, lambda tensors: tensors.update({n: v.astype(narrow) for n, v in tensors.items()}))
    _assert_equal(weights.load_checkpoint(llama_folder).params, wanted)


def test_tied_head_that_is_stored_too_must_equal_the_embedding(tmp_path):
    config = GROUPED.model_copy(update={"tie_embeddings": True})
    folder = weights.save_checkpoint(tmp_path / "tied", config, _params(config))
    _rewrite(folder, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"]}))
    assert "head.kernel" not in weights.load_checkpoint(folder).params
    _rewrite(folder, lambda tensors: tensors.update({"lm_head.weight": tensors["lm_head.weight"] + 1}))
    with pytest.raises(ValueError, match="1 unused: lm_head.weight"):
        weights.load_checkpoint(folder)


# --- round trip


@pytest.mark.parametrize("config", [GROUPED, QWEN3, GPT2], ids=["llama", "qwen3", "gpt2"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_saved_checkpoint_is_read_back_bit_for_bit(tmp_path, config, dtype):
    params = {name: value.astype(dtype) for name, value in initial_params(config, 1, distinct=True).items()}
    found = weights.load_checkpoint(weights.save_checkpoint(tmp_path / "saved", config, params))
    _assert_equal(found.params, params)
    assert found.config == config
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


@pytest.mark.parametrize("config", [GROUPED, QWEN3, GPT2], ids=["llama", "qwen3", "gpt2"])
def test_transformers_loads_a_saved_checkpoint_without_complaint(tmp_path, config):
    folder = weights.save_checkpoint(tmp_path / "saved", config, _params(config))
    _, report = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values()), report


def test_saving_is_refused_where_it_would_overwrite_or_not_fit(tmp_path, llama_folder):
    params = _params(GROUPED)
    before = sorted(llama_folder.iterdir())
    with pytest.raises(ValueError, match="exists and is not an empty folder"):
        weights.save_checkpoint(llama_folder, GROUPED, params)
    assert sorted(llama_folder.iterdir()) == before
    params["extra"] = params.pop("head.kernel")
    params["final_norm.scale"] = params["final_norm.scale"][:3]
    with pytest.raises(ValueError, match=r"1 missing: head.kernel; 1 unused: extra; 1 misshapen: final_norm.scale is"):
        weights.save_checkpoint(tmp_path / "new", GROUPED, params)
    assert not (tmp_path / "new").exists()


def test_full_disk_while_saving_leaves_nothing(tmp_path, monkeypatch):
    def save_file(tensors, path, metadata):
        Path(path).write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(safetensors.numpy, "save_file", save_file)
    with pytest.raises(OSError, match="No space left"):
        weights.save_checkpoint(tmp_path / "new", GROUPED, _params(GROUPED))
    assert list(tmp_path.iterdir()) == []


# --- damage


def test_every_misfit_is_named_in_one_error(llama_folder):
    def change(tensors):
        del tensors["model.layers.1.mlp.up_proj.weight"]
        tensors["model.norm.weight"] = tensors["model.norm.weight"][:5]
        tensors["model.layers.0.surprise"] = np.zeros(3, np.float32)

    _rewrite(llama_folder, change)
    with pytest.raises(ValueError, match="tensors do not fit the model") as raised:
        weights.load_checkpoint(llama_folder)
    for part in (
        str(llama_folder),
        "1 missing: model.layers.1.mlp.up_proj.weight",
        "1 unused: model.layers.0.surprise",
        "1 misshapen: model.norm.weight is (5,), wanted (32,)",
    ):
        assert part in str(raised.value)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_are_refused_by_name(llama_folder, value):
    def change(tensors):
        tensors["model.layers.0.mlp.up_proj.weight"][3, 4] = value

    _rewrite(llama_folder, change)
    with pytest.raises(ValueError, match="1 with NaN or infinite values: model.layers.0.mlp.up_proj.weight"):
        weights.load_checkpoint(llama_folder)


def test_integer_tensors_are_refused_by_name(llama_folder):
    _rewrite(llama_folder, lambda tensors: tensors.update({"model.norm.weight": np.ones(32, np.int32)}))
    with pytest.raises(ValueError, match="tensor model.norm.weight has type I32, wanted F64, F32, F16 or BF16"):
        weights.load_checkpoint(llama_folder)


@pytest.mark.parametrize("share", [0.0, 0.001, 0.3, 0.999])
def test_cut_safetensors_file_is_one_error_that_names_it(llama_folder, share):
    file = llama_folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[: int(share * file.stat().st_size)])
    with pytest.raises(ValueError, match=r"model\.safetensors: truncated or corrupt"):
        weights.load_checkpoint(llama_folder)


@pytest.mark.parametrize(
    ("content", "message"), [("{", "cannot be read as JSON"), ("[]", "holds a list"), (None, "cannot be read")]
)
def test_damaged_config_json_is_an_error_that_names_it(llama_folder, content, message):
    path = llama_folder / "config.json"
    path.unlink() if content is None else path.write_text(content)
    with pytest.raises(ValueError, match=rf"config\.json: {message}"):
        weights.load_checkpoint(llama_folder)


def test_more_layers_than_tensors_are_refused_before_their_names_are_listed(llama_folder):
    path = llama_folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_hidden_layers": 2_000_000_000}))
    with pytest.raises(ValueError, match="says it has 2000000000 layers, and holds 21 tensors in all"):
        weights.load_checkpoint(llama_folder)


@pytest.mark.parametrize(
    ("weight_map", "wanted"), [([], "list"), (None, "NoneType"), ({"a": 3}, "'a': 3"), ({"a": ["b"]}, r"\['b'\]")]
)
def test_an_index_of_another_form_is_an_error_that_names_it(llama_folder, weight_map, wanted):
    (llama_folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ValueError, match=rf"index\.json: weight_map .*{wanted}, wanted an object of tensor: file"):
        weights.load_checkpoint(llama_folder)


def test_folder_without_weights_is_an_error(llama_folder):
    (llama_folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="llama: missing model.safetensors"):
        weights.load_checkpoint(llama_folder)


def test_files_of_tensors_that_are_not_read_do_not_change_a_models_checksum(llama_folder):
    before = weights.checksum(llama_folder)
    shutil.copy(llama_folder / "model.safetensors", llama_folder / "consolidated.safetensors")  # as Mistral's folders
    assert weights.checksum(llama_folder) == weights.load_checkpoint(llama_folder).sha256 == before
    (llama_folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"missing model\.safetensors"):
        weights.checksum(llama_folder)


def test_the_checksum_of_a_model_is_that_of_its_checkpoint(llama_folder):
    assert weights.checksum(llama_folder) == weights.load_checkpoint(llama_folder).sha256
    before = weights.checksum(llama_folder)
    config = llama_folder / "config.json"
    config.write_text(config.read_text() + "\n")
    assert weights.checksum(llama_folder) != before


@pytest.mark.parametrize("name", weights.TEXT_FILES)
def test_a_folder_whose_texts_become_other_tokens_is_another_model(llama_folder, name):
    before = weights.checksum(llama_folder)
    (llama_folder / name).parent.mkdir(exist_ok=True)
    (llama_folder / name).write_text("{}")
    one = weights.checksum(llama_folder)
    (llama_folder / name).write_text('{"bos_token": "<s>"}')
    assert len({before, one, weights.checksum(llama_folder)}) == 3


def test_name_that_is_nothing_is_an_error():
    with pytest.raises(ValueError, match=r"no/such/file.gguf does not exist; pass a GGUF file"):
        weights.load_checkpoint("no/such/file.gguf")


def test_hub_id_without_network_is_an_error_and_with_one_a_folder(monkeypatch, llama_folder):
    def offline(*_, **__):
        raise huggingface_hub.errors.LocalEntryNotFoundError("cannot reach the hub\nand more lines")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(
        ValueError, match=r"owner/model is no file or folder here, and fetching .*cannot reach the hub\)"
    ):
        weights.load_checkpoint("owner/model")

    def online(_, *, allow_patterns):
        read = {path.name for path in llama_folder.iterdir()} | set(weights.TEXT_FILES)
        assert read == set(huggingface_hub.utils.filter_repo_objects(read, allow_patterns=allow_patterns))
        return str(llama_folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", online)
    assert weights.load_checkpoint("owner/model").config == GROUPED


def test_one_file_of_weights_beside_an_index_of_others_is_refused(llama_folder):
    shutil.copy(llama_folder / "model.safetensors", llama_folder / "model-00001-of-00001.safetensors")
    index = {"weight_map": {"model.norm.weight": "model-00001-of-00001.safetensors"}}
    (llama_folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="holds model.safetensors beside an index of model-00001.*wanted one of them"):
        weights.load_checkpoint(llama_folder)


def test_index_that_names_absent_tensors_is_an_error(llama_folder):
    index = {"weight_map": {"model.norm.weight": "model.safetensors", "model.absent": "model.safetensors"}}
    (llama_folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="1 missing in the files: model.absent"):
        weights.load_checkpoint(llama_folder)
