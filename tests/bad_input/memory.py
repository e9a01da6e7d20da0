"""Bad input of memory.py: arms, cost, speed, stability."""

from __future__ import annotations

import json

from tests.bad_input.harness import Case

ARMS = "memory.py arms --workdir={tmp}/out "
BOOKS = ARMS + "--config=configs/memory/books.yaml "
COST = "memory.py cost --workdir={tmp}/out "
SPEED = "memory.py speed --workdir={tmp}/out "
STABILITY = "memory.py stability --workdir={tmp}/out "
SHORT = json.dumps({"text": "A short story. " * 20}) + "\n"
RECORD = {"identity": {"run": ["recall", "plain", 0.001, 0]}, "held_out": 0.5, "factors": {}}


def _set(command: str, *changes: str) -> tuple[str, ...]:
    """Return a command line with settings changed; values may hold spaces."""
    return (*command.split(), *(f"--set={change}" for change in changes))


COMMANDS = [
    Case("memory.py arm", ("'arm'", "nearest is arms")),
    Case("memory.py arms cost", ("'cost' is not a flag",)),
    Case("memory.py arms --seeds=3", ("--seeds", "no flag")),
    Case("memory.py cost --part=1/2", ("--part", "no flag")),
    Case("memory.py cost --device=tpu", ("--device=tpu",)),
    Case("memory.py cost --device=gpu", ("--device=gpu", "this machine has none")),
    Case("memory.py speed --device=tpu", ("--device=tpu",)),
    Case("memory.py speed --device=gpu", ("--device=gpu", "this machine has none")),
    Case("memory.py stability --device=gpu", ("--device",)),
    Case("memory.py cost --config={tmp}/none.yaml", ("none.yaml", "no file")),
    Case("memory.py speed --config={tmp}", ("config",)),
    Case("memory.py arms --config=", ("config",)),
    Case("memory.py stability --config={tmp}/bytes.yaml", ("bytes.yaml",), {"bytes.yaml": b"\xff\xfe\x00\x01"}),
    Case("memory.py arms --config={tmp}/empty.yaml", ("empty.yaml", "'window' is missing"), {"empty.yaml": ""}),
    Case("memory.py cost --config={tmp}/empty.yaml", ("'layer' is missing",), {"empty.yaml": "\n"}),
    Case("memory.py speed --config={tmp}/list.yaml", ("list.yaml", "mapping"), {"list.yaml": "[1, 2]"}),
    Case("memory.py stability --config=configs/memory/cost.yaml", ("cost.yaml", "unknown")),
    Case("memory.py arms --workdir={tmp}/taken", ("taken",), {"taken": "a file"}),
    Case("memory.py cost --workdir={tmp}/taken", ("taken",), {"taken": "a file"}),
    Case("memory.py speed --workdir={tmp}/taken", ("taken",), {"taken": "a file"}),
    Case("memory.py stability --workdir={tmp}/taken", ("taken",), {"taken": "a file"}),
]

PARTS = [
    Case(ARMS + f"--part={part}", (f"--part={part}", "k/n"))
    for part in ("0/2", "3/2", "1/0", "2", "a/b", "-1/2", "1.5/2")
]

RUNS = [
    Case(_set(ARMS, "seeds=[]"), ("seeds", "empty")),
    Case(_set(ARMS, "seeds=3"), ("seeds", "valid tuple")),
    Case(_set(ARMS, "seeds=[-1]"), ("seeds.0", "-1")),
    Case(_set(ARMS, "seeds=[1099511627776]"), ("seeds.0", "less than")),  # the held-out rows are that seed's
    Case(_set(ARMS, "seeds=[0, 1, 0]"), ("seeds", "0 is given twice")),
    Case(_set(ARMS, "seeds=[0.5]"), ("seeds.0", "0.5")),
    Case(_set(ARMS, "learning_rates=[]"), ("learning_rates", "empty")),
    Case(_set(ARMS, "learning_rates=1e-3"), ("learning_rates", "valid tuple")),
    Case(_set(ARMS, "learning_rates=[0]"), ("learning_rates.0", "greater than 0")),
    Case(_set(ARMS, "learning_rates=[-1.0e-3]"), ("learning_rates.0", "greater than 0")),
    Case(_set(ARMS, "learning_rates=[.inf]"), ("learning_rates.0", "finite")),
    Case(_set(ARMS, "learning_rates=[.nan]"), ("learning_rates.0", "finite")),
    Case(_set(ARMS, "learning_rates=[1.0e-3, 0.001]"), ("learning_rates", "0.001 is given twice")),
    Case(_set(ARMS, "learning_rates=[fast]"), ("learning_rates.0", "'fast'")),
    Case(_set(ARMS, "arms.plain.seeds=[]"), ("arms.plain.seeds", "empty")),
    Case(_set(ARMS, "arms.plain.learning_rates=[]"), ("arms.plain.learning_rates", "empty")),
    Case(_set(ARMS, "steps=0"), ("steps", "greater than or equal to 1")),
    Case(_set(ARMS, "steps=1.5"), ("steps", "1.5")),
    Case(_set(ARMS, "steps=true"), ("steps", "true")),
    Case(_set(ARMS, "step=5"), ("'step' is unknown", "nearest is steps")),
    Case(_set(ARMS, "task_steps.copy=5"), ("task_steps", "copy", "recall, passkey")),
    Case(_set(ARMS, "task_steps.recall=0"), ("task_steps", "recall: 0")),
    Case(_set(ARMS, "batch_size=0"), ("batch_size",)),
    Case(_set(ARMS, "warmup_steps=-1"), ("warmup_steps",)),
    Case(_set(ARMS, "clip_norm=.inf"), ("clip_norm", "finite")),
    Case(_set(ARMS, "weight_decay=-0.1"), ("weight_decay",)),
    Case(_set(ARMS, "factors=[]"), ("factors", "empty")),
    Case(_set(ARMS, "factors=[0]"), ("factors.0", "greater than or equal to 1")),
    Case(_set(ARMS, "factors=[1, 1]"), ("factors", "1 is given twice")),
    Case(_set(ARMS, "test_rows=1"), ("test_rows", "8")),
    Case(_set(ARMS, "seeds"), ("'seeds'", "key=value")),
    Case(_set(ARMS, "seeds=[0"), ("seeds", "YAML")),
]

DECODERS = [
    Case(_set(ARMS, "window=0"), ("window", "greater than 0")),
    Case(_set(ARMS, "window=8"), ("window of", "is 4", "window=8")),
    Case(_set(ARMS, "arms={}"), ("arms", "at least 1 item")),
    Case(_set(ARMS, "arms=[plain]"), ("arms", "valid dictionary")),
    Case(_set(ARMS, "arms.plain=5"), ("arms.plain",)),
    Case(_set(ARMS, "arms.plain.d_ff=0"), ("arms.plain.d_ff", "greater than 0")),
    Case(_set(ARMS, "arms.plain.d_ff=500"), ("parameters", "change its d_ff")),
    Case(_set(ARMS, "arms.plain.window=0"), ("arms.plain.window", "greater than 0")),
    Case(_set(ARMS, "arms.mag.against=mga"), ("mag is against mga",)),
    Case(_set(ARMS, "arms.mag.memory.kind=mga"), ("arms.mag.memory.kind", "'mag'")),
    Case(_set(ARMS, "arms.mag.memory.layers=[2]"), ("layers=[2]", "0 to 1")),
    Case(_set(ARMS, "arms.mag.memory.layers=[-1]"), ("layers=[-1]", "0 to 1")),
    Case(_set(ARMS, "arms.mag.memory.layers=[]"), ("layers=[]", "0 to 1")),
    Case(_set(ARMS, "arms.mag.memory.layers=[1, 1]"), ("layers=[1, 1]", "different")),
    Case(_set(ARMS, "arms.mag.memory.layers=1"), ("arms.mag.memory.layers", "valid tuple")),
    Case(_set(ARMS, "arms.mag.memory.window=0"), ("arms.mag.memory.window", "greater than 0")),
    Case(_set(ARMS, "arms.mag.memory.insert=true"), ("insert", "lmm")),
    Case(_set(ARMS, "arms.mag.memory.neural=null"), ("kind=mag", "neural")),
    Case(_set(ARMS, "arms.mag.memory.neural.d_model=32"), ("neural.d_model=32", "d_model=64")),
    Case(_set(ARMS, "arms.mag.memory.neural.chunk_size=0"), ("chunk_size", "greater than 0")),
    Case(_set(ARMS, "arms.mac.memory.neural.chunk_size=8"), ("chunk_size=4", "got 8")),
    Case(_set(ARMS, "arms.mag.memory.neural.depth=5"), ("depth", "less than or equal to 4")),
    Case(_set(ARMS, "arms.mag.memory.neural={d_model: 64, num_heads: 2, head_dim: 32, depth: 0, num_persistent: 4}"),
         ("depth=0", "num_persistent=0")),
    Case(_set(ARMS, "arms.mag.memory.neural.activation=relu"), ("activation", "gelu_erf")),
    Case(_set(ARMS, "arms.mag.memory.neural.read=after"), ("read", "'before'")),
    Case(_set(ARMS, "arms.mag.memory.neural.initial_theta=1.5"), ("initial_theta=1.5", "max_theta=1.0")),
    Case(_set(ARMS, "arms.mag.memory.neural.max_update_norm=.nan"), ("max_update_norm",)),
    Case(_set(ARMS, "arms.bank.memory.bank.ratio=3"), ("block_size=4", "ratio=3")),
    Case(_set(ARMS, "arms.bank.memory.bank.num_heads=1"), ("bank.num_heads=2", "got 1")),
    Case(_set(ARMS, "decoder.num_heads=0"), ("decoder.num_heads", "greater than 0")),
    Case(_set(ARMS, "decoder.head_dim=31"), ("head_dim=31", "even")),
    Case(_set(ARMS, "decoder.initial_std=0"), ("initial_std",)),
]  # fmt: skip

TASKS = [
    Case(_set(ARMS, "tasks={}"), ("tasks", "at least 1 item")),
    Case(_set(ARMS, "tasks.recall.task=recal"), ("tasks.recall", "'recall'")),
    Case(_set(ARMS, "tasks.more={length: 8}"), ("tasks.more", "discriminator 'task'")),
    Case(_set(ARMS, "tasks.recall.length=8"), ("length=8", "48")),
    Case(_set(ARMS, "tasks.recall.length=[64]"), ("tasks.recall", "length")),
    Case(_set(ARMS, "tasks.recall.items=100"), ("items=100", "vocab_size=64")),
    Case(_set(ARMS, "tasks.passkey.items=0"), ("items", "greater than or equal to 1")),
    Case(_set(ARMS, "tasks.recall.vocab_size=2"), ("vocab_size", "8")),
    Case(BOOKS + "--set=tasks.books.path={tmp}/none.txt", ("none.txt", "no file")),
    Case(BOOKS + "--set=tasks.books.path={tmp}", ("unknown suffix",)),
    Case(BOOKS + "--set=tasks.books.path={tmp}/a.pdf", ("a.pdf", "unknown suffix"), {"a.pdf": "%PDF"}),
    Case(BOOKS + "--set=tasks.books.path={tmp}/a.txt", ("a.txt",), {"a.txt": ""}),
    Case(BOOKS + "--set=tasks.books.path={tmp}/a.txt", ("a.txt", "UTF-8"), {"a.txt": b"\xff\xfe\xfd"}),
    Case(BOOKS + "--set=tasks.books.path={tmp}/a.jsonl.gz", ("a.jsonl.gz",), {"a.jsonl.gz": b"no gzip"}),
    Case(BOOKS + "--set=tasks.books.path={tmp}/a.jsonl", ("a.jsonl", "line 1"), {"a.jsonl": '{"body": "x"}\n'}),
    Case(BOOKS + "--set=tasks.books.path={tmp}/ids.npy", ("ids.npy", "wanted a text"), {"ids.npy": b"\x93NUMPY"}),
    Case(BOOKS + "--set=tasks.books.path={tmp}/a.jsonl", ("length=256", "longer text"), {"a.jsonl": SHORT}),
    # rows to train on and to choose by fit, those of 1,024 bytes do not: said before anything is trained
    Case(BOOKS + "--set=tasks.books.path={tmp}/a.jsonl", ("length=1024", "longer text"), {"a.jsonl": 20 * SHORT}),
    Case(BOOKS + "--set=tasks.books.held_out_share=1", ("held_out_share", "less than 1")),
    Case(BOOKS + "--set=tasks.books.length=0", ("length", "greater than 0")),
]

RECORDS = [
    Case(ARMS, ("runs-1-of-1.jsonl line 1", "no record"), {"out/runs-1-of-1.jsonl": "[]\n"}),
    Case(ARMS, ("runs-1-of-2.jsonl line 1", "no record"), {"out/runs-1-of-2.jsonl": b"\xff\xfe\n"}),
    Case(ARMS, ("runs-1-of-1.jsonl line 2", "no record"), {"out/runs-1-of-1.jsonl": json.dumps(RECORD) + "\n\n"}),
    Case(
        ARMS,
        ("runs-1-of-1.jsonl line 1",),
        {"out/runs-1-of-1.jsonl": json.dumps(RECORD | {"identity": {"run": [[], 1, 2, 3]}}) + "\n"},
    ),
    Case(ARMS, ("runs-1-of-1.jsonl",), {"out/runs-1-of-1.jsonl/folder": ""}),
]

COSTS = [
    Case(_set(COST, "lengths=[]"), ("lengths", "empty")),
    Case(_set(COST, "lengths=[-5]"), ("lengths.0", "greater than or equal to 1")),
    Case(_set(COST, "lengths=[0]"), ("lengths.0", "greater than or equal to 1")),
    Case(_set(COST, "lengths=[1]"), ("length 1", "at least 2")),
    Case(_set(COST, "segment=1"), ("segment", "greater than or equal to 2")),
    Case(_set(COST, "lengths=2048"), ("lengths", "valid tuple")),
    Case(_set(COST, "lengths=[2048, 2048]"), ("lengths", "2048 is given twice")),
    Case(_set(COST, "lengths=[3000]"), ("3000", "segment=2048")),
    Case(_set(COST, "lengths=[1000000000000]"), ("lengths.0", "less than or equal to")),
    Case(_set(COST, "lengths=[.inf]"), ("lengths.0",)),
    Case(_set(COST, "segment=0"), ("segment",)),
    Case(_set(COST, "repeats=0"), ("repeats",)),
    Case(_set(COST, "max_bytes=0"), ("max_bytes",)),
    Case(_set(COST, "max_flops=.nan"), ("max_flops", "finite")),
    Case(_set(COST, "layer=5"), ("layer",)),
    Case(_set(COST, "layer.window=0"), ("layer.window",)),
    Case(_set(COST, "layer.key_block=0"), ("layer.key_block",)),
    Case(_set(COST, "layer.num_heads=0"), ("layer.num_heads",)),
    Case(_set(COST, "layer.head_dim=63"), ("head_dim=63", "even")),
    Case(_set(COST, "layer.d_model=128"), ("d_model=256", "d_model=128")),
    Case(_set(COST, "layer.bank.memory_slots=500"), ("memory_slots=500", "32")),
    Case(_set(COST, "layer.bank=null"), ("layer.bank",)),
    Case(_set(COST, "layer.bank.compresion=max"), ("compresion", "nearest is layer.bank.compression")),
    Case(_set(COST, "layer.neural.chunk_size=-4"), ("chunk_size",)),
]

SPEEDS = [
    Case(_set(SPEED, "networks=[]"), ("networks", "empty")),
    Case(_set(SPEED, "networks=paper"), ("networks", "valid tuple")),
    Case(_set(SPEED, "networks.0.name=x"), ("networks", "no keys below")),
    Case(
        _set(SPEED, "networks=[{name: a, shape: {d_model: 8, num_heads: 2, head_dim: 4, depth: 0}}]"), ("a", "depth=0")
    ),
    Case(_set(SPEED, "networks=[{name: a, shape: {d_model: 8, num_heads: 2, head_dim: 4}, reads: []}]"), ("reads",)),
    Case(_set(SPEED, "networks=[{name: a, shape: {d_model: 8, num_heads: 2}}]"), ("head_dim", "missing")),
    Case(
        _set(
            SPEED,
            "networks=[{name: a, shape: &s {d_model: 8, num_heads: 1, head_dim: 4}}, "
            "{name: a, shape: *s, reads: [token]}]",
        ),
        ("two networks", "named a"),
    ),
    Case(_set(SPEED, "engines=[]"), ("engines", "empty")),
    Case(_set(SPEED, "engines=[jnp]"), ("engines.0", "'flax'")),
    Case(_set(SPEED, "engines=[flax, flax]"), ("engines", "flax is given twice")),
    Case(_set(SPEED, "batch=0"), ("batch",)),
    Case(_set(SPEED, "length=-1"), ("length",)),
    Case(_set(SPEED, "launches=1"), ("launches", "2")),
    Case(_set(SPEED, "repeats=0"), ("repeats",)),
    Case(_set(SPEED, "memory_lengths=[]"), ("memory_lengths", "empty")),
    Case(_set(SPEED, "memory_lengths=[0]"), ("memory_lengths.0",)),
    Case(_set(SPEED, "slope_lengths=[]"), ("slope_lengths", "empty")),
    Case(_set(SPEED, "slope_lengths=[1024]"), ("slope_lengths=[1024]", "at least 2")),
    Case(_set(SPEED, "slope_lengths=[1024, -2]"), ("slope_lengths.1",)),
    Case(_set(SPEED, "slope_lengths=[1024, 1024]"), ("slope_lengths", "1024 is given twice")),
]

STABILITIES = [
    Case(_set(STABILITY, "depths=[]"), ("depths", "empty")),
    Case(_set(STABILITY, "depths=[0]"), ("depths.0", "greater than or equal to 1")),
    Case(_set(STABILITY, "depths=[2, 7]"), ("depths.1", "less than or equal to 4")),
    Case(_set(STABILITY, "depths=[2, 2]"), ("depths", "2 is given twice")),
    Case(_set(STABILITY, "depths=2"), ("depths", "valid tuple")),
    Case(_set(STABILITY, "steps=0"), ("steps",)),
    Case(_set(STABILITY, "length=0"), ("length",)),
    Case(_set(STABILITY, "length=16000000"), ("length=16000000", "bytes of the default text")),
    Case(_set(STABILITY, "batch=0"), ("batch",)),
    Case(_set(STABILITY, "learning_rate=.inf"), ("learning_rate", "finite")),
    Case(_set(STABILITY, "learning_rate=[1.0e-3]"), ("learning_rate", "valid number")),
    Case(_set(STABILITY, "seed=-1"), ("seed", "greater than or equal to 0")),
    Case(_set(STABILITY, "memory=null"), ("memory",)),
    Case(_set(STABILITY, "memory.head_dim=0"), ("memory.head_dim",)),
    Case(_set(STABILITY, "memory.max_update_norm=0"), ("max_update_norm",)),
    Case(_set(STABILITY, "memory.initial_eta=1"), ("initial_eta", "less than 1")),
]

CASES = COMMANDS + PARTS + RUNS + DECODERS + TASKS + RECORDS + COSTS + SPEEDS + STABILITIES
