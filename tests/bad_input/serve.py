"""Bad input of serve.py: flags, settings, places, damaged models."""

from __future__ import annotations

import functools
import json

from tests.bad_input.core import EMBEDDING, folder, gguf
from tests.bad_input.harness import Case, case_of

KGW = "--set=engine.watermarks.a.scheme.scheme=kgw"


of = functools.partial(case_of, ("serve.py",))


def memory_folder() -> dict[str, str | bytes]:
    """Return the files of a folder of a decoder with memory, without weights."""
    neural = {"d_model": 16, "num_heads": 2, "head_dim": 8, "chunk_size": 4}
    decoder = {
        "vocab_size": 31, "d_model": 16, "d_ff": 24, "num_layers": 1, "num_heads": 2, "num_kv_heads": 2,
        "head_dim": 8, "max_seq_len": 64,
        "memory": {"kind": "mac", "window": 4, "neural": neural},
    }  # fmt: skip
    return {"model/config.json": json.dumps({"model_type": "jaxbench_memory", "decoder": decoder})}


CASES = [
    of("now", "'now' is not a flag"),
    of("--prot=8080", "--prot"),
    of("--device=gpu", "--device=gpu", "this machine has none"),
    of("--device=now", "--device", "cpu"),
    of("--modell=default", "--modell", "nearest is --model"),
    of("--config=", "--config"),
    of("--config=none.yaml", "none.yaml"),
    of("--config=configs/serve", "configs/serve"),
    of("--config=a.yaml", "a.yaml", a_yaml="port: [1"),
    of("--config=a.yaml", "a.yaml", "nearest is port", a_yaml="prot: 8080\n"),
    of("--config=a.yaml", "a.yaml", "port", a_yaml="port: 1\nport: 2\n"),
    of("--config=a.yaml", "a.yaml", a_yaml="- port\n"),
    of("--config=configs/lm/tiny.yaml", "configs/lm/tiny.yaml"),
    of("--set=prot=1", "prot", "nearest is port"),
    of("--set=port", "port"),
    of("--set=port=many", "port", "many"),
    of("--set=port=-1", "port", "-1"),
    of("--set=port=65536", "port", "65536"),
    of("--set=port=1.5", "port", "1.5"),
    of("--set=host=0.0.0.0", "host=0.0.0.0", "JAXBENCH_API_KEY"),
    of("--set=host='::'", "host=::", "JAXBENCH_API_KEY"),
    of("--set=max_body_bytes=10", "max_body_bytes", "10"),
    of("--set=max_choices=0", "max_choices", "0"),
    of("--set=default_new_tokens=0", "default_new_tokens"),
    of("--set=drain_s=-1", "drain_s", "-1"),
    of("--set=drain_s=.inf", "drain_s"),
    of("--set=engine.backend=equinox", "backend", "equinox"),
    of("--set=engine.weights=int3", "weights", "int3"),
    of("--set=engine.cache=float16", "cache", "float16"),
    of("--set=engine.activations=int4", "activations", "int4"),
    of("--set=engine.threads=-1", "threads", "-1"),
    of("--set=engine.hang_s=0", "hang_s", "0"),
    of("--set=engine.draft=none.gguf", "draft=none.gguf guesses nothing with limits.max_guessed=0"),
    of("--set=engine.draft=none.gguf|--set=engine.limits.max_guessed=4", "none.gguf does not exist"),
    Case(
        ("serve.py", "--set=engine.draft=model", "--set=engine.limits.max_guessed=4"),
        ("draft=model has 257 tokens, and the model 49152",),
        folder(vocab_size=257),
    ),
    of("--set=engine.cache_tokens=1", "cache_tokens", "1"),
    of("--set=engine.kernels=cuda", "kernels", "cuda"),
    of("--set=engine.segment=1", "segment", "1"),
    of("--set=engine.slot_tokens=1", "slot_tokens", "1"),
    of("--set=engine.slot_tokens=64", "slot_tokens=64 is for kernels=xla alone"),
    of("--set=engine.segment=8", "segment=8 is for kernels=xla alone"),
    of("--set=engine.kernels=xla|--set=engine.limits.max_guessed=4", "max_guessed=4", "slots take back no token"),
    of("--set=engine.kernels=xla|--set=engine.segment=250", "max_batch_tokens=256", "at least 282"),
    of("--set=engine.kernels=xla|--set=engine.cache=int8", "cache=int8 is for kernels=native alone"),
    of("--set=engine.kernels=xla|--set=engine.weights=q4_0", "weights=q4_0 is for kernels=native alone"),
    Case(("serve.py", "--model=model"), ("kernels=native", "'mac'", "set engine.kernels=xla"), memory_folder()),
    Case(
        ("serve.py", "--model=model", "--set=engine.kernels=xla"),
        ("config.json: decoder", "d_model"),
        {"model/config.json": '{"model_type": "jaxbench_memory", "decoder": {"d_model": -1}}'},
    ),
    of("--set=engine.limits.max_running=0", "max_running", "0"),
    of("--set=engine.limits.max_waiting=-1", "max_waiting", "-1"),
    of("--set=engine.limits.max_guessed=33", "max_guessed", "33"),
    of("--set=engine.limits.max_batch_tokens=8", "max_batch_tokens=8 is less than max_running=32"),
    of("--set=engine.limits.max_runing=8", "max_runing", "max_running"),
    of("--set=engine.limits=8", "limits", "8"),
    of(KGW, "watermarks.a.key_file is missing", "keygen"),
    of("--set=engine.watermarks.a.scheme.scheme=kgv", "watermarks.a", "kgv"),
    of(f"{KGW}|--set=engine.watermarks.a.key_file=k", "key file: k cannot be read"),
    of("--set=engine.watermarks.a=kgw", "watermarks.a", "kgw"),
    of("--input=a.jsonl", "--output is missing"),
    of("--output=a.jsonl", "--input is missing"),
    of("--replicas=0", "--replicas", "0"),
    of("--replicas=two", "--replicas", "two"),
    of("--replicas=2|--set=host=0.0.0.0", "host=0.0.0.0", "JAXBENCH_API_KEY"),
    of("--set=result_cache.url=http://host", "url begins with 'http'", "redis://"),
    of("--set=result_cache.url=redis://me:word@host", "url holds a login (not shown)", "JAXBENCH_REDIS_PASSWORD"),
    of("--set=result_cache.entries=-1", "entries", "-1"),
    of("--set=result_cache.keep_s=0", "keep_s", "0"),
    of("--set=result_cache.size=1", "size"),
    of("--set=jobs.folder=a.txt", "jobs.folder=a.txt", "is a file", a_txt="x"),
    of("--set=jobs.workers=-1", "workers", "-1"),
    of("--set=jobs.workers=65", "workers", "65"),
    of("--set=jobs.max_bytes=1", "max_bytes", "1"),
    of("--set=jobs.keep_days=0", "keep_days", "0"),
    of("--set=jobs.folder=q|--replicas=2", "jobs.folder", "--replicas=2"),
    of("--set=alerts.send=local", "send=local has nothing to send without rules"),
    of(
        "--config=a.yaml",
        "none.yaml is no file",
        a_yaml="alerts: {send: none, rules: [{name: a, figure: waiting, most: 1}]}",
    ),
    of("--config=a.yaml", "most=None, least=None", a_yaml="alerts: {rules: [{name: a, figure: waiting}]}"),
    of("--config=a.yaml", "figure", a_yaml="alerts: {rules: [{name: a, figure: speed, most: 1}]}"),
    of(
        "--config=a.yaml",
        "quantile=0.5",
        a_yaml="alerts: {rules: [{name: a, figure: waiting, most: 1, quantile: 0.5}]}",
    ),
    of("--config=a.yaml", "a is there 2 times", a_yaml="alerts: {rules: [&r {name: a, figure: waiting, most: 1}, *r]}"),
    of("--overwrite", "--overwrite=True needs --input and --output"),
    of("--replicas=2|--overwrite", "--overwrite=True needs --input and --output"),
    of("--input=a.jsonl|--output=b.jsonl|--replicas=2", "--replicas=2", "one engine", a_jsonl="{}"),
    of("--input=a.jsonl|--output=b.jsonl", "a.jsonl is no file"),
    of("--input=a.jsonl|--output=a.jsonl", "is the input a.jsonl", a_jsonl="{}"),
    of("--input=a.jsonl|--output=b.jsonl", "line 1", "custom_id is missing", a_jsonl="{}"),
    of("--input=a.jsonl|--output=b.jsonl", "b.jsonl exists", "--overwrite", a_jsonl="{}", b_jsonl="x"),
    of("--model=", "model: '' names nothing"),
    of("--model=none.gguf", "none.gguf does not exist"),
    of("--model=configs", "configs"),
    of("--model=a.txt", "a.txt", "not a GGUF file", a_txt="text"),
    of("--model=x.gguf", "x.gguf", "truncated", x_gguf=gguf(EMBEDDING)[:60]),
    of("--model=x.gguf", "x.gguf", "bert", x_gguf=gguf(EMBEDDING, architecture="bert")),
    Case(("serve.py", "--model=model"), ("hidden_size=0",), folder(hidden_size=0)),
    Case(("serve.py", "--model=model"), ("bert",), folder(model_type="bert")),
    Case(("serve.py", "--model=model"), ("config.json",), {"model/config.json": "{"}),
]
