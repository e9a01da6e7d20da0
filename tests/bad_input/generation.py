"""Bad input of generate.py: flags, prompts, files of requests, outputs, models."""

from __future__ import annotations

import json

from tests.bad_input.harness import Case

REQUESTS = '{"prompt": "One."}\n{"prompt": "Two."}\n'
DEEP = '{"prompt": ' + "[" * 50_000 + "]" * 50_000 + "}\n"
BINARY = bytes(range(256)) * 20
LONG = "word " * 9000  # more tokens than the default model's context


def of(words: str, *wanted: str, **files: str | bytes) -> Case:
    """Return a case; underscores in the names of files stand for dots."""
    given = {"a.jsonl": REQUESTS} | {name.replace("_", "."): content for name, content in files.items()}
    return Case(("generate.py", *(word for word in words.split("|") if word)), wanted, given)


def line(content: object, *wanted: str) -> Case:
    """Return a case whose second line is bad."""
    text = content if isinstance(content, str) else json.dumps(content)
    return of("--input=x.jsonl|--output=o.jsonl", "x.jsonl line 2", *wanted, x_jsonl='{"prompt": "One."}\n' + text)


WORDS = {"type": "WordLevel", "vocab": {"a": 0, "Hello": 1}, "unk_token": "a"}
PARTS = dict.fromkeys(("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor", "decoder"))


def tokenizer(words: str, *wanted: str, added: dict[str, int] | None = None, **settings: object) -> Case:
    """Return a case whose folder has a tokenizer with these settings, added tokens, and no weights."""
    content = {"tokenizer.json": PARTS | {"version": "1.0", "added_tokens": [], "model": WORDS}}
    content |= {"tokenizer_config.json": settings, "added_tokens.json": added or {}}
    files = {f"model/{name}": json.dumps(values) for name, values in content.items()}
    return Case(("generate.py", *words.split("|"), "--model={tmp}/model"), wanted, files)


ONE = "--prompt=Hello"
MANY = "--input=a.jsonl|--output=o.jsonl"

CASES = [
    of("", "--prompt is missing", "--chat", "--input"),
    of("--new_tokens=4", "--prompt is missing"),
    of("--prompt=", "--prompt is empty"),
    of("--prompt=a\udcffb", "--prompt has a lone surrogate", "'a\\udcffb'"),
    of(f"{ONE}|--input=a.jsonl", "--prompt='Hello'", "--input=a.jsonl", "one of them"),
    of(f"{ONE}|--promt=a", "--promt", "nearest is --prompt"),
    of("Hello", "'Hello' is not a flag"),
    of(f"{ONE}|--system=Be brief.", "--system='Be brief.'", "needs --chat"),
    of(f"{ONE}|--chat|--system=", "--system is empty"),
    of(f"{ONE}|--chat_template_kwargs={{}}", "--chat_template_kwargs='{}' needs --chat"),
    of(f"{ONE}|--chat|--chat_template_kwargs={{a", "--chat_template_kwargs='{a' is no JSON"),
    of(f"{ONE}|--chat|--chat_template_kwargs=[]", "'[]' is a list, wanted a JSON object"),
    of(f'{ONE}|--chat|--chat_template_kwargs={{"a":{"[" * 100}{"]" * 100}}}', "nested more than 100 deep"),
    of(
        f'{ONE}|--chat|--chat_template_kwargs={{"enable_thinking":false}}', "--prompt: 'enable_thinking' is no variable"
    ),
    of(f'{ONE}|--chat|--chat_template_kwargs={{"a":1,"a":2}}', "has the key 'a' twice"),
    of(f"{ONE}|--logit_bias=[5]", "--logit_bias='[5]' is a list, wanted a JSON object"),
    of(f'{ONE}|--logit_bias={{"the":5}}', "--logit_bias=", "has the key 'the', wanted ids of tokens"),
    of(f'{ONE}|--logit_bias={{"5":1,"5":2}}', "--logit_bias=", "has the key '5' twice"),
    of(f'{ONE}|--logit_bias={{"5":"1"}}', "logit_bias of token 5 is '1'", "from -100 to 100"),
    of(f'{ONE}|--logit_bias={{"5":-Infinity}}', "logit_bias of token 5 is -inf", "from -100 to 100"),
    of(f'{ONE}|--logit_bias={{"49152":1}}', "logit_bias of token 49152, wanted ids below 49152"),
    of(f'{MANY}|--chat_template_kwargs={{"a":1}}', "with a.jsonl: its 2 requests have no messages"),
    of(f"{ONE}|--new_tokens=0", "new_tokens", "0"),
    of(f"{ONE}|--new_tokens=many", "new_tokens", "many"),
    of(f"{ONE}|--new_tokens=9000", "--prompt has 1 tokens", "context of 8192", "--new_tokens=8191 or less"),
    of(f"--prompt={LONG}", "--prompt has 9", "context of 8192", "shorten it"),
    of(f"{ONE}|--temperature=-1", "temperature=-1.0"),
    of(f"{ONE}|--temperature=nan", "temperature=nan"),
    of(f"{ONE}|--temperature=1e-9", "temperature=1e-09", "at least 1e-06"),
    of(f"{ONE}|--temperature=hot", "temperature", "hot"),
    of(f"{ONE}|--temperature=1|--top_k=-1", "top_k=-1"),
    of(f"{ONE}|--temperature=1|--top_p=0", "top_p=0.0", "in (0, 1]"),
    of(f"{ONE}|--temperature=1|--top_p=1.5", "top_p=1.5"),
    of(f"{ONE}|--temperature=1|--min_p=1", "min_p=1.0", "in [0, 1)"),
    of(f"{ONE}|--repetition_penalty=0", "repetition_penalty=0.0", "from 1e-06 to 1000000"),
    of(f"{ONE}|--frequency_penalty=2.5", "frequency_penalty=2.5", "from -2 to 2"),
    of(f"{ONE}|--presence_penalty=nan", "presence_penalty=nan", "from -2 to 2"),
    of(f"{ONE}|--top_k=5", "--top_k=5", "--temperature=0"),
    of(f"{ONE}|--top_p=0.9", "--top_p=0.9", "--temperature=0"),
    of(f"{ONE}|--seed=-1", "seed", "-1"),
    of(f"{ONE}|--stop=", "--stop is empty"),
    of(f"{ONE}|--output=o.jsonl", "--output=o.jsonl needs --input"),
    of(f"{ONE}|--batch_size=4", "--batch_size=4 needs --input"),
    of(f"{MANY}|--stream", "--stream=True does nothing with --input"),
    of(f"{ONE}|--backend=jax", "jax", "flax|equinox|torch"),
    of(f"{ONE}|--device=gpu", "--device=gpu"),
    of(f"{ONE}|--device=cuda", "cuda", "cpu|gpu|tpu"),
    of(f"{ONE}|--backend=torch|--device=tpu", "--device=tpu"),
    of(f"{ONE}|--tensor_parallel=0", "tensor_parallel", "0"),
    of(f"{ONE}|--tensor_parallel=2", "--tensor_parallel=2 does not divide the model's num_kv_heads=3; wanted 1 or 3"),
    of(f"{ONE}|--tensor_parallel=3|--backend=equinox", "--tensor_parallel=3: --backend=equinox", "flax or torch"),
    of(f"{MANY}|--tensor_parallel=3|--backend=torch", "--tensor_parallel=3 with --input=a.jsonl", "--backend=flax"),
    of(f"{ONE}|--tensor_parallel=3|--kernels=native", "--kernels=native: native kernels are for one device"),
    of(f"{ONE}|--tensor_parallel=3|--weights=q4_0", "--weights=q4_0", "--tensor_parallel=3", "float32 or bfloat16"),
    of(f"{ONE}|--tensor_parallel=3|--cache=int8", "--cache=int8 is for native kernels alone", "--tensor_parallel=3"),
    of(f"{ONE}|--kernels=fast", "fast", "auto|native|xla"),
    of(f"{ONE}|--kernels=xla|--cache=int8", "--cache=int8 is for native kernels alone"),
    of(f"{ONE}|--kernels=xla|--activations=int8", "--activations=int8 is for native kernels alone"),
    of(f"{ONE}|--kernels=xla|--threads=2", "--threads=2 is for native kernels alone"),
    of(f"{ONE}|--kernels=xla|--weights=q8_0", "--weights=q8_0", "float32 or bfloat16"),
    of(f"{ONE}|--weights=q9_0", "q9_0", "q8_0"),
    of(f"{ONE}|--threads=-1", "threads", "-1"),
    of(f"{ONE}|--model=none.gguf", "none.gguf does not exist"),
    of(f"{ONE}|--model=x.gguf", "x.gguf", "not a GGUF file", x_gguf=BINARY),
    of(f"{ONE}|--model=", "names nothing"),
    of(f"{ONE}|--model={{tmp}}", "missing tokenizer.json"),
    tokenizer(f"{ONE}|--chat", "the model's template failed: division by zero", chat_template="{{ 1 / 0 }}"),
    tokenizer(f"{ONE}|--chat", "the model's template failed: 'bos_token' is", chat_template="{{ bos_token + 'a' }}"),
    tokenizer(f"{ONE}|--chat", "tokenizer_config.json: chat_template is 5", "wanted a text", chat_template=5),
    tokenizer(ONE, "added_tokens.json: the added token 'b' has id 7, and 2 in tokenizer.json", added={"b": 7}),
    tokenizer(ONE, "tokenizer_config.json: its added tokens cannot be read", added_tokens_decoder=[1]),
    of("--input=a.jsonl", "--input=a.jsonl needs --output"),
    of("--input=none.jsonl|--output=o.jsonl", "none.jsonl", "No such file"),
    of("--input={tmp}|--output=o.jsonl", "Is a directory"),
    of("--input=a.jsonl|--output=a.jsonl", "--output=a.jsonl is the input a.jsonl"),
    of("--input=a.jsonl|--output=a.jsonl|--overwrite", "--output=a.jsonl is the input a.jsonl"),
    of("--input=a.jsonl|--output=o.json", "o.json has an unknown suffix", ".jsonl"),
    of("--input=a.jsonl|--output=a.jsonl/o.jsonl", "a.jsonl is a file"),
    of(MANY, "o.jsonl exists", "o.jsonl.run.json", "--overwrite", o_jsonl="mine\n"),
    of(MANY, "o.jsonl holds rows made with other", o_jsonl="mine\n", o_jsonl_run_json="{}"),
    of(MANY, "o.jsonl.run.json", "cannot be read as JSON", o_jsonl="mine\n", o_jsonl_run_json="{"),
    of(f"{MANY}|--batch_size=0", "batch_size", "0"),
    of(f"{MANY}|--new_tokens=8192", "a.jsonl line 1 has 2 tokens", "--new_tokens=8190 or less"),
    of("--input=x.jsonl|--output=o.jsonl", "x.jsonl holds no request", x_jsonl="\n"),
    of("--input=x.jsonl|--output=o.jsonl", "x.jsonl line 1: not JSON", x_jsonl=BINARY),
    line("{broken", "not JSON", "column 2"),
    line(DEEP, "line 2: "),
    line([1], "holds a list"),
    line({}, "neither prompt nor messages"),
    line({"prompt": ""}, "prompt is empty"),
    line({"prompt": None}, "prompt is a NoneType"),
    line({"prompt": "a", "text": "b"}, "the key 'text'", "rename it"),
    line('{"prompt": "a", "prompt": "b"}', "the key 'prompt' twice", "wanted once"),
    of(f"{MANY}|--system=Be brief.", "--system='Be brief.' does nothing with a.jsonl", "2 requests", "--chat"),
    line({"messages": []}, "messages is an empty list"),
    line({"messages": [{"role": "user"}]}, "content of message 1 is missing"),
    line({"messages": [{"role": "user", "content": 5}]}, "content of message 1 is a int"),
]
