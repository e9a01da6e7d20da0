"""The default model on a recorded trace (trace.json): every answer is that of the request alone, on both backends."""

import functools
import json
from pathlib import Path

import pytest

from jaxbench.native import checkpoint, library
from jaxbench.native import model as native
from jaxbench.pretrained import assets, tokenizer
from jaxbench.serve.engine import Engine
from jaxbench.serve.native_runner import NativeRunner
from jaxbench.serve.request import Request, Sampling
from jaxbench.serve.scheduler import Limits
from tests.serve.playing import answers, played

pytestmark = pytest.mark.skipif(not library.is_available(), reason="native kernels cannot be had here")

LIMITS, SIZES = (
    Limits(max_running=4, max_batch_tokens=32, max_waiting=8),
    (4, 16, 32),
)  # few programs: they take a second each
KINDS = {"float32": ("float32", "float32"), "int8": ("int8", "int8")}  # of cache and activations


@functools.cache
def trace():
    """(step at which it comes, request), as trace.json has them: pieces of the default text by their first token."""
    ids = tokenizer.load_tokenizer().encode(assets.default_text(), add_special=False)
    found = []
    for number, each in enumerate(json.loads(Path(__file__).with_name("trace.json").read_text())):
        prompt = tuple(ids[each["first"] : each["first"] + each["length"]])
        sampling = Sampling(temperature=each["temperature"], seed=number)
        found.append((each["step"], Request(f"r{number}", prompt, each["new_tokens"], sampling, logprobs=1)))
    return found


@functools.cache
def engine_of(kind, package="jaxbench"):
    cache, activations = KINDS[kind]
    made, of = native, NativeRunner
    if package == "torch_ref":
        from torch_ref.native import model as made
        from torch_ref.serve.native_runner import NativeRunner as of
    model = made.build(checkpoint.load(), cache_dtype=cache, activations=activations)
    return Engine(of(model, num_blocks=12, sizes=SIZES, max_wanted=LIMITS.max_running * 4), LIMITS)


@functools.cache
def together(kind, package="jaxbench"):
    engine = engine_of(kind, package)
    found = answers(played(engine, trace(), cancelled=(14, "r2"), preempted=(20, 31)))
    assert engine.scheduler.num_preempted >= 2
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_those_of_the_request_alone(kind):
    busy, engine = together(kind), engine_of(kind)
    for _, request in trace():
        engine.runner.reset()
        fresh = Engine(engine.runner, LIMITS)
        (alone,) = answers(fresh.generate([request])).values()
        count = len(busy[request.id]) if request.id == "r2" else request.max_new_tokens
        assert len(busy[request.id]) == count and busy[request.id] == alone[:count], request.id


def test_both_backends_give_the_same_tokens():
    flax, torch = (together("float32", package) for package in ("jaxbench", "torch_ref"))
    for name, answer in flax.items():
        assert [token for token, _ in answer] == [token for token, _ in torch[name]], name
