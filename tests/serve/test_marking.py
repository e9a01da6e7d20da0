"""Watermarks by request: marked as by the generator, alone as in company, and found again."""

import functools
import importlib

import jax.monitoring
import numpy as np
import pytest

from jaxbench import initial
from jaxbench.config import TransformerConfig
from jaxbench.native import checkpoint, library
from jaxbench.native import model as native
from jaxbench.serve.engine import Engine
from jaxbench.serve.native_runner import NativeRunner
from jaxbench.serve.request import Request, Sampling
from jaxbench.serve.scheduler import Limits
from jaxbench.serve.sizes import row_sizes
from jaxbench.watermark import keys
from jaxbench.watermark.serving import Finder, Marks, WatermarkKey, Watermarks

pytestmark = pytest.mark.skipif(not library.is_available(), reason="native kernels cannot be had here")

CONFIG = TransformerConfig(
    vocab_size=96, d_model=64, d_ff=96, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, max_seq_len=320
)
LIMITS = Limits(max_running=4, max_batch_tokens=48, max_waiting=16, max_guessed=2)
SCHEMES = {
    "kgw": {"scheme": "kgw", "gamma": 0.25, "delta": 4.0},
    "gumbel": {"scheme": "gumbel"},
    "synthid": {"scheme": "synthid"},
    "dip": {"scheme": "dip"},
    "payload": {"scheme": "gumbel", "payload_bits": 4},
    "lists": {"scheme": "kgw_markllm"},
}


@pytest.fixture(scope="module")
def watermarks(tmp_path_factory):
    """Return every scheme with a key of its own, but for the one that carries its key."""
    folder, made = tmp_path_factory.mktemp("keys"), {}
    for number, (name, scheme) in enumerate(SCHEMES.items()):
        path = None if name == "lists" else folder / f"{name}.key"
        if path is not None:
            keys.write_key_file(path, keys.Key(1000 + number))
        made[name] = WatermarkKey(scheme=scheme, key_file=None if path is None else str(path))
    return made


@functools.cache
def packed():
    return checkpoint.pack_params(CONFIG, initial.initial_params(CONFIG, 3, distinct=True), weights_as="float32")


@pytest.fixture(scope="module", params=["jaxbench", "torch_ref"])
def engine(request, watermarks):
    """Return an engine with all watermarks, of each backend."""
    made, of = native, NativeRunner
    if request.param == "torch_ref":
        from torch_ref.native import model as made
        from torch_ref.serve.native_runner import NativeRunner as of
    runner = of(made.build(packed()), num_blocks=24, sizes=row_sizes(LIMITS), max_wanted=LIMITS.max_logits)
    return Engine(runner, LIMITS, watermarks=Watermarks(fields(watermarks), package=request.param))


def fields(watermarks):
    return {name: {"scheme": SCHEMES[name], "key_file": each.key_file} for name, each in watermarks.items()}


def requests():
    random, found = np.random.default_rng(0), []
    for number, name in enumerate([*SCHEMES, None, *SCHEMES]):
        prompt = tuple(random.integers(0, 96, (3, 12, 40)[number % 3]).tolist())
        sampling = Sampling(temperature=1.0, seed=number, top_k=50 * (number % 2))
        payload = 11 if name == "payload" else 0
        found.append(Request(f"{number}-{name}", prompt, 100, sampling, watermark=name, payload=payload))
    return found


def tokens(events):
    return [each.token for each in events if each.token is not None]


def test_a_text_is_marked_in_company_as_it_is_alone_and_its_key_is_found(engine, watermarks):
    engine.runner.reset()
    engine.scheduler.pool.invalidate_all()
    asked, compiled = requests(), []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, *_, **__: compiled.append(event) if "compile" in event else None
    )
    try:
        busy = engine.generate(asked)
    finally:
        jax.monitoring.clear_event_listeners()
    assert compiled == []  # marks are ready before the first request
    finder = Finder(watermarks, None, CONFIG.vocab_size)
    for request in asked:
        engine.scheduler.pool.invalidate_all()
        (alone,) = engine.generate([request]).values()
        answer = tokens(busy[request.id])
        assert answer == tokens(alone), request.id
        found = finder.find([*request.prompt, *answer], finder.names, prompt_tokens=len(request.prompt))
        if request.watermark is None:
            assert found["p_value"] > 1e-3, found
        else:
            assert found["best"] == request.watermark and found["p_value"] < 1e-4, (request.id, found)
    payload = next(each for each in found["watermarks"] if each["watermark"] == "payload")
    assert payload["payload"] is not None and found["num_tokens"] == len(request.prompt) + 100


@pytest.mark.parametrize("name", ["synthid", "dip"])
def test_several_answers_to_one_prompt_differ_and_each_has_the_mark(engine, watermarks, name):
    asked = [
        Request(f"{name}-{choice}", (1, 2, 3), 100, Sampling(temperature=1.0, seed=5, choice=choice), watermark=name)
        for choice in range(3)
    ]
    answers = [tokens(events) for events in engine.generate(asked).values()]
    assert len(set(map(tuple, answers))) == 3
    finder = Finder(watermarks, None, CONFIG.vocab_size)
    for answer in answers:
        assert finder.find([1, 2, 3, *answer], [name], prompt_tokens=3)["p_value"] < 1e-4


def test_both_backends_mark_alike(watermarks):
    random = np.random.default_rng(1)
    one, other = (Marks(watermarks, vocab_size=96, package=package) for package in ("jaxbench", "torch_ref"))
    for name in SCHEMES:
        request = Request("a", (1, 2, 3), 9, Sampling(temperature=1.0, seed=5), watermark=name)
        markers, text = (one.begin(request), other.begin(request)), [1, 2, 3]
        for _ in range(12):
            logits = (3 * random.standard_normal(96)).astype(np.float32)
            marked = [marker(text, logits) for marker in markers]
            likely = [np.exp(each - each.max()) for each in marked]  # logits of what has no probability may differ
            np.testing.assert_allclose(*likely, rtol=1e-4, atol=1e-6, err_msg=name)
            text.append(int(np.argmax(marked[0])))


@pytest.mark.parametrize("name", ["kgw", "gumbel"])
def test_marked_tokens_are_those_of_the_generator(engine, watermarks, name):
    package = type(engine.runner).__module__.split(".")[0]
    names = ("sample", "native.model", "watermark.logits_processor")
    sample, native, processors = (importlib.import_module(f"{package}.{each}") for each in names)
    request = Request("g", tuple(range(20)), 60, Sampling(temperature=0.8, top_k=40, seed=4), watermark=name)
    (events,) = engine.generate([request]).values()
    watermark = processors.Watermark(SCHEMES[name], vocab_size=96)
    generate = sample.Generator(
        native.build(packed()), eos_id=None, sampling=request.sampling.params(), processors=[watermark]
    )
    state = watermark.state([watermarks[name].read(name)])
    wanted = generate([list(request.prompt)], max_new_tokens=60, seed=4, processor_states=[state])[0][0]
    assert tokens(events) == wanted.tolist()


def test_what_cannot_be_marked_is_refused_with_the_place_and_the_value(engine, watermarks):
    base = Request("x", (1, 2), 4, Sampling(temperature=1.0))
    for change, said in (
        ({"watermark": "nobody"}, "watermark: 'nobody' is unknown here; wanted one of: kgw"),
        ({"watermark": "payload", "payload": 16}, "watermark_payload: 16; payload carries payloads from 0 to 15"),
        ({"watermark": "kgw", "payload": 1}, "watermark_payload: 1; kgw carries payloads from 0 to 0"),
        ({"payload": 1}, "watermark_payload: 1 without a watermark"),
        ({"watermark": "gumbel", "sampling": Sampling()}, "temperature: 0 leaves nothing to draw"),
        (
            {"watermark": "gumbel", "sampling": Sampling(temperature=1.0, choice=1)},
            "n: 2 answers; watermark gumbel draws those to one prompt alike",
        ),
    ):
        with pytest.raises(ValueError, match=said):
            engine.add(base._replace(**change))
    with pytest.raises(ValueError, match="watermarks.a.key_file is missing; make a key"):
        WatermarkKey(scheme={"scheme": "kgw"}).read("a")
    selfhash = {"scheme": "kgw_transformers", "seeding_scheme": "selfhash"}
    for given, said in (
        ({"scheme": selfhash}, "watermarks.a: .*list for each candidate token"),
        ({"scheme": {"scheme": "kgw"}}, "key_file is missing"),
        ({"scheme": {"scheme": "kgw", "gama": 1}}, "watermarks.a: .*gama"), ({"schema": 1}, "watermarks.a: .*schem"),
        ({"scheme": {"scheme": "kgw"}, "key_file": "nowhere"}, "nowhere cannot be read"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=said):
            Watermarks({"a": given}, package="jaxbench")
    engine = Engine(engine.runner, LIMITS)
    with pytest.raises(ValueError, match="watermark: 'kgw' is unknown here; the server has none"):
        engine.add(base._replace(watermark="kgw"))
    with pytest.raises(ValueError, match="'b' unknown here|b.* unknown here"):
        Finder(watermarks, None, 96).find([1, 2], ["b"])
