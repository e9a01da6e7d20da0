"""Tokenizers of GGUF files: byte-level BPE ("gpt2") and SentencePiece ("llama") from a file's metadata (S file).

Missing metadata gets llama.cpp's defaults (src/llama-vocab.cpp): whether the begin token is put in front,
SentencePiece's begin and end ids, and the tokens, by name, that end a generation.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxbench.pretrained import gguf_file

if TYPE_CHECKING:
    import tokenizers

# Token types: control tokens are special, user-defined text is kept whole.
UNKNOWN, SPECIAL, USER_DEFINED, UNUSED, BYTE = 2, 3, 4, 5, 6
# How GGUF's `tokenizer.ggml.pre` splits text before merging: regular expressions, each splits what the one before left,
# or "digits", which takes every digit alone, then GPT-2's. Sources: llama.cpp src/llama-vocab.cpp; SmolLM2's own
# tokenizer.json (Digits, then ByteLevel).
LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2_SPLIT = LLAMA3_SPLIT.replace("{1,3}", "")  # every digit alone; Qwen3 has it too
GPT2_SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
DEFAULT_SPLITS = (r"[\p{P}\$\+<=>\^~\|]+", GPT2_SPLIT, r"\p{N}+", "[0-9][0-9][0-9]")
PRE_TOKENIZERS = {"gpt-2": None, "smollm": "digits", "llama-bpe": (LLAMA3_SPLIT,), "qwen2": (QWEN2_SPLIT,)}
PRE_TOKENIZERS |= {"default": DEFAULT_SPLITS}  # llama.cpp's if a file names none
WITH_BEGIN = ("llama-bpe",)  # of these; SentencePiece has it too
SENTENCEPIECE_IDS = {"bos": 1, "eos": 2}
# From llama.cpp's list, those of the families read here, without its fill-in-the-middle tokens.
ENDS = ("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>")
ENDS += ("</s>", "<eos>")
SPACE = "\u2581"  # SentencePiece's


class Read(NamedTuple):
    """Tokenizer data of a file."""

    core: tokenizers.Tokenizer
    eos_id: int | None
    bos_id: int | None
    end_ids: tuple[int, ...]  # end a generation; eos_id first
    chat_template: str | None
    tool_template: str | None  # used instead if tools are described


def read(path: Path) -> Read:
    """Build the tokenizer of a GGUF file.

    Raises:
      ValueError: a damaged vocabulary, or a kind that is not supported.
    """
    from tokenizers import AddedToken

    metadata = gguf_file.read(path).metadata
    kind, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre", "default")
    if kind != "llama" and (kind != "gpt2" or not isinstance(pre, str) or pre not in PRE_TOKENIZERS):
        raise ValueError(
            f"{path}: tokenizer model {kind!r} with pre-tokenizer {pre!r} is not supported, wanted model 'llama', or "
            f"'gpt2' with one of {', '.join(PRE_TOKENIZERS)}; pass the Hugging Face folder instead"
        )
    types = metadata.get("tokenizer.ggml.token_type", [])
    if not isinstance(types, list):
        raise ValueError(f"{path}: tokenizer.ggml.token_type is {types!r}, wanted one type a token")
    try:
        tokens = metadata["tokenizer.ggml.tokens"]
        core = _sentencepiece(metadata, tokens, types) if kind == "llama" else _byte_level(metadata, tokens, pre)
    except Exception as error:  # KeyError from the metadata; tokenizers raises bare Exception for a bad merge
        raise ValueError(f"{path}: the vocabulary cannot be read ({type(error).__name__}: {error})") from error
    kept = [(tokens[i], kind) for i, kind in enumerate(types[: len(tokens)]) if kind in (SPECIAL, USER_DEFINED)]
    core.add_tokens([AddedToken(t, special=kind == SPECIAL, normalized=False) for t, kind in kept])
    ids = _special_ids(path, metadata, tokens, SENTENCEPIECE_IDS if kind == "llama" else {})
    _add_around(core, metadata, tokens, ids, has_begin=kind == "llama" or pre in WITH_BEGIN)
    named = [i for i, token in enumerate(tokens) if token in ENDS]
    ends = dict.fromkeys(i for i in (ids["eos"], ids["eot"], ids["eom"], *named) if i is not None)
    texts = (metadata.get(f"tokenizer.chat_template{name}") for name in ("", ".tool_use"))
    return Read(core, ids["eos"], ids["bos"], tuple(ends), *texts)


def _special_ids(path: Path, metadata: dict[str, Any], tokens: list[str], defaults: dict) -> dict[str, int | None]:
    """Ids of begin and end, of a turn and of a message; None where the file has none."""
    ids = {name: metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos", "eot", "eom")}
    bad = {name: i for name, i in ids.items() if i is not None and not (isinstance(i, int) and 0 <= i < len(tokens))}
    if bad:
        raise ValueError(f"{path}: special ids {bad} lie outside the vocabulary of {len(tokens)}")
    return ids | {name: i for name, i in defaults.items() if ids[name] is None and i < len(tokens)}


def _add_around(core: tokenizers.Tokenizer, metadata: dict, tokens: list[str], ids: dict, *, has_begin: bool) -> None:
    """Put the begin and end tokens around every text, if the file or llama.cpp's default for it says so."""
    from tokenizers import processors

    wanted = {"bos": metadata.get("tokenizer.ggml.add_bos_token", has_begin)}
    wanted["eos"] = metadata.get("tokenizer.ggml.add_eos_token", False)
    before, after = ([ids[name]] if wanted[name] and ids[name] is not None else [] for name in ("bos", "eos"))
    if before or after:
        single = [*(tokens[i] for i in before), "$A", *(tokens[i] for i in after)]
        special = {tokens[i]: i for i in (*before, *after)}
        core.post_processor = processors.TemplateProcessing(single=single, special_tokens=list(special.items()))


def _byte_level(metadata: dict[str, Any], tokens: list[str], pre: str) -> tokenizers.Tokenizer:
    """Build a byte-level BPE (Radford et al. 2019)."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    # Llama 3 keeps words of the vocabulary whole, even if no merges lead to them.
    core = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=pre == "llama-bpe"))
    if pre == "qwen2":  # as Qwen's own tokenizer.json; llama.cpp leaves it out
        core.normalizer = normalizers.NFC()
    core.pre_tokenizer = _pre_tokenizer(pre)
    core.decoder = decoders.ByteLevel()
    return core


def _pre_tokenizer(pre: str) -> tokenizers.pre_tokenizers.PreTokenizer:
    """Pre-tokenizer of a name in PRE_TOKENIZERS."""
    from tokenizers import Regex, pre_tokenizers

    splits = PRE_TOKENIZERS[pre]
    if splits is None:
        return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if splits == "digits":
        first, then_gpt2 = [pre_tokenizers.Digits(individual_digits=True)], True
    else:
        first, then_gpt2 = [pre_tokenizers.Split(Regex(each), behavior="isolated") for each in splits], False
    return pre_tokenizers.Sequence(
        [*first, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=then_gpt2, trim_offsets=True)]
    )


def _sentencepiece(metadata: dict[str, Any], tokens: list[str], types: list[int]) -> tokenizers.Tokenizer:
    """Build a SentencePiece BPE (Kudo and Richardson 2018, arXiv:1808.06226) with byte fallback.

    A space is put in front of a text and after every special token, as llama.cpp does, unless the file says otherwise.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers

    unknown = next((tokens[i] for i, kind in enumerate(types) if kind == UNKNOWN), None)
    vocabulary = {token: i for i, token in enumerate(tokens)}
    merges = _merges(tokens, metadata["tokenizer.ggml.scores"], types)
    core = Tokenizer(models.BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    steps, undone = [normalizers.Replace(" ", SPACE)], [decoders.Replace(SPACE, " "), decoders.ByteFallback()]
    undone.append(decoders.Fuse())
    if metadata.get("tokenizer.ggml.add_space_prefix", True):
        steps.insert(0, normalizers.Prepend(SPACE))
        undone.append(decoders.Strip(content=" ", left=1))
    core.normalizer, core.decoder = normalizers.Sequence(steps), decoders.Sequence(undone)
    return core


def _merges(tokens: list[str], scores: list[float], types: list[int]) -> list[tuple[str, str]]:
    """Pairs of pieces that make a piece, the piece of the highest score first; only text can be made or merged.

    Differs from SentencePiece: if two overlapping pairs make pieces of equal score, SentencePiece takes the left one,
    and this one the pair that comes first in the list. Scores of trained vocabularies are all different.
    """
    if len(scores) != len(tokens):
        raise ValueError(f"{len(scores)} scores for {len(tokens)} tokens")
    kinds = types or [0] * len(tokens)
    text = {token for token, kind in zip(tokens, kinds, strict=True) if kind not in (UNKNOWN, SPECIAL, UNUSED, BYTE)}
    found = []
    for token, score in zip(tokens, scores, strict=True):
        if token in text:
            pairs = ((token[:i], token[i:]) for i in range(1, len(token)))
            found += [(-score, len(left), left, right) for left, right in pairs if left in text and right in text]
    return [(left, right) for _, _, left, right in sorted(found, key=lambda pair: pair[:2])]
