"""Chat templates: rendered as transformers renders them, whatever they use; a failure is one ValueError."""

import json

import pytest
import transformers

from jaxbench.pretrained import chat_template, small_tokenizers, tokenizer

CHAT = [{"role": "system", "content": "S <b>"}, {"role": "user", "content": 'h\u00e9 "q"', "name": None}]
TOOLS = [{"type": "function", "function": {"name": "f", "description": "d\u00e9<", "parameters": {"b": 1, "a": 2}}}]


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """Return a folder with a tokenizer of bytes."""
    folder = tmp_path_factory.mktemp("plain")
    small_tokenizers.ByteTokenizer().save(folder)
    return folder


def _folder(plain, made, **settings):
    """Make a folder whose tokenizer_config.json has these settings too; None: not this one."""
    (made / "tokenizer.json").write_bytes((plain / "tokenizer.json").read_bytes())
    given = json.loads((plain / "tokenizer_config.json").read_text()) | settings
    (made / "tokenizer_config.json").write_text(json.dumps({k: v for k, v in given.items() if v is not None}))
    return made


def _theirs(folder, tools=None, messages=CHAT):
    read = transformers.AutoTokenizer.from_pretrained(folder)
    return read.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=True)


NAMED = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T{{tools|tojson}}"}]


@pytest.mark.parametrize(
    "template",
    [
        "{{tools|tojson}}",
        "{{tools|tojson(indent=4)}}",
        "{{tools|tojson(ensure_ascii=False)}}{{tools|tojson(ensure_ascii=True)}}{{tools|tojson(True)}}",
        "{{tools|tojson(separators=(',', ':'), sort_keys=True)}}",
        "{% if strftime_now is defined %}{{strftime_now('%Y')}}{% else %}1989{% endif %}",
        "{% for m in messages %}{% generation %}{{m.content}}{% endgeneration %}{% if loop.first %}{% break %}"
        "{% endif %}{% endfor %}",
        "[{{pad_token}}|{{unk_token}}|{{eos_token}}|{{bos_token}}{% if bos_token is defined %}!{% endif %}]",
        "{% for m in messages %}{% for k in m %}{{k}},{% endfor %}{{m.name}}{% endfor %}",
        "{{documents}}{% if tools is none %}no{% endif %}{{add_generation_prompt}}",
        NAMED,
    ],
)
def test_templates_are_rendered_as_by_transformers(plain, tmp_path, template):
    folder = _folder(plain, tmp_path, chat_template=template, pad_token="a", unk_token="b", tokenizer_class=None)
    for tools in (None, TOOLS):
        assert tokenizer.load_tokenizer(folder).chat(CHAT, tools=tools) == _theirs(folder, tools)


def test_a_template_gets_the_variables_that_it_reads_as_in_transformers_and_no_others(plain, tmp_path):
    folder = _folder(
        plain, tmp_path, chat_template="{% if enable_thinking is false %}no{% else %}{{effort}}{% endif %}"
    )
    read, theirs = tokenizer.load_tokenizer(folder), transformers.AutoTokenizer.from_pretrained(folder)
    for variables in ({}, {"enable_thinking": False}, {"effort": "low"}, {"enable_thinking": True, "effort": "high"}):
        rendered = theirs.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True, **variables)
        assert read.chat(CHAT, variables=variables) == rendered
    read.template_variables = {"effort": "low"}
    assert (read.chat(CHAT), read.chat(CHAT, variables={"effort": "high"})) == ("low", "high")
    for name in ("efort", "messages", "tools", "bos_token", "namespace"):
        with pytest.raises(ValueError, match=f"'{name}' is no variable that .* reads; wanted one of effort, enable_th"):
            read.chat(CHAT, variables={name: 1})


IS_SET = "{% if a %}{% set x = a %}{% elif b %}{% set x = b %}{% else %}{% set x = 1 %}{% endif %}"


@pytest.mark.parametrize(("template", "wanted"), [
    (IS_SET + "{% for m in messages %}{% if x %}{{x}}{% set x = m %}{% endif %}{{x}}{% endfor %}", "a b"),
    (IS_SET.replace("{% else %}{% set x = 1 %}", "") + "{{x}}", "a b x"),
    ("{% for m in messages %}{% set x = m %}{{loop.index}}{% else %}{{a}}{% endfor %}{{x}}", "a x"),
    ("{% if x is not defined %}{% set x = 1 %}{% endif %}{% set y = y | default(2) %}{{x}}{{y}}", "x y"),
    ("{% macro f(x, y=a) %}{{x}}{{y}}{{b}}{% set z = 1 %}{% endmacro %}{{f(1)}}{{z}}", "a b z"),
    ("{% with x = x %}{{x}}{% endwith %}{% set y %}{{b}}{% endset %}{{y}}", "b x"),
    ("{% set n = namespace(x=1) %}{% set n.x = b %}{{n.x}}{% block q %}{{c}}{% endblock %}", "b c"),
    ("{% generation %}{{a}}{% set b = 1 %}{% endgeneration %}{{b}}{{c if d is defined}}", "a b c d"),
])  # fmt: skip
def test_the_names_that_a_template_has_always_assigned_before_are_no_variables(template, wanted):
    assert chat_template._read_variables(template) - {"messages"} == {*wanted.split()}


def test_an_answers_reasoning_is_found_under_each_of_its_names(plain, tmp_path):
    folder = _folder(
        plain, tmp_path, chat_template="{% for m in messages %}{{m.reasoning_content}}{{m.thinking}}{% endfor %}"
    )
    for name in chat_template.REASONING:
        messages = [{"role": "assistant", "content": "x", name: "because"}]
        assert tokenizer.load_tokenizer(folder).chat(messages) == _theirs(folder, messages=messages) == "because" * 2


def test_a_template_that_prints_a_message_with_reasoning_prints_its_keys_in_transformers_order(plain, tmp_path):
    folder = _folder(plain, tmp_path, chat_template="{{messages|tojson}}")
    for name in chat_template.REASONING:
        messages = [{"role": "assistant", "content": "x", name: "because", "name": "n"}]
        assert tokenizer.load_tokenizer(folder).chat(messages) == _theirs(folder, messages=messages)


@pytest.mark.parametrize(
    "template", ["{% set n = namespace(_a=1) %}{{n._a}}", "{% set n = namespace() %}{% set n.__html__ = 1 %}{{n}}"]
)
def test_a_template_that_sets_pythons_own_names_is_refused_as_by_transformers(plain, tmp_path, template):
    folder = _folder(plain, tmp_path, chat_template=template)
    with pytest.raises(Exception, match="underscore"):
        _theirs(folder)
    with pytest.raises(ValueError, match="a namespace takes no name with an underscore first"):
        tokenizer.load_tokenizer(folder).chat(CHAT)


def test_a_namespace_keeps_what_a_template_sets(plain, tmp_path):
    template = "{% set n = namespace({'a': 1}, self=2) %}{% for m in messages %}{% set n.a = n.a + 1 %}{% endfor %}"
    folder = _folder(plain, tmp_path, chat_template=template + "{{n.a}}{{n.self}}")
    assert tokenizer.load_tokenizer(folder).chat(CHAT) == _theirs(folder) == "32"


def test_the_begin_token_of_a_familys_class_is_seen_and_one_that_is_null_is_not(plain, tmp_path):
    template = "{% if bos_token is defined %}{{bos_token}}{% else %}none{% endif %}"
    about = {"chat_template": template, "tokenizer_class": "LlamaTokenizerFast"}
    (tmp_path / "config.json").write_text('{"bos_token_id": 97}')
    assert tokenizer.load_tokenizer(_folder(plain, tmp_path, **about)).chat(CHAT) == "a"
    generic = about | {"tokenizer_class": "PreTrainedTokenizerFast"}
    assert tokenizer.load_tokenizer(_folder(plain, tmp_path, **generic)).chat(CHAT) == "none"


def test_files_of_templates_stand_before_tokenizer_config_and_are_written_back(plain, tmp_path):
    folder = _folder(plain, tmp_path, chat_template="settings")
    (folder / "additional_chat_templates").mkdir()
    for name, text in ((chat_template.DEFAULT_FILE, "D"), (chat_template.TOOLS_FILE, "T")):
        (folder / name).write_text(text)
    read = tokenizer.load_tokenizer(folder)
    assert (read.chat(CHAT), read.chat(CHAT, tools=TOOLS)) == (_theirs(folder), _theirs(folder, TOOLS)) == ("D", "T")
    (tmp_path / "again").mkdir()
    read.save(tmp_path / "again")
    again = tokenizer.load_tokenizer(tmp_path / "again")
    assert (again.chat(CHAT), again.chat(CHAT, tools=TOOLS)) == ("D", "T")


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{1 / 0}}", "division by zero"),
        ("{{1 + messages[0].content}}", "unsupported operand"),
        ("{{'a'.index('b')}}", "substring not found"),
        ("{{bos_token + 'x'}}", "'bos_token' is undefined"),
        ("{% for i in range(999999999) %}{% endfor %}", "Range too big"),
        ("{{1|nope}}", "No filter named 'nope'"),
        ("{{strftime_now(5)}}", "argument 1 must be str"),
        ("{{ {1: 2}|tojson(7, 'x', 3) }}", ""),
    ],
)
def test_whatever_a_template_raises_is_one_line(plain, tmp_path, template, reason):
    read = tokenizer.load_tokenizer(_folder(plain, tmp_path, chat_template=template, tokenizer_class=None))
    with pytest.raises(ValueError, match=f"^chat: the model's template failed: .*{reason}") as raised:
        read.chat(CHAT)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("given", [5, ["x"], {"a": 1}, [{"name": "default"}], [{"name": "default", "template": 5}]])
def test_templates_of_another_form_are_an_error_that_names_the_file(plain, tmp_path, given):
    with pytest.raises(ValueError, match=r"tokenizer_config\.json: chat_template is .*, wanted a text or a list"):
        tokenizer.load_tokenizer(_folder(plain, tmp_path, chat_template=given))
