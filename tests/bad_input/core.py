"""Bad input of compare.py, parity.py, parallel.py and train.py: command line, what the error says."""

from __future__ import annotations

import json
import struct

import numpy as np

from tests.bad_input.harness import Case

STRING, ARRAY, UINT32, FLOAT32 = 8, 9, 4, 6  # type codes of GGUF values
F32, I32 = 0, 26  # of GGUF tensors
TINY = "compare.py --config=configs/suites/tiny.yaml --workdir={tmp}/out"
TRAIN = "train.py --workdir={tmp}/out"
SHAPE = {"hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 8, "num_hidden_layers": 1, "vocab_size": 16}
BOMB = "a: &a [x, x, x, x, x, x, x, x]\n" + "".join(
    f"{new}: &{new} [{', '.join([f'*{old}'] * 8)}]\n" for old, new in zip("abcdefghi", "bcdefghij", strict=True)
)


def gguf(tensors: dict[str, tuple[tuple[int, ...], int]], *, cut: int = 0, **changes: object) -> bytes:
    """Return a small GGUF file of the Llama family: tensors are name -> (shape, type code), all zeros.

    `changes` are settings by name without `llama.`; a list stands as an array of words. The last `cut` bytes are lost.
    """
    settings = {"block_count": 1, "embedding_length": 8, "feed_forward_length": 8, "context_length": 16}
    settings |= {"attention.head_count": 2, "attention.layer_norm_rms_epsilon": 1e-5, "architecture": "llama"}
    settings |= {name.replace("__", "."): value for name, value in changes.items()}
    values = b"".join(_entry(name, value) for name, value in settings.items())
    entries, data = b"", b""
    for name, (shape, kind) in tensors.items():
        entries += _text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape[::-1], kind, len(data))
        data += bytes(-(-4 * int(np.prod(shape)) // 32) * 32)
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(settings)) + values + entries
    whole = head + bytes(-len(head) % 32) + data
    return whole[: len(whole) - cut]


def _text(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


def _entry(name: str, value: object) -> bytes:
    place = _text(("general." if name == "architecture" else "llama.") + name)
    if isinstance(value, list):
        return place + struct.pack("<IIQ", ARRAY, STRING, len(value)) + b"".join(map(_text, value))
    if isinstance(value, str):
        return place + struct.pack("<I", STRING) + _text(value)
    code, layout = (FLOAT32, "f") if isinstance(value, float) else (UINT32, "I")
    return place + struct.pack(f"<I{layout}", code, value)


def folder(**changes: object) -> dict[str, str | bytes]:
    """Return the files of a Hugging Face folder `model` without weights, with changed settings."""
    return {"model/config.json": json.dumps({"model_type": "llama"} | SHAPE | changes)}


def index(weight_map: object) -> dict[str, str | bytes]:
    """Return the files of such a folder with an index of its weights."""
    return folder() | {"model/model.safetensors.index.json": json.dumps({"weight_map": weight_map})}


EMBEDDING = {"token_embd.weight": ((16, 8), F32)}
RESULTS = {"out/results.jsonl": b"\x89\xff\x00binary\n", "out/keep": ""}

DEEP = """model: {vocab_size: 64, d_model: 8, d_ff: 8, num_layers: 2000000000, num_heads: 2, num_kv_heads: 2,
  head_dim: 4, max_seq_len: 64}
data: {seq_len: 8}
batch_size: 1
steps: 1
learning_rate: 0.1
"""

CASES = [
    # flags
    Case("compare.py --set=rounds.launchs=3", ("rounds.launchs", "nearest is rounds.launches")),
    Case("train.py --steps=4", ("--steps", "no flag")),
    Case("compare.py tiny", ("'tiny'", "--name=value")),
    Case("compare.py --device=phone", ("phone", "cpu|gpu|tpu")),
    Case("compare.py --set=decode", ("'decode'", "a.b=value")),
    Case(f"{TINY} --tpu_topology=", ("--tpu_topology", "v5e:2x2", "tpu.topologies=[]")),
    Case(f"{TINY} --tpu_topology=v5e:2x2,", ("--tpu_topology",)),
    Case(f"{TINY} --tpu_topology=v9z:2x2", ("v9z:2x2", "v5e")),
    Case(f"{TINY} --resume=perhaps", ("resume", "perhaps")),
    Case("parity.py", ("--case=ID", "--all")),
    Case("parity.py --case=transformer/smollm", ("transformer/smollm", "transformer/smollm2")),
    Case("parity.py --case=", ("--case=",)),
    Case("parity.py --case=transformer/smollm2 --all", ("--case=transformer/smollm2", "--all")),
    Case("parity.py --all --backend=torch", ("torch", "flax|equinox")),
    Case("parallel.py --part=9/8", ("--part=9/8", "1 <= k <= n")),
    Case("parallel.py --part=1/0", ("--part=1/0",)),
    Case("parallel.py --part=900/900", ("--part=900/900 has none of the", "wanted k from 1 to")),
    Case("parallel.py --case=2.5e", ("2.5e", "2.5d")),
    Case("parallel.py --case=2.5d --all", ("--case=2.5d", "--all")),
    Case("parallel.py --case=2.5d --part=2/8", ("--case=2.5d", "--part=2/8", "exclude each other")),
    Case("train.py --profile_steps=3:1", ("--profile_steps=3:1", "a < b")),
    Case("train.py --profile_steps=\u00b2:4", ("--profile_steps=\u00b2:4", "a < b")),
    Case("train.py --memory_mib=-1", ("memory_mib", "-1")),
    Case("train.py --process_id=1", ("--process_id", "--coordinator")),
    Case("train.py --backend=equinox", ("equinox", "flax|torch")),
    # devices
    Case("train.py --backend=torch --device=tpu", ("--device=tpu", "this machine has none")),
    # folders and files to write
    Case("compare.py --config=configs/suites/tiny.yaml --workdir={tmp}/file", ("file", "--workdir"), {"file": ""}),
    Case("compare.py --workdir={tmp}/file/deep/er", ("file", "--workdir"), {"file": ""}),
    Case("train.py --workdir={tmp}/file/run", ("file", "--workdir"), {"file": ""}),
    Case("train.py", ("out", "--workdir"), {"out": ""}),
    Case("parity.py --case=transformer/smollm2 --workdir={tmp}/file", ("file", "--workdir"), {"file": ""}),
    Case("compare.py --workdir=/proc/none", ("/proc/none", "--workdir")),
    Case("compare.py --workdir=", ("--workdir",)),
    Case("parallel.py --case=zero0 --output={tmp}/none/x.jsonl", ("none", "--output")),
    Case("parallel.py --case=zero0 --output={tmp}", ("--output", "folder")),
    Case("parallel.py --case=zero0 --output=a.txt", ("a.txt line 1 is no case of this command",), {"a.txt": "a note"}),
    Case(f"{TINY} --resume", ("results.jsonl", "UTF-8"), RESULTS),
    Case(f"{TINY} --resume", ("results.jsonl line 1",), {"out/results.jsonl": "{}\n{}\n"}),
    # configurations as files
    Case("compare.py --config=missing.yaml", ("missing.yaml is no file",), {".pre-commit-config.yaml": "a: 1"}),
    Case("compare.py --config=configs/suites/tinny.yaml", ("tinny.yaml", "nearest is configs/suites/tiny.yaml")),
    Case("compare.py --config=configs", ("configs is a folder",)),
    Case("compare.py --config=", ("--config",)),
    Case("compare.py --config=x.yaml", ("x.yaml", "not YAML"), {"x.yaml": b"\x00\x01\x02"}),
    Case("compare.py --config=x.yaml", ("x.yaml", "not UTF-8"), {"x.yaml": "modèle: 1".encode("latin-1")}),
    Case("train.py --config=x.yaml", ("x.yaml", "'model' is missing"), {"x.yaml": ""}),
    Case("compare.py --config=x.yaml", ("x.yaml holds a list",), {"x.yaml": "[1, 2]"}),
    Case("compare.py --config=x.yaml", ("x.yaml line 1", "key"), {"x.yaml": "? [a, b]\n: 1\n"}),
    Case("compare.py --config=x.yaml", ("x.yaml line 1", "key"), {"x.yaml": "? {a: b}\n: 1\n"}),
    Case("compare.py --config=x.yaml", ("x.yaml", "seed", "twice"), {"x.yaml": "seed: 1\nseed: 2\n"}),
    Case("compare.py --config=x.yaml", ("x.yaml", "a"), {"x.yaml": BOMB}),
    Case("compare.py --config=x.yaml", ("x.yaml",), {"x.yaml": "[" * 5000 + "]" * 5000}),
    Case("compare.py --config=x.yaml", ("x.yaml",), {"x.yaml": "a: &a {<<: *a}\n"}),
    Case("compare.py --config=x.yaml", ("x.yaml", "arms"), {"x.yaml": "arms: &a [*a]\n"}),
    Case("compare.py --config=x.yaml", ("x.yaml", "1"), {"x.yaml": "1: 2\n"}),
    Case("compare.py --config=x.yaml", ("x.yaml", "month"), {"x.yaml": "seed: 2026-13-45\n"}),
    Case("compare.py --config=x.yaml", ("x.yaml",), {"x.yaml": f"seed: {'9' * 5000}\n"}),
    Case("compare.py --config=x.yaml", ("x.yaml",), {"x.yaml": "seed: !!python/object/apply:os.getcwd []\n"}),
    # values
    Case(("compare.py", "--set={[1]: 2}=3"), ("--set",)),
    Case(("compare.py", "--set=seed={[1]: 2}"), ("--set", "seed")),
    Case("compare.py --set=rounds.worker_timeout_s=.inf", ("rounds.worker_timeout_s", "finite")),
    Case("compare.py --set=rounds.worker_timeout_s=1e300", ("rounds.worker_timeout_s", "less than")),
    Case("compare.py --set=rounds.budget_s=.nan", ("rounds.budget_s", "finite")),
    Case("compare.py --set=rounds=3", ("rounds", "3")),
    Case("compare.py --set=seed=[1,2]", ("seed", "[1, 2]")),
    Case("compare.py --set=seed=true", ("seed", "true", "number")),
    Case("compare.py --set=decode.batches=8", ("decode.batches", "8", "tuple")),
    Case("compare.py --set=decode.batches=[0]", ("decode.batches.0", "greater than 0")),
    Case("compare.py --set=roofline.gemm_sizes=[[-1,2,3]]", ("roofline.gemm_sizes", "-1", "greater than 0")),
    Case("compare.py --set=roofline.gemm_sizes=[[1,2]]", ("roofline.gemm_sizes",)),
    Case(f"{TINY} --set=roofline.read_bytes=2", ("roofline.read_bytes", "4")),
    Case(f"{TINY} --set=roofline.read_bytes=1000000000000000", ("roofline.read_bytes", "GiB")),
    Case(f"{TINY} --set=roofline.gemm_sizes=[[1000000,1000000,8]]", ("roofline.gemm_sizes", "GiB")),
    Case("compare.py --set=arms=[]", ("arms", "empty")),
    Case("compare.py --set=arms=[flax,flax]", ("arms", "twice")),
    Case("compare.py --set=arms=[flax,equinox]", ("verdicts.baseline=torch_eager", "arms")),
    Case("compare.py --set=verdicts.baseline=llama_cpp", ("verdicts.baseline=llama_cpp", "arms")),
    Case("compare.py --set=train.learning_rate=.inf", ("train.learning_rate", "finite")),
    Case(f"{TINY} --set=threads=4096", ("threads=4096", "cores")),
    Case(f"{TINY} --set=decode.new_tokens=1000", ("1008 positions", "128")),
    Case(f"{TINY} --profile --set=prefill.dtypes=[] --set=decode.dtypes=[]", ("--profile", "inference")),
    Case(
        f"{TINY} --set=prefill.dtypes=[] --set=decode.dtypes=[] --set=train.enabled=false --set=roofline.enabled=false",
        ("nothing to measure",),
    ),
    Case("compare.py --set=train.dtype=[]", ("train.dtype=[]", "train.enabled=false")),
    Case("compare.py --set=rounds.launches=1000000000000", ("rounds.launches", "10000")),
    Case("compare.py --set=rounds=null", ("rounds", "None")),
    Case("compare.py --set=a..b=1", ("a..b=1", "a.b=value")),
    Case((*TINY.split(), "--set=tpu.runs=[{config: none.yaml, topology: v5e:2x2}]"), ("none.yaml is no file",)),
    Case("train.py --set=learning_rate=.inf", ("learning_rate", "finite")),
    Case("train.py --set=learning_rate=nan", ("learning_rate", "nan")),
    Case("train.py --set=step.clip_norm=.inf", ("step.clip_norm", "finite")),
    Case("train.py --set=model.rope_theta=.inf", ("model.rope_theta", "finite")),
    Case(f"{TRAIN} --set=model.num_layers=2000000000", ("model.num_layers=2000000000", "GiB")),
    Case(f"{TRAIN} --backend=torch --set=model.d_ff=2000000000000", ("GiB",)),
    Case(f"{TRAIN} --set=batch_size=2000000000000", ("batch_size=2000000000000", "GiB")),
    Case(f"{TRAIN} --set=parallel.mesh.model=3000000000", ("mesh", "3000000000")),
    Case("train.py --config=configs/ltm/mac.yaml --set=model.num_layers=2000000000", ("num_layers=2000000000", "GiB")),
    Case(
        "train.py --config=configs/ltm/mac.yaml --set=memory.layers=null --set=model.num_layers=2000000000",
        ("num_layers=2000000000", "GiB"),
    ),
    Case(f"{TRAIN} --set=data.seq_len=100000", ("data.seq_len=100000", "model.max_seq_len")),
    Case(f"{TRAIN} --set=batch_size=3 --set=step.accumulation=2", ("batch_size=3", "step.accumulation=2")),
    # texts
    Case(f"{TRAIN} --data={{tmp}}/none.txt", ("none.txt",)),
    Case(f"{TRAIN} --data={{tmp}}", ("is no file", "--data")),
    Case(f"{TRAIN} --data=x.txt", ("x.txt", "no text"), {"x.txt": ""}),
    Case(f"{TRAIN} --data=x.txt", ("x.txt", "UTF-8"), {"x.txt": b"\xff\xfe\x00 longer than the least"}),
    Case(f"{TRAIN} --data=x.npy", ("x.npy",), {"x.npy": b"no array"}),
    Case(
        f"{TRAIN} --data=x.bin --set=model.vocab_size=null",
        ("x.bin", "model.vocab_size"),
        {"x.bin": np.arange(4000, dtype="<u2").tobytes()},
    ),
    Case(f"{TINY} --data=x.txt", ("--data=x.txt", "'tiny' has none"), {"x.txt": "text"}),
    Case(f"{TINY} --model=default --data=x.jsonl", ("x.jsonl line 1",), {"x.jsonl": '{"no": 1}\n'}),
    Case(f"{TINY} --model=default --data=x.txt", ("the text has 3", "longer --data"), {"x.txt": "a short text"}),
    Case(f"{TINY} --model=default --data=x.jsonl", ("x.jsonl line 1",), {"x.jsonl": "[" * 100_000 + "\n"}),
    Case(f"{TINY} --model=default --data=x.txt.gz", ("x.txt.gz",), {"x.txt.gz": b"\x1f\x8b\x08junk"}),
    Case(f"{TRAIN} --set=data.tokenizer=none/such.gguf", ("none/such.gguf",)),
    Case(f"{TRAIN} --set=start=x.gguf", ("x.gguf", "truncated"), {"x.gguf": b"GGUF\x03\0\0\0"}),
    Case(f"{TRAIN} --backend=torch --set=parallel={{}}", ("one device", "--backend=flax")),
    Case(
        f"{TRAIN} --backend=torch --set=step.optimizer.kind=lion",
        ("kind=lion is not in torch_ref, which has adamw, sgd;",),
    ),
    # models
    Case(f"{TINY} --model=none/such/model.gguf", ("none/such/model.gguf does not exist",)),
    Case(f"{TINY} --model=", ("model: '' names nothing",)),
    Case(f"{TINY} --model=x.gguf", ("x.gguf", "not a GGUF file"), {"x.gguf": ""}),
    Case(f"{TINY} --model=README.md", ("README.md", "not a GGUF file"), {"README.md": "# text, no model"}),
    Case(f"{TINY} --model={{tmp}}/model", ("config.json",), {"model/notes.txt": ""}),
    Case(f"{TINY} --model=x.gguf", ("x.gguf", "truncated"), {"x.gguf": gguf(EMBEDDING, cut=64)}),
    Case(f"{TINY} --model=x.gguf", ("x.gguf", "truncated"), {"x.gguf": gguf(EMBEDDING)[:60]}),
    Case(f"{TINY} --model=x.gguf", ("x.gguf", "['llama']"), {"x.gguf": gguf(EMBEDDING, architecture=["llama"])}),
    Case(f"{TINY} --model=x.gguf", ("x.gguf", "bert"), {"x.gguf": gguf(EMBEDDING, architecture="bert")}),
    Case(
        f"{TINY} --model=x.gguf",
        ("x.gguf", "token_embd.weight", "I32"),
        {"x.gguf": gguf({"token_embd.weight": ((16, 8), I32)})},
    ),
    Case(
        f"{TINY} --model=x.gguf",
        ("x.gguf", "2000000000", "layers"),
        {"x.gguf": gguf(EMBEDDING, block_count=2_000_000_000)},
    ),
    Case(f"{TINY} --model=x.gguf", ("x.gguf", "many"), {"x.gguf": gguf(EMBEDDING, block_count="many")}),
    Case(f"{TINY} --model=x.gguf", ("x.gguf",), {"x.gguf": gguf(EMBEDDING, attention__head_count=0)}),
    Case(f"{TINY} --model=x.gguf", ("x.gguf", "head_count"), {"x.gguf": gguf(EMBEDDING, attention__head_count=["2"])}),
    Case(
        f"{TINY} --model=x.gguf",
        ("x.gguf", "epsilon"),
        {"x.gguf": gguf(EMBEDDING, attention__layer_norm_rms_epsilon="small")},
    ),
    Case(f"{TINY} --model={{tmp}}/model", ("config.json", "['llama']"), folder(model_type=["llama"])),
    Case(f"{TINY} --model={{tmp}}/model", ("config.json", "{'a': 1}"), folder(model_type={"a": 1})),
    Case(f"{TINY} --model={{tmp}}/model", ("missing model.safetensors",), folder()),
    Case(f"{TINY} --model={{tmp}}/model", ("config.json",), folder(hidden_size="wide")),
    Case(f"{TINY} --model={{tmp}}/model", ("config.json",), folder(hidden_size=None)),
    Case(f"{TINY} --model={{tmp}}/model", ("config.json",), folder(rope_scaling=[1])),
    Case(f"{TINY} --model={{tmp}}/model", ("config.json",), folder(rope_theta=float("inf"))),
    Case(f"{TINY} --model={{tmp}}/model", ("is_causal=False", "wanted True"), folder(is_causal=False)),
    Case(
        f"{TINY} --model={{tmp}}/model",
        ("config.json: yarn with rope_theta=1.0", "wanted more than 1"),
        folder(rope_theta=1, rope_scaling={"rope_type": "yarn", "factor": 2.0}),
    ),
    Case(
        f"{TINY} --model={{tmp}}/model",
        ("holds model.safetensors beside an index", "wanted one of them"),
        index({"model.norm.weight": "a.safetensors"}) | {"model/model.safetensors": ""},
    ),
    Case(
        f"{TINY} --model=x.gguf",
        ("x.gguf", "llama.rope.scaling.attn_factor=2.0", "wanted 1.0"),
        {"x.gguf": gguf(EMBEDDING, rope__scaling__attn_factor=2.0)},
    ),
    Case(f"{TINY} --model={{tmp}}/model", ("weight_map", "list"), index(["model.safetensors"])),
    Case(f"{TINY} --model={{tmp}}/model", ("weight_map", "NoneType"), index(None)),
    Case(f"{TINY} --model={{tmp}}/model", ("weight_map", "5"), index({"model.norm.weight": 5})),
    Case(f"{TINY} --model={{tmp}}/model", ("config.json",), {"model/config.json": "[" * 100_000}),
    Case(
        f"{TINY} --model={{tmp}}/model",
        ("model.safetensors", "truncated or corrupt"),
        folder() | {"model/model.safetensors": b"\x10\x00\x00\x00\x00\x00\x00\x00{}"},
    ),
    Case(f"{TINY} --model=configs/lm/tiny.yaml", ("configs/lm/tiny.yaml", "model.vocab_size")),
    Case(f"{TINY} --model=x.yaml", ("x.yaml",), {"x.yaml": "model: 3\n"}),
    Case(f"{TINY} --model=x.yaml", ("GiB", "available"), {"x.yaml": DEEP}),
]
