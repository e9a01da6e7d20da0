"""Text to token ids and back, from a GGUF file's metadata or a Hugging Face folder (S file).

`tokenizers` does the work; this module adds what a checkpoint keeps elsewhere: begin and end ids, chat template.
"""

from __future__ import annotations

import datetime
import functools
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxbench.config import shown
from jaxbench.pretrained import chat_template as templates
from jaxbench.pretrained import gguf_tokenizer, safetensors_files, weights

if TYPE_CHECKING:
    import tokenizers


# transformers' names of special tokens, which chat templates may use
NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# transformers' classes that have only the special tokens that a folder names
GENERIC = ("PreTrainedTokenizerFast", "TokenizersBackend", "PreTrainedTokenizer")
ABOUT_FILE = ("bos_token_id", "eos_token_id", "transformers_version", "_from_model_config")  # no settings of sampling
FLAGS = ("lstrip", "rstrip", "single_word", "normalized", "special")  # of an added token
PREFIXING = ("GPT2Tokenizer", "Qwen2Tokenizer")  # byte-level classes that follow add_prefix_space, with "Fast" too
BYTE_PIECE = re.compile(r"<0x[0-9A-Fa-f]{2}>")  # a byte of a SentencePiece vocabulary


@functools.cache
def _byte_of() -> dict[str, int]:
    """The byte that each character of a byte-level vocabulary stands for (Radford et al. 2019, GPT-2's encoder).

    Printable bytes of Latin-1 map to themselves, the others, in order, to the characters from U+0100 on.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return {chr(byte if byte in printable else next(others)): byte for byte in range(256)}


class Tokenizer:
    """A vocabulary with its begin and end ids (None if a model has none) and its chat template.

    eos_id ends a document; end_ids are all that end a generation, eos_id first: a chat model also has one that ends its
    turn. tool_template replaces chat_template if tools are described, and template_variables, {} at first, are further
    variables that every chat's template gets. special_tokens are those that templates get by
    their names in transformers (bos_token, pad_token, ...); None = the begin and end tokens that exist.
    generation_settings, {} at first, are those of sampling (temperature, top_p, ...) that a model's folder has. They
    are written beside new weights by save_checkpoint; jaxbench itself does not read them.
    """

    def __init__(
        self,
        core: tokenizers.Tokenizer,
        *,
        eos_id: int | None,
        bos_id: int | None,
        chat_template: str | None,
        end_ids: Sequence[int] = (),
        tool_template: str | None = None,
        special_tokens: Mapping[str, str] | None = None,
    ):
        self.core = core
        self.eos_id = eos_id
        self.end_ids = tuple(dict.fromkeys(i for i in (eos_id, *end_ids) if i is not None))
        self.bos_id = bos_id
        self.chat_template, self.tool_template = chat_template, tool_template
        self.template_variables: Mapping[str, Any] = {}
        self.generation_settings: Mapping[str, Any] = {}
        self.template_time: datetime.datetime | None = None  # whose date templates write; None = the clock's
        ids = {"bos_token": bos_id, "eos_token": eos_id}
        self._own_names = {name: _text_of(core, i) for name, i in ids.items() if i is not None}
        self.special_tokens = self._own_names if special_tokens is None else dict(special_tokens)
        self.vocab_size: int = core.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        """Token ids of a text; add_special adds the prefix that the model was trained with (often nothing)."""
        return self.encode_batch([text], add_special=add_special)[0]  # core.encode would hold Python's lock meanwhile

    @functools.cached_property
    def longest_token(self) -> int | None:
        """Maximum number of a text's characters in one token; None where it is not known, as texts may be shortened."""
        from tokenizers import decoders

        if self.core.normalizer is not None or not isinstance(self.core.decoder, decoders.ByteLevel):
            return None
        return max(map(len, self.core.get_vocab(with_added_tokens=True)))  # bytes, of which a character has some

    def encode_batch(self, texts: Sequence[str], *, add_special: bool = True) -> list[list[int]]:
        """Token ids of many texts, encoded on several threads."""
        return [encoding.ids for encoding in self.core.encode_batch(list(texts), add_special_tokens=add_special)]

    def encode_with_places(self, text: str) -> tuple[list[int], list[int]]:
        """Token ids of a text, without added special tokens, and the index of the character in which each begins."""
        encoding = self.core.encode(text, add_special_tokens=False)
        return encoding.ids, [start for start, _ in encoding.offsets]

    def decode(self, ids: Sequence[int], *, skip_special: bool = False) -> str:
        """Text of token ids; invalid UTF-8 becomes U+FFFD."""
        return self.core.decode([int(i) for i in ids], skip_special_tokens=skip_special)

    def token_bytes(self, id: int) -> bytes:
        """UTF-8 bytes of one token's text; for a token that is part of a character, its bytes of it."""
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
        variables: Mapping[str, Any] = {},
        now: datetime.datetime | None = None,
    ) -> str:
        """Render {"role": ..., "content": ...} messages with the model's template; encode with add_special=False.

        Args:
          tools: descriptions that the template may show to the model.
          variables: further ones of the template, such as Qwen 3's enable_thinking; they precede template_variables.
          now: the time whose date the template may write; None = template_time.

        Raises:
          ValueError: the model has no chat template, or its template refuses the messages or reads no such variable.
        """
        template = templates.Templates(self.chat_template, self.tool_template).of(tools)
        if template is None:
            raise ValueError(f"chat: this model of {self.vocab_size} tokens has no chat template; use plain prompts")
        return templates.render(
            template,
            messages,
            add_generation_prompt=add_generation_prompt,
            tools=tools,
            special_tokens=self.special_tokens,
            variables={**self.template_variables, **variables},
            now=now or self.template_time,
        )

    def save(self, folder: str | Path) -> None:
        """Write tokenizer.json and tokenizer_config.json into a folder, as transformers reads them."""
        names = self.special_tokens | self._own_names
        values = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **names}
        values |= {"split_special_tokens": True} if self.core.encode_special_tokens else {}  # tokenizer.json lacks it
        if self.tool_template is not None:
            given = {"default": self.chat_template, "tool_use": self.tool_template}
            values["chat_template"] = [{"name": k, "template": v} for k, v in given.items() if v is not None]
        elif self.chat_template is not None:
            values["chat_template"] = self.chat_template
        text = json.dumps(values, indent=2, ensure_ascii=False)
        self.core.save(str(Path(folder) / "tokenizer.json"))
        (Path(folder) / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")


def identity(core: tokenizers.Tokenizer) -> str:
    """Return all that decides the ids of a text, as a text: for checksums."""
    return core.to_str() + (" split_special_tokens" if getattr(core, "encode_special_tokens", False) else "")


def _text_of(core: tokenizers.Tokenizer, id: int) -> str:
    """Return a token as files name it; of an added one id_to_token may give what the normalizer makes of it."""
    added = core.get_added_tokens_decoder().get(id)
    return core.id_to_token(id) if added is None else added.content


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
    core.no_truncation()  # a limit set by the file's author, which transformers lifts too
    core.no_padding()
    settings = _optional_json(folder / "tokenizer_config.json")
    if "added_tokens_decoder" not in settings:  # it replaces the two older files
        settings = settings | _optional_json(folder / "special_tokens_map.json")
    named = {name: _content(settings[name]) for name in NAMES if _content(settings.get(name)) is not None}
    _add_tokens(core, folder, settings, named)
    _set_flags(core, folder / "tokenizer_config.json", settings)
    generation = _optional_json(folder / "generation_config.json")
    model = _optional_json(folder / "config.json") | generation
    ids = {name: _special_id(core, named, model, name) for name in ("eos", "bos")}
    if settings.get("tokenizer_class") not in GENERIC:  # a class of one family, which knows its own
        others = {f"{name}_token": i for name, i in ids.items() if i is not None and f"{name}_token" not in settings}
        named |= {name: _text_of(core, i) for name, i in others.items()}
    plain, tools = templates.of_folder(folder, settings)
    about = {"tool_template": tools, "special_tokens": named, "end_ids": _model_ids(core, model, "eos")}
    tokenizer = Tokenizer(core, eos_id=ids["eos"], bos_id=ids["bos"], chat_template=plain, **about)
    tokenizer.generation_settings = {name: x for name, x in generation.items() if name not in ABOUT_FILE}
    return tokenizer


def _content(token: Any) -> str | None:
    """Text of a token of tokenizer_config.json, which may be an object; None if it is no token."""
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) and token else None


def _add_tokens(core: tokenizers.Tokenizer, folder: Path, settings: dict, named: dict[str, str]) -> None:
    """Add the tokens that a folder defines outside tokenizer.json, as transformers does: each is then kept whole.

    Special tokens that are in no vocabulary are not added: the model has no embedding for them.

    Raises:
      ValueError: a token cannot have the id that the folder gives it.
    """
    from tokenizers import AddedToken

    known = core.get_added_tokens_decoder()
    place = folder / ("tokenizer_config.json" if "added_tokens_decoder" in settings else "added_tokens.json")
    try:
        if "added_tokens_decoder" in settings:
            listed = {int(i): dict(about) for i, about in settings["added_tokens_decoder"].items()}
            flags = {i: {name: about[name] for name in FLAGS if name in about} for i, about in listed.items()}
            wanted = {i: AddedToken(about["content"], **flags[i]) for i, about in listed.items()}
        else:
            older = {i: text for text, i in _optional_json(place).items() if i not in known}
            wanted = {i: AddedToken(text, normalized=text not in named.values()) for i, text in older.items()}
    except (TypeError, ValueError, AttributeError, KeyError) as error:
        raise ValueError(f"{place}: its added tokens cannot be read ({error!r})") from error
    same = {repr(token) for token in known.values()}
    more = [token for _, token in sorted(wanted.items(), key=lambda pair: pair[0]) if repr(token) not in same]
    for token in more:
        token.special = token.special or token.content in named.values()
    core.add_tokens(more)
    for i, token in wanted.items():
        if core.token_to_id(token.content) != i:
            found = core.token_to_id(token.content)
            raise ValueError(f"{place}: the added token {token.content!r} has id {i}, and {found} in tokenizer.json")
    whole = {token.content for token in core.get_added_tokens_decoder().values()}
    extra = settings.get("additional_special_tokens") or settings.get("extra_special_tokens")
    others = (_content(each) for each in (extra.values() if isinstance(extra, dict) else extra or []))
    texts = dict.fromkeys([*named.values(), *others])
    special = [text for text in texts if text and text not in whole and core.token_to_id(text) is not None]
    core.add_tokens([AddedToken(text, special=True) for text in special])


def _set_flags(core: tokenizers.Tokenizer, place: Path, settings: dict[str, Any]) -> None:
    """Follow what tokenizer_config.json says of encoding, where transformers lets it change tokenizer.json.

    split_special_tokens: the texts of special tokens are texts like any other. add_prefix_space: a space stands in
    front of a text; only classes of PREFIXING follow it.

    Raises:
      ValueError: one of the two is neither true nor false.
    """
    from tokenizers import pre_tokenizers

    given = {name: settings.get(name) for name in ("split_special_tokens", "add_prefix_space")}
    for name, value in given.items():
        if not isinstance(value, bool | None):
            raise ValueError(f"{place}: {name}={shown(value)}, wanted true or false")
    core.encode_special_tokens = bool(given["split_special_tokens"])
    if given["add_prefix_space"] is None or str(settings.get("tokenizer_class")).removesuffix("Fast") not in PREFIXING:
        return
    first = core.pre_tokenizer
    for step in first if isinstance(first, pre_tokenizers.Sequence) else [first]:
        if isinstance(step, pre_tokenizers.ByteLevel):
            step.add_prefix_space = given["add_prefix_space"]


def _special_id(core: tokenizers.Tokenizer, named: dict[str, str], model: dict, name: str) -> int | None:
    """Find the id of the token that the folder names, else the model configuration's id (the first of several)."""
    token = named.get(f"{name}_token")
    if token is not None and core.token_to_id(token) is not None:
        return core.token_to_id(token)
    return next(iter(_model_ids(core, model, name)), None)


def _model_ids(core: tokenizers.Tokenizer, model: dict, name: str) -> list[int]:
    """Ids that the model's configuration names, one or a list, restricted to the vocabulary."""
    given = model.get(f"{name}_token_id")
    size = core.get_vocab_size(with_added_tokens=True)
    ids = [i for i in (given if isinstance(given, list) else [given]) if isinstance(i, int) and 0 <= i < size]
    return [i for i in ids if core.id_to_token(i) is not None]


def _optional_json(path: Path) -> dict[str, Any]:
    """Read a file's JSON object, empty if there is no file."""
    return safetensors_files.read_json(path) if path.is_file() else {}
