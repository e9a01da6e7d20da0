"""Bad input of hallucination.py: flags, folders of responses, stored scores, models."""

from __future__ import annotations

import datetime
import io
import json

import pyarrow as pa
import pyarrow.parquet as pq

from tests.bad_input.core import folder
from tests.bad_input.harness import Case

SOURCE = {"source_id": "s1", "task": "QA", "question": "when", "context": "The mill was built in 1820."}
LABEL = {"start": 0, "end": 2, "label_type": "Evident Conflict"}
RESPONSE = {"id": "r1", "source_id": "s1", "model": "one", "response": "In 1820.", "labels": []}
SCORES = {"response": 0, "chunk_label": 0, "external": {"a": 1.0, "b": 2.0}, "parametric": {"c": 0.5}}
FEATURES = ("features", "--data={tmp}/data", "--workdir={tmp}/out")


def data(source: dict | str | None = None, response: dict | str | None = None) -> dict[str, str | bytes]:
    """Return the files of a folder with a changed source or response, or with other text in its place."""
    lines = {"sources": (SOURCE, source), "responses": (RESPONSE, response)}
    return {
        f"data/{name}.jsonl": change if isinstance(change, str) else json.dumps(plain | (change or {}))
        for name, (plain, change) in lines.items()
    }


def read(*wanted: str, words: str = "", **changes: dict | str) -> Case:
    """Return a case of `features` on a bad folder, or with bad flags."""
    return Case(("hallucination.py", *FEATURES, *words.split()), wanted, data(**changes))


def regress(text: str | dict, *wanted: str, words: str = "") -> Case:
    """Return a case of `redeep` on bad scores: a changed first row of two, or the whole file."""
    if isinstance(text, dict):
        text = json.dumps(SCORES | text) + "\n" + json.dumps(SCORES | {"response": 1, "chunk_label": 1})
    return Case(("hallucination.py", "redeep", "--scores={tmp}/s.jsonl", *words.split()), wanted, {"s.jsonl": text})


def detect(
    row: dict | str, *wanted: str, words: str = "", names: tuple[str, ...] = ("d", "i.jsonl"), d: str = ""
) -> Case:
    """Return a case of `detect` on a changed row, or other text in its place; names: the files that are there."""
    text = row if isinstance(row, str) else json.dumps({"context": "a", "question": "b", "response": "c"} | row)
    files: dict[str, str | bytes] = {"d": d, "i.jsonl": text, "i.csv": text, "i.parquet": text}
    command = "hallucination.py detect --detector={tmp}/d --input={tmp}/i.jsonl --output={tmp}/o.jsonl"
    return Case((*command.split(), *words.split()), wanted, {k: v for k, v in files.items() if k in names})


def table(**columns: list) -> bytes:
    """Return a Parquet file of these columns."""
    sink = io.BytesIO()
    pq.write_table(pa.table(columns), sink)
    return sink.getvalue()


def heads(words: str, *wanted: str, **files: str | bytes) -> Case:
    """Return a case of `copy_heads`; underscores in the names of files stand for dots."""
    given = {name.replace("_", "."): content for name, content in files.items()}
    return Case(("hallucination.py", "copy_heads", *words.split()), wanted, given)


def export(words: str, *wanted: str, **files: str | bytes) -> Case:
    """Return a case of `export`; a double underscore in the names of files stands for a slash, one for a dot."""
    given = {name.replace("__", "/").replace("_", "."): content for name, content in files.items()}
    return Case(("hallucination.py", "export", *words.split()), wanted, given)


def answer(row: dict | str, *wanted: str, words: str = "", names: tuple[str, ...] = ("i.jsonl",)) -> Case:
    """Return a case of `answer` on a changed row, or other text in its place."""
    text = row if isinstance(row, str) else json.dumps({"context": "a", "question": "b"} | row)
    command = "hallucination.py answer --input={tmp}/i.jsonl --output={tmp}/o.jsonl"
    return Case(
        (*command.split(), *words.split()),
        wanted,
        {k: v for k, v in {"i.jsonl": text, "o.jsonl": "mine"}.items() if k in names},
    )


def scores(row: dict | str, *wanted: str, words: str = "", names: tuple[str, ...] = ("i.jsonl",)) -> Case:
    """Return a case of `scores` on a changed row, or other text in its place."""
    text = row if isinstance(row, str) else json.dumps({"context": "a", "question": "b", "response": "c"} | row)
    command = "hallucination.py scores --input={tmp}/i.jsonl --output={tmp}/o.jsonl --workdir={tmp}/out"
    files: dict[str, str | bytes] = {"i.jsonl": text, "i.csv": text, "i.parquet": text, "o.jsonl": "mine"}
    return Case((*command.split(), *words.split()), wanted, {k: v for k, v in files.items() if k in names})


CASES = [
    Case("hallucination.py feature", ("'feature' is no command", "features")),
    Case("hallucination.py detect_all", ("no command",)),
    Case("hallucination.py features", ("--data is missing",)),
    Case("hallucination.py features --data={tmp}/none", ("0 files sources",)),
    Case("hallucination.py features --data={tmp}/x", ("0 files sources",), {"x/responses.jsonl": "{}"}),
    Case("hallucination.py features --data={tmp}/x", ("0 responses",), {"x/sources.jsonl": json.dumps(SOURCE)}),
    Case("hallucination.py redeep", ("--scores is missing",)),
    Case("hallucination.py redeep --scores={tmp}/none.jsonl", ("none.jsonl is no file",)),
    read("sources.jsonl line 1", "no JSON", source="{"),
    read("responses.jsonl line 1", "no JSON", response="{'id': 1}"),
    read("task", "Poem", source={"task": "Poem"}),
    read("context", "valid string", source={"context": None}),
    read("source_id", "5", source={"source_id": 5}),
    read("response", "valid string", response={"response": 3}),
    read("responses.jsonl line 1", "names source s9", "sources.jsonl", response={"source_id": "s9"}),
    read("2..1 is outside", response={"labels": [LABEL | {"start": 2, "end": 1}]}),
    read("0..99 is outside", response={"labels": [LABEL | {"end": 99}]}),
    read("-1..2 is outside", response={"labels": [LABEL | {"start": -1}]}),
    read("label_type", "Lie", response={"labels": [LABEL | {"label_type": "Lie"}]}),
    read("labels", response={"labels": "none"}),
    read("row", "[1]", response="[1]"),
    read("responses.jsonl line 1: response: ", "'?!' has no letter and no digit", response={"response": "?!"}),
    read("responses.jsonl line 1: response: ", "'' has no letter and no digit", response={"response": ""}),
    read("sources.jsonl line 1: context: ", "' ' is empty", source={"context": " "}),
    read("response r1: response: ", "the window of 8192 takes 4096", response={"response": "so " * 5000}),
    read("response r1: context: ", "leave no room in a window", source={"question": "so " * 9000}),
    read("id r1 is there twice", response=json.dumps(RESPONSE) + "\n" + json.dumps(RESPONSE)),
    read("dtype", "float8", words="--set=dtype=float8"),
    read("share", "0", words="--set=share=0"),
    read("share", "1.5", words="--set=share=1.5"),
    read("lens_tokens", "0", words="--set=lens_tokens=0"),
    read("bits", "2, 3, 4 or 8", "5", words="--set=bits=5"),
    read("lens_tokens", "nearest is lens_tokens", words="--set=lens_token=4"),
    read("style", "poem", words="--set=style=poem"),
    read("row_tokens", "-1", words="--set=row_tokens=-1"),
    read("window", "1", words="--set=window=1"),
    read("--processes", "0", words="--processes=0"),
    read("--backend", "equinox", words="--backend=equinox"),
    read("--device", "abacus", words="--device=abacus"),
    read("--device=gpu", "this machine has none", words="--device=gpu"),
    read("--devices", "0", words="--devices=0"),
    read("--processes=4: --devices=2 is for one process", words="--devices=2 --processes=4"),
    read("--devices=99: PyTorch sees 1 of kind cpu", words="--devices=99 --backend=torch"),
    read("--offload_layers", "-1", words="--offload_layers=-1"),
    read("offload_layers=31: the model has 30 blocks", words="--offload_layers=31 --processes=1"),
    read("--batch", "no flag", words="--batch=3"),
    read("none.gguf does not exist", words="--set=model=none.gguf"),
    Case(("hallucination.py", *FEATURES, "--config=none.yaml"), ("none.yaml",), data()),
    Case("hallucination.py scores", ("--input is missing",)),
    Case("hallucination.py scores --input={tmp}/i.jsonl", ("--output is missing",), {"i.jsonl": "{}"}),
    Case("hallucination.py scores --data={tmp}/none --output={tmp}/o.jsonl", ("0 files sources",)),
    Case(
        "hallucination.py scores --data={tmp}/data --output={tmp}/o.jsonl --workdir={tmp}/out",
        ("responses.jsonl line 1: response: ", "'?!' has no letter and no digit"),
        data(response={"response": "?!"}),
    ),
    scores({}, "--data=x: leave one of them out", words="--data=x"),
    scores({}, "i.jsonl is no file", names=()),
    scores("", "holds no row"),
    scores("{", "line 1: no JSON"),
    scores("[1]", "line 1", "the text context"),
    scores({"response": None}, "line 1", "the text response"),
    scores({"response": " "}, "line 1: response is empty"),
    scores({"response": "?!"}, "line 1: response '?!' has no letter and no digit"),
    scores({"response": "\ud800"}, "line 1: response is no Unicode text"),
    scores({"context": " "}, "line 1: context is empty"),
    scores({"response": "so " * 5000}, "line 1: response: ", "the window of 8192 takes 4096"),
    scores({"question": "so " * 9000}, "line 1: context: ", "leave no room in a window"),
    scores({"id": "\ud800"}, "line 1: id cannot be written"),
    scores({"id": {}}, "line 1 and behind: id is no one type", words="--output={tmp}/o.parquet"),
    scores({"source_id": 1.5}, "line 1: source_id is '1.5', wanted a text or a whole number"),
    scores('{"context": "a", "question": "b", "response": "c"}\n \n{', "line 3: no JSON"),
    scores("\n\n", "holds no row"),
    scores({"labels": 3}, "line 1: labels is '3'", "start and end"),
    scores({"labels": [3]}, "line 1: labels: '3' is no part of the response's 1 characters"),
    scores({"labels": [{"start": 0, "end": 2}]}, "line 1: labels: ", "'end': 2", "the response's 1 characters"),
    scores({"labels": [{"start": 1, "end": 1}]}, "line 1: labels: ", "'start': 1"),
    scores({"labels": [{"start": False, "end": 1}]}, "line 1: labels: ", "'start': False"),
    scores({}, "o.jsonl exists", "--overwrite", names=("i.jsonl", "o.jsonl")),
    scores({}, "i.jsonl is the input", words="--output={tmp}/i.jsonl --overwrite"),
    scores({}, "o.csv has an unknown suffix", words="--output={tmp}/o.csv"),
    scores({}, "i.csv has an unknown suffix", words="--input={tmp}/i.csv", names=("i.csv",)),
    scores({}, "i.parquet cannot be read as Parquet", words="--input={tmp}/i.parquet", names=("i.parquet",)),
    scores({}, "--level", "word", words="--level=word"),
    scores({}, "--chunk_tokens", "0", words="--level=chunk --chunk_tokens=0"),
    scores({}, "--chunk_tokens=5 is of --level=chunk", words="--chunk_tokens=5"),
    scores({}, "lens_tokens", "0", words="--set=lens_tokens=0"),
    scores({}, "--processes", "0", words="--processes=0"),
    scores({}, "--backend", "equinox", words="--backend=equinox"),
    scores({}, "--device=gpu", "this machine has none", words="--device=gpu"),
    scores({}, "none.gguf does not exist", words="--set=model=none.gguf"),
    Case("hallucination.py evaluate", ("--data is missing",)),
    Case(
        ("hallucination.py", "evaluate", "--data={tmp}/data", "--workdir={tmp}/out"),
        ("features of response r1 are not in",),
        data(),
    ),
    Case(
        ("hallucination.py", "evaluate", "--data={tmp}/data", "--workdir={tmp}/out", "--noreader"),
        ("0 of 1 judged responses are labelled",),
        data(),
    ),
    Case(("hallucination.py", "evaluate", "--data={tmp}/data", "--folds=1"), ("--folds", "1"), data()),
    Case(("hallucination.py", "evaluate", "--data={tmp}/data", "--device=gpu"), ("this machine has none",), data()),
    Case(("hallucination.py", "evaluate", "--data={tmp}/data", "--draws=5"), ("--draws", "5"), data()),
    Case(
        ("hallucination.py", "evaluate", "--data={tmp}/data", "--detector={tmp}/d"),
        ("d is no file", "hallucination.py fit"),
        data(),
    ),
    Case("hallucination.py fit", ("--data is missing",)),
    Case(("hallucination.py", "fit", "--data={tmp}/data"), ("--output is missing",), data()),
    Case(("hallucination.py", "fit", "--data={tmp}/data", "--output=configs"), ("configs is a folder",), data()),
    Case(
        ("hallucination.py", "fit", "--data={tmp}/data", "--output={tmp}/d", "--workdir={tmp}/out"),
        ("features of response r1 are not in",),
        data(),
    ),
    Case("hallucination.py fit --data={tmp} --output={tmp}/o --method=boosting", ("--method", "boosting")),
    *(
        Case(("hallucination.py", "fit", "--data={tmp}", "--output={tmp}/o", *words.split()), wanted)
        for words, wanted in (
            ("--method=redeep --nolabels", ("--method=redeep, --nolabels", "--method=detector")),
            ("--method=ensemble --tuned", ("--method=ensemble, --tuned",)),
            ("--top_n=3", ("--top_n=3 is of --method=redeep, not detector",)),
            ("--method=redeep --columns=3", ("--columns=3 is of --method=mutual_information or ensemble",)),
            ("--method=mutual_information --members=2", ("--members=2 is of --method=ensemble",)),
            ("--method=redeep --top_k=0", ("--top_k", "0")),
            ("--method=redeep --alpha=nan", ("--alpha=nan: wanted a finite number",)),
            ("--method=redeep --m=-1", ("--m", "-1")),
            ("--method=ensemble --members=0", ("--members", "0")),
        )
    ),
    Case("hallucination.py detect", ("--detector is missing",)),
    detect({}, "d is no file", names=("i.jsonl",)),
    detect({}, "damaged or no detector", d="text"),
    detect({}, "i.jsonl is no file", names=("d",)),
    detect("", "holds no row"),
    detect("{", "line 1: no JSON"),
    detect("[1]", "line 1", "the text context"),
    detect({"response": None}, "line 1", "the text response"),
    detect({"response": " "}, "line 1: response is empty"),
    detect({"context": ""}, "line 1: context is empty"),
    detect({}, "i.jsonl is the input", words="--output={tmp}/i.jsonl --overwrite"),
    detect({}, "--page", "d is the input", words="--page={tmp}/d --overwrite"),
    detect({"response": "?!"}, "line 1: response '?!' has no letter and no digit"),
    detect({"response": "\ud800"}, "line 1: response is no Unicode text"),
    detect({"id": "\ud800"}, "line 1 cannot be a line of JSON"),
    detect({"probability": 1}, "line 1: probability is where the verdict goes"),
    detect({"id": {}}, "i.jsonl: ", "name a .jsonl output", words="--output={tmp}/o.parquet"),
    detect('{"context": "a", "question": "b", "response": "c", "id": 1}\n' * 2 + "{", "line 3: no JSON"),
    detect('\n{"context": "a", "question": "b", "response": "c"}\n\n{', "line 4: no JSON"),
    detect(
        "".join(json.dumps({"context": "a", "question": "b", "response": "c", "id": i}) + "\n\n" for i in (1, "x")),
        "lines 1 to 3: id is no one type",
        words="--output={tmp}/o.parquet",
    ),
    detect({}, "o.html has an unknown suffix", "--page=", words="--output={tmp}/o.html"),
    detect({}, "i.csv has an unknown suffix", words="--input={tmp}/i.csv", names=("d", "i.jsonl", "i.csv")),
    detect({}, "p.pdf has an unknown suffix", words="--page={tmp}/p.pdf"),
    detect({}, "--sentences=", "s.txt has an unknown suffix", words="--sentences={tmp}/s.txt"),
    detect({}, "--sentences must be other files", words="--sentences={tmp}/o.jsonl"),
    detect({}, "i.parquet cannot be read as Parquet", words="--input={tmp}/i.parquet", names=("d", "i.parquet")),
    Case(
        "hallucination.py detect --detector={tmp}/d --input={tmp}/i.parquet --output={tmp}/o.jsonl",
        ("i.parquet has no column context; it has response",),
        {"d": "", "i.parquet": table(response=["It is."])},
    ),
    Case(
        "hallucination.py detect --detector={tmp}/d --input={tmp}/i.parquet --output={tmp}/o.jsonl",
        ("i.parquet row 2", "the text response"),
        {"d": "", "i.parquet": table(context=["a", "b"], question=["", ""], response=["It is.", None])},
    ),
    detect({}, "--processes", "0", words="--processes=0"),
    detect({}, "--engine", "spark", words="--engine=spark"),
    detect({}, "--engine=ray: --devices=2 is for one process", words="--engine=ray --devices=2"),
    detect({}, "--device=tpu", "this machine has none", words="--device=tpu"),
    detect({}, "--follow", "takes no --input", words="--follow"),
    Case("hallucination.py detect --follow --detector={tmp}/d --processes=2", ("takes no --processes",)),
    Case("hallucination.py detect --follow --detector={tmp}/d --devices=2", ("takes no --devices",)),
    Case("hallucination.py detect --follow --detector={tmp}/d", ("d is no file",)),
    detect({}, "--backend", words="--backend=equinox"),
    Case("hallucination.py fit --data={tmp} --output={tmp}/o --device=abacus", ("--device", "abacus")),
    Case("hallucination.py fit --data={tmp} --output={tmp}/o --nolabels --rate=1.5", ("--rate", "1.5")),
    Case("hallucination.py fit --data={tmp} --output={tmp}/o --nolabels --rate=nan", ("--rate=nan", "between 0 and 1")),
    Case("hallucination.py fit --data={tmp} --output={tmp}/o --rate=0.1", ("--rate=0.1 is of --nolabels",)),
    Case("hallucination.py fit --data={tmp} --output={tmp}/o --processes=3", ("--processes=3 is of --tuned",)),
    Case(
        "hallucination.py detect --detector={tmp}/configs --input={tmp}/i.jsonl --output={tmp}/o.jsonl",
        ("configs/bundle.json is no file",),
        {"i.jsonl": "{}"},
    ),
    detect(
        {}, "configs is a folder; each of 2 detectors that vote is a file of `fit`", words="--detector={tmp}/configs"
    ),
    Case(
        "hallucination.py detect --follow --detector=b",
        ("b holds no bundle of `hallucination.py export`",),
        {"b/bundle.json": "{"},
    ),
    Case(
        "hallucination.py detect --follow --detector=b --model=none.gguf",
        ("b holds its own reader",),
        {"b/bundle.json": "{"},
    ),
    Case("hallucination.py vote", ("--detector is missing", "once for each member")),
    Case("hallucination.py vote --detector={tmp}/d", ("--data is missing", "development responses")),
    Case("hallucination.py vote --detector={tmp}/d --data={tmp}/x", ("--output is missing",)),
    Case("hallucination.py vote --detector=d --detector=e --data=x --output=o --rule=loud", ("--rule", "loud")),
    Case(
        "hallucination.py vote --detector={tmp}/d --detector={tmp}/d --data={tmp}/x --output={tmp}/o",
        ("d is named 2 times, wanted each detector once",),
    ),
    Case(
        "hallucination.py vote --detector={tmp}/d --detector={tmp}/e --data={tmp}/x --output={tmp}/o",
        ("d is no file; `hallucination.py fit` makes one",),
    ),
    export("", "--detector is missing"),
    export("--detector=d", "--format is missing"),
    export("--detector=d --format=onnx", "--output is missing"),
    export("--detector=d --format=gguf --output=o", "--format", "gguf"),
    export("--detector=d --format=onnx --output=o", "d is no file"),
    export("--detector=d --format=onnx --output=o", "damaged or no detector", d="text"),
    export("--detector=d --format=onnx --output=o --window=8", "--window", "8"),
    export("--detector=d --format=onnx --output=o --window=9000", "--window=9000", "trained on 8192 tokens"),
    export("--detector=d --format=safetensors --output=o --window=64", "--window=64 is of programs"),
    export("--detector=d --format=onnx --output=configs", "configs exists", "--overwrite"),
    export("--detector=d --format=onnx --output=configs --overwrite", "configs holds no export"),
    export("--detector=d --format=onnx --output=d", "d cannot be a folder", d="text"),
    export("--detector=o/d --format=onnx --output=o --overwrite", "holds the input o/d", o__d="text"),
    export("--detector=d --format=stablehlo --output=o --model=none.gguf", "none.gguf does not exist"),
    Case("hallucination.py answer", ("--input is missing",)),
    Case("hallucination.py answer --input={tmp}/i", ("--output is missing",), {"i": "{}"}),
    answer({}, "i.jsonl is no file", names=()),
    answer({}, "o.jsonl exists", names=("i.jsonl", "o.jsonl")),
    answer({}, "--output=", "o.parquet has an unknown suffix, wanted .jsonl", words="--output={tmp}/o.parquet"),
    answer({}, "i.jsonl is the input", words="--output={tmp}/i.jsonl --overwrite"),
    answer("", "holds no row"),
    answer("{", "line 1: no JSON"),
    answer({"question": None}, "line 1", "the text question"),
    answer({"context": " "}, "line 1: context is empty"),
    answer('{"context": "a", "question": "b"}\n\n[1]', "line 3", "the text context"),
    *(
        answer({name: 1}, f"line 1: {name} is where the answer goes; rename it")
        for name in ("response", "ended", "num_tokens", "num_reweighted", "num_prompt_cut")
    ),
    answer({"id": "\ud800"}, "line 1 cannot be a line of JSON", "make it a text, or leave it out"),
    answer({"question": "so " * 9000}, "line 1: context: ", "leave no room in a window"),
    Case(
        "hallucination.py answer --input={tmp}/i.parquet --output={tmp}/o.jsonl",
        ("i.parquet row 2 cannot be a line of JSON", "date", "make it a text"),
        {"i.parquet": table(context=["a", "b"], question=["", ""], day=[None, datetime.date(2026, 1, 2)])},
    ),
    Case(
        "hallucination.py answer --input={tmp}/i.parquet --output={tmp}/o.jsonl",
        ("i.parquet: num_tokens is where the answer goes",),
        {"i.parquet": table(context=["a"], question=[""], num_tokens=[1])},
    ),
    answer({}, "tau", "1.5", words="--set=tau=1.5"),
    answer({}, "tau", "-0.1", words="--set=tau=-0.1"),
    answer({}, "attention_factor", "0", words="--set=attention_factor=0"),
    answer({}, "feed_factor", "-1", words="--set=feed_factor=-1"),
    answer({}, "heads", words="--set=heads=[]"),
    answer({}, "heads", "named twice", words="--set=heads=[[0,1],[0,1]]"),
    answer({}, "heads: [30, 0] is not in a model of 30 layers of 9 heads", words="--set=heads=[[30,0]]"),
    answer({}, "heads: [0, 9] is not in a model of 30 layers of 9 heads", words="--set=heads=[[0,9]]"),
    answer({}, "layers: -1 is not in a model of 30 layers", words="--set=layers=[-1]"),
    answer({}, "external_range=0.5, 0.5", "the lower end first", words="--set=external_range=[0.5,0.5]"),
    answer({}, "--new_tokens", "0", words="--new_tokens=0"),
    answer({}, "--new_tokens=9000 leaves no room for a prompt in a window of 8192", words="--new_tokens=9000"),
    answer({}, "--batch_size", "0", words="--batch_size=0"),
    answer({}, "none.gguf does not exist", words="--model=none.gguf"),
    Case(
        "hallucination.py answer --input={tmp}/i --output={tmp}/o.jsonl",
        ("i has an unknown suffix", "wanted .jsonl or .parquet"),
        {"i": "{}"},
    ),
    regress("", "holds no row"),
    regress("{", "line 1: no JSON"),
    regress("[1, 2]", "is no object"),
    regress({"response": "a"}, "response is 'a', wanted a whole number"),
    regress({"source_id": [1]}, "line 1: source_id is '[1]', wanted a text or a whole number"),
    regress("\ufeff{", "line 1: no JSON"),
    regress({"chunk_label": 3}, "chunk_label is 3, wanted 0 or 1"),
    regress({"external": {}}, "external is '{}', wanted scores by name"),
    regress({"external": {"a": None, "b": 1.0}}, "external a is None, wanted a finite number"),
    regress({"parametric": {"d": 1.0}}, "line 2: parametric has other columns"),
    regress({"external": []}, "external is '{}', wanted scores by name, or lists of them"),
    regress({"external": [[1.0, 2.0], [None]]}, "external 1.0 is None, wanted a finite number"),
    regress({"parametric": [1.0, [2.0]]}, "parametric 1 is [2.0], wanted a finite number"),
    regress({"chunk_label": 1}, "wanted both classes"),
    regress({}, "--top_n=9", "2 columns", words="--top_n=9"),
    regress({}, "--folds=5", "1 of 2 responses", words="--top_n=2 --top_k=1"),
    regress({}, "--top_n", "0", words="--top_n=0"),
    regress({}, "--alpha", "-1", words="--alpha=-1"),
    regress({}, "--alpha=nan: wanted a finite number", words="--alpha=nan"),
    regress({}, "--m=inf: wanted a finite number", words="--m=inf"),
    regress({}, "--folds", "1", words="--folds=1"),
    heads("--rows=-1", "--rows", "-1"),
    heads("--top=0", "--top", "0"),
    heads("--model=none.gguf", "none.gguf does not exist"),
    heads("--model=a.txt", "a.txt", "not a GGUF file", a_txt="text"),
    heads("--output=o.json", "o.json exists", o_json="mine"),
    heads("--output=configs", "configs"),
    Case(("hallucination.py", "copy_heads", "--model=model"), ("hidden_size=0",), folder(hidden_size=0)),
]
