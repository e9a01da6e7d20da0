"""A detector that was exported says what the detector says, in every runtime."""

import json
import pickle
import shutil
import sys

import numpy as np
import pytest
import torch

from jaxbench import initial
from jaxbench.config import TransformerConfig
from jaxbench.hallucination import detect, features, layout, portable, programs, saved_detector
from jaxbench.hallucination.bulk import run
from tests.hallucination import small

PACKAGES = {"onnx": "torch_ref", "stablehlo": "jaxbench", "safetensors": "jaxbench"}
LOAD = {"onnx": programs.load_onnx, "stablehlo": programs.load_stablehlo}
SIZES = portable.Sizes(window=48, lens_slots=3)
# as Gemma 2: a window in every other layer, caps, norms behind the branches
GEMMA = TransformerConfig(
    vocab_size=67, d_model=32, d_ff=48, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, max_seq_len=64,
    activation="geglu", post_norms=True, attention_softcap=5.0, logit_softcap=4.0, sliding_window=9, global_every=2,
)  # fmt: skip


@pytest.fixture(scope="module")
def folders(made, tmp_path_factory):
    """Return a folder with an export of each kind."""
    pytest.importorskip("onnxscript", reason="the exporter of ONNX is not installed")
    _, _, path, _, model = made
    folder = tmp_path_factory.mktemp("exported")
    for kind, package in PACKAGES.items():
        window = None if kind == "safetensors" else 128
        saved = saved_detector.load(path)
        portable.write(folder / kind, saved, kind, model=model, window=window, package=package)
    return folder


@pytest.fixture(scope="module")
def gemma(tmp_path_factory):
    """Return a reader, and a folder with its programs."""
    pytest.importorskip("onnxscript", reason="the exporter of ONNX is not installed")
    from jaxbench import transformer
    from jaxbench.hallucination import exported
    from torch_ref import transformer as torch_transformer
    from torch_ref.hallucination import exported as torch_exported

    folder, params = tmp_path_factory.mktemp("gemma"), initial.initial_params(GEMMA, 0, distinct=True)
    for build, write in ((transformer, exported), (torch_transformer, torch_exported)):
        model = build.build(GEMMA, params, dtype="float32")
        write.write_programs(model, folder, SIZES.example(), state_layer=1)
    return features.FeatureReader(transformer.build(GEMMA, params, dtype="float32"), state_layer=1), folder


def test_the_traced_program_switches_no_gradients_off_inside(monkeypatch):
    # each switch is a region of the traced graph, which PyTorch folds back by compiling the whole graph anew
    from torch_ref import transformer as torch_transformer
    from torch_ref.hallucination import exported as torch_exported

    model = torch_transformer.build(GEMMA, initial.initial_params(GEMMA, 0), dtype="float32")
    program = torch_exported._Program(model, 1)
    enter, switched = torch.no_grad.__enter__, []
    monkeypatch.setattr(torch.no_grad, "__enter__", lambda self: (switched.append(self), enter(self))[1])
    program(*(torch.as_tensor(SIZES.example()[name]) for name in programs.INPUTS))
    assert len(switched) == 0


@pytest.mark.parametrize("kind", ["onnx", "stablehlo"])
def test_programs_compute_what_the_reader_computes_for_any_lengths_and_numbers(gemma, kind):
    plain, folder = gemma
    exported = portable.ProgramReader(LOAD[kind](folder, SIZES.example()), SIZES)
    random = np.random.default_rng(0)
    # tokens of the prompt, its context, tokens of the response, share of attended tokens, slots of the lens
    for length, context, answer, share, slots in (
        (21, range(2, 18), 5, 0.1, [0, 2, 4]),
        (25, range(0, 24), 23, 0.3, [22, 3]),
        (12, range(4, 9), 1, 1.0, [0]),
        (32, range(1, 30), 16, 0.9, [7, 7, 15]),
    ):
        ids = random.integers(1, GEMMA.vocab_size, length + answer).tolist()
        text = layout.Text(ids[:length], context)
        prompts = layout.prompt_arrays([text], share=share, size=32)
        rows = layout.response_arrays([text], [[ids[length:]]], size=24)
        padded = np.zeros(24, np.int32)
        padded[: len(slots)] = slots
        wanted = plain.scores(plain.read_prompt(prompts), prompts, rows, padded, len(slots))
        found = exported.scores(exported.read_prompt(prompts), prompts, rows, padded, len(slots))
        assert set(found) == set(wanted) and found["external"].any() and found["parametric"].any()
        assert prompts.num_attended[0] == max(1, int(len(context) * share + 1e-9))
        cut = {"parametric": np.s_[: len(slots)], "states": np.s_[:, :answer]}
        for name, value in wanted.items():
            part = cut.get(name, np.s_[..., :answer])
            scale = np.abs(value[part]).max()  # float32 rounds sums by their largest terms
            np.testing.assert_allclose(
                found[name][part], value[part], rtol=2e-5, atol=2e-6 * max(1, scale), err_msg=name
            )
        bare = layout.prompt_arrays([text._replace(context=range(0))], share=share, size=32)
        wanted = plain.surprise(plain.read_prompt(bare), rows)
        for name, value in exported.surprise(exported.read_prompt(bare), rows).items():
            np.testing.assert_allclose(value[0, :answer], wanted[name][0, :answer], rtol=2e-5, err_msg=name)


@pytest.mark.parametrize("kind", PACKAGES)
def test_an_exported_detector_has_the_same_verdicts(made, folders, kind):
    _, _, path, _, model = made
    plain, exported = detect.HallucinationDetector(path, model=model), detect.HallucinationDetector(folders / kind)
    again = pickle.loads(pickle.dumps(exported))  # as it travels to other processes and Ray's actors
    _, question, context = small.CONTEXTS["s1"]
    cut = []
    for text, row in ((context, 0), (context * 4, 1), ("The mill burned.", 2)):
        one, other = (each.detect(text, question, small.RESPONSES[row][3]) for each in (plain, exported))
        assert other.probability == pytest.approx(one.probability, abs=0 if kind == "safetensors" else 2e-3)
        assert [part.is_flagged for part in other.sentences] == [part.is_flagged for part in one.sentences]
        assert [(span.start, span.end) for span in other.spans] == [(span.start, span.end) for span in one.spans]
        cut.append((other.num_cut, one.num_cut))
    assert cut[0] == (0, 0) and cut[1][0] == cut[1][1] > 0
    assert again.detect(text, question, small.RESPONSES[row][3]) == other


@pytest.mark.parametrize("threads", ["2,1", "", "many"])
def test_whatever_says_how_many_threads_there_are_onnx_runtime_reads(folders, monkeypatch, threads):
    detector = detect.HallucinationDetector(folders / "onnx")
    wanted = detector.detect("The mill was built in 1820.", "when", "In 1850.")
    monkeypatch.setenv("OMP_NUM_THREADS", threads)
    found = detect.HallucinationDetector(folders / "onnx").detect("The mill was built in 1820.", "when", "In 1850.")
    assert found.probability == pytest.approx(wanted.probability, abs=1e-5)


def test_answers_of_a_group_are_judged_one_by_one(folders):
    exported = detect.HallucinationDetector(folders / "stablehlo")
    context, responses = "The mill was built in 1820 by Reed.", [row[3] for row in small.RESPONSES[:3]]
    alone = [exported.detect(context, "when", response) for response in responses]
    assert exported.detect_group(context, "when", responses) == alone
    with pytest.raises(ValueError, match="response: 65 tokens, and the window of 128 takes 64"):
        exported.detect(context, "", "a" * 65)


def test_onnx_files_have_standard_operators_alone_and_the_inputs_that_are_named(folders):
    onnx = pytest.importorskip("onnx")
    about, nodes = portable.load(folders / "onnx"), {}
    for name, inputs in (("scores", programs.INPUTS), ("surprise", programs.INPUTS[:-1])):
        path = folders / "onnx" / programs.ONNX[name]
        onnx.checker.check_model(str(path), full_check=True)
        graph = onnx.load(path, load_external_data=False)
        assert {node.domain for node in graph.graph.node} == {""} and not graph.functions
        assert [(each.domain, each.version) for each in graph.opset_import] == [("", 20)]
        assert [each.name for each in graph.graph.input] == list(inputs)
        assert [each.name for each in graph.graph.output] == list(about.outputs[name])
        nodes[name] = {node.op_type for node in graph.graph.node}
        assert not [each for each in nodes[name] if "Sequence" in each]  # TensorRT's parser has none
    assert list(about.inputs) == list(programs.INPUTS)
    assert "TopK" in nodes["scores"] and "TopK" not in nodes["surprise"]  # attended tokens are not ranked there
    assert about.dtype == "float32" and about.inputs["slots"] == "int32[3]"


def test_stablehlo_takes_weights_and_inputs_in_the_order_that_is_named_on_every_platform(folders):
    from jax import export
    from safetensors.numpy import load_file

    folder = folders / "stablehlo"
    about, weights = portable.load(folder), load_file(folder / programs.WEIGHTS)
    for name, count in (("scores", 10), ("surprise", 9)):
        program = export.deserialize((folder / programs.STABLEHLO[name]).read_bytes())
        assert program.platforms == ("cpu", "cuda", "tpu")
        assert program.module_kept_var_idx == tuple(range(len(weights) + count))
        found = [f"{aval.dtype}[{','.join(map(str, aval.shape))}]" for aval in program.in_avals]
        held = [f"{weights[key].dtype}[{','.join(map(str, weights[key].shape))}]" for key in sorted(weights)]
        assert found == held + list(about.inputs.values())[:count]
        assert len(program.out_avals) == len(about.outputs[name])
        assert "jaxbench_" not in program.mlir_module()  # no native kernel


def test_a_folder_that_is_not_as_it_was_written_is_refused_and_named(folders, tmp_path):
    with pytest.raises(ValueError, match="holds no bundle"):
        detect.HallucinationDetector(tmp_path)
    with pytest.raises(ValueError, match="holds its own reader"):
        detect.HallucinationDetector(folders / "stablehlo", model="default")
    for kind, file in (
        ("stablehlo", "scores.stablehlo"), ("onnx", "surprise.onnx"), ("onnx", "scores.onnx.data"),
        ("safetensors", "model/model.safetensors"), ("stablehlo", "tokenizer/tokenizer.json"),
    ):  # fmt: skip
        folder = tmp_path / kind / file.replace("/", "-")
        shutil.copytree(folders / kind, folder)
        (folder / file).write_bytes((folder / file).read_bytes()[:-9])
        with pytest.raises(ValueError, match=f"{folder}: {file} is not what was exported"):
            detect.HallucinationDetector(folder)
        (folder / file).unlink()
        with pytest.raises(ValueError, match=f"{file} is missing"):
            detect.HallucinationDetector(folder)


@pytest.mark.parametrize("kind", ["onnx", "stablehlo"])
def test_programs_of_another_size_and_detectors_of_another_reader_are_refused(folders, tmp_path, kind):
    shutil.copytree(folders / kind, tmp_path / kind)
    about = json.loads((tmp_path / kind / "bundle.json").read_text())

    def changed(**changes):
        (tmp_path / kind / "bundle.json").write_text(json.dumps(about | changes))
        return detect.HallucinationDetector(tmp_path / kind)

    with pytest.raises(ValueError, match=r"takes tokens as int32\[1,128\], and its folder says int32\[1,96\]"):
        _ = changed(sizes={"window": 96, "lens_slots": 3}).reader
    with pytest.raises(ValueError, match="name that model, or fit a detector with this one"):
        changed(model_sha256="0" * 64)
    with pytest.raises(ValueError, match="holds no bundle .*kind='gguf': Input should be 'onnx', 'stablehlo' or"):
        changed(kind="gguf")


def test_a_file_of_rows_is_judged_by_a_folder(folders, tmp_path):
    _, question, context = small.CONTEXTS["s1"]
    row = {"context": context, "question": question, "response": small.RESPONSES[1][3]}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    wanted = run.Outputs.of(output=str(tmp_path / "verdicts.jsonl"), page=str(tmp_path / "page.html"))
    source, folder = str(tmp_path / "rows.jsonl"), str(folders / "onnx")
    part, total = run.check(source, folder, wanted)
    detector = detect.HallucinationDetector(folder)
    assert len(list(run.detect(detector, source, part))) == total == 1
    run.finish(source, part, wanted, detector)
    found = json.loads((tmp_path / "verdicts.jsonl").read_text())
    assert found["probability"] == detector.detect(context, question, row["response"]).probability
    assert small.RESPONSES[1][3] in (tmp_path / "page.html").read_text()


def test_an_export_replaces_another_one_alone_and_names_what_is_missing(made, folders, tmp_path, monkeypatch):
    _, _, path, _, model = made
    saved = saved_detector.load(path)
    how = {"model": model, "window": None, "overwrite": True}
    shutil.copytree(folders / "onnx", tmp_path / "there")
    portable.write(tmp_path / "there", saved, "safetensors", model=model, package="jaxbench")
    assert portable.load(tmp_path / "there").kind == "safetensors" and [*tmp_path.iterdir()] == [tmp_path / "there"]
    with pytest.raises(ValueError, match="holds the input"):
        portable.check(tmp_path / "there", "safetensors", inputs=(str(tmp_path / "there/model"),), **how)
    (tmp_path / "there" / "bundle.json").unlink()
    with pytest.raises(ValueError, match="holds no export, and --overwrite replaces nothing else"):
        portable.check(tmp_path / "there", "safetensors", **how)
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(ValueError, match=r"--format=onnx: .*onnxscript.*pip install -e '\.\[export\]'"):
        portable.check(tmp_path / "new", "onnx", **how | {"window": 64})
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(ValueError, match=r"onnx needs ONNX Runtime .*pip install -e '\.\[export\]'"):
        _ = detect.HallucinationDetector(folders / "onnx").reader
