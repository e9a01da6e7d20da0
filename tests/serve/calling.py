"""Templates that show calls of tools in several notations, tokenizers that have them, and what follows a grammar."""

from jaxbench.pretrained import chat_template
from jaxbench.serve import tools
from tests.serve.asking import Bytes

CALL = "{{ {'name': c.function.name, 'arguments': c.function.arguments} | tojson }}"
TAGGED = "{% for c in m.tool_calls %}{{ '\n' if m.content or not loop.first }}<tool_call>\n" + CALL
TAGGED += "{{ '\n' }}</tool_call>{% endfor %}"
CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n@{{ m.content }}{% if m.tool_calls %}" + TAGGED
CHATML += "{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
TURN = "{% for m in messages %}{% if m.tool_calls %}@{{ eos_token }}{% else %}[INST]{{ m.content }}[/INST]{% endif %}"
TURN += "{% endfor %}"
BARE = "{% if m.tool_calls | length > 1 %}{{ raise_exception('one call at most') }}{% endif %}"
BARE += "{% set c = m.tool_calls[0] %}" + CALL.replace("'arguments'", "'parameters'")
LISTED = '[TOOL_CALLS] [{% for c in m.tool_calls %}{{ (c.function | tojson)[:-1] }}, "id": {{ c.id | tojson }}}'
LISTED += "{{ ', ' if not loop.last }}{% endfor %}]"
WRAPPED = '{% for c in m.tool_calls %}{"type": "function", "function": ' + CALL + "}{{ '\n' }}{% endfor %}"
ELEMENTS = "{% for c in m.tool_calls %}<function={{ c.function.name }}>{{ c.function.arguments | tojson }}"
ELEMENTS += "</function>{% endfor %}"
SPECIAL = "<|im_start|>", "<|im_end|>", "[INST]", "[/INST]", "</s>"
OBJECT = '{"type": "function", "function":'
TAGS = tools.Notation(("name", "arguments"), "name", "arguments", "<tool_call>", "</tool_call>", "<tool_call>\n")
PLAIN = TAGS._replace(opening="", closing="", prefill="")
LOOK = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {"type": "object", "properties": {"at": {"enum": ["sky", "sea"]}}, "required": ["at"]},
    },
}  # fmt: skip


class Templated(Bytes):
    """A tokenizer of characters with a template; some texts are special tokens."""

    def __init__(self, template, special=SPECIAL):
        self._template, self._special = template, special

    def encode(self, text, *, add_special=True):
        return [*text]

    def decode(self, ids, *, skip_special=False):
        text = "".join(ids)
        for each in self._special:
            text = text.replace(each, "")
        return text

    def chat(self, messages, *, tools=None, add_generation_prompt=True, variables=None):
        how = {"add_generation_prompt": add_generation_prompt, "tools": tools, "variables": variables or {}}
        return chat_template.render(self._template, messages, special_tokens={"eos_token": "</s>"}, **how)

    @property
    def chat_template(self):
        return self._template


FIND = {"type": "function", "function": {"name": "find"}}
SEA, SKY = '{"name": "look", "arguments": {"at": "sea"}}', '{"arguments": {"at": "sky"}, "name": "look"}'


class Told(Templated):
    """The same, whose tokens are numbers of characters."""

    longest_token, vocab_size = None, 256

    def encode(self, text, *, add_special=True):
        return [ord(each) for each in text]

    def decode(self, ids, *, skip_special=False):
        return super().decode([chr(each) for each in ids], skip_special=skip_special)


def accepted(grammar):
    """A function that says whether an answer follows a grammar, and is whole."""
    from llguidance import LLMatcher, LLTokenizer

    def follows(text):
        matcher = LLMatcher(LLTokenizer("byte"), grammar)
        return all(matcher.consume_token(byte) for byte in text.encode()) and matcher.is_accepting()

    return follows


def split(text, notation=TAGS, names=("look",), *, most=None, is_begun=False):
    """Content and calls of a text that comes at once."""
    content, calls = tools.Finder(notation, names, most=most, is_begun=is_begun).update(text, is_whole=True)
    return content, [(each.name, each.arguments) for each in calls]
