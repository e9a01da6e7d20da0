"""Measure watermark detection on a device, by scheme: tokens/s from ids on the host to p-values on the host.

    python -m jaxbench.gpu.detection --schemes=kgw,unigram --rows=4096 --tokens=256 --output=results.jsonl

Ids are random, so these are unmarked texts, which cost as much as marked ones. A call scores all rows: it copies ids to
the device, computes evidence there and copies it back, and computes statistics and p-values in float64 on the host
(`evidence_s` of a record's detail is without this last step). What the first call compiles and draws is not counted.
The rate is the median over calls.
"""

from __future__ import annotations

import statistics

import numpy as np
from absl import flags

from jaxbench import cli, outputs, process_environment
from jaxbench.gpu import rates
from jaxbench.measure import environment
from jaxbench.measure.records import Record, RecordFile, Workload
from jaxbench.watermark import detection
from jaxbench.watermark.keys import Key
from jaxbench.watermark.texts import Ragged

VALUES = flags.FLAGS
SCHEMES = ("kgw", "unigram", "gumbel", "synthid", "dip")
KEY = Key(0x6A617862656E6368)  # any: all cost the same


def check_schemes(names: list[str], vocab_size: int) -> None:
    """Check the schemes to score.

    Raises:
      ValueError: there is no scheme, one is unknown, or one has lists that are scored on the host.
    """
    if not names:
        raise ValueError(f"--schemes={','.join(names)} names none, wanted some of {', '.join(SCHEMES)}")
    for name in names:
        if detection.checked_scheme(name, vocab_size).key_field is not None:
            raise ValueError(f"--schemes={name}: its lists are scored on the host; wanted {', '.join(SCHEMES)}")


def main() -> int:
    """Measure every scheme and append a record as each ends."""
    check_schemes(VALUES.schemes, VALUES.vocab_size)
    output = outputs.check_file(VALUES.output, overwrite=True)
    process_environment.ensure(VALUES.device)
    import jax

    from jaxbench.watermark.detect import Detector

    shape, most = (VALUES.rows, VALUES.tokens), VALUES.vocab_size
    ids = Ragged.from_array(np.random.default_rng(0).integers(0, most, shape, dtype=np.int32))
    batches = [(tokens, lengths) for _, tokens, lengths in detection.batches(ids)]
    workload = Workload(kind="inference", batch=VALUES.rows, prompt_tokens=VALUES.tokens)
    common = {"device": VALUES.device, "commit": environment.commit(), "versions": environment.versions()}
    lost: list[str] = []
    for name in VALUES.schemes:
        record = Record(metric="detect_tokens_per_s", unit="tokens/s", arm=name, workload=workload, **common)
        with rates.apart(lost, name, RecordFile(output).append, record):
            detector = Detector(name, vocab_size=most, device=VALUES.device)

            def score(detector=detector) -> None:
                detection.detect(detector, ids, KEY)

            def evidence(detector=detector) -> None:
                for tokens, lengths in batches:
                    detector.evidence(tokens, lengths, KEY)

            whole, alone = (rates.timed(call, lambda _: None) for call in (score, evidence))  # both end on the host
            samples = tuple(ids.ids.size / seconds for seconds in whole)
            detail = {
                "vocab_size": most, "call_s": statistics.median(whole), "evidence_s": statistics.median(alone),
                "device_kind": jax.devices()[0].device_kind,
            }  # fmt: skip
            own = {"value": statistics.median(samples), "samples": samples, "detail": detail}
            RecordFile(output).append(record.model_copy(update=own))
            call_ms, evidence_ms = 1e3 * detail["call_s"], 1e3 * detail["evidence_s"]
            print(
                f"{name}: {own['value']:.4g} tokens/s, a call {call_ms:.3g} ms, its evidence {evidence_ms:.3g} ms",
                flush=True,
            )
    rates.check_all(lost, len(VALUES.schemes))
    return cli.EXIT_OK


if __name__ == "__main__":
    cli.define_device("gpu")
    flags.DEFINE_list("schemes", list(SCHEMES), "watermarking schemes by name")
    flags.DEFINE_integer("rows", 4096, "texts of a call", lower_bound=1)
    flags.DEFINE_integer(
        "tokens", 256, "tokens of a text", lower_bound=1, upper_bound=detection.MAX_DEVICE_LENGTH
    )  # longer ones are scored on the host
    flags.DEFINE_integer("vocab_size", 49152, "size of the vocabulary", lower_bound=2, upper_bound=detection.MAX_VOCAB)
    flags.DEFINE_string("output", "out/gpu-detection/results.jsonl", "file that records are appended to")
    cli.run(main, about=__doc__)
