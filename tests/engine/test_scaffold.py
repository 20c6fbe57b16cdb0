"""What is learnt from chat templates of several families, in the ways in which they differ."""

from __future__ import annotations

import pytest

from engine.errors import TemplateError
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
