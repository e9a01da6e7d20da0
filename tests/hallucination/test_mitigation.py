"""Mitigated answers: against transformers with reweighted attention, plain where factors are 1, files that go on."""

import contextlib
import importlib
import json

import jax
import numpy as np
import pytest
import torch
import transformers

from jaxbench import initial
from jaxbench.config import TransformerConfig
from jaxbench.hallucination import layout, linear, mitigation, ragtruth, reference
from jaxbench.hallucination.bulk import row_files
from jaxbench.hallucination.study import mitigated
from jaxbench.hallucination.verdict import Verdict
from jaxbench.parity import hallucination as proof
from jaxbench.parity.oracles import transformers_model
from jaxbench.pretrained import weights
from tests.hallucination import small
from tests.test_cli import command, refused

MODEL = TransformerConfig(
    vocab_size=61, d_model=32, d_ff=64, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=8, max_seq_len=64,
    tie_embeddings=False,
)  # fmt: skip
TEXTS = [
    layout.Text([3, 9, 27, 20, 5, 44, 52, 7, 11, 40, 2], range(2, 9)),
    layout.Text([8, 6, 31, 1, 19, 33], range(1, 5)),
]
BACKENDS = ("jaxbench", "torch_ref")
NEW = 8


def settings(**changes):
    """Return settings of a strong change, so that what is wrong shows."""
    given = {
        "heads": ((0, 1), (2, 3), (2, 0)), "layers": (1, 2), "external_range": (0.6, 0.9),
        "parametric_range": (0.001, 0.009),
        "attention_factor": 3.0, "feed_factor": 0.3, "share": 0.3, "dtype": "float32",
    }  # fmt: skip
    return mitigation.Mitigation(**(given | changes))


@pytest.fixture(scope="module")
def params():
    return initial.initial_params(MODEL, 0, distinct=True)


def answered(package, params, chosen, *, dtype="float64"):
    """Return tokens of every step: fields [steps B ...]."""
    transformer, reweighting = (
        importlib.import_module(f"{package}.{name}") for name in ("transformer", "hallucination.reweighting")
    )
    answerer = reweighting.Answerer(transformer.build(MODEL, params, dtype=dtype), chosen, config=MODEL)
    state = answerer.start(
        layout.prompt_arrays(TEXTS, share=0.3, size=16), np.array([text.ids[-1] for text in TEXTS], np.int32), NEW
    )
    steps = []
    for _ in range(NEW):
        state, token = answerer.advance(state, np.ones(len(TEXTS), bool))
        logits = token.logits.numpy() if isinstance(token.logits, torch.Tensor) else token.logits
        steps.append({name: np.array(value) for name, value in token._replace(logits=logits)._asdict().items()})
    return {name: np.stack([step[name] for step in steps]) for name in steps[0]}


@contextlib.contextmanager
def literally(model, chosen, flags):
    """While open, transformers multiplies attention weights and feed-forward outputs at the flagged positions."""

    def attend(module, query, key, value, mask, scaling, dropout=0.0, **_):
        groups = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
        scores = query @ key.transpose(2, 3) * scaling + mask[..., : key.shape[2]]
        seen = torch.softmax(scores, dim=-1)
        for layer, head in chosen.heads:
            if layer == module.layer_idx:
                seen[:, head, flags] *= chosen.attention_factor
        return (seen @ value).transpose(1, 2).contiguous(), seen

    def feed(module, inputs, out):
        out = out.clone()
        out[:, flags] *= chosen.feed_factor
        return out

    transformers.AttentionInterface.register("reweighted", attend)
    transformers.AttentionMaskInterface.register("reweighted", transformers.masking_utils.eager_mask)
    hooks = [model.model.layers[layer].mlp.register_forward_hook(feed) for layer in chosen.layers]
    model.set_attn_implementation("reweighted")
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def by_the_paper(model, text, chosen):
    """Return the answer to a prompt, every token of which reads the whole text again: fields [steps ...]."""
    ids, flags, steps = list(text.ids), [False] * len(text.ids), []
    norm, n0 = model.model.norm, len(text.ids) - 1

    def lens(state):
        with torch.no_grad(), transformers_model.wide():
            return model.lm_head(norm(torch.from_numpy(state)[None, None]))[0, 0].numpy()

    for n in range(n0, n0 + NEW):
        with literally(model, chosen, torch.tensor(flags)):
            seen = proof.seen(model, ids)
        external = np.mean(
            [
                reference.external_context_score(seen.attention[layer, head, n], seen.hidden, n, text.context, 30)
                for layer, head in chosen.heads
            ]
        )
        parametric = np.mean(
            [
                reference.parametric_knowledge_score(seen.middle[layer, n], seen.stream[layer + 1, n], lens)
                for layer in chosen.layers
            ]
        )
        e = min(max((external - 0.6) / 0.3, 0), 1)
        p = min(max((parametric - 0.001) / 0.008, 0), 1)
        flags[n] = (p - 0.6 * e + 0.6) / 1.6 > chosen.tau
        with literally(model, chosen, torch.tensor(flags)):
            logits = proof.seen(model, ids).logits[n]
        steps.append((int(np.argmax(logits)), logits, external, parametric, flags[n]))
        ids.append(int(np.argmax(logits)))
        flags.append(False)
    return dict(zip(mitigation.Token._fields, (np.array(each) for each in zip(*steps)), strict=True))


@pytest.fixture(scope="module")
def oracle(params, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    weights.save_checkpoint(folder, MODEL, params)
    return transformers_model.load(folder)


@pytest.mark.parametrize("package", BACKENDS)
def test_answers_are_those_of_transformers_with_its_weights_behind_the_softmax_scaled(package, params, oracle):
    chosen = settings(tau=0.51)
    with jax.enable_x64(True):
        found = answered(package, params, chosen)
    plain = answered(package, params, None, dtype="float32")
    assert np.abs(found["logits"] - plain["logits"]).max() > 0.05
    share = found["is_reweighted"].mean()
    assert 0.2 < share < 0.8, share
    for row, text in enumerate(TEXTS):
        wanted = by_the_paper(oracle, text, chosen)
        np.testing.assert_array_equal(found["ids"][:, row], wanted["ids"])
        np.testing.assert_array_equal(found["is_reweighted"][:, row], wanted["is_reweighted"])
        for name in ("logits", "external", "parametric"):
            np.testing.assert_allclose(found[name][:, row], wanted[name], rtol=1e-9, atol=1e-11, err_msg=name)


@pytest.mark.parametrize("package", BACKENDS)
@pytest.mark.parametrize("changes", [{"attention_factor": 1.0, "feed_factor": 1.0, "tau": None}, {"tau": 1.0}])
def test_factors_of_one_and_a_score_that_nothing_exceeds_give_the_plain_answer_to_the_bit(package, changes, params):
    found, plain = (answered(package, params, each, dtype="float32") for each in (settings(**changes), None))
    np.testing.assert_array_equal(found["logits"], plain["logits"])
    assert found["is_reweighted"].all() == (changes["tau"] is None)


def chosen_of_the_small_model(**changes):
    return settings(**({"heads": ((0, 1),), "layers": (0,), "style": "plain", "tau": None} | changes))


@pytest.mark.parametrize("package", BACKENDS)
def test_a_run_that_was_stopped_goes_on_and_writes_every_row_once(package, tmp_path):
    model = str(small.model(tmp_path / "model"))
    answering = mitigation.load(model, chosen_of_the_small_model(), is_on=True, package=package)
    rows = [{"id": i, "context": text, "question": "when"} for i, text in enumerate(["In 1820.", "In 1911.", "Noon."])]
    part, output, whole = tmp_path / "new" / "part", tmp_path / "new" / "out.jsonl", tmp_path / "whole.jsonl"
    how = {"new_tokens": 5, "batch_size": 1}
    assert list(mitigation.answer_rows(answering, rows, tmp_path / "p", whole, **how)) == [1, 1, 1]
    run = mitigation.answer_rows(answering, rows, part, output, **how)
    assert next(run) == 1
    run.close()
    with open(part, "a") as file:
        file.write('{"torn')
    assert not output.exists() and list(mitigation.answer_rows(answering, rows, part, output, **how)) == [1, 1]
    assert output.read_text() == whole.read_text() and not part.exists()
    found = [json.loads(line) for line in output.read_text().splitlines()]
    assert [row["id"] for row in found] == [0, 1, 2]
    assert all(row["num_reweighted"] == row["num_tokens"] > 0 and isinstance(row["response"], str) for row in found)
    with pytest.raises(ValueError, match="rows 1 to 1: context: 16 tokens around it leave no room in a window of 8"):
        list(mitigation.answer_rows(answering, rows, part, output, new_tokens=120, batch_size=1))
    with pytest.raises(ValueError, match=r"out\.jsonl exists"):
        list(mitigation.answer_rows(answering, rows, part, output, **how))
    assert output.read_text() == whole.read_text() and part.exists()
    assert list(mitigation.answer_rows(answering, rows, part, output, overwrite=True, **how)) == []


def test_a_batch_answers_as_its_rows_do_alone_and_rows_that_ended_change_nothing(params):
    chosen = settings(tau=0.51)
    both = answered("jaxbench", params, chosen, dtype="float32")
    from jaxbench import transformer
    from jaxbench.hallucination import reweighting

    answerer = reweighting.Answerer(transformer.build(MODEL, params, dtype="float32"), chosen, config=MODEL)
    end = int(both["ids"][2, 0])
    first = int(np.flatnonzero(both["ids"][:, 0] == end)[0])
    together = mitigation.generate(answerer, TEXTS, new_tokens=NEW, end_ids=[end], share=0.3)
    assert together[0].ended and together[0].ids == both["ids"][:first, 0].tolist()
    assert len(together[0].is_reweighted) == first + 1
    alone = mitigation.generate(answerer, TEXTS[1:], new_tokens=NEW, end_ids=[end], share=0.3)
    assert alone[0].ids == together[1].ids and len(alone[0].ids) > 1
    np.testing.assert_allclose(alone[0].external, together[1].external, rtol=1e-5)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"heads": ((1, 0),)}, r"heads: \[1, 0\] is not in a model of 1 layers of 2 heads"),
        ({"heads": ((0, -1),)}, r"heads: \[0, -1\] is not in a model"),
        ({"layers": (3,)}, "layers: 3 is not in a model of 1 layers"),
    ],
)
def test_heads_and_layers_beyond_the_model_are_refused(tmp_path, changes, match):
    with pytest.raises(ValueError, match=match):
        mitigation.load(
            str(small.model(tmp_path / "m")), chosen_of_the_small_model(**changes), is_on=True, package="torch_ref"
        )


@pytest.mark.parametrize("package", BACKENDS)
def test_plain_answers_ask_for_no_heads_of_the_model(package, tmp_path):
    model, found = str(small.model(tmp_path / "model")), []
    for settings in (chosen_of_the_small_model(), chosen_of_the_small_model(heads=((28, 5),))):
        answering = mitigation.load(model, settings, is_on=False, package=package)
        found.append(answering([("Rain fell over Lisbon.", "")], new_tokens=6)[0][0].ids)
    assert len(found[0]) > 0 and found[0] == found[1]


def test_the_score_is_0_where_all_comes_from_the_context_and_1_where_nothing_does():
    chosen = settings()
    external, parametric = np.array([0.95, 0.9, 0.75, 0.6, 0.0]), np.array([0.0, 0.001, 0.005, 0.009, 0.5])
    np.testing.assert_allclose(chosen.score(external, parametric), [0, 0, 0.5, 1, 1], atol=1e-12)


def test_rows_to_be_answered_need_no_response(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"context": "a", "question": ""}) + "\n")
    assert len(list(row_files.rows(path, texts=row_files.PROMPT))) == 1
    with pytest.raises(ValueError, match="the text response"):
        list(row_files.rows(path))


def test_all_rows_are_looked_at_before_the_first_is_answered(tmp_path):
    model, path = small.model(tmp_path / "model"), tmp_path / "rows.jsonl"
    rows = [{"context": "In 1820.", "question": "when"}] * 4 + [{"context": "a", "question": "why " * 30}]
    path.write_text("\n".join(map(json.dumps, rows)))
    words = (
        f"--model={model}",
        f"--input={path}",
        f"--output={tmp_path / 'o.jsonl'}",
        "--new_tokens=4",
        "--batch_size=1",
    )
    chosen = ("--set=heads=[[0,1]]", "--set=layers=[0]", "--set=style=plain", "--set=dtype=float32")
    refused(command("hallucination.py", "answer", *words, *chosen), "rows.jsonl line 5: context: ", "leave no room")
    assert not list(tmp_path.glob("o.jsonl*"))  # not even answers that would be kept


def test_detect_takes_what_answer_writes():
    assert not {*mitigation.ADDED} & {*Verdict._fields}


def test_answers_of_an_arm_are_read_again_from_their_file_and_those_of_another_run_are_not(tmp_path):
    kept, how = {"context": "a", "question": "", "response": "b", "num_cut": 0}, {"new_tokens": 64}
    path = mitigated.arm_path(tmp_path, "AARF", settings(), True, [], **how)
    path.write_text(json.dumps(kept) + "\n")
    assert mitigated.answers("AARF", settings(), True, [], tmp_path, **how) == [kept]
    others = [(settings(tau=0.5), True, [], how), (settings(), False, [], how), (settings(), True, [kept], how)]
    others.append((settings(), True, [], {"new_tokens": 32}))
    paths = [mitigated.arm_path(tmp_path, "AARF", *each, **last) for *each, last in others]
    assert path not in paths and len(set(paths)) == 4


def test_words_are_judged_by_a_regression_that_has_seen_no_answer_to_the_context(tmp_path, monkeypatch):
    sources = [
        {"source_id": f"s{i}", "task": "QA", "context": f"House {i // 2}.", "question": f"{i}"} for i in range(40)
    ]
    rows = [
        {"id": f"r{i}", "source_id": f"s{i}", "model": "m", "response": f"House {i}.", "labels": []} for i in range(40)
    ]
    label = {"start": 0, "end": 5, "label_type": "Evident Conflict"}
    for row in rows[::4]:
        row["labels"] = [label]
    for name, each in (("sources", sources), ("responses", rows)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in each))
    data, fitted, fit = ragtruth.load(tmp_path), [], linear.fit
    monkeypatch.setattr(mitigated.linear, "choose", lambda x, labels, source: 1.0)
    monkeypatch.setattr(
        mitigated.linear, "fit", lambda x, labels, **how: fitted.append(len(x)) or fit(x, labels, **how)
    )
    mitigated.lexical_regression(data, [data.sources["s1"], data.sources["s4"]])  # s0 has the context of s1, s5 of s4
    assert fitted == [36]


def test_the_control_scales_as_many_other_heads_and_differences_are_paired_by_source():
    arms = mitigated.arms(settings(), num_layers=3, num_heads=4)
    heads = [set(arms[name].heads) for name in ("every token", mitigated.CONTROL)]
    assert len(heads[0]) == len(heads[1]) == 3 and not heads[0] & heads[1]
    assert arms["every token"].layers == arms[mitigated.CONTROL].layers and arms[mitigated.PLAIN] is None
    random = np.random.default_rng(0)
    plain = random.normal(size=(30, len(mitigated.MEASURES)))
    values = {name: plain for name in arms} | {"AARF": plain + [1, 0, 0, 0, -2]}
    found = mitigated.compared(values, np.arange(30).astype(str))
    assert found["AARF"]["words"]["over_plain"] == pytest.approx([-2, -2, -2])
    assert found["AARF"]["lexical logit"]["over_control"] == pytest.approx([1, 1, 1])
    assert found["every token"]["words"]["over_plain"] == [0, 0, 0]
