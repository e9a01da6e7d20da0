"""The tokenizer: known encodings, transformers as oracle, round trips, templates that cannot reach out."""

import json
import threading
import time

import pytest
import tokenizers
import transformers
from hypothesis import given
from hypothesis import strategies as st

from jaxbench.pretrained import assets, small_tokenizers, tokenizer

CHAT = [{"role": "user", "content": "Hi"}]
SAMPLES = ["Hello world", "don't  stop", " leading", "naïve café 😀\n\n\ttabs", "<|im_start|>user\nHi<|im_end|>\n", ""]


@pytest.fixture(scope="module")
def default():
    return tokenizer.load_tokenizer()


@pytest.fixture(scope="module")
def saved(default, tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    default.save(folder)
    return folder


def test_default_has_the_published_ids_and_size(default):
    assert (default.vocab_size, default.eos_id, default.bos_id) == (49152, 2, 1)
    assert default.encode("<|endoftext|><|im_start|><|im_end|>") == [0, 1, 2]


def test_digits_are_taken_one_by_one_and_never_with_the_space_before(default):
    digits = {str(d): default.core.token_to_id(str(d)) for d in range(10)}
    space, two_spaces = default.core.token_to_id("Ġ"), default.core.token_to_id("ĠĠ")
    assert default.encode("2024") == [digits[d] for d in "2024"]
    assert default.encode("a  12")[1:] == [two_spaces, digits["1"], digits["2"]]  # not two single spaces
    assert default.encode(" 7") == [space, digits["7"]]


def test_encodings_equal_transformers_own_reading_of_the_file(default):
    path = assets.default_model_path()
    theirs = transformers.AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    for text in [*SAMPLES, *assets.default_text().split("\f")]:
        assert default.encode(text) == theirs(text).input_ids


def test_saved_tokenizer_is_the_same_for_us_and_for_transformers(default, saved):
    ours = tokenizer.load_tokenizer(saved)
    theirs = transformers.AutoTokenizer.from_pretrained(saved)
    for text in [*SAMPLES, "In 2024, the  12 cats", assets.default_text()[:5000]]:
        assert default.encode(text) == ours.encode(text) == theirs(text).input_ids
    assert (ours.eos_id, ours.bos_id, ours.vocab_size) == (2, 1, 49152)
    rendered = theirs.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    assert default.chat(CHAT) == ours.chat(CHAT) == rendered


def test_chat_puts_the_system_message_first_and_asks_for_an_answer(default):
    text = default.chat(CHAT)
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert default.encode(text)[0] == default.bos_id
    assert not default.chat(CHAT, add_generation_prompt=False).endswith("assistant\n")


# SmolLM2's vocabulary has no token for the bytes of some control characters and of code points above U+3FFFF.
COVERED = st.characters(max_codepoint=0x3FFFF, exclude_categories=("Cs", "Cc"))


@given(text=st.text(COVERED, max_size=60))
def test_decoding_gives_the_text_back(default, text):
    assert default.decode(default.encode(text)) == text


def test_special_tokens_can_be_left_out_of_the_text(default):
    ids = default.encode("<|im_start|>Hi<|im_end|>")
    assert default.decode(ids) == "<|im_start|>Hi<|im_end|>"
    assert default.decode(ids, skip_special=True) == "Hi"


def test_batch_equals_one_by_one(default):
    for special in (True, False):
        singly = [default.core.encode(text, add_special_tokens=special).ids for text in SAMPLES]
        assert default.encode_batch(SAMPLES, add_special=special) == singly
        assert [default.encode(text, add_special=special) for text in SAMPLES] == singly


def test_no_token_has_more_characters_than_the_longest_one(default, small):
    text = f"{' ' * 200}{'=' * 200}{'é😀' * 50}" + " ".join(SAMPLES)
    longest = default.longest_token
    assert longest == 81 and len(text) <= longest * len(default.encode(text))
    assert len(max(default.core.get_vocab(), key=len)) == longest
    made, other = (tokenizer.load_tokenizer(small("tokenizer_config.json")) for _ in range(2))
    other.core.normalizer = tokenizers.normalizers.NFC()  # which makes one character of several
    assert (made.longest_token, other.longest_token) == (len("<|endoftext|>"), None)


def test_other_threads_go_on_while_a_long_text_is_encoded(default):
    thread, turns = threading.Thread(target=default.encode, args=("The mill stands still. " * 50_000,)), 0
    thread.start()
    while thread.is_alive():
        time.sleep(0.001)
        turns += 1
    assert turns > 50  # a handful where the encoding holds Python's lock


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "no chat template"),
        ("{{ messages.__class__.__mro__ }}", "unsafe"),
        ("{% set _ = messages.append(1) %}", "unsafe|not safely callable"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% if %}", "template failed"),
    ],
)
def test_template_that_is_missing_broken_or_reaches_out_is_an_error(default, template, message):
    broken = tokenizer.Tokenizer(default.core, eos_id=2, bos_id=1, chat_template=template)
    with pytest.raises(ValueError, match=message):
        broken.chat(CHAT)


def test_template_sees_token_names_and_loop_controls(default):
    template = "{{ bos_token }}{% for m in messages %}{{ m | tojson }}{% break %}{% endfor %}{{ eos_token }}"
    made = tokenizer.Tokenizer(default.core, eos_id=2, bos_id=1, chat_template=template)
    assert made.chat(CHAT * 2) == '<|im_start|>{"role": "user", "content": "Hi"}<|im_end|>'


# --- folders


def _settings(folder, values):
    (folder / "tokenizer_config.json").write_text(json.dumps(values))


def test_end_token_is_found_in_each_place_that_folders_keep_it(saved, tmp_path):
    (tmp_path / "tokenizer.json").write_bytes((saved / "tokenizer.json").read_bytes())
    assert (tokenizer.load_tokenizer(tmp_path).eos_id, tokenizer.load_tokenizer(tmp_path).end_ids) == (None, ())
    (tmp_path / "config.json").write_text('{"eos_token_id": [5, 6]}')
    assert tokenizer.load_tokenizer(tmp_path).eos_id == 5
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 7}')
    assert tokenizer.load_tokenizer(tmp_path).eos_id == 7
    _settings(tmp_path, {"eos_token": {"content": "<|endoftext|>"}})
    assert tokenizer.load_tokenizer(tmp_path).eos_id == 0
    _settings(tmp_path, {"eos_token": "<|im_end|>"})
    assert tokenizer.load_tokenizer(tmp_path).eos_id == 2


def test_every_id_that_ends_a_generation_is_kept_the_documents_first(default, saved, tmp_path):
    assert (default.end_ids, tokenizer.load_tokenizer(saved).end_ids) == ((2, 0), (2,))
    (tmp_path / "tokenizer.json").write_bytes((saved / "tokenizer.json").read_bytes())
    (tmp_path / "config.json").write_text('{"eos_token_id": 9}')
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, 2, 999999]}')
    assert tokenizer.load_tokenizer(tmp_path).end_ids == (5, 2)  # transformers' generate stops at the second file's
    _settings(tmp_path, {"eos_token": "<|im_end|>"})
    assert tokenizer.load_tokenizer(tmp_path).end_ids == (2, 5)


def test_template_is_found_in_each_place_that_folders_keep_it(saved, tmp_path):
    (tmp_path / "tokenizer.json").write_bytes((saved / "tokenizer.json").read_bytes())
    _settings(tmp_path, {"chat_template": [{"name": "tools", "template": "t"}, {"name": "default", "template": "d"}]})
    assert tokenizer.load_tokenizer(tmp_path).chat([]) == "d"
    (tmp_path / "chat_template.jinja").write_text("file")
    assert tokenizer.load_tokenizer(tmp_path).chat([]) == "file"


def test_missing_or_damaged_tokenizer_json_is_an_error_that_names_it(tmp_path):
    with pytest.raises(ValueError, match=r"missing tokenizer\.json; write it with"):
        tokenizer.load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer\.json: cannot be read as a tokenizer"):
        tokenizer.load_tokenizer(tmp_path)


def test_bytes_of_tokens_are_those_of_the_text_also_where_a_character_is_split(default, tmp_path):
    text = "caf\u00e9, na\u00efve \u2013 \u4f60\u597d \U0001f9e6\U0001f30a and a \ufffd"
    ids = default.encode(text)
    assert b"".join(default.token_bytes(each) for each in ids) == text.encode()
    assert any("\ufffd" in default.decode([each]) for each in ids)  # a character that is split
    small_tokenizers.ByteTokenizer().save(tmp_path)
    byte = tokenizer.load_tokenizer(tmp_path)
    assert b"".join(byte.token_bytes(each) for each in byte.encode(text)) == text.encode()


# --- what stands beside tokenizer.json, or in it and is not the text's


@pytest.fixture
def small(tmp_path):
    """Return a folder with a tokenizer of bytes, and what changes a JSON file of it."""
    small_tokenizers.ByteTokenizer().save(tmp_path)

    def change(name, **values):
        file = tmp_path / name
        before = json.loads(file.read_text()) if file.is_file() else {}
        file.write_text(json.dumps(before | values))
        return tmp_path

    return change


def _same(folder, *texts):
    """Read a folder, and hold the ids of texts to transformers'."""
    ours, theirs = tokenizer.load_tokenizer(folder), transformers.AutoTokenizer.from_pretrained(folder)
    for text in texts:
        assert ours.encode(text) == theirs(text).input_ids
    assert (ours.vocab_size, ours.eos_id) == (len(theirs), theirs.eos_token_id)
    return ours


FILLED = {"strategy": {"Fixed": 16}, "direction": "Right", "pad_id": 0, "pad_type_id": 0, "pad_token": "a"}
CUT = {"direction": "Right", "max_length": 8, "strategy": "LongestFirst", "stride": 0}


@pytest.mark.parametrize("setting", [{"truncation": CUT}, {"padding": FILLED | {"pad_to_multiple_of": None}}])
def test_limits_of_length_that_a_file_was_written_with_are_lifted(small, setting):
    read = _same(small("tokenizer.json", **setting), "word " * 30, "a")
    assert [len(ids) for ids in read.encode_batch(["a", "word " * 30])] == [1, 150]


NO_FLAGS = dict.fromkeys(("lstrip", "rstrip", "normalized", "single_word"), False)
THINK = {"content": "<think>"} | NO_FLAGS


def test_added_tokens_outside_tokenizer_json_are_kept_whole_as_in_transformers(small):
    size = tokenizer.load_tokenizer(small("tokenizer.json")).vocab_size
    read = _same(small("added_tokens.json", **{"<think>": size}), "a<think>b", "<think> ")
    assert read.encode("a<think>b") == [97, size, 98]
    decoder = {str(size): THINK | {"special": True}, str(size + 1): THINK | {"content": "<x>", "special": False}}
    folder = small("tokenizer_config.json", added_tokens_decoder=decoder)
    read = _same(folder, "a<think>b<x>")
    assert read.decode(read.encode("a<think>b<x>"), skip_special=True) == "ab<x>"


def test_a_special_token_that_is_only_in_the_vocabulary_is_kept_whole_as_in_transformers(small):
    piece = "\u0120"  # a space, as vocabularies of bytes write it
    _same(small("tokenizer_config.json", pad_token="Q", additional_special_tokens=[piece]), "aQb c", piece + "x")


def test_an_older_file_of_special_tokens_stands_before_tokenizer_config_unless_that_lists_added_tokens(small):
    folder = small("special_tokens_map.json", eos_token="a", pad_token={"content": "b"})
    assert _same(folder, "ab").eos_id == 97
    folder = small("tokenizer_config.json", added_tokens_decoder={}, eos_token="c")
    assert _same(folder, "abc").eos_id == 99


def test_special_tokens_are_split_into_text_where_the_folder_says_so_as_in_transformers(small, tmp_path_factory):
    text = "a<|endoftext|>b"
    whole = _same(small("tokenizer_config.json", split_special_tokens=False), text)
    split = _same(small("tokenizer_config.json", split_special_tokens=True), text)
    assert (whole.encode(text), split.encode(text)) == ([97, 256, 98], list(text.encode()))
    assert whole.core.to_str() == split.core.to_str()
    assert tokenizer.identity(whole.core) != tokenizer.identity(split.core)  # caches of ids tell them apart
    folder = tmp_path_factory.mktemp("saved_again")
    split.save(folder)
    assert _same(folder, text).encode(text) == split.encode(text)


def test_a_begin_token_that_the_normalizer_changes_is_saved_under_its_own_name(small, tmp_path_factory):
    """SentencePiece's space is put in front of it, as in folders of older Llamas."""
    prepend = {"type": "Prepend", "prepend": "\u2581"}
    begin = {"id": 256, "content": "<s>", "special": True} | NO_FLAGS | {"normalized": True}
    folder = small("tokenizer.json", normalizer=prepend, added_tokens=[begin])
    small("tokenizer_config.json", bos_token="<s>", chat_template="{{ bos_token }}")
    read = tokenizer.load_tokenizer(folder)
    assert (read.core.id_to_token(256), read.bos_id) == ("\u2581<s>", 256)
    saved_again = tmp_path_factory.mktemp("saved_again")
    read.save(saved_again)
    again = tokenizer.load_tokenizer(saved_again)
    assert (again.bos_id, again.special_tokens["bos_token"], again.chat(CHAT)) == (256, "<s>", "<s>")


@pytest.mark.parametrize("kind", ["GPT2Tokenizer", "Qwen2TokenizerFast"])
def test_a_space_stands_in_front_of_a_text_where_the_folder_says_so_as_in_transformers(small, kind):
    folder = small("tokenizer_config.json", tokenizer_class=kind, add_prefix_space=True)
    small("tokenizer.json", added_tokens=[{"id": 256, "content": "<|endoftext|>", "special": True} | NO_FLAGS])
    read = _same(folder, "ab", " ab", "", "<|endoftext|>a")
    assert read.encode("ab") == list(b" ab")
    assert _same(small("tokenizer_config.json", add_prefix_space=False), "ab").encode("ab") == list(b"ab")
    generic = small("tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast", add_prefix_space=True)
    assert _same(generic, "ab").encode("ab") == list(b"ab")  # which has tokenizer.json alone


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("tokenizer_config.json", {"split_special_tokens": "no"}, "split_special_tokens='no', wanted true or false"),
        ("tokenizer_config.json", {"add_prefix_space": 1}, "add_prefix_space=1, wanted true or false"),
        ("added_tokens.json", {"<think>": 900}, "the added token '<think>' has id 900, and 257 in tokenizer.json"),
        (
            "tokenizer_config.json",
            {"added_tokens_decoder": {"5": THINK | {"special": False}}},
            "the added token '<think>' has id 5, and 257 in tokenizer.json",
        ),
        ("tokenizer_config.json", {"added_tokens_decoder": {"x": THINK}}, "its added tokens cannot be read"),
        ("tokenizer_config.json", {"added_tokens_decoder": [1]}, "its added tokens cannot be read"),
        ("tokenizer_config.json", {"added_tokens_decoder": {"257": {"text": "a"}}}, "its added tokens cannot be read"),
    ],
)
def test_settings_and_added_tokens_that_do_not_fit_are_an_error_that_names_their_file(small, name, values, message):
    with pytest.raises(ValueError, match=f"{name}: {message}"):
        tokenizer.load_tokenizer(small(name, **values))
