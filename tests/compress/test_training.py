"""Training a compressor: a run that is broken off ends as any other; the decoder stays; wrong runs are refused."""

import json
from pathlib import Path

import numpy as np
import pytest

from jaxbench import initial, store
from jaxbench.compress import artifact, config, curve, material, questions, training
from jaxbench.compress.rows import RowsConfig
from jaxbench.compress.train_config import QuestionsConfig, TrainingConfig
from jaxbench.parity import cases
from jaxbench.pretrained import small_tokenizers, weights
from jaxbench.training.schedules import ScheduleConfig

DECODER = cases.LLAMA
SETTINGS = TrainingConfig(
    num_layers=1, steps=4, rows=RowsConfig(batch=2, num_chunks=1, num_targets=16, ratio=32, sampled=4),
    schedule=ScheduleConfig(warmup_steps=1), held_out_every=2, held_out_batches=2, held_out_ratio=32,
    precision="float32",
)  # fmt: skip
TEXTS = [np.random.default_rng(0).integers(0, 64, 900).astype(np.int32)]
HELD_OUT = [np.random.default_rng(1).integers(0, 64, 400).astype(np.int32)]


@pytest.fixture(scope="module")
def held():
    params = {name: value.astype(np.float32) for name, value in initial.initial_params(DECODER, 0).items()}
    return weights.Checkpoint(DECODER, params, Path("tiny"), "tiny", "0" * 64)


def run(held, folder, settings=SETTINGS, texts=TEXTS, **how):
    said = []
    shape = settings.shape(DECODER)
    sides = [[material.of_texts(each, shape, settings)] for each in (texts, HELD_OUT)]
    return training.train(settings, held, *sides, folder, say=said.append, **how), said


@pytest.fixture(scope="module")
def whole(held, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    return *run(held, folder), folder


def records(folder):
    return [json.loads(line) for line in (folder / training.RECORDS).read_text().splitlines()]


def test_training_changes_everything_but_the_decoder(whole, held):
    trained, said, folder = whole
    shape = SETTINGS.shape(DECODER)
    start = config.starting_params(shape, held.params, seed=0)
    assert set(trained) == {name for name in start if config.is_trained(name)}
    still = {"encoder.layers.0.attention.k_proj.kernel"}  # its gradient may be lost to rounding in one layer
    assert {name for name in trained if np.array_equal(trained[name], start[name])} <= still
    assert [line.split(":")[0] for line in said] == ["step 2", "step 4"]
    steps = records(folder)
    assert [each["step"] for each in steps if "loss" in each] == [1, 2, 3, 4]
    figures = steps[-1]["held_out"]
    assert set(figures) == {
        "reconstruct_loss", "continue_loss", "reconstruct_accuracy", "continue_accuracy", "local_accuracy",
        "reconstruct_own", "continue_own",
    }  # fmt: skip
    assert all(np.isfinite(value) for value in figures.values())


def test_a_run_that_is_broken_off_goes_on_to_the_same_bits(whole, held, tmp_path):
    count = []

    def stop(steps):
        count.append(steps)
        if sum(count) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(held, tmp_path, progress=stop)
    assert [each["step"] for each in records(tmp_path) if "loss" in each] == [1, 2, 3]
    written = tmp_path / training.WEIGHTS
    assert artifact.describe(written)["about"]["steps"] == 2  # what there was, for a run that nobody takes up again
    early = written.read_bytes()
    trained, said = run(held, tmp_path)
    assert [line.split(":")[0] for line in said] == ["step 4"]
    for name, value in whole[0].items():
        np.testing.assert_array_equal(trained[name], value, err_msg=name)
    about, late = artifact.describe(written)["about"], written.read_bytes()
    assert about["steps"] == 4 and about["held_out"]
    written.write_bytes(early)  # as a kill behind the last checkpoint leaves it
    run(held, tmp_path)
    assert written.read_bytes() == late
    losses = [[each["loss"] for each in records(folder) if "loss" in each] for folder in (whole[2], tmp_path)]
    assert losses[0] == losses[1]


def test_texts_and_questions_are_learned_from_in_turn(held, tmp_path):
    own = RowsConfig(batch=2, num_chunks=1, num_targets=4, clear=6, ratio=32, sampled=1, in_clear=0.5)
    settings = SETTINGS.model_copy(update={"questions": QuestionsConfig(share=0.5, rows=own), "steps": 8})
    shape, random = settings.shape(DECODER), np.random.default_rng(2)

    def question(title: str) -> questions.Question:
        ids = [random.integers(0, 64, count).astype(np.int32) for count in (90, 5, 3)]
        return questions.Question(title, *ids, ("a",))

    sides = [
        [material.of_texts(texts, shape, settings), material.of_questions([question(title)], shape, settings)]
        for texts, title in ((TEXTS, "a"), (HELD_OUT, "b"))
    ]
    training.train(settings, held, *sides, tmp_path, say=lambda line: None)
    drawn = [material.draw(sides[0], seed=settings.seed, step=step).arrays for step in range(8)]
    asked = sum(len(arrays.targets[0]) == 4 for arrays in drawn)
    assert 0 < asked < 8 and sum((arrays.context < 0).all() for arrays in drawn) < asked
    figures = records(tmp_path)[-1]["held_out"]
    assert {"answer_loss", "answer_own", "continue_loss"} <= set(figures)
    assert all(np.isfinite(value) for value in figures.values())


def test_a_text_whose_vectors_are_told_from_anothers_has_a_loss_of_its_own(whole, held):
    """Held-out figures of untrained parameters: the vectors are the tokens' own embeddings, and change the loss."""
    from jaxbench.compress import compressor, judge
    from jaxbench.training import optimizer_step

    shape = SETTINGS.shape(DECODER)
    params = config.starting_params(shape, held.params, seed=0)
    state = optimizer_step.init_state(compressor.build(shape, params), params, SETTINGS.step_config())
    other = material.of_texts(HELD_OUT, shape, SETTINGS)
    found = judge.Judge(SETTINGS, shape, state.graph, [other])(state.params)
    assert found["continue_own"] != 0.0
    same = other._replace(draw=lambda *args, **how: alike(other.draw(*args, **how)))
    assert judge.Judge(SETTINGS, shape, state.graph, [same])(state.params)["continue_own"] == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("aligned", [False, True])
def test_an_answer_is_judged_behind_anothers_vectors_and_no_empty_ones(held, aligned):
    from jaxbench.compress import compressor, judge, rows
    from jaxbench.training import optimizer_step

    shape, random = SETTINGS.shape(DECODER), np.random.default_rng(3)
    passages = [random.integers(0, 64, count).astype(np.int32) for count in (200, 40)]
    asked = [[random.integers(0, 64, count).astype(np.int32) for count in (3, 5)] for _ in passages]
    params = config.starting_params(shape, held.params, seed=0)
    state = optimizer_step.init_state(compressor.build(shape, params), params, SETTINGS.step_config())

    def judged(order):
        made = [
            rows.row(passages[i], answer, rows.ANSWER, shape, 32, 1, aligned=aligned, clear=clear)
            for i, (answer, clear) in zip(order, asked)
        ]
        drawn = rows.Draw(32, rows.stacked(made, 4, clear=6))
        one = material.Material(lambda *args, **how: drawn, RowsConfig(batch=2, num_chunks=1), 1.0, "")
        return judge.Judge(SETTINGS, shape, state.graph, [one])(state.params)

    own, other = judged((0, 1)), judged((1, 0))
    assert own["answer_own"] == pytest.approx(other["answer_loss"] - own["answer_loss"], abs=1e-5)
    assert other["answer_own"] == pytest.approx(-own["answer_own"], abs=1e-5)


def alike(drawn):
    """Rows that all have the first one's passage."""
    return drawn._replace(arrays=drawn.arrays._replace(context=np.repeat(drawn.arrays.context[:1], 2, axis=0)))


def test_held_out_figures_are_drawn_over_steps(whole):
    drawn = curve.picture(records(whole[2]), "four steps")
    assert "<svg" in drawn and "read back" in drawn and "four steps" in drawn and "answers" not in drawn
    with pytest.raises(ValueError, match="none of 1 records has held-out figures"):
        curve.picture([{"step": 1, "loss": 2.0}], "none")


def test_a_folder_that_another_process_trains_in_is_refused(held, tmp_path):
    with store.alone(tmp_path / training.WEIGHTS):
        with pytest.raises(ValueError, match="another process writes .*compressor.safetensors"):
            run(held, tmp_path)


def test_a_text_held_out_from_itself_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("The mill is old. " * 400)
    same = {"data": str(tmp_path / "a.txt"), "held_out": str(tmp_path / "a.txt"), "question_files": []}
    with pytest.raises(ValueError, match="--held_out=.*a.txt is the text of --data="):
        material.of_files(SETTINGS, SETTINGS.shape(DECODER), small_tokenizers.ByteTokenizer(), **same)


def test_a_run_on_another_text_is_refused(whole, held):
    with pytest.raises(ValueError, match="holds"):
        run(held, whole[2], texts=[TEXTS[0][1:]])


@pytest.mark.parametrize(
    ("update", "words"),
    [
        ({"rows": {"in_clear": 0.5}}, "rows.in_clear=0.5: not of rows of texts"),
        ({"questions": {"rows": {"short": 0.5}}}, "questions.rows.short=0.5: not of rows of questions"),
        ({"questions": {"rows": {"dropout": 0.3}}}, "questions.rows.dropout=0.3: not of rows of questions"),
        ({"questions": {"share": 1.0}, "distilled": 4}, "distilled=4 with questions.share=1.0: nothing is continued"),
    ],
)
def test_settings_that_nothing_would_follow_are_refused(update, words):
    with pytest.raises(ValueError, match=words):
        TrainingConfig.model_validate(update)


def test_a_ratio_that_is_not_there_is_refused(held):
    with pytest.raises(ValueError, match="ratio=5; wanted one of 2, 4, 8, 16, 32"):
        SETTINGS.model_copy(update={"held_out_ratio": 5}).shape(DECODER)


def test_one_step_with_rates_of_its_own_is_that_of_the_twin(held):
    import functools

    import jax
    import torch

    from jaxbench.compress import compressor, rows
    from jaxbench.training import optimizer_step
    from torch_ref.compress import compressor as torch_compressor
    from torch_ref.training import optimizer_step as torch_step

    shape, how = SETTINGS.shape(DECODER), SETTINGS.step_config()
    params = config.starting_params(shape, held.params, seed=0)
    arrays = rows.draw(TEXTS, shape, SETTINGS.rows, seed=0, step=0).arrays
    own = optimizer_step.init_state(compressor.build(shape, params), params, how)
    other = torch_step.init_state(torch_compressor.build(shape, params), params, how)
    batch = torch_compressor.Batch(*(None if x is None else torch.from_numpy(x) for x in arrays))
    step_fn = jax.jit(functools.partial(optimizer_step.train_step, step_config=how, loss_fn=compressor.loss_fn))
    most = []
    for _ in range(2):
        before = own.params
        own, _ = step_fn(own, compressor.Batch(*arrays), 0.01)
        other, _ = torch_step.train_step(other, batch, 0.01, step_config=how, loss_fn=torch_compressor.loss_fn)
        most.append({name: float(abs(value - before[name]).max()) for name, value in own.params.items()})
    for name, value in other.params.named_parameters():
        # a gradient near AdamW's eps has a step that float32 does not settle
        differing = np.abs(own.params[name] - value.detach().numpy()) > 2e-4
        assert differing.mean() < 2e-3, name
    # AdamW's first step is the rate, whatever the gradient's size; the encoder has none before its connector speaks
    kernel = "layers.0.mlp.up_proj.kernel"
    assert most[0]["tags.embedding"] == pytest.approx(0.05, rel=0.1) and most[0][f"encoder.{kernel}"] < 0.001
    first_of_two = 0.1 / 0.19 / np.sqrt(0.05 / (1 - 0.95**2))  # moments of one gradient, corrected as if of two
    assert most[1][f"encoder.{kernel}"] == pytest.approx(0.01 * first_of_two, rel=0.1)
    assert most[1][f"decoder.{kernel}"] == 0.0


def test_weights_are_not_named_after_fewer_steps_than_they_have(whole, held):
    folder = whole[2]
    before = (folder / training.WEIGHTS).read_bytes()
    with pytest.raises(ValueError, match="has 4 steps, and steps=2; wanted 4 or more, or another --workdir"):
        run(held, folder, SETTINGS.model_copy(update={"steps": 2}))
    assert (folder / training.WEIGHTS).read_bytes() == before and len(records(folder)) == 6
