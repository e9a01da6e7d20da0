"""The GGUF container: read as the gguf package writes it; damage is always one ValueError."""

import shutil
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxbench.config import RotaryScaling, TransformerConfig
from jaxbench.initial import initial_params
from jaxbench.pretrained import assets, gguf_file, weights

RANDOM = np.random.default_rng(0)
PLAIN = RANDOM.normal(size=(3, 5)).astype(np.float32)
ROWS = RANDOM.normal(size=(4, 64)).astype(np.float32)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A file with every kind of metadata and three kinds of tensors."""
    path = tmp_path_factory.mktemp("gguf") / "all.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_string("a.string", "naïve")
    writer.add_uint32("a.count", 7)
    writer.add_float32("a.number", 0.5)
    writer.add_bool("a.flag", True)
    writer.add_array("a.words", ["x", "yy", ""])
    writer.add_array("a.numbers", [3, 1, 2])
    writer.add_tensor("plain", PLAIN)
    writer.add_tensor("half", ROWS.astype(np.float16))
    kind = gguf.GGMLQuantizationType.Q4_1
    writer.add_tensor("quantised", gguf.quants.quantize(ROWS, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_metadata_is_read_with_its_types(written):
    metadata = gguf_file.read(written).metadata
    expected = {"a.string": "naïve", "a.count": 7, "a.number": 0.5, "a.flag": True, "a.words": ["x", "yy", ""]}
    assert {key: metadata[key] for key in expected} == expected
    assert metadata["a.numbers"] == [3, 1, 2]


def test_tensors_have_the_slowest_axis_first_and_are_dequantised(written):
    file = gguf_file.read(written)
    np.testing.assert_array_equal(file.tensor("plain"), PLAIN)
    np.testing.assert_array_equal(file.tensor("half"), ROWS.astype(np.float16).astype(np.float32))
    step = (ROWS.reshape(-1, 32).max(1) - ROWS.reshape(-1, 32).min(1)) / 15  # Q4_1: 16 levels in each block of 32
    error = np.abs(file.tensor("quantised") - ROWS).reshape(-1, 32).max(1)
    assert file.tensor("quantised").dtype == np.float32
    assert (error <= 0.51 * step + 1e-3).all()


def test_everything_agrees_with_the_gguf_packages_own_reader(written):
    theirs, ours = gguf.GGUFReader(written), gguf_file.read(written)
    assert {t.name for t in theirs.tensors} == set(ours.tensors)
    for tensor in theirs.tensors:
        expected = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        np.testing.assert_array_equal(ours.tensor(tensor.name), expected)


@pytest.mark.parametrize("kind", list(gguf.GGMLQuantizationType), ids=lambda kind: kind.name)
def test_types_that_gguf_cannot_turn_into_floats_are_refused_by_name_and_no_others(tmp_path, kind):
    block, size = gguf.GGML_QUANT_SIZES[kind]
    path = tmp_path / "one.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("only", np.zeros((1, size), np.uint8), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    try:
        gguf.quants.dequantize(np.zeros((1, size), np.uint8), kind)
    except NotImplementedError:
        with pytest.raises(ValueError, match=f"one.gguf: tensor 'only' has type {kind.name}, wanted F32"):
            gguf_file.read(path)
    else:
        assert gguf_file.read(path).tensor("only").shape == (1, block)


@given(share=st.floats(0, 0.999))
def test_file_cut_anywhere_is_one_error_that_names_it(written, share):
    content = written.read_bytes()
    cut = written.with_name("cut.gguf")
    cut.write_bytes(content[: int(share * len(content))])
    with pytest.raises(ValueError, match=r"cut\.gguf: (truncated|not a GGUF file)"):
        gguf_file.read(cut)


@given(place=st.integers(0, 1000), value=st.integers(0, 255))
def test_changed_byte_in_the_header_is_read_or_one_error(written, place, value):
    content = bytearray(written.read_bytes())
    content[place % 700] = value
    changed = written.with_name("changed.gguf")
    changed.write_bytes(bytes(content))
    try:
        file = gguf_file.read(changed)
    except ValueError as error:
        assert "changed.gguf" in str(error)
        assert "\n" not in str(error)
    else:
        assert all(info.offset + info.size <= len(content) for info in file.tensors.values())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not a GGUF file"),
        (b"PK\x03\x04 a zip file", "not a GGUF file .starts with"),
        (b"GGUF\x01\0\0\0" + bytes(64), "GGUF version 1 is not supported, wanted one of .2, 3."),
        (b"GGUF\0\0\0\x03" + bytes(64), "GGUF version 50331648 is not supported"),  # big-endian
        (b"GGUF\x03\0\0\0" + b"\xff" * 64, "truncated or corrupt"),
    ],
)
def test_other_files_are_refused(tmp_path, content, message):
    (tmp_path / "bad.gguf").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        gguf_file.read(tmp_path / "bad.gguf")


# --- as a checkpoint


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
        np.testing.assert_array_equal(found[name], value, err_msg=name)


def _permuted(kernel: np.ndarray, num_heads: int) -> np.ndarray:
    """Order rows as llama.cpp's convert_hf_to_gguf.py does (LlamaModel.permute)."""
    halves = kernel.reshape(num_heads, 2, kernel.shape[0] // num_heads // 2, *kernel.shape[1:])
    return halves.swapaxes(1, 2).reshape(kernel.shape)


LLAMA_GGUF = {
    "attn_norm.weight": "attention_norm.scale",
    "attn_q.weight": "attention.q_proj.kernel",
    "attn_k.weight": "attention.k_proj.kernel",
    "attn_v.weight": "attention.v_proj.kernel",
    "attn_output.weight": "attention.o_proj.kernel",
    "ffn_norm.weight": "mlp_norm.scale",
    "ffn_gate.weight": "mlp.gate_proj.kernel",
    "ffn_up.weight": "mlp.up_proj.kernel",
    "ffn_down.weight": "mlp.down_proj.kernel",
}


def _llama_tensors(config: TransformerConfig, params: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the tensors of a file of Llama, Qwen or Gemma; llama.cpp permutes what it rotates as Llama's own code."""
    tensors = {"token_embd.weight": params["embed.embedding"], "output_norm.weight": params["final_norm.scale"]}
    if not config.tie_embeddings:
        tensors["output.weight"] = params["head.kernel"].T
    is_llama = not (config.qk_norm or config.qkv_bias or config.activation == "geglu")
    heads = {"attn_q.weight": config.num_heads, "attn_k.weight": config.num_kv_heads} if is_llama else {}
    names = LLAMA_GGUF | (
        {f"attn_{x}_norm.weight": f"attention.{x}_norm.scale" for x in "qk"} if config.qk_norm else {}
    )
    names |= {f"attn_{x}.bias": f"attention.{x}_proj.bias" for x in "qkv"} if config.qkv_bias else {}
    post = {"post_attention_norm.weight": "attention_post_norm.scale", "post_ffw_norm.weight": "mlp_post_norm.scale"}
    names |= post if config.post_norms else {}
    for i in range(config.num_layers):
        for theirs, ours in names.items():
            value = params[f"layers.{i}.{ours}"].T
            tensors[f"blk.{i}.{theirs}"] = _permuted(value, heads[theirs]) if theirs in heads else value
    return tensors


def _write_gguf(
    path: Path, arch: str, tensors: dict[str, np.ndarray], config: TransformerConfig, extra=None, kind=None
):
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.max_seq_len)
    writer.add_embedding_length(config.d_model)
    writer.add_feed_forward_length(config.d_ff)
    writer.add_head_count(config.num_heads)
    if arch != "gpt2":
        writer.add_head_count_kv(config.num_kv_heads)
        writer.add_layer_norm_rms_eps(config.norm_eps)
        writer.add_rope_freq_base(config.rope_theta)
    else:
        writer.add_layer_norm_eps(config.norm_eps)
    if extra:
        extra(writer)
    for name, value in tensors.items():
        value = np.ascontiguousarray(value)
        if kind is not None and value.ndim == 2:
            writer.add_tensor(name, gguf.quants.quantize(value, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_the_types_kept_here_are_those_of_the_gguf_package():
    for kind, known in gguf_file.COMMON.items():
        one = gguf.GGMLQuantizationType(kind)
        assert known == (one.name, *gguf.GGML_QUANT_SIZES[one])


def test_gguf_llama_gives_back_what_was_written(tmp_path):
    params = _params(GROUPED)
    path = _write_gguf(tmp_path / "x.gguf", "llama", _llama_tensors(GROUPED, params), GROUPED)
    found = weights.load_checkpoint(path)
    assert found.config == GROUPED
    assert found.tokenizer == path
    assert found.sha256 == assets.sha256_file(path)
    _assert_equal(found.params, params)


@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0", "F16", "BF16"])
def test_gguf_quantised_values_are_those_of_the_gguf_package(tmp_path, kind):
    kind = gguf.GGMLQuantizationType[kind]
    tensors = _llama_tensors(GROUPED, _params(GROUPED))
    found = weights.load_checkpoint(_write_gguf(tmp_path / "x.gguf", "llama", tensors, GROUPED, kind=kind)).params
    for theirs, ours in (("blk.1.ffn_up.weight", "layers.1.mlp.up_proj.kernel"), ("output.weight", "head.kernel")):
        wanted = gguf.quants.dequantize(gguf.quants.quantize(np.ascontiguousarray(tensors[theirs]), kind), kind)
        np.testing.assert_array_equal(found[ours], wanted.T)


def test_gguf_qwen3_gives_back_what_was_written(tmp_path):
    params = _params(QWEN3)
    how = {"extra": lambda writer: writer.add_key_length(QWEN3.head_dim)}
    path = _write_gguf(tmp_path / "x.gguf", "qwen3", _llama_tensors(QWEN3, params), QWEN3, **how)
    found = weights.load_checkpoint(path)
    assert found.config == QWEN3
    _assert_equal(found.params, params)


QWEN2 = TransformerConfig(**SIZES, num_kv_heads=2, qkv_bias=True, rope_theta=1e6)
GEMMA = TransformerConfig(**SIZES, num_kv_heads=1, activation="geglu", embedding_scale=32**0.5)
WINDOWS = {"post_norms": True, "sliding_window": 7}
GEMMA2 = GEMMA.model_copy(update=WINDOWS | {"global_every": 2, "attention_softcap": 40.0, "logit_softcap": 30.0})
GEMMA3 = GEMMA.model_copy(
    update=WINDOWS | {"global_every": 6, "qk_norm": True, "rope_theta": 1e6, "local_rope_theta": 10000.0}
)


def _about_gemma(config: TransformerConfig):
    """Return what writes the keys of its architecture; Gemma 3's local base is llama.cpp's default."""

    def extra(writer):
        writer.add_key_length(config.head_dim)
        if config.sliding_window:
            writer.add_sliding_window(config.sliding_window)
        if config.attention_softcap:
            writer.add_attn_logit_softcapping(config.attention_softcap)
        if config.rope_scaling:
            writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
            writer.add_rope_scaling_factor(config.rope_scaling.factor)

    return extra


SCALED = GEMMA3.model_copy(update={"rope_scaling": RotaryScaling(kind="linear", factor=8.0)})
LARGE = {"num_layers": 46, "query_pre_attn_scalar": 8.0, "d_ff": 32}  # of 46 layers are those of 27B, with another root


@pytest.mark.parametrize(
    ("arch", "config"),
    [
        ("qwen2", QWEN2),
        ("gemma", GEMMA),
        ("gemma2", GEMMA2),
        ("gemma2", GEMMA2.model_copy(update=LARGE | {"vocab_size": 8})),
        ("gemma3", GEMMA3),
        ("gemma3", SCALED),
    ],
    ids=["qwen2", "gemma", "gemma2", "gemma2 of 46 layers", "gemma3", "gemma3 stretched"],
)
def test_gguf_qwen2_and_gemma_give_back_what_was_written(tmp_path, arch, config):
    params = _params(config)
    tensors = _llama_tensors(config, params)
    found = weights.load_checkpoint(_write_gguf(tmp_path / "x.gguf", arch, tensors, config, _about_gemma(config)))
    assert found.config == config
    _assert_equal(found.params, params)  # norm scales as they are: llama.cpp's files have 1 added already


def test_gguf_yarn_is_read(tmp_path):
    def extra(writer):
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(16)

    path = _write_gguf(tmp_path / "x.gguf", "qwen2", _llama_tensors(QWEN2, _params(QWEN2)), QWEN2, extra)
    scaling = weights.load_checkpoint(path).config.rope_scaling
    assert scaling == RotaryScaling(kind="yarn", factor=4.0, original_max_seq_len=16)
    assert scaling.magnitude == pytest.approx(1 + 0.1 * np.log(4.0))


def test_gguf_pattern_of_windows_that_is_not_the_familys_is_refused(tmp_path):
    def extra(writer):
        _about_gemma(GEMMA3)(writer)
        writer.add_uint32("gemma3.attention.sliding_window_pattern", 4)

    path = _write_gguf(tmp_path / "x.gguf", "gemma3", _llama_tensors(GEMMA3, _params(GEMMA3)), GEMMA3, extra)
    with pytest.raises(ValueError, match=r"sliding_window_pattern=4 is not supported, wanted 6"):
        weights.load_checkpoint(path)


def _gpt2_tensors(config: TransformerConfig, params: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    tensors = {"token_embd.weight": params["embed.embedding"], "position_embd.weight": params["position.embedding"]}
    modules = {"attn_norm": "attention_norm", "attn_output": "attention.o_proj", "ffn_norm": "mlp_norm"}
    modules |= {"ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
    layers = range(config.num_layers)
    names = {"output_norm": "final_norm"} | {
        f"blk.{i}.{a}": f"layers.{i}.{b}" for i in layers for a, b in modules.items()
    }
    for theirs, ours in names.items():
        tensors[f"{theirs}.weight"] = params.get(f"{ours}.kernel", params.get(f"{ours}.scale")).T
        tensors[f"{theirs}.bias"] = params[f"{ours}.bias"]
    for i in layers:
        for theirs, ours in (("weight", "kernel"), ("bias", "bias")):
            parts = [params[f"layers.{i}.attention.{name}_proj.{ours}"].T for name in "qkv"]
            tensors[f"blk.{i}.attn_qkv.{theirs}"] = np.concatenate(parts)
    return tensors


def test_gguf_gpt2_gives_back_what_was_written(tmp_path):
    params = _params(GPT2)
    found = weights.load_checkpoint(_write_gguf(tmp_path / "x.gguf", "gpt2", _gpt2_tensors(GPT2, params), GPT2))
    assert found.config == GPT2
    _assert_equal(found.params, params)


def test_gguf_linear_scaling_is_read(tmp_path):
    def extra(writer):
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(4.0)

    path = _write_gguf(tmp_path / "x.gguf", "llama", _llama_tensors(GROUPED, _params(GROUPED)), GROUPED, extra)
    assert weights.load_checkpoint(path).config.rope_scaling == RotaryScaling(kind="linear", factor=4.0)


def test_gguf_llama3_scaling_is_recognised_by_its_divisors_or_refused(tmp_path):
    config = GROUPED.model_copy(update={"rope_theta": 5e5, "head_dim": 64})
    frequencies = 5e5 ** -(np.arange(0, 64, 2) / 64)
    divisors = []  # as in llama.cpp's convert_hf_to_gguf.py, LlamaModel.generate_extra_tensors
    for wavelength in 2 * np.pi / frequencies:
        smooth = np.clip((8192 / wavelength - 1) / 3, 0, 1)
        divisors.append(1 / ((1 - smooth) / 32 + smooth))

    def extra(writer):
        writer.add_key_length(64)

    tensors = _llama_tensors(config, _params(config)) | {"rope_freqs.weight": np.array(divisors, np.float32)}
    found = weights.load_checkpoint(_write_gguf(tmp_path / "x.gguf", "llama", tensors, config, extra)).config
    assert found.rope_scaling == RotaryScaling(kind="llama3", factor=32.0)
    tensors["rope_freqs.weight"][5] = 2
    with pytest.raises(ValueError, match="rope_freqs.weight .* is not Llama 3's scaling"):
        weights.load_checkpoint(_write_gguf(tmp_path / "y.gguf", "llama", tensors, config, extra))


def test_gguf_misfits_and_architectures_are_named(tmp_path):
    tensors = _llama_tensors(GROUPED, _params(GROUPED))
    path = _write_gguf(tmp_path / "mamba.gguf", "mamba", tensors, GROUPED)
    with pytest.raises(ValueError, match="architecture 'mamba' is not supported, wanted one of llama, gpt2"):
        weights.load_checkpoint(path)
    del tensors["blk.0.attn_q.weight"]
    tensors["blk.1.ffn_up.weight"] = tensors["blk.1.ffn_up.weight"].T
    path = _write_gguf(tmp_path / "missing.gguf", "llama", tensors, GROUPED)
    with pytest.raises(
        ValueError, match=r"1 missing: blk.0.attn_q.weight; 1 misshapen: blk.1.ffn_up.weight is \(32, 64\)"
    ):
        weights.load_checkpoint(path)


def test_cut_gguf_file_is_one_error_and_the_folder_is_untouched(tmp_path):
    path = _write_gguf(tmp_path / "x.gguf", "llama", _llama_tensors(GROUPED, _params(GROUPED)), GROUPED)
    shutil.copy(path, tmp_path / "cut.gguf")
    with open(tmp_path / "cut.gguf", "r+b") as file:
        file.truncate(path.stat().st_size - 100)
    with pytest.raises(ValueError, match=r"cut.gguf: truncated GGUF file, tensor .* ends at byte"):
        weights.load_checkpoint(tmp_path / "cut.gguf")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["cut.gguf", "x.gguf"]


def test_every_part_of_a_split_gguf_file_is_refused_with_the_command_that_joins_them(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama", split_max_tensors=1)
    for name in ("token_embd.weight", "output.weight"):
        writer.add_tensor(name, np.zeros((4, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    parts = sorted(tmp_path.glob("*.gguf"))
    assert len(parts) == 2
    for part in parts:
        with pytest.raises(ValueError, match=f"{part.name}: one of 2 parts of a model, .* llama-gguf-split --merge"):
            gguf_file.read(part)
        with pytest.raises(ValueError, match="one of 2 parts of a model"):
            weights.load_checkpoint(part)
