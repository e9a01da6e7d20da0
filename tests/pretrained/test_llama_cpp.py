"""What is read from a GGUF file gives llama.cpp's logits: every family with random weights, and the default model.

Needs xllamacpp, llama.cpp as a wheel. It computes in float32, and looks GELU up in a table of 16-bit floats; we compute
in float64, with the same table where it has one.
"""

import json
import urllib.request

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxbench import transformer
from jaxbench.config import RotaryScaling, TransformerConfig
from jaxbench.pretrained import assets, tokenizer, weights
from jaxbench.quantization import gguf_export, grids, inputs, quantize
from jaxbench.quantization.recipe import Recipe
from tests.pretrained import test_gguf_file as files

xllamacpp = pytest.importorskip("xllamacpp", reason="needs xllamacpp, llama.cpp as a wheel: pip install xllamacpp")
gguf = files.gguf

SIZES = {"vocab_size": 96, "d_model": 64, "d_ff": 96, "num_layers": 3, "num_heads": 4, "head_dim": 16}
SIZES |= {"max_seq_len": 256}
LLAMA = TransformerConfig(**SIZES, num_kv_heads=2)
QWEN2 = LLAMA.model_copy(update={"qkv_bias": True, "rope_theta": 1e6})
QWEN3 = LLAMA.model_copy(update={"qk_norm": True, "rope_theta": 1e6, "norm_eps": 1e-6})
GEMMA = LLAMA.model_copy(update={"num_kv_heads": 1, "activation": "geglu", "embedding_scale": 8.0})
WINDOWS = {"post_norms": True, "sliding_window": 7}
GEMMA2 = GEMMA.model_copy(update=WINDOWS | {"global_every": 2, "attention_softcap": 50.0, "logit_softcap": 30.0})
GEMMA3 = GEMMA.model_copy(
    update=WINDOWS
    | {"num_layers": 7, "global_every": 6, "qk_norm": True, "rope_theta": 1e6, "local_rope_theta": 10000.0}
)
GPT2 = files.GPT2.model_copy(update=SIZES | {"num_kv_heads": 4})
LINEAR = RotaryScaling(kind="linear", factor=4.0)
YARN = RotaryScaling(kind="yarn", factor=4.0, original_max_seq_len=16)
PROMPTS = [np.random.default_rng(3).integers(2, 96, length).tolist() for length in (5, 23)]


def _server(path):
    """Return llama.cpp with a file."""
    settings = xllamacpp.CommonParams()
    settings.model.path, settings.n_ctx, settings.n_parallel = str(path), 256, 1
    settings.cpuparams.n_threads = settings.cpuparams_batch.n_threads = 2
    settings.warmup, settings.n_gpu_layers, settings.verbosity = False, 0, 0
    settings.cache_type_k = settings.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    settings.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    return xllamacpp.Server(settings)


def log_probabilities(path, prompts, vocab_size: int) -> np.ndarray:
    """Return llama.cpp's log-probabilities [N V] of the token after each prompt."""
    server = _server(path)
    rows = np.full((len(prompts), vocab_size), np.nan)
    for row, prompt in zip(rows, prompts):
        request = {"prompt": prompt, "n_predict": 1, "n_probs": vocab_size, "temperature": 1.0, "cache_prompt": False}
        answer = server.handle_completions(request | {"samplers": []})
        for token in answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]:
            row[token["id"]] = token["logprob"]
    return rows


def ours(path, prompts, dtype: str) -> np.ndarray:
    """Return our log-probabilities [N V] of the token after each prompt."""
    checkpoint = weights.load_checkpoint(path)
    model = transformer.build(checkpoint.config, checkpoint.params, dtype=dtype)
    rows = []
    for prompt in prompts:
        logits = model(np.array([prompt], np.int32), np.arange(len(prompt), dtype=np.int32)[None])
        rows.append(jax.nn.log_softmax(logits[0, -1]))
    return np.stack(rows)


def write(path, arch: str, config: TransformerConfig, params: dict[str, np.ndarray], **more: float):
    """Write a file of a model in float32, with a vocabulary of words that nobody reads; more: keys with numbers."""

    def extra(writer):
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("gpt-2")
        writer.add_token_list([f"t{index}" for index in range(config.vocab_size)])
        writer.add_token_types([1] * config.vocab_size)
        writer.add_token_merges(["t 1"])
        writer.add_bos_token_id(0)
        writer.add_eos_token_id(1)
        if arch != "gpt2":
            writer.add_rope_dimension_count(config.head_dim)
            writer.add_key_length(config.head_dim)
            writer.add_value_length(config.head_dim)
        if config.sliding_window:
            writer.add_sliding_window(config.sliding_window)
        if config.attention_softcap:
            writer.add_attn_logit_softcapping(config.attention_softcap)
            writer.add_final_logit_softcapping(config.logit_softcap)
        if config.rope_scaling:
            writer.add_rope_scaling_type(gguf.RopeScalingType(config.rope_scaling.kind))
            writer.add_rope_scaling_factor(config.rope_scaling.factor)
        for name, value in more.items():
            (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(name, value)
        if config.rope_scaling == YARN:
            writer.add_rope_scaling_orig_ctx_len(YARN.original_max_seq_len)

    make = files._gpt2_tensors if arch == "gpt2" else files._llama_tensors
    return files._write_gguf(path, arch, make(config, params), config, extra)


@pytest.mark.parametrize(
    ("arch", "config"),
    [
        ("llama", LLAMA),
        ("llama", LLAMA.model_copy(update={"rope_scaling": LINEAR})),
        ("qwen2", QWEN2),
        ("qwen2", QWEN2.model_copy(update={"rope_scaling": YARN})),
        ("qwen3", QWEN3),
        ("gemma", GEMMA),
        ("gemma2", GEMMA2),
        ("gemma3", GEMMA3),
        ("gpt2", GPT2),
    ],
    ids=["llama", "llama stretched", "qwen2", "qwen2 yarn", "qwen3", "gemma", "gemma2", "gemma3", "gpt2"],
)
def test_a_file_of_random_weights_gives_llama_cpps_logits(arch, config, tmp_path, monkeypatch):
    true = jax.nn.gelu

    def looked_up(x, approximate):
        return true(x.astype(jnp.float16).astype(x.dtype), approximate=approximate).astype(jnp.float16).astype(x.dtype)

    has_gelu = config.activation in ("geglu", "gelu")
    if has_gelu:
        monkeypatch.setattr(jax.nn, "gelu", looked_up)
    path = write(tmp_path / "x.gguf", arch, config, files._params(config))
    with jax.enable_x64(True):
        expected = ours(path, PROMPTS, "float64")
    found = log_probabilities(path, PROMPTS, config.vocab_size)
    np.testing.assert_allclose(found, expected, rtol=0, atol=5e-4 if has_gelu else 5e-6)


@pytest.mark.parametrize(
    ("arch", "config", "keys", "effect"),
    [
        ("llama", LLAMA, {"llama.rope.scaling.factor": 4.0}, {"rope_scaling": LINEAR}),
        ("qwen2", QWEN2, {"qwen2.attention.sliding_window": 7}, {}),
    ],
)
def test_keys_that_llama_cpp_takes_in_a_way_of_its_own_give_its_logits(arch, config, keys, effect, tmp_path):
    path = write(tmp_path / "x.gguf", arch, config, files._params(config), **keys)
    assert weights.read_config(path) == config.model_copy(update=effect)
    with jax.enable_x64(True):
        expected = ours(path, PROMPTS, "float64")
    np.testing.assert_allclose(log_probabilities(path, PROMPTS, config.vocab_size), expected, rtol=0, atol=5e-6)


def test_the_default_model_gives_llama_cpps_logits(tmp_path):
    path = assets.fetch_default_model()
    checkpoint, text = weights.load_checkpoint(path), tokenizer.load_tokenizer(path)
    prompts = [text.encode(each) for each in ("The capital of France is", "def fibonacci(n):", "Once upon a time")]
    expected = ours(path, prompts, "float32")
    wide = write(tmp_path / "wide.gguf", "llama", checkpoint.config, checkpoint.params)  # the file's own numbers
    np.testing.assert_allclose(
        log_probabilities(wide, prompts, checkpoint.config.vocab_size), expected, rtol=0, atol=5e-4
    )
    narrow = log_probabilities(path, prompts, checkpoint.config.vocab_size)  # activations of 8 bits: other logits
    assert narrow.argmax(1).tolist() == expected.argmax(1).tolist()


TEXTS = [
    "12345 6.7e8",
    "a,b; c!? (x)",
    "don't I'M",
    "\u00e9\u4e2d\u6587 \U0001f600",
    "x\n\n\n  y\t z",
    "foo(bar)[0] ...and",
]
TEXTS += [
    "$100 <=> ~^|`",
    "  two  spaces  ",
    "\u0663\u0664\u0665 12 \u00bc",
    "a\u00a0b\u3000c",
    "<|im_start|>hi<|im_end|>",
    "\n\n",
]
LETTERS = "abZ 019.,'\"$+<=>^~|-_()\n\t \u00e9\u00a0\u2014\u4e2d\u0663\u00bd\u20ac\U0001f600"


def test_the_default_models_file_without_a_pre_tokenizer_gives_llama_cpps_ids(tmp_path):
    content, name = assets.fetch_default_model().read_bytes(), b"tokenizer.ggml.pre"
    (tmp_path / "x.gguf").write_bytes(content.replace(name, b"tokenizer.ggml.prX", 1))
    text, server = tokenizer.load_tokenizer(tmp_path / "x.gguf"), _server(tmp_path / "x.gguf")
    random, prose = np.random.default_rng(0), assets.default_text()
    texts = TEXTS + ["".join(random.choice(list(LETTERS), 30)) for _ in range(40)]
    texts += [prose[at : at + 200] for at in random.integers(0, len(prose) - 200, 10)]
    for each in texts:
        body = json.dumps({"content": each, "add_special": True, "parse_special": True}).encode()
        request = urllib.request.Request(f"{server.listening_address}/tokenize", body)
        with urllib.request.urlopen(request) as answer:
            assert text.encode(each) == json.load(answer)["tokens"], each


def test_a_file_of_calibrated_integers_gives_llama_cpps_logits(tmp_path):
    """llama.cpp computes such products with activations of 8 bits: its logits are near ours, not equal."""
    path = write(tmp_path / "x.gguf", "llama", LLAMA, files._params(LLAMA))
    held = weights.load_checkpoint(path)
    tokens = np.random.default_rng(0).integers(0, 96, (16, 32))
    recipe = Recipe(**grids.NAMED["q4_0"]._asdict(), rounding="gptq", equalize="awq")
    made = quantize.quantize(held.config, held.params, recipe, calibrator=inputs.LayerByLayer(LLAMA), tokens=tokens)
    written = gguf_export.export(path, tmp_path / "q.gguf", format="q4_0", quantized=made).path
    whole, rounded = (ours(each, PROMPTS, "float32") for each in (path, written))
    found = log_probabilities(written, PROMPTS, LLAMA.vocab_size)
    assert np.linalg.norm(found - rounded) < 0.2 * np.linalg.norm(whole - rounded)
