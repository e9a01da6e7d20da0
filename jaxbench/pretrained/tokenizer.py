"""Text to token ids and back, from a GGUF file's metadata or a Hugging Face folder (S file).

The work is done by `tokenizers`; this adds what a checkpoint keeps elsewhere: begin and end ids, chat template.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxbench.pretrained import gguf_tokenizer, safetensors_files, weights

if TYPE_CHECKING:
    import tokenizers


BYTE_PIECE = re.compile(r"<0x[0-9A-Fa-f]{2}>")  # a byte of a SentencePiece vocabulary


@functools.cache
def _byte_of() -> dict[str, int]:
    """The byte that each character of a byte-level vocabulary stands for (Radford et al. 2019, GPT-2's encoder).

    Printable bytes of Latin-1 stand for themselves, the others, in order, for what comes from U+0100 on.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return {chr(byte if byte in printable else next(others)): byte for byte in range(256)}


class Tokenizer:
    """A vocabulary with its begin and end ids (None where a model has none) and its chat template.

    eos_id ends a document; end_ids are all that end a generation, eos_id first: a chat model has one for its turn, too.
    """

    def __init__(
        self,
        core: tokenizers.Tokenizer,
        *,
        eos_id: int | None,
        bos_id: int | None,
        chat_template: str | None,
        end_ids: Sequence[int] = (),
    ):
        self.core = core
        self.eos_id = eos_id
        self.end_ids = tuple(dict.fromkeys(i for i in (eos_id, *end_ids) if i is not None))
        self.bos_id = bos_id
        self.chat_template = chat_template
        self.vocab_size: int = core.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        """Token ids of a text; add_special puts in front what the model was trained with (often nothing)."""
        return self.core.encode(text, add_special_tokens=add_special).ids

    def encode_batch(self, texts: Sequence[str], *, add_special: bool = True) -> list[list[int]]:
        """Token ids of many texts, encoded on several threads."""
        return [encoding.ids for encoding in self.core.encode_batch(list(texts), add_special_tokens=add_special)]

    def encode_with_places(self, text: str) -> tuple[list[int], list[int]]:
        """Token ids of a text without special ones added, and the character that each begins in."""
        encoding = self.core.encode(text, add_special_tokens=False)
        return encoding.ids, [start for start, _ in encoding.offsets]

    def decode(self, ids: Sequence[int], *, skip_special: bool = False) -> str:
        """Text of token ids; bytes that are no UTF-8 become U+FFFD."""
        return self.core.decode([int(i) for i in ids], skip_special_tokens=skip_special)

    def token_bytes(self, id: int) -> bytes:
        """UTF-8 of one token's text; of a token that is part of a character, the bytes that it has."""
        text, piece = self.decode([id]), self.core.id_to_token(id) or ""
        if "\ufffd" not in text:
            return text.encode()
        if BYTE_PIECE.fullmatch(piece):
            return bytes([int(piece[3:5], 16)])
        places = _byte_of()
        return bytes(places[each] for each in piece) if all(each in places for each in piece) else text.encode()

    def chat(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[dict[str, Any]] | None = None,
    ) -> str:
        """Render {"role": ..., "content": ...} messages with the model's template; encode with add_special=False.

        tools: descriptions that the template may show to the model.

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
                messages=list(messages), add_generation_prompt=add_generation_prompt, tools=tools, **names
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
    if path.is_dir():
        return _from_folder(path)
    return Tokenizer(**gguf_tokenizer.read(path)._asdict())


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
    return Tokenizer(
        core, eos_id=ids["eos"], bos_id=ids["bos"], chat_template=template, end_ids=_model_ids(core, model, "eos")
    )


def _special_id(core: tokenizers.Tokenizer, settings: dict, model: dict, name: str) -> int | None:
    """Find the id by tokenizer_config.json's token, else by the model configuration's id (the first of several)."""
    token = settings.get(f"{name}_token")
    token = token.get("content") if isinstance(token, dict) else token
    if isinstance(token, str) and core.token_to_id(token) is not None:
        return core.token_to_id(token)
    return next(iter(_model_ids(core, model, name)), None)


def _model_ids(core: tokenizers.Tokenizer, model: dict, name: str) -> list[int]:
    """Ids that the model's configuration names, one or a list, as far as the vocabulary has them."""
    given = model.get(f"{name}_token_id")
    size = core.get_vocab_size(with_added_tokens=True)
    ids = [i for i in (given if isinstance(given, list) else [given]) if isinstance(i, int) and 0 <= i < size]
    return [i for i in ids if core.id_to_token(i) is not None]


def _optional_json(path: Path) -> dict[str, Any]:
    """JSON object of a file, empty where there is none."""
    return safetensors_files.read_json(path) if path.is_file() else {}


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
