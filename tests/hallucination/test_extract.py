"""Features into a cache by content: nothing twice, nothing lost, the same by any backend and packing."""

import functools
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from jaxbench import initial
from jaxbench.hallucination import encoding, extract, lexical, pooled, reading, token_inputs, where
from jaxbench.pretrained import small_tokenizers, weights
from jaxbench.pretrained.tokenizer import load_tokenizer
from tests.generation import tiny
from tests.hallucination import small
from tests.structure import ROOT


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hallucination")
    return small.write(folder / "data"), small.model(folder / "model")


def store(place, folder, **changes):
    settings = small.settings(place[1], **changes)
    return extract.Store(folder, settings, weights.checksum(place[1])), settings


def read(place, folder, package="jaxbench", items=None, **changes):
    made, settings = store(place, folder, **changes)
    work = extract.groups(items or small.items(place[0]), made)
    worker = extract.Worker(settings, made, functools.partial(extract.load_reader, package=package))
    return made, sum(extract.run(work, worker))


@pytest.fixture(scope="module")
def flax(place, tmp_path_factory):
    made, count = read(place, tmp_path_factory.mktemp("flax"))
    assert count == 4
    return made


def test_a_response_is_read_once_whatever_run_asks(place, flax):
    assert extract.groups(small.items(place[0]), flax) == []
    again = [*small.items(place[0]), extract.Item("Another text.", "", "It was built in 1820.")]
    assert [group.responses for group in extract.groups(again, flax)] == [("It was built in 1820.",)]


def test_the_same_text_twice_is_one_file(place, tmp_path):
    items = small.items(place[0])[:1]
    made, count = read(place, tmp_path, items=items * 3)
    assert count == 1 and len(list(tmp_path.glob("*/*.safetensors"))) == 1


def test_a_run_says_how_many_contexts_lost_their_ends(place, tmp_path):
    fits, cut = extract.Item("In 1820.", "", "Yes."), extract.Item("The mill was built in 1820. " * 5, "", "Yes.")
    made, count = read(place, tmp_path, items=[fits, cut])
    assert count == 2 and made.read(made.key(cut))["num_cut"].item() > 0
    how = {"package": "jaxbench", "where": where.Where(), "processes": 1}
    said = [reading.read(items, store(place, tmp_path)[1], made, **how) for items in ([fits], [fits, cut, cut])]
    assert "window" not in said[0]
    assert said[1].endswith("; the contexts of 2 of 3 did not fit the window and lost their ends")


def test_features_have_a_row_a_token_and_a_column_a_head(place, flax):
    item = small.items(place[0])[1]
    found = flax.read(flax.key(item))
    tokens = len(item.response.encode())
    assert found["external"].shape == found["lookback"].shape == (1, 2, tokens)
    assert found["loss"].shape == found["entropy_without"].shape == (tokens,)
    assert found["states"].shape == (tokens, 32) and found["parametric"].shape == (3, 1)
    assert all(np.isfinite(value).all() for value in found.values())
    assert np.abs(found["external"]).max() <= 1 and found["context_mass"].min() >= 0
    assert 0 <= found["lookback"].min() and found["lookback"].max() <= 1
    assert 0 < found["parametric"].min() and found["parametric"].max() <= np.log(2)
    text = "".join(item.response[start:end] for start, end in found["offsets"])
    assert text == item.response


def test_backends_and_packings_agree(place, flax, tmp_path):
    theirs, _ = read(place, tmp_path / "torch", package="torch_ref")
    alone, _ = read(place, tmp_path / "alone", row_tokens=1)
    for item in small.items(place[0]):
        mine = flax.read(flax.key(item))
        for other in (theirs, alone):
            found = other.read(other.key(item))
            assert found.keys() == mine.keys()
            for name, value in mine.items():
                np.testing.assert_allclose(found[name], value, atol=2e-3 if value.dtype == np.float16 else 2e-5)


def test_what_decides_features_is_part_of_their_name(place, tmp_path):
    item, names = small.items(place[0])[0], set()
    for changes in (
        {},
        {"share": 0.2},
        {"dtype": "bfloat16"},
        {"style": "chat"},
        {"lens_tokens": None},
        {"window": 90},
    ):
        names.add(store(place, tmp_path, **changes)[0].key(item))
    other = extract.Store(tmp_path, small.settings(place[1]), "another model")
    assert len(names | {other.key(item), store(place, tmp_path, row_tokens=64)[0].key(item)}) == 7


@pytest.mark.parametrize("package", ["jaxbench", "torch_ref"])
def test_a_residual_stream_beyond_float16_gives_finite_inputs(place, tmp_path, package):
    params = initial.initial_params(tiny.CONFIG, 0, distinct=True)
    params["layers.0.mlp.down_proj.kernel"] *= 1e7
    model = weights.save_checkpoint(tmp_path / "m", tiny.CONFIG, params, tokenizer=small_tokenizers.ByteTokenizer())
    settings = small.settings(model)
    loaded, item = extract.load_reader(settings, package=package), small.items(place[0])[0]
    group = extract.Group(item.context, item.question, (item.response,), ("",))
    with pytest.warns(RuntimeWarning, match="overflow"):
        ((_, features),) = extract.read_group(group, *loaded, settings)
    assert np.isinf(features["states"]).any()
    lexicon = lexical.Lexicon(item.context)
    for by_sentence in (False, True):
        states = pooled.pool(features, item.response, lexicon, by_sentence=by_sentence).families["states"]
        assert np.isfinite(states).all() and np.abs(states).max() > 1e4
    assert np.isfinite(token_inputs.tokens(features, item.response, lexicon).columns).all()


def test_a_damaged_file_is_named(place, tmp_path):
    made, _ = read(place, tmp_path, items=small.items(place[0])[:1])
    path = made.path(made.key(small.items(place[0])[0]))
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ValueError, match=f"{path.name}: cannot be read"):
        made.read(path.stem)


def test_a_context_beyond_the_window_is_cut_and_counted(place):
    tokenizer = load_tokenizer(place[1])
    found = encoding.encode_prompt(tokenizer, "abcdefghij" * 5, "Why?", window=40)
    assert len(found.text.ids) == 40 and found.num_cut == 50 - len(found.text.context)
    assert found.offsets[-1][1] == len(found.text.context)
    assert found.without.ids == [
        *found.text.ids[: found.text.context.start],
        *found.text.ids[found.text.context.stop :],
    ]


@pytest.mark.parametrize(
    ("context", "question", "window", "match"),
    [(" \n", "Why?", 40, "is empty"), ("abc", "Why?" * 20, 40, "leave no room in a window of 40")],
)
def test_a_prompt_that_cannot_be_is_refused(place, context, question, window, match):
    with pytest.raises(ValueError, match=match):
        encoding.encode_prompt(load_tokenizer(place[1]), context, question, window=window)


def test_an_empty_and_an_endless_response_are_refused(place, tmp_path):
    for response, match in (("  ", "is empty"), ("x" * 100, "100 tokens, and the window of 128 takes 64")):
        with pytest.raises(ValueError, match=match):
            read(place, tmp_path, items=[extract.Item("A text.", "", response)])


def test_a_killed_command_goes_on_and_reads_nothing_twice(place, tmp_path):
    command = [sys.executable, str(ROOT / "experiments/hallucination.py"), "features", f"--data={place[0]}"]
    command += [f"--workdir={tmp_path}", f"--set=model={place[1]}", "--set=dtype=float32", "--processes=1"]
    started = subprocess.Popen(command, env=os.environ, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 200
    while not list(tmp_path.glob("features/*/*.safetensors")) and time.monotonic() < deadline:
        time.sleep(0.05)
    started.send_signal(signal.SIGKILL)
    started.communicate()
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("features/*/*.safetensors")}
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ, cwd=ROOT, timeout=240)
    assert done.returncode == 0, done.stderr
    assert f"4 responses, {4 - len(before)} of them to be read" in done.stdout
    after = {path: path.stat().st_mtime_ns for path in tmp_path.glob("features/*/*.safetensors")}
    assert len(after) == 4 and before.items() <= after.items()


def chat(folder, template):
    tokenizer = load_tokenizer(tiny.make(folder, template=template))
    found = encoding.encode_prompt(tokenizer, "A text.", "Why?", window=100, style="chat")
    return tokenizer.decode(found.text.ids)


def test_a_template_that_writes_the_date_gives_the_same_prompt_on_every_day(tmp_path):
    text = chat(tmp_path, "Today Date: {{ strftime_now('%d %b %Y') }} " + tiny.TEMPLATE)
    assert text == "Today Date: 26 Jul 2024 [user]Why?\n\nA text.[assistant]"


@pytest.mark.parametrize(
    ("shown", "times"), [("", 0), ("{{ messages[0].content }}" * 2, 2), ("{{ messages | tojson }}", 0)]
)
def test_a_template_that_does_not_write_the_text_once_as_it_is_is_refused(tmp_path, shown, times):
    with pytest.raises(
        ValueError, match=f"style=chat: .* writes the text of the user {times} times as it is, wanted once"
    ):
        chat(tmp_path, shown + "[assistant]")
