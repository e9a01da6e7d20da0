"""What breaks among several measurements is a record of its own, and the others are kept."""

import gc
import os
import subprocess
import sys
import weakref

import pytest

from jaxbench import process_environment
from jaxbench.gpu import rates
from jaxbench.measure.records import Record, RecordFile
from tests.structure import ROOT

QUICK = "--xla_backend_optimization_level=0"  # and one device: a decoder is not split
TINY = "--device=cpu --config=configs/lm/tiny_shape.yaml --new_tokens=4"
LADDER = f"--workload=ladder {TINY} --set=model.num_layers=1 --prompt_tokens=16"
BREAK = """
import runpy, sys, importlib
module, holder, name, culprit = sys.argv[1:5]
del sys.argv[1:5]
where = importlib.import_module(holder.partition(":")[0])
where = getattr(where, holder.partition(":")[2]) if ":" in holder else where
whole = getattr(where, name)

def broken(*given, **named):
    if culprit in repr((given, named)):
        raise RuntimeError("RESOURCE_EXHAUSTED: out of memory\\nwhile allocating")
    return whole(*given, **named)

setattr(where, name, broken)
runpy.run_module(module, run_name="__main__")
"""


@pytest.mark.parametrize(
    ("module", "place", "words", "culprit", "metric", "arms"),
    [
        (
            "one_arm", ("jaxbench.gpu.packed_weights", "random_model"), LADDER, "'int8'", "decode_tokens_per_s",
            ["float32 dense float", "bfloat16 dense float", "bfloat16 dense int8 xla", "bfloat16 dense int4 xla"],
        ),
        (
            "marked", ("jaxbench.watermark.study.decode_overhead:Generation", "overhead"),
            f"{TINY} --rounds=2 --batches=1 --schemes=kgw,control", "'kgw'", "watermark_overhead", ["kgw", "control"],
        ),
        (
            "detection", ("jaxbench.watermark.detect:Detector", "__init__"),
            "--device=cpu --rows=12 --tokens=20 --vocab_size=64 --schemes=kgw,unigram", "'kgw'", "detect_tokens_per_s",
            ["kgw", "unigram"],
        ),
    ],
)  # fmt: skip
def test_one_that_breaks_leaves_the_others(module, place, words, culprit, metric, arms, tmp_path):
    path = tmp_path / "results.jsonl"
    command = [
        sys.executable,
        "-c",
        BREAK,
        f"jaxbench.gpu.{module}",
        *place,
        culprit,
        f"--output={path}",
        *words.split(),
    ]
    settings = os.environ | process_environment.environment("cpu") | {"XLA_FLAGS": QUICK}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=settings)
    assert done.returncode == 1, done.stderr
    reason = "RuntimeError: RESOURCE_EXHAUSTED: out of memory while allocating"
    assert done.stderr.splitlines()[-1].startswith(f"failed: 1 of {len(arms)} could not be measured, the first: ")
    found = [record for record in RecordFile(path).read() if record.metric == metric]
    assert [record.arm.removeprefix("flax ") for record in found] == arms
    name = culprit.strip("'")
    assert [(each.status, each.reason, each.value is None) for each in found] == [
        ("error", reason, True) if name in each.arm else ("ok", "", False) for each in found
    ]


class Weights:
    """Stands for arrays that fill a device."""


def broken(held):
    """Fail with weights in a frame that its own error holds, as those of a library do."""
    weights = Weights()
    held.append(weakref.ref(weights))
    try:
        raise MemoryError("out of memory")
    except MemoryError as error:
        again = error
        assert again
        raise


def test_what_one_that_broke_has_held_is_freed_before_the_next_begins():
    lost, held, kept = [], [], []
    record = Record(metric="decode_tokens_per_s", unit="tokens/s")
    gc.disable()  # it would free them at a time of its own
    try:
        with rates.apart(lost, "large", kept.append, record):
            broken(held)
        assert held[0]() is not None  # else this would test nothing
        with rates.apart(lost, "small", kept.append, record):
            assert held[0]() is None
    finally:
        gc.enable()
    assert lost == ["large: MemoryError: out of memory"] and [each.status for each in kept] == ["error"]
