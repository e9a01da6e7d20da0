"""Compiled and packed PyTorch says what plain PyTorch says; what JAX keeps for later processes and tells of memory."""

import collections
import sys
import time
import types

import jax
import numpy as np
import pytest
import torch

from jaxbench import initial
from jaxbench.bench import plan
from jaxbench.bench.arms import arm_table, contract, int4, jax_arms, torch_arms
from jaxbench.measure import inductor, worker
from jaxbench.measure.records import Workload
from jaxbench.pretrained import weights
from torch_ref import functional

DECODE = Workload(kind="decode", dtype="float32", batch=2, prompt_tokens=5, new_tokens=4)
INPUTS = np.random.default_rng(0).integers(0, 128, (2, 5)).tolist()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    weights.save_checkpoint(path, plan.TINY, initial.initial_params(plan.TINY, seed=0, distinct=True))
    return str(path)


def loaded(name, folder, dtype="float32"):
    arm = arm_table.create(name, device="cpu", threads=1, checkpoint=folder)
    assert arm.start() == ""
    arm.load(dtype, num_layers=1, train=None)
    return arm


def generated(name, folder):
    arm = loaded(name, folder)
    facts = arm.prepare(DECODE)
    arm.warm(DECODE, INPUTS)
    return facts, [arm.measure(DECODE, INPUTS)["tokens"] for _ in range(2)], arm


@pytest.mark.skipif(bool(inductor.unusable("cpu")), reason=inductor.unusable("cpu") or "-")
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method:DeprecationWarning")  # that Inductor imports
@pytest.mark.parametrize("name", ["torch_compile_step", "transformers_compile"])
def test_a_compiled_decode_step_says_what_the_eager_arm_says(name, folder):
    _, (_, eager), _ = generated("torch_eager", folder)
    facts, (first, again), arm = generated(name, folder)
    assert first == again == eager and facts["compile_s"] > 0
    assert "skip" in arm.prepare(DECODE.model_copy(update={"kind": "prefill", "new_tokens": 0}))


@pytest.mark.parametrize("changes", [{}, {"use_bias": True, "tie_embeddings": False}], ids=["tied", "bias and a head"])
def test_packed_products_are_the_plain_ones(changes, tmp_path):
    config = plan.TINY.model_copy(update=changes)
    weights.save_checkpoint(tmp_path, config, initial.initial_params(config, seed=0, distinct=True))
    plain, packed = (loaded(name, str(tmp_path)) for name in ("torch_plain", "torch_eager"))
    assert packed.model.layers[0].mlp.up_proj.kernel.numel() == 0 < plain.model.layers[0].mlp.up_proj.kernel.numel()
    np.testing.assert_allclose(packed.logits(INPUTS[0]), plain.logits(INPUTS[0]), rtol=1e-4, atol=1e-5)
    packed.unload()
    assert packed.packed._weights == []


@pytest.mark.parametrize("changes", [{}, {"use_bias": True, "tie_embeddings": False}], ids=["tied", "bias and a head"])
def test_bfloat16_products_of_several_rows_are_float32_s_where_onednn_has_none(changes, tmp_path, monkeypatch):
    config = plan.TINY.model_copy(update=changes)
    weights.save_checkpoint(tmp_path, config, initial.initial_params(config, seed=0, distinct=True))
    plain = loaded("torch_plain", str(tmp_path), "bfloat16").model
    monkeypatch.setattr(functional, "NARROW_PRODUCTS", frozenset())
    arm = loaded("torch_eager", str(tmp_path), "bfloat16")
    assert not any(weight.is_mkldnn for weight in arm.packed._weights) and arm.prepare(DECODE) == {}
    layer, reference = arm.model.layers[0].mlp.up_proj, plain.layers[0].mlp.up_proj
    for rows in (1, arm.packed.FEW_ROWS, arm.packed.FEW_ROWS + 1):
        x = torch.randn(rows, config.d_model, generator=torch.Generator().manual_seed(rows)).bfloat16()
        exact = x.double() @ reference.kernel.double() + (0 if reference.bias is None else reference.bias.double())
        found = layer(x)
        assert found.dtype == torch.bfloat16
        torch.testing.assert_close(found.double(), exact, rtol=2**-7, atol=2**-7)
    assert len(arm.measure(DECODE, INPUTS)["tokens"][0]) == DECODE.new_tokens
    arm.unload()


@pytest.mark.parametrize("changes", [{}, {"use_bias": True, "tie_embeddings": False}], ids=["tied", "bias and a head"])
def test_single_rows_take_plain_products_where_a_trial_finds_them_faster(changes, tmp_path, monkeypatch):
    """On this machine either may be: the ratio of the trial's times is set here, everything else is as always."""
    config = plan.TINY.model_copy(update=changes)
    weights.save_checkpoint(tmp_path, config, initial.initial_params(config, seed=0, distinct=True))
    tokens = {}
    for name, gain in (("plain", 1.2), ("packed", 1.0)):
        arm = loaded("torch_eager", str(tmp_path))
        tried = []
        monkeypatch.setattr(
            arm.packed, "_gain", lambda layers, gain=gain, tried=tried: tried.append(len(layers)) or gain
        )
        assert arm.prepare(DECODE) == arm.prepare(DECODE) == {"single_row": name} and len(tried) == 1
        assert (arm.model.layers[0].mlp.up_proj.kernel.numel() > 0) == (name == "plain")
        called = _packed_calls(arm, monkeypatch)
        tokens[name] = [
            arm.measure(DECODE.model_copy(update={"batch": rows}), INPUTS[:rows])["tokens"] for rows in (1, 2)
        ]
        assert (called[1] == 0) == (name == "plain") and called[2] > 0
        arm.unload()
    assert tokens["plain"] == tokens["packed"]


def _packed_calls(arm, monkeypatch) -> collections.Counter:
    """How often packed weights multiply how many rows, counted from now on."""
    called, linear = collections.Counter(), arm.packed._linear

    def counted(x, packed, bias):
        called[x.numel() // x.shape[-1]] += 1
        return linear(x, packed, bias)

    monkeypatch.setattr(arm.packed, "_linear", counted)
    return called


def test_the_trial_of_single_rows_times_both_products(folder):
    arm = loaded("torch_eager", folder)
    x = arm.torch.zeros(1, 4)
    slow, fast = (lambda x: time.sleep(0.002)), (lambda x: None)
    assert arm.packed._gain([(slow, fast, x)] * 3) > arm.packed.LEAST_GAIN > arm.packed._gain([(fast, slow, x)] * 3)


def test_what_is_trained_is_not_packed(folder):
    arm = loaded("torch_eager", folder)
    train = {"form": "plain", "learning_rate": 1e-3}
    arm.load("float32", num_layers=1, train=train)
    assert arm.model.layers[0].mlp.up_proj.kernel.numel() > 0


def test_transformers_trains_without_dropout_and_generates_by_the_suite_alone(tmp_path):
    """GPT-2's configuration has rates of 0.1, and a folder's own file may ask for a penalty or another end."""
    import transformers

    config = transformers.GPT2Config(vocab_size=128, n_positions=64, n_embd=32, n_layer=1, n_head=2)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path)
    step = Workload(kind="train", dtype="float32", batch=2, prompt_tokens=4)
    losses = []
    for _ in range(2):
        arm = arm_table.create("transformers", device="cpu", threads=1, checkpoint=str(tmp_path))
        assert arm.start() == ""
        arm.load("float32", num_layers=1, train={"form": "plain", "learning_rate": 1e-3})
        losses.append(arm.measure(step, INPUTS)["loss"])
    assert losses[0] == losses[1] and arm.optimizer.param_groups[0]["fused"]
    plain = generated("transformers", str(tmp_path))[1][0]
    asked = transformers.GenerationConfig(repetition_penalty=5.0, eos_token_id=plain[0][0])
    asked.save_pretrained(tmp_path)
    assert generated("transformers", str(tmp_path))[1][0] == plain


def test_llama_cpp_measures_the_model_that_was_asked_for(folder, monkeypatch):
    """Not the default one; its package, which is not among the tests' own, is taken as installed."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    arm = arm_table.create("llama_cpp", device="cpu", threads=1, checkpoint=folder, file=folder)
    assert arm.start() == f"needs a GGUF file, the model is {folder}"
    opened = []
    llama = lambda path, **how: opened.append(path)
    monkeypatch.setitem(sys.modules, "llama_cpp", types.SimpleNamespace(Llama=llama))
    arm = arm_table.create("llama_cpp", device="cpu", threads=1, checkpoint=folder, file="mine.gguf")
    assert arm.start() == ""
    arm.load("float32", num_layers=None, train=None)
    assert opened == ["mine.gguf"]


@pytest.mark.parametrize("is_hit", [False, True])
def test_a_program_out_of_jax_s_cache_is_not_written_for_later_processes(is_hit, folder, tmp_path, monkeypatch):
    arm = arm_table.create("flax", device="cpu", threads=1, checkpoint=folder, programs=str(tmp_path))
    assert arm.start() == ""
    arm.load("float32", num_layers=1, train=None)
    compiled = arm.generator.compile

    def compile_program(*sizes):
        hits = arm.cache_hits
        programs = compiled(*sizes)
        arm.cache_hits = hits  # the tests' own cache may have it
        if is_hit:
            jax.monitoring.record_event("/jax/compilation_cache/cache_hits")
        return programs

    monkeypatch.setattr(arm.generator, "compile", compile_program)
    arm.prepare(DECODE)
    assert bool(list(tmp_path.iterdir())) == (not is_hit)


def test_jax_tells_a_stages_device_memory_only_where_it_raised_the_peak(monkeypatch):
    arm, peaks = jax_arms.FlaxArm(device="gpu", threads=1, checkpoint=""), [300, 300, 300, 500]
    monkeypatch.setattr(jax_arms.JaxArm, "_peak", lambda self: peaks.pop(0))
    for expected in (None, 500):
        arm.reset_device_memory()
        assert arm.device_memory() == expected


def dequantised(layer: int4.Int4Linear, codes: torch.Tensor) -> torch.Tensor:
    scale, zero = (layer.scales_and_zeros[..., i].float().T[..., None] for i in (0, 1))
    return ((codes.reshape(*scale.shape[:2], int4.GROUP) - 8) * scale + zero).reshape(codes.shape)


def test_codes_of_a_q4_1_weight_are_found_again_and_its_product_is_that_of_the_codes():
    random = np.random.default_rng(0)
    codes = random.integers(0, 16, (48, 3, int4.GROUP))
    codes[..., :2] = 0, 15  # every group of a Q4_1 file has its least and its largest code
    scale, low = random.uniform(0.01, 0.1, (48, 3, 1)), random.uniform(-1, 0, (48, 3, 1))
    weight = torch.from_numpy((codes * scale + low).reshape(48, -1).astype(np.float32))
    found, _ = int4.quantized(weight)
    assert np.array_equal(found, codes.reshape(48, -1))
    bias, x = torch.randn(48).bfloat16(), torch.randn(2, 5, 96).bfloat16()
    layer = int4.Int4Linear(weight, bias)
    wanted = x.float() @ dequantised(layer, found).T + bias.float()
    np.testing.assert_allclose(layer(x).float(), wanted, atol=0.03 * wanted.abs().max())
    assert int4.Int4Linear(torch.ones(16, 32), None)(torch.ones(1, 32).bfloat16()).tolist() == [[32.0] * 16]
    with pytest.raises(ValueError, match="a weight of 40 outputs and 48 inputs; .* multiples of 16 and 32"):
        int4.quantized(torch.zeros(40, 48))


@pytest.mark.skipif(bool(inductor.unusable("cpu")), reason=inductor.unusable("cpu") or "-")
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method:DeprecationWarning")  # that Inductor imports
def test_the_compiled_arm_of_pytorch_s_4_bit_weights_generates_as_its_eager_model_and_skips_all_else(folder):
    facts, (first, again), arm = generated("torch_int4", folder)
    layers = [module for module in arm.model.modules() if isinstance(module, int4.Int4Linear)]
    assert first == again and np.shape(first) == (2, 4) and len(layers) == 7  # of the one layer that is loaded
    table = arm.model.embed.embedding
    assert facts["weight_bytes"] == sum(x.packed.nbytes + x.scales_and_zeros.nbytes for x in layers) + (
        table.numel() // 2 + 4 * table.numel() // int4.GROUP
    )
    hidden = torch.randn(1, table.shape[1]).bfloat16()
    tied = int4.Int4Linear(table, None)
    np.testing.assert_array_equal(arm.model.embed.attend(hidden).float(), tied(hidden).float())
    for changes, said in (({"kind": "train", "new_tokens": 0}, "no gradient"), ({"dtype": "bfloat16"}, "float32")):
        assert said in arm.prepare(DECODE.model_copy(update=changes))["skip"]
    prompt = DECODE.model_copy(update={"kind": "prefill", "new_tokens": 0})
    assert "skip" not in arm.prepare(prompt)
    of_prompt = arm.measure(prompt, INPUTS)["tokens"]
    with torch.compiler.set_stance("force_eager"):
        assert arm.measure(DECODE, INPUTS)["tokens"] == first
        assert arm.measure(prompt, INPUTS)["tokens"] == of_prompt
    arm.load("bfloat16", num_layers=1, train=None)
    assert arm.model is None


@pytest.mark.parametrize(("device", "count"), [("cpu", 1), ("gpu", 10)])
@pytest.mark.parametrize("base", [jax_arms.JaxArm, torch_arms.TorchBase])
def test_rates_of_an_accelerator_are_of_calls_in_a_row_that_are_waited_for_once(base, device, count, monkeypatch):
    waits = []
    monkeypatch.setattr(jax, "block_until_ready", waits.append)
    arm = types.SimpleNamespace(
        device=device, jax=jax, torch=torch, torch_device="cpu", synchronize=lambda: waits.append(None)
    )

    def timed(run, repeats):
        run()
        return {"seconds": [20.0] * repeats}

    monkeypatch.setattr(worker, "timed", timed)
    assert base.read_seconds(arm, 64, 3) == base.gemm_seconds(arm, (2, 3, 4), "float32", 3) == [20.0 / count] * 3
    assert len(waits) == 2
    order = []
    contract.call_seconds(lambda: order.append("call"), lambda _: order.append("wait"), 3, device=device)
    assert order == ["call"] * count + ["wait"]
