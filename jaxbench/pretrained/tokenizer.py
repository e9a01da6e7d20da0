"""Text to token ids and back, from a GGUF file's metadata or a Hugging Face folder (S file).

The work is done by `tokenizers`; this adds what a checkpoint keeps elsewhere: begin and end ids, chat template.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxbench.pretrained import gguf_file, weights

if TYPE_CHECKING:
    import tokenizers

SPECIAL, USER_DEFINED = 3, 4  # GGUF token types: control tokens, and text kept whole
# How GGUF's `tokenizer.ggml.pre` splits text before merging: a regular expression or "digits", which takes every digit
# alone, then GPT-2's. Sources: llama.cpp src/llama-vocab.cpp; SmolLM2's own tokenizer.json (Digits, then ByteLevel).
LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2_SPLIT = LLAMA3_SPLIT.replace("{1,3}", "")  # every digit alone; Qwen3 has it too
PRE_TOKENIZERS = {"gpt-2": None, "smollm": "digits", "llama-bpe": LLAMA3_SPLIT, "qwen2": QWEN2_SPLIT}


class Tokenizer:
    """A vocabulary with its begin and end ids (None where a model has none) and its chat template."""

    def __init__(
        self, core: tokenizers.Tokenizer, *, eos_id: int | None, bos_id: int | None, chat_template: str | None
    ):
        self.core = core
        self.eos_id = eos_id
        self.bos_id = bos_id
        self.chat_template = chat_template
        self.vocab_size: int = core.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        """Token ids of a text; add_special puts in front what the model was trained with (often nothing)."""
        return self.core.encode(text, add_special_tokens=add_special).ids

    def encode_batch(self, texts: Sequence[str], *, add_special: bool = True) -> list[list[int]]:
        """Token ids of many texts, encoded on several threads."""
        return [encoding.ids for encoding in self.core.encode_batch(list(texts), add_special_tokens=add_special)]

    def decode(self, ids: Sequence[int], *, skip_special: bool = False) -> str:
        """Text of token ids; bytes that are no UTF-8 become U+FFFD."""
        return self.core.decode([int(i) for i in ids], skip_special_tokens=skip_special)

    def chat(self, messages: Sequence[dict[str, str]], *, add_generation_prompt: bool = True) -> str:
        """Render {"role": ..., "content": ...} messages with the model's template; encode with add_special=False.

        Raises:
          ValueError: the model has no chat template, or its template refuses these messages.
        """
        if self.chat_template is None:
            raise ValueError(f"chat: this model of {self.vocab_size} tokens has no chat template; use plain prompts")
        import jinja2

        # A template is code from a stranger: no attribute access out of the sandbox, no change of its arguments.
        environment = _sandbox()
        names = {name: self.core.id_to_token(i) if i is not None else "" for name, i in self._special_ids().items()}
        try:
            return environment.from_string(self.chat_template).render(
                messages=list(messages), add_generation_prompt=add_generation_prompt, **names
            )
        except jinja2.TemplateError as error:
            raise ValueError(f"chat: the model's template failed: {error}") from error

    def save(self, folder: str | Path) -> None:
        """Write tokenizer.json and tokenizer_config.json into a folder, as transformers reads them."""
        names = {name: self.core.id_to_token(i) for name, i in self._special_ids().items() if i is not None}
        values = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **names}
        if self.chat_template is not None:
            values["chat_template"] = self.chat_template
        text = json.dumps(values, indent=2, ensure_ascii=False)
        self.core.save(str(Path(folder) / "tokenizer.json"))
        (Path(folder) / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")

    def _special_ids(self) -> dict[str, int | None]:
        return {"bos_token": self.bos_id, "eos_token": self.eos_id}


def load_tokenizer(spec: str | Path | None = None) -> Tokenizer:
    """Load the tokenizer of a model: None or "default", a GGUF file, a Hugging Face folder, or a hub id.

    Raises:
      ValueError: a missing or damaged file, or a kind of vocabulary that is not supported.
    """
    path = weights.resolve(spec)
    return _from_folder(path) if path.is_dir() else _from_gguf(path)


def _from_gguf(path: Path) -> Tokenizer:
    """Build a byte-level BPE from metadata."""
    from tokenizers import AddedToken, decoders, models, normalizers, processors
    from tokenizers import Tokenizer as Core

    metadata = gguf_file.read(path).metadata
    kind, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre", "gpt-2")
    if kind != "gpt2" or not isinstance(pre, str) or pre not in PRE_TOKENIZERS:
        raise ValueError(
            f"{path}: tokenizer model {kind!r} with pre-tokenizer {pre!r} is not supported, wanted model 'gpt2' with "
            f"one of {', '.join(PRE_TOKENIZERS)}; pass the Hugging Face folder instead"
        )
    try:
        tokens = metadata["tokenizer.ggml.tokens"]
        merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
        vocabulary = {token: i for i, token in enumerate(tokens)}
        # Llama 3 keeps words that are in the vocabulary whole, even where no merges lead to them.
        core = Core(models.BPE(vocabulary, merges, ignore_merges=pre == "llama-bpe"))
    except Exception as error:  # KeyError from the metadata; tokenizers raises bare Exception for a bad merge
        raise ValueError(f"{path}: the vocabulary cannot be read ({type(error).__name__}: {error})") from error
    if pre == "qwen2":  # as Qwen's own tokenizer.json; llama.cpp leaves it out
        core.normalizer = normalizers.NFC()
    core.pre_tokenizer = _pre_tokenizer(pre)
    core.decoder = decoders.ByteLevel()
    types = metadata.get("tokenizer.ggml.token_type", [])
    if not isinstance(types, list):
        raise ValueError(f"{path}: tokenizer.ggml.token_type is {types!r}, wanted one type a token")
    kept = [(tokens[i], kind) for i, kind in enumerate(types[: len(tokens)]) if kind in (SPECIAL, USER_DEFINED)]
    core.add_tokens([AddedToken(t, special=kind == SPECIAL, normalized=False) for t, kind in kept])
    ids = {name: metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos")}
    bad = {name: i for name, i in ids.items() if i is not None and not (isinstance(i, int) and 0 <= i < len(tokens))}
    if bad:
        raise ValueError(f"{path}: special ids {bad} lie outside the vocabulary of {len(tokens)}")
    if metadata.get("tokenizer.ggml.add_bos_token", False) and ids["bos"] is not None:
        bos = tokens[ids["bos"]]
        core.post_processor = processors.TemplateProcessing(single=[bos, "$A"], special_tokens=[(bos, ids["bos"])])
    template = metadata.get("tokenizer.chat_template")
    return Tokenizer(core, eos_id=ids["eos"], bos_id=ids["bos"], chat_template=template)


def _pre_tokenizer(pre: str) -> tokenizers.pre_tokenizers.PreTokenizer:
    """Pre-tokenizer of a name in PRE_TOKENIZERS."""
    from tokenizers import Regex, pre_tokenizers

    split = PRE_TOKENIZERS[pre]
    if split is None:
        return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if split == "digits":
        first, then_gpt2 = pre_tokenizers.Digits(individual_digits=True), True
    else:
        first, then_gpt2 = pre_tokenizers.Split(Regex(split), behavior="isolated"), False
    return pre_tokenizers.Sequence(
        [first, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=then_gpt2, trim_offsets=True)]
    )


def _from_folder(folder: Path) -> Tokenizer:
    """Tokenizer of a Hugging Face folder."""
    from tokenizers import Tokenizer as Core

    file = folder / "tokenizer.json"
    if not file.is_file():
        raise ValueError(
            f"{folder}: missing tokenizer.json; write it with transformers' AutoTokenizer(...).save_pretrained"
        )
    try:
        core = Core.from_file(str(file))
    except Exception as error:  # tokenizers raises bare Exception
        raise ValueError(f"{file}: cannot be read as a tokenizer ({error})") from error
    settings = _optional_json(folder / "tokenizer_config.json")
    model = _optional_json(folder / "config.json") | _optional_json(folder / "generation_config.json")
    template_file = folder / "chat_template.jinja"
    template = template_file.read_text(encoding="utf-8") if template_file.is_file() else settings.get("chat_template")
    if isinstance(template, list):  # several named templates
        template = next((entry.get("template") for entry in template if entry.get("name") == "default"), None)
    ids = {name: _special_id(core, settings, model, name) for name in ("eos", "bos")}
    return Tokenizer(core, eos_id=ids["eos"], bos_id=ids["bos"], chat_template=template)


def _special_id(core: tokenizers.Tokenizer, settings: dict, model: dict, name: str) -> int | None:
    """Find the id by tokenizer_config.json's token, else by the model configuration's id (the first of several)."""
    token = settings.get(f"{name}_token")
    token = token.get("content") if isinstance(token, dict) else token
    if isinstance(token, str) and core.token_to_id(token) is not None:
        return core.token_to_id(token)
    token_id = model.get(f"{name}_token_id")
    token_id = token_id[0] if isinstance(token_id, list) and token_id else token_id
    is_id = isinstance(token_id, int) and 0 <= token_id < core.get_vocab_size(with_added_tokens=True)
    return token_id if is_id and core.id_to_token(token_id) is not None else None


def _optional_json(path: Path) -> dict[str, Any]:
    """JSON object of a file, empty where there is none."""
    return weights.read_json(path) if path.is_file() else {}


def _sandbox() -> Any:
    """Sandboxed jinja2 environment with what chat templates of transformers use."""
    import jinja2
    from jinja2 import sandbox

    environment = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(f"{message}")

    environment.globals["raise_exception"] = raise_exception
    environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
    return environment
