"""What is learnt from chat templates of several families, in the ways in which they differ."""

from __future__ import annotations

import pytest

from engine.errors import TemplateError
from engine.tokens.formats import CALL_ID, LLAMA3, MISTRAL, MISTRAL_NAMED, CallFormat
from engine.tokens.scaffold import Scaffold, Template, learn

# qwen3: the last assistant message has its thoughts before it, and loses them once another one follows
THOUGHTFUL = """
{%- if tools %}<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content + '\n\n' }}{% endif %}Call as <tool_call>.
{%- for tool in tools %}{{ tool | tojson }}{% endfor %}<|im_end|>
{% elif messages[0].role == 'system' %}<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif %}
{%- for m in messages %}
{%- if m.role == 'user' %}<|im_start|>user
{{ m.content }}<|im_end|>
{% elif m.role == 'assistant' %}<|im_start|>assistant
{% if loop.last %}<think>

</think>

{% endif %}{{ m.content }}{% for call in m.tool_calls or [] %}<tool_call>{{ call.function.name }}{% endfor -%}
<|im_end|>
{% elif m.role == 'tool' %}
{%- if messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}
{{- '\n<tool_response>\n' + m.content + '\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>
{% endif %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

# mistral: nothing opens an assistant message, and a system message has no place of its own
PLACELESS = """
{%- if messages[0].role == 'system' %}{% set system = messages[0].content %}{% set messages = messages[1:] %}{% endif %}
{{- bos_token }}
{%- for m in messages %}
{%- if m.role == 'user' %}{{ '[INST] ' + (system + '\n\n' if loop.last and system else '') + m.content + '[/INST]' }}
{%- else %}{{ ' ' + m.content | trim + eos_token }}{% endif %}
{%- endfor %}"""

ALTERNATING = """{{ bos_token }}{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('roles must alternate') }}{% endif %}
{%- if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}{% else %}{{ m.content + eos_token }}{% endif %}
{%- endfor %}"""

# llama 3: contents trimmed, tools inside the first user message and calls of another kind
HEADED = """{{ bos_token }}
{%- if messages[0].role == 'system' %}{% set system = messages[0].content | trim %}{% set messages = messages[1:] %}
{%- else %}{% set system = '' %}{% endif %}<|head|>system<|/head|>

{{ system }}<|eot|>
{%- for m in messages %}<|head|>{{ m.role }}<|/head|>

{{ (tools | tojson if tools and loop.first else '') + m.content | trim }}<|eot|>{% endfor %}
{%- if add_generation_prompt %}<|head|>assistant<|/head|>

{% endif %}"""


def learnt(source: str, bos: str = "<s>", eos: str = "</s>") -> tuple[Template, Scaffold]:
    template = Template(source, bos, eos)
    return template, learn(template)


def test_thoughts_before_the_last_message_are_no_part_of_a_transcript() -> None:
    template, scaffold = learnt(THOUGHTFUL, "", "<|im_end|>")
    assert (scaffold.assistant_open, scaffold.assistant_close) == ("<|im_start|>assistant\n", "\n")
    assert scaffold.user == ("<|im_start|>user\n", "<|im_end|>\n")
    assert scaffold.native_tools
    first, between, last = scaffold.tools
    assert first == "<|im_start|>user\n<tool_response>\n"
    assert between == "\n</tool_response>\n<tool_response>\n"
    assert last == "\n</tool_response><|im_end|>\n"
    assert scaffold.opening(template, False, []) == ("",)


def test_a_system_message_that_has_no_place_is_a_user_message_of_its_own() -> None:
    for source in (PLACELESS, ALTERNATING):
        template, scaffold = learnt(source)
        assert not scaffold.has_system
        assert scaffold.opening(template, False, []) == ("<s>",)
        assert scaffold.opening(template, True, []) == ("<s>[INST] ", scaffold.user[1])
        assert (scaffold.assistant_open, scaffold.assistant_close) == ("", "")


def test_tools_that_the_template_writes_for_calls_of_another_kind_are_not_left_to_it() -> None:
    template, scaffold = learnt(HEADED, "<|begin|>", "<|eot|>")
    assert not scaffold.native_tools
    assert scaffold.opening(template, True, []) == ("<|begin|><|head|>system<|/head|>\n\n", "<|eot|>")
    assert scaffold.user == ("<|head|>user<|/head|>\n\n", "<|eot|>")


def test_the_first_refusal_is_the_one_that_is_told() -> None:
    with pytest.raises(TemplateError, match="no system messages here"):
        learnt("{% if messages[0].role == 'system' %}{{ raise_exception('no system messages here') }}{% endif %}")


# llama 3.1: tools in the system message if asked, one call in a message, results as JSON texts
ONE_CALL = """{{- bos_token }}
{%- if not tools_in_user_message is defined %}{% set tools_in_user_message = true %}{% endif %}
{%- if messages[0].role == 'system' %}{% set system = messages[0].content %}{% set messages = messages[1:] %}
{%- else %}{% set system = '' %}{% endif %}<|head|>system<|/head|>

{% if tools and not tools_in_user_message %}Answer with JSON of a function and its parameters.
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}{% endif %}{{ system }}<|eot|>
{%- for m in messages %}
{%- if m.role == 'tool' %}{{ '<|head|>ipython<|/head|>\n\n' + (m.content | tojson) + '<|eot|>' }}
{%- elif m.tool_calls %}
{%- if m.tool_calls | length != 1 %}{{ raise_exception('one call at a time') }}{% endif %}
{{- '<|head|>assistant<|/head|>\n\n{"name": "' + m.tool_calls[0].function.name + '", "parameters": ' }}
{{- (m.tool_calls[0].function.arguments | tojson) + '}<|eot|>' }}
{%- else %}{{ '<|head|>' + m.role + '<|/head|>\n\n' }}
{{- (tools | tojson if tools and tools_in_user_message and loop.first else '') + m.content + '<|eot|>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|head|>assistant<|/head|>\n\n' }}{% endif %}"""

# mistral: calls in a list with ids of nine characters; later ones: a name, and arguments after it
LISTED = """{{ bos_token }}{% if messages[0].role == 'system' %}{% set messages = messages[1:] %}{% endif %}
{%- if tools %}{{ '[AVAILABLE_TOOLS] ' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{% endif %}
{%- for m in messages %}
{%- if m.role == 'user' %}{{ '[INST] ' + m.content + '[/INST]' }}
{%- elif m.role == 'tool' %}
{%- if m.tool_call_id | length != 9 %}{{ raise_exception('ids have nine characters') }}{% endif %}
{{- '[TOOL_RESULTS] {"content": ' + m.content + ', "call_id": "' + m.tool_call_id + '"}[/TOOL_RESULTS]' }}
{%- elif m.tool_calls %}{{ CALLS }}{{ eos_token }}
{%- else %}{{ ' ' + m.content + eos_token }}{% endif %}
{%- endfor %}"""
WITH_IDS = """{{ '[TOOL_CALLS] [' }}{% for call in m.tool_calls %}
{{- (call.function | tojson)[:-1] + ', "id": "' + call.id + '"}' }}
{%- if not loop.last %}, {% endif %}{% endfor %}]"""
BY_NAME = """{% for call in m.tool_calls %}
{{- '[TOOL_CALLS]' + call.function.name + '[ARGS]' + (call.function.arguments | tojson) }}{% endfor %}"""
LOOK = {"type": "function", "function": {"name": "look", "description": "", "parameters": {"type": "object"}}}


def test_a_template_that_writes_one_call_with_parameters_is_llamas() -> None:
    template, scaffold = learnt(ONE_CALL, "<|begin|>", "<|eot|>")
    assert scaffold.calls is LLAMA3
    opening = scaffold.opening(template, True, [LOOK])
    assert opening[0].startswith("<|begin|><|head|>system<|/head|>\n\nAnswer with JSON")
    assert '"name": "look"' in opening[0]
    assert scaffold.user == ("<|head|>user<|/head|>\n\n", "<|eot|>")
    assert scaffold.tools[0] == '<|head|>ipython<|/head|>\n\n"'
    assert scaffold.result('say "a"\nb') == 'say \\"a\\"\\nb'


@pytest.mark.parametrize(("calls", "wanted"), [(WITH_IDS, MISTRAL), (BY_NAME, MISTRAL_NAMED)])
def test_templates_that_list_calls_or_name_them_are_mistrals(calls: str, wanted: CallFormat) -> None:
    template, scaffold = learnt(LISTED.replace("{{ CALLS }}", calls))
    assert scaffold.calls is wanted
    assert scaffold.opening(template, False, [LOOK])[0].startswith("<s>[AVAILABLE_TOOLS] [{")
    first, between, last = scaffold.tools
    assert first == '[TOOL_RESULTS] {"content": '
    assert between == f', "call_id": "{CALL_ID}"}}[/TOOL_RESULTS][TOOL_RESULTS] {{"content": '
    assert last == f', "call_id": "{CALL_ID}"}}[/TOOL_RESULTS]'
    assert scaffold.result('"') == '"'


def test_a_template_that_writes_calls_as_nobody_else_does_is_told_of_tools_in_words() -> None:
    _, scaffold = learnt(LISTED.replace("{{ CALLS }}", "call {{ m.tool_calls[0].function.name }}"))
    assert scaffold.calls is None
    assert not scaffold.native_tools
