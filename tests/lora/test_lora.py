"""Low-rank adapters: PEFT's own outputs, folders both ways, what is trained, what is merged, what is refused."""

import json
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import yaml
from safetensors.numpy import load_file, save_file

from jaxbench import config, functional, initial, nn, prng, transformer
from jaxbench.lora import layers as flax_layers
from jaxbench.lora import peft_files
from jaxbench.lora.config import LoraConfig, merged, with_lora
from jaxbench.memory.train_config import MemoryTrainConfig
from jaxbench.parity import cases, hallucination
from jaxbench.parity.oracles import transformers_model
from jaxbench.pretrained import weights
from jaxbench.training import engine, trainer
from tests.structure import ROOT
from torch_ref import functional as torch_functional
from torch_ref import prng as torch_prng
from torch_ref.lora import layers as torch_layers
from torch_ref.training import engine as torch_engine

TOKENS = np.random.default_rng(0).integers(0, 61, (2, 20))
POSITIONS = np.tile(np.arange(20), (2, 1))
SOME = LoraConfig(rank=3, alpha=5.0, targets=("q_proj", "v_proj", "o_proj", "down_proj"), layers=(0, 2))


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral"])
def test_outputs_are_peft_s_and_its_folders_are_read_back(family, tmp_path):
    import peft

    theirs = hallucination.family_model(family)
    transformers_model.save(theirs, tmp_path / "model")
    checkpoint = weights.load_checkpoint(tmp_path / "model")
    shape = with_lora(checkpoint.config, SOME)
    drawn = initial.initial_params(shape, 0, distinct=True)
    params = {**checkpoint.params, **{name: value for name, value in drawn.items() if ".lora_" in name}}
    peft_files.save(tmp_path / "ours", shape, params)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT's own
        adapted = peft.PeftModel.from_pretrained(theirs, tmp_path / "ours").double()
        adapted.save_pretrained(tmp_path / "theirs")
    with torch.no_grad(), transformers_model.wide():
        wanted = adapted(torch.tensor(TOKENS)).logits.numpy()
    found = torch_layers.build(shape, params, dtype="float64")(torch.tensor(TOKENS), torch.tensor(POSITIONS))
    assert np.abs(found.detach().numpy() - wanted).max() <= 1e-11 * np.abs(wanted).max()
    again, read = peft_files.load(tmp_path / "theirs", checkpoint.config)
    assert again.lora == shape.lora and read.keys() == {name for name in params if ".lora_" in name}
    assert all(np.allclose(read[name], params[name], rtol=1e-6, atol=0) for name in read)


@pytest.mark.parametrize(
    ("names", "targets", "layers"),
    [
        ({"target_modules": r".*layers\.[02]\.self_attn\.(q|v)_proj"}, ("q_proj", "v_proj"), (0, 2)),
        ({"target_modules": ["self_attn.o_proj", "mlp.down_proj"], "exclude_modules": r".*layers\.1\..*"},
         ("o_proj", "down_proj"), (0, 2)),
        ({"target_modules": ["q_proj", "k_proj"], "exclude_modules": ["k_proj"], "layers_to_transform": 1},
         ("q_proj",), (1,)),
        ({"target_modules": ["model.layers.2.mlp.up_proj"], "layers_to_transform": [0]}, ("up_proj",), (2,)),
        ({"target_modules": "all-linear", "exclude_modules": ["mlp.gate_proj"]},
         ("q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj"), None),
    ],
)  # fmt: skip
def test_modules_are_named_as_peft_names_them(names, targets, layers, tmp_path):
    import peft

    theirs = hallucination.family_model("llama")
    transformers_model.save(theirs, tmp_path / "model")
    checkpoint = weights.load_checkpoint(tmp_path / "model")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT's own
        adapted = peft.get_peft_model(theirs, peft.LoraConfig(r=2, lora_alpha=3, **names), autocast_adapter_dtype=False)
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.1)
        adapted.save_pretrained(tmp_path / "theirs")
    if names["target_modules"] == "all-linear":  # PEFT has written the names that it found
        path = tmp_path / "theirs" / peft_files.CONFIG
        found = json.loads(path.read_text())
        assert isinstance(found["target_modules"], list) and peft_files.load(tmp_path / "theirs", checkpoint.config)
        path.write_text(json.dumps(found | {"target_modules": "all-linear"}))
    shape, read = peft_files.load(tmp_path / "theirs", checkpoint.config)
    assert (shape.lora.targets, shape.lora.layers) == (targets, layers)
    with torch.no_grad(), transformers_model.wide():
        wanted = adapted.double()(torch.tensor(TOKENS)).logits.numpy()
    found = torch_layers.build(shape, {**checkpoint.params, **read}, dtype="float64")
    logits = found(torch.tensor(TOKENS), torch.tensor(POSITIONS)).detach().numpy()
    assert np.abs(logits - wanted).max() <= 1e-11 * np.abs(wanted).max()


def test_rank_stabilised_adapters_are_scaled_as_peft_scales_them(tmp_path):
    import peft

    theirs = hallucination.family_model("llama")
    transformers_model.save(theirs, tmp_path / "model")
    checkpoint = weights.load_checkpoint(tmp_path / "model")
    shape = with_lora(checkpoint.config, SOME)
    peft_files.save(tmp_path / "a", shape, initial.initial_params(shape, 0, distinct=True))
    path = tmp_path / "a" / peft_files.CONFIG
    path.write_text(json.dumps(json.loads(path.read_text()) | {"use_rslora": True}))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT's own
        adapted = peft.PeftModel.from_pretrained(theirs, tmp_path / "a").double()
    with torch.no_grad(), transformers_model.wide():
        wanted = adapted(torch.tensor(TOKENS)).logits.numpy()
    read_shape, read = peft_files.load(tmp_path / "a", checkpoint.config)
    assert read_shape.lora.scale == pytest.approx(5.0 / 3**0.5)
    model = torch_layers.build(read_shape, {**checkpoint.params, **read}, dtype="float64")
    found = model(torch.tensor(TOKENS), torch.tensor(POSITIONS)).detach().numpy()
    assert np.abs(found - wanted).max() <= 1e-11 * np.abs(wanted).max()


def test_backends_agree_with_dropout_and_merged_kernels_compute_the_same():
    shape = with_lora(cases.LLAMA, cases.ADAPTED.lora.model_copy(update={"dropout": 0.3}))
    params = initial.initial_params(shape, 0, distinct=True)
    flax = flax_layers.build(shape, params)
    run = jax.jit(
        lambda tokens, key: flax(tokens, POSITIONS, dropout=None if key is None else functional.DropoutStream(key, 3))
    )
    plain, dropped = run(TOKENS, None), run(TOKENS, prng.key_from_seed(0))
    whole = transformer.build(cases.LLAMA, merged(shape, params))
    np.testing.assert_allclose(jax.jit(lambda x: whole(x, POSITIONS))(TOKENS), plain, rtol=0, atol=2e-6)
    twin = torch_layers.build(shape, params)
    given = (torch.tensor(TOKENS), torch.tensor(POSITIONS))
    with torch.no_grad():
        np.testing.assert_allclose(twin(*given), plain, rtol=0, atol=2e-6)
        found = twin(*given, dropout=torch_functional.DropoutStream(torch_prng.key_from_seed(0), 3))
    np.testing.assert_allclose(found, dropped, rtol=0, atol=2e-6)
    assert np.abs(np.asarray(dropped) - plain).max() > 1e-3


def test_a_factor_of_adapters_is_not_rounded_to_bfloat16():
    random = np.random.default_rng(0)
    x, first, second = (random.normal(size=shape).astype(np.float32) for shape in ((1, 64, 48), (48, 3), (3, 48)))
    mine = flax_layers.LoraLinear(nn.Linear(48, 48, use_bias=False, dtype="bfloat16"), SOME, "x", dtype="bfloat16")
    x, first, second = (jnp.asarray(each, "bfloat16") for each in (x, first, second))
    mine.lora_a.kernel[...], mine.lora_b.kernel[...] = first, second
    found, plain = mine(x), np.asarray(mine.lora_b(mine.lora_a(x)), np.float64)  # the kernel itself is zero
    share = float((np.asarray(found, np.float64) * plain).sum() / np.square(plain).sum())
    assert abs(share / (5.0 / 3.0) - 1.0) < 3e-4  # 5 / 3 in bfloat16 is 0.16 % less


def test_new_adapters_leave_the_decoder_as_it_is():
    params = initial.initial_params(cases.LLAMA, 0)
    shape = with_lora(cases.LLAMA, SOME.model_copy(update={"layers": None}))
    with torch.no_grad():
        given = (torch.tensor(TOKENS), torch.tensor(POSITIONS))
        found = torch_layers.build(shape, initial.inserted(shape, params, 0), dtype="float64")(*given)
        assert torch.equal(found, torch_layers.build(cases.LLAMA, params, dtype="float64")(*given))


def settings(**changes):
    content = yaml.safe_load((ROOT / "configs/lm/tiny.yaml").read_text(encoding="utf-8"))
    content["model"]["dropout"] = 0.0
    content |= {"steps": 6, "lora": {"rank": 4, "dropout": 0.1}, "step": {"optimizer": {"trained": "adapters"}}}
    return MemoryTrainConfig(**(content | changes))


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Return the folders of one run in both backends."""
    found = {}
    for name, layers, module in (("flax", flax_layers, engine), ("torch", torch_layers, torch_engine)):
        run, extension = settings(), layers.extension(settings().lora)
        make = lambda *args, module=module, extension=extension: module.Engine(*args, extension=extension)
        found[name] = tmp_path_factory.mktemp(name)
        trainer.run(run, make, workdir=found[name], backend=name)
    return found


def test_a_run_trains_adapters_alone_alike_in_both_backends(runs):
    losses = []
    for folder in runs.values():
        records = [json.loads(line) for line in (folder / "records.jsonl").read_text().splitlines()]
        losses.append([record["loss"] for record in records if "loss" in record])
    np.testing.assert_allclose(losses[0], losses[1], rtol=2e-6)
    assert len(losses[0]) == 6 and losses[0][-1] < losses[0][0]


def test_a_run_exports_its_adapters_for_peft_and_merged(runs):
    start = initial.initial_params(settings().decoder(257), 0)
    for folder in runs.values():
        export = weights.load_checkpoint(folder / "export")
        shape, adapters = peft_files.load(folder / "adapters", export.config)
        assert shape.lora.rank == 4 and any(np.any(v) for n, v in adapters.items() if "lora_b" in n)
        wanted = merged(shape, {**start, **adapters})
        for name, value in export.params.items():
            np.testing.assert_allclose(value, wanted[name], rtol=1e-5, atol=1e-7, err_msg=name)
        assert np.array_equal(export.params["embed.embedding"], np.float32(start["embed.embedding"]))


def test_a_run_whose_adapters_peft_has_no_place_for_says_that_the_merged_decoder_is_there(tmp_path, capsys):
    content = yaml.safe_load((ROOT / "configs/lm/tiny.yaml").read_text(encoding="utf-8"))
    gpt2 = {"norm": "layernorm", "activation": "gelu", "position": "learned", "use_bias": True, "num_kv_heads": 4}
    run = settings(model=content["model"] | gpt2 | {"num_layers": 1}, schedule={}, steps=1)
    make = lambda *args: torch_engine.Engine(*args, extension=torch_layers.extension(run.lora))
    trainer.run(run, make, workdir=tmp_path / "w", backend="torch")
    said = capsys.readouterr().err
    assert "export/ (adapters merged), no adapters/ (peft: transformer.h" in said and "not exported" not in said
    assert weights.load_checkpoint(tmp_path / "w" / "export").config.position == "learned"
    assert not (tmp_path / "w" / "adapters").exists()


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"step": {}}, "trained=all and lora is there: adapters are trained alone"),
        ({"lora": None}, "trained=adapters and lora is null: there would be nothing to train"),
        ({"lora": {"targets": ["head"]}}, "must be different ones of q_proj"),
        ({"lora": {"layers": [2]}}, "must be different layers from 0 to 1"),
        ({"lora": {"rank": 0}}, "greater than 0"),
        ({"fused_projections": True}, "projections of their own, got fused_projections=True"),
        (
            {"step": {"optimizer": {"trained": "adapters"}, "hold_zeros": True}},
            "step.hold_zeros=True does not go with lora: an adapter's B begins as zeros",
        ),
        (
            {"lora": {"dropout": 0.1}, "parallel": {"mesh": {"data": 2}, "gradient_type": "float16"}},
            "lora.dropout=0.1 does not go with parallel.gradient_type=float16; use dropout 0, or gradient_type=full",
        ),
    ],
)
def test_runs_that_do_not_fit_their_adapters_are_refused(changes, match):
    with pytest.raises(ValueError, match=match):
        settings(**changes)


def test_a_run_without_adapters_is_the_run_it_was():
    identity = settings(lora=None, step={}).identity()
    assert "lora" not in identity and "trained" not in identity["step"]["optimizer"]
    assert settings().identity()["lora"]["rank"] == 4


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"use_dora": True}, "use_dora is True"),
        ({"use_rslora": 1}, "use_rslora is '1', wanted true or false"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern"),
        ({"target_modules": {"q_proj": 1}}, "target_modules is no list of names and no regular expression, but"),
        (
            {"target_modules": "(q_proj", "layers_to_transform": None},
            r"target_modules='.q_proj' is no regular expression \(missing",
        ),
        (
            {"target_modules": ".*q_proj", "layers_to_transform": None},
            "is not adapted by the settings beside it, which name q_proj",
        ),
        (
            {"target_modules": ".*(0.self_attn.q|1.self_attn.v)_proj", "layers_to_transform": None},
            r"adapts q_proj in layers .0. and v_proj in .1.",
        ),
        ({"target_modules": ["query"]}, r"leaves no projection, as model.layers.0.self_attn.q_proj"),
        (
            {"exclude_modules": ["q_proj"], "target_modules": ["q_proj"]},
            r"target_modules=.* with exclude_modules=.*q_proj.* with layers_to_transform=.* leaves no projection",
        ),
        ({"r": 0}, "a/adapter_config.json: rank: Input should be greater than 0"),
        ({"layers_pattern": "h"}, "layers_pattern is h, wanted layers"),
        (
            {"target_modules": ".*q_proj", "layers_to_transform": [0]},
            r"layers_to_transform=.0., target_modules=.*: layers go with a list",
        ),
        ({"exclude_modules": 3}, "exclude_modules is no list of names"),
        ({"r": None}, "r is None"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa', which changes the decoder's own weights"),
        ({"init_lora_weights": "olora"}, "init_lora_weights is 'olora', which changes the decoder's own weights"),
        ({"alora_invocation_tokens": [1, 2]}, "alora_invocation_tokens is .1, 2., which is not read"),
        ({"layer_replication": [[0, 1], [0, 1]]}, "layer_replication is .*, which is not read"),
        ({"layers_to_transform": 0.5}, r"a/adapter_config.json: layers_to_transform has 0.5, wanted layers from 0 to"),
        ({"layers_to_transform": [0, 9]}, r"layers_to_transform has 9, wanted layers from 0 to"),
    ],
)
def test_folders_that_would_be_read_wrongly_are_refused(change, match, tmp_path):
    params = initial.initial_params(cases.ADAPTED, 0)
    peft_files.save(tmp_path / "a", cases.ADAPTED, params)
    path = tmp_path / "a" / peft_files.CONFIG
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ValueError, match=match):
        peft_files.load(tmp_path / "a", cases.LLAMA)
    with pytest.raises(ValueError, match="exists and is not an empty folder"):
        peft_files.save(tmp_path / "a", cases.ADAPTED, params)
    torn = tmp_path / "a" / peft_files.WEIGHTS
    torn.write_bytes(torn.read_bytes()[:-5])
    with pytest.raises(ValueError, match="cannot be read"):
        peft_files.load(tmp_path / "a", cases.LLAMA)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda a: a[:, :-1], r"is \(.*\), wanted \(.*\) \(in, out\)"),
        (lambda a: np.full_like(a, np.nan), "numbers that are not finite"),
        (None, "is missing; the decoder's layers have"),
    ],
)
def test_adapters_that_are_missing_misshapen_or_no_numbers_are_named(change, match, tmp_path):
    params = initial.initial_params(cases.ADAPTED, 0)
    peft_files.save(tmp_path / "a", cases.ADAPTED, params)
    tensors = load_file(tmp_path / "a" / peft_files.WEIGHTS)
    name = next(iter(tensors))
    old = tensors.pop(name)
    if change is not None:
        tensors[name] = np.ascontiguousarray(change(old))
    save_file(tensors, tmp_path / "a" / peft_files.WEIGHTS)
    with pytest.raises(ValueError, match=match):
        peft_files.load(tmp_path / "a", cases.LLAMA)


@pytest.mark.parametrize("change", [{"target_modules": ["q_proj"]}, {"layers_to_transform": [0]}])
def test_adapters_that_their_own_settings_leave_out_are_refused_as_merging_would_add_them(change, tmp_path):
    shape = with_lora(cases.LLAMA, LoraConfig(targets=("q_proj", "down_proj")))
    peft_files.save(tmp_path / "a", shape, initial.initial_params(shape, 0))
    path = tmp_path / "a" / peft_files.CONFIG
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ValueError, match=r"lora_a.kernel is not adapted by the settings beside it, which name"):
        peft_files.load(tmp_path / "a", cases.LLAMA)


@pytest.mark.parametrize(
    ("base", "written"),
    [("default", "HuggingFaceTB/SmolLM2-135M-Instruct"), ("models/mine", "models/mine"), (None, None)],
)
def test_peft_is_told_which_decoder_the_adapters_belong_to(base, written, tmp_path):
    peft_files.save(tmp_path / "a", cases.ADAPTED, initial.initial_params(cases.ADAPTED, 0), base=base)
    assert json.loads((tmp_path / "a" / peft_files.CONFIG).read_text())["base_model_name_or_path"] == written


@pytest.mark.parametrize("text", ["[1]", "null", '"text"'])
def test_settings_of_adapters_that_are_no_object_are_named(text, tmp_path):
    peft_files.save(tmp_path / "a", cases.ADAPTED, initial.initial_params(cases.ADAPTED, 0))
    (tmp_path / "a" / peft_files.CONFIG).write_text(text)
    with pytest.raises(ValueError, match=r"a/adapter_config.json: holds .*, wanted an object"):
        peft_files.load(tmp_path / "a", cases.LLAMA)


def test_adapters_in_bfloat16_are_read_as_the_float32_numbers_that_both_backends_take(tmp_path):
    params = initial.initial_params(cases.ADAPTED, 0, distinct=True)
    narrow = {name: np.asarray(value, jax.numpy.bfloat16) for name, value in params.items()}
    peft_files.save(tmp_path / "a", cases.ADAPTED, narrow)
    shape, read = peft_files.load(tmp_path / "a", cases.LLAMA)
    assert all(value.dtype == np.float32 and np.array_equal(value, narrow[name]) for name, value in read.items())
    torch_layers.build(shape, {**params, **read})


def test_the_shipped_configuration_adapts_the_default_model():
    shipped = config.load("configs/lm/smollm2_lora.yaml", (), MemoryTrainConfig)
    assert shipped.step.optimizer.trained == "adapters" and shipped.start == "default"
