"""Tokenizers of GGUF files: what metadata says and what it leaves out, byte-level BPE and SentencePiece."""

import gguf
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from jaxbench.pretrained import assets, gguf_tokenizer, tokenizer

TOKENS = ["<s>", "</s>", "a", "b", "c", "\u0120", "1", "2", "\u0120a", "bc", "12", "<|eot_id|>"]
TYPES = [3, 3, 1, 1, 1, 1, 1, 1, 1, 1, 1, 3]
MERGES = ("\u0120 a", "b c")


def _write(path, model="gpt2", pre="gpt-2", merges=MERGES, eos=1, tokens=TOKENS, types=TYPES, **extra):
    """Write a file of a vocabulary alone; extra: further keys, which start with add_."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(model)
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    if merges is not None:
        writer.add_token_merges([*merges, "1 2"])
        writer.add_bos_token_id(0)
        writer.add_eos_token_id(eos)
    for name, value in extra.items():
        getattr(writer, f"add_{name}")(value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(
    ("pre", "digits"), [("gpt-2", [10]), ("llama-bpe", [10]), ("smollm", [6, 7]), ("qwen2", [6, 7]), ("default", [10])]
)
def test_pre_tokenizers_differ_in_how_they_take_digits(tmp_path, pre, digits):
    made = tokenizer.load_tokenizer(_write(tmp_path / "x.gguf", pre=pre, add_bos_token=False))
    assert made.encode("bc a</s>") == [9, 8, 1]
    assert made.encode("12") == digits


@pytest.mark.parametrize("pre", ["default", None])
def test_a_file_without_a_pre_tokenizer_is_split_by_llama_cpps_default(tmp_path, pre):
    """Marks first, then as GPT-2 does, then numbers in threes (src/llama-vocab.cpp, LLAMA_VOCAB_PRE_TYPE_DEFAULT)."""
    made = tokenizer.load_tokenizer(_write(tmp_path / "x.gguf", pre=pre))
    pieces = made.core.pre_tokenizer.pre_tokenize_str("don't b, $12345  c")
    assert [piece for piece, _ in pieces] == "don ' t \u0120b , \u0120 $ 123 45 \u0120 \u0120c".split()


def test_a_template_for_tools_is_used_where_tools_are_described_as_llama_cpp_does(tmp_path):
    templates = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]
    made = tokenizer.load_tokenizer(_write(tmp_path / "x.gguf", chat_template=templates))
    assert (made.chat([]), made.chat([], tools=[{}])) == ("D", "T")


@pytest.mark.parametrize("pre", gguf_tokenizer.PRE_TOKENIZERS)
def test_the_begin_token_is_added_where_the_file_or_llama_cpps_default_says_so(tmp_path, pre):
    """Its default is true for llama-bpe alone of these (src/llama-vocab.cpp, `add_bos`)."""
    for given_, wanted in ((None, pre == "llama-bpe"), (True, True), (False, False)):
        extra = {} if given_ is None else {"add_bos_token": given_}
        made = tokenizer.load_tokenizer(_write(tmp_path / "x.gguf", pre=pre, **extra))
        assert made.encode("bc") == ([0, 9] if wanted else [9])
        assert made.encode("bc", add_special=False) == [9]


def test_the_end_token_is_added_where_the_file_says_so(tmp_path):
    made = tokenizer.load_tokenizer(_write(tmp_path / "x.gguf", pre="llama-bpe", add_eos_token=True))
    assert made.encode("bc") == [0, 9, 1]


def test_generations_end_at_the_tokens_of_end_turn_and_message_and_at_known_names(tmp_path):
    assert tokenizer.load_tokenizer(_write(tmp_path / "x.gguf", eos=4)).end_ids == (4, 1, 11)
    made = tokenizer.load_tokenizer(_write(tmp_path / "y.gguf", eos=1, eot_token_id=7))
    assert (made.eos_id, made.end_ids) == (1, (1, 7, 11))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "bert"}, "tokenizer model 'bert' with pre-tokenizer 'gpt-2' is not supported, wanted model 'llama'"),
        ({"pre": "viking"}, "pre-tokenizer 'viking' is not supported.*gpt-2, smollm, llama-bpe"),
        ({"merges": ("x y",)}, "the vocabulary cannot be read"),
        ({"model": "llama"}, r"the vocabulary cannot be read .KeyError: 'tokenizer.ggml.scores'"),
        ({"model": "llama", "token_scores": [0.0]}, "the vocabulary cannot be read .*1 scores for 12 tokens"),
        ({"eos": 99}, "special ids {'eos': 99} lie outside the vocabulary of 12"),
        ({"eot_token_id": 12}, "special ids {'eot': 12} lie outside the vocabulary of 12"),
    ],
)
def test_vocabularies_that_cannot_be_used_are_refused(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        tokenizer.load_tokenizer(_write(tmp_path / "x.gguf", **changes))


# --- SentencePiece

SPACE = "\u2581"
CONTROL = ["<unk>", "<s>", "</s>"]


class Vocabulary:
    """A trained SentencePiece vocabulary, and the algorithm over it as its paper tells it."""

    def __init__(self):
        core = tokenizers.Tokenizer(tokenizers.models.BPE())
        core.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
        trainer = tokenizers.trainers.BpeTrainer(vocab_size=400, show_progress=False)
        core.train_from_iterator(assets.default_text()[:50000].splitlines(), trainer)
        trained = sorted(core.get_vocab(), key=core.get_vocab().get)
        self.pieces = [piece for piece in trained if len(piece) > 1] + [piece for piece in trained if len(piece) == 1]
        hexadecimal = [f"<0x{byte:02X}>" for byte in range(256)]
        self.tokens = [*CONTROL, *hexadecimal, *self.pieces]
        self.scores = [0.0] * (len(CONTROL) + 256) + [-float(i) for i in range(len(self.pieces))]
        self.types = [2, 3, 3] + [6] * 256 + [1] * len(self.pieces)

    def encode(self, text: str) -> list[int]:
        """Merge the neighbours of the best score, the leftmost of equal ones, until none make a piece."""
        score = dict(zip(self.pieces, self.scores[-len(self.pieces) :], strict=True))
        parts = list(text.replace(" ", SPACE))
        while True:
            pairs = [(score.get(a + b), -i) for i, (a, b) in enumerate(zip(parts, parts[1:]))]
            pairs = [pair for pair in pairs if pair[0] is not None]
            if not pairs:
                break
            at = -max(pairs)[1]
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        ids = {token: i for i, token in enumerate(self.tokens)}
        return [i for part in parts for i in ([ids[part]] if part in score else [3 + b for b in part.encode()])]


@pytest.fixture(scope="module")
def vocabulary():
    return Vocabulary()


def _spm(path, vocabulary, **extra):
    about = {"tokens": vocabulary.tokens, "types": vocabulary.types, "token_scores": vocabulary.scores}
    return tokenizer.load_tokenizer(_write(path, model="llama", pre="default", merges=None, **about, **extra))


@pytest.fixture(scope="module")
def sentencepiece(vocabulary, tmp_path_factory):
    return _spm(tmp_path_factory.mktemp("spm") / "x.gguf", vocabulary)


@given(text=st.text(max_size=40) | st.text("abe st\n\u2581\u4e2d\U0001f600<0x>", max_size=40))
def test_sentencepiece_ids_are_those_of_its_algorithm_and_give_the_text_back(vocabulary, sentencepiece, text):
    ids = sentencepiece.encode(text)
    assert ids == [1, *(vocabulary.encode(" " + text) if text else [])]
    assert sentencepiece.decode(ids, skip_special=True) == text.replace(SPACE, " ")


def test_sentencepiece_ids_of_prose_are_those_of_its_algorithm(vocabulary, sentencepiece):
    for paragraph in assets.default_text()[:6000].split("\n\n"):
        assert sentencepiece.encode(paragraph, add_special=False) == vocabulary.encode(" " + paragraph)


def test_sentencepiece_has_llama_cpps_special_ids_and_a_space_after_each(vocabulary, sentencepiece):
    assert (sentencepiece.bos_id, sentencepiece.eos_id, sentencepiece.end_ids) == (1, 2, (2,))
    assert sentencepiece.encode("</s>the") == [1, 2, *vocabulary.encode(" the")]
    assert sentencepiece.encode("<0x0A>\n")[-1] == 3 + ord("\n")  # the byte's token, not the letters of its name
    assert sentencepiece.encode("<0x0A>\n").count(3 + ord("\n")) == 1


def test_sentencepiece_without_a_first_space_or_begin_token_is_read(vocabulary, tmp_path):
    made = _spm(tmp_path / "x.gguf", vocabulary, add_space_prefix=False, add_bos_token=False)
    assert made.encode("the end") == vocabulary.encode("the end")
    assert made.decode(made.encode(" the end")) == " the end"
    assert made.chat_template is None


def test_sentencepiece_saved_is_the_same_for_us_and_for_transformers(vocabulary, sentencepiece, tmp_path):
    import transformers

    sentencepiece.save(tmp_path)
    ours, theirs = tokenizer.load_tokenizer(tmp_path), transformers.AutoTokenizer.from_pretrained(tmp_path)
    for text in ("the end", " two  spaces", "caf\u00e9 \u4e2d\n", "", "</s>after"):
        assert sentencepiece.encode(text) == ours.encode(text) == theirs(text).input_ids
    assert theirs.decode(sentencepiece.encode("the end"), skip_special_tokens=True) == "the end"
