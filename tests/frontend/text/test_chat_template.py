"""Templates from strangers' files: the sandbox holds, and every limit bites."""

from __future__ import annotations

import pytest

from wavecore.frontend.text import chat_template, template_sandbox
from wavecore.frontend.text.chat_template import ChatTemplate
from wavecore.transport.errors import ModelError, ValidationError

MESSAGES = [{"role": "user", "content": "hi"}]


def render(source: str, **variables: object) -> str:
    return ChatTemplate(source, "here").render({"messages": MESSAGES, **variables})


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.__class__ }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ lipsum.__globals__ }}",
        "{{ raise_exception.__globals__['os'] }}",
        "{{ self.__init__ }}",
        "{{ ''|attr('__class__') }}",
        "{{ '{0.__class__}'.format(1) }}",
        "{{ messages.append(1) }}",
        "{{ namespace.__init__.__globals__ }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
    ],
)
def test_no_way_out_of_the_sandbox(source: str) -> None:
    try:
        shown = render(source)
    except (ValidationError, ModelError):
        return
    assert shown == ""  # undefined prints as nothing; nothing leaks


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{{ 'a' * 10**9 }}",
        "{{ [1] * 10**9 }}",
        "{{ 10**(10**10) }}",
        "{% set ns = namespace(x=10) %}{% for i in range(60) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
        "{% set ns = namespace(x='aaaaaaaa') %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
        "{% set ns = namespace(x='aaaaaaaa') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
        "{% set n = namespace(x='aaaa') %}{% for i in range(60) %}{% set n.x = n.x.replace('a', n.x) %}{% endfor %}",
        "{% set n = namespace(x='aaaa') %}{% for i in range(60) %}{% set n.x = n.x|replace('a', n.x) %}{% endfor %}",
        "{% set n = namespace(x='aaaa') %}{% for i in range(60) %}{% set n.x = n.x.join([n.x, n.x]) %}{% endfor %}",
        "{{ '%1000000000d' % 1 }}",
        "{{ '%1000000000d'|format(1) }}",
        "{{ 'x'|center(1000000000) }}",
        "{{ 'x'.center(1000000000) }}",
        "{{ 'x'.zfill(1000000000) }}",
        "{{ '{:1000000000d}'.format(1) }}",
        "{{ messages|tojson(indent=1000000000) }}",
        "{% for i in range(90000) %}" + "x" * 200 + "{% endfor %}",
        "{{ 'a' | indent(1000000000) }}",
        "{{ range(90000) | join('x' * 1000000) }}",
        "{{ ('ab' * 4000000) | sort | first }}",
        "{{ ('ab' * 4000000) | list | unique | list }}",
        "{{ ('ab' * 4000000) | map('upper') | list | reverse | first }}",
        "{% call(x) dict() %}{% endcall %}",
        "{{ ('x' * 1000000).join(range(90000) | map('string')) }}",
        "{{ (5).to_bytes(1000000000, 'big') }}",
        "{{ 'x'.encode().center(1000000000) }}",
        "{{ ['a'] | batch(1000000000, 'x') | list }}",
        "{% set n = namespace(x=[1]) %}{% for i in range(60) %}{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x }}",
        "{% set n = namespace(x=[1]) %}{% for i in range(60) %}{% set n.x = dict(a=n.x, b=n.x) %}{% endfor %}{{ n.x }}",
        "{% set n = namespace(x=1) %}{% for i in range(60) %}{% set n.x = {'a': n.x, 'b': n.x} %}{% endfor %}{{ n.x }}",
    ],
)
def test_a_bomb_costs_bounded_time_and_memory(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_sandbox, "MAX_SECONDS", 1.0)
    with pytest.raises((ValidationError, ModelError)):
        render(source)


def test_a_template_may_refuse() -> None:
    with pytest.raises(ValidationError, match="roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")


def test_what_templates_of_real_models_use() -> None:
    assert render("{{ messages[0]['content'] ~ 1 ~ 'x' }}") == "hi1x"
    assert render("{% for m in messages %}{% if loop.first %}{{ m.role }}{% break %}{% endif %}{% endfor %}") == "user"
    assert (
        render("{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}")
        == "1"
    )
    assert render("{{ {'a': 'ü<'} | tojson }}") == '{"a": "ü<"}'
    assert render("{{ {'a': 1} | tojson(indent=2) }}") == '{\n  "a": 1\n}'
    assert render("{{ messages[0].content.split('h')[-1].strip() | upper }}") == "I"
    assert render("{{ strftime_now('%Y') }}").isdigit()
    assert render("{%- for m in messages[::-1] %}{{ m.content.startswith('h') }}{% endfor %}") == "True"
    assert (
        render("{% if tools is defined and tools %}no{% endif %}{% if messages[0].x is not defined %}yes{% endif %}")
        == "yes"
    )
    assert render("{% macro show(m) %}<{{ m.content }}>{% endmacro %}{{ show(messages[0]) }}") == "<hi>"


def test_namespaces_that_hold_each_other_have_short_texts() -> None:
    source = (
        "{% set a = namespace() %}{% for i in range(60) %}{% set b = namespace() %}{% set b.x = a %}{% endfor %}{{ a }}"
    )
    assert render(source) == "<namespace>"


def test_generation_blocks_and_indent() -> None:
    source = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    assert render(source) == "hi"
    assert render("{{ 'a\nb' | indent(2) }}") == "a\n  b"


def test_same_text_as_transformers() -> None:
    """Whitespace control, loops, tests and filters of real templates, by transformers' own renderer."""
    from transformers.utils.chat_template_utils import render_jinja_template

    source = """{%- if tools %}
    {{- '<tools>' }}
    {%- for tool in tools %}
        {{- "\n" }}{{ tool | tojson }}
    {%- endfor %}
{%- endif %}
{% set ns = namespace(found=false) %}
{%- for message in messages | reverse if message.role == 'user' %}
    {%- if loop.index0 == 0 %}{% set ns.found = true %}{% continue %}{% endif %}
    {{ message['content'] | trim }}
{%- endfor %}
{% for message in messages %}
  {% if message['role'] in ['user', 'system'] and message.content is string %}
[{{ message.role | upper }}] {{ message.content | trim + "\n" }}
  {% elif '</think>' in message.content %}
{{ message.content.split('</think>')[-1].lstrip('\n') }}
  {% endif %}
{% endfor %}
{{ ns.found }} {{ bos_token }}
{% if add_generation_prompt %}<|assistant|>{% endif %}
"""
    messages = [
        {"role": "system", "content": " Be <brief> & ünïcode. "},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "<think>x</think>\n\nb"},
        {"role": "user", "content": "c\n"},
    ]
    tools = [{"type": "function", "function": {"name": "f", "description": "ü <b>"}}]
    variables = {"tools": tools, "bos_token": "<s>", "add_generation_prompt": True}
    [[theirs], _] = render_jinja_template(conversations=[messages], chat_template=source, **variables)
    assert ChatTemplate(source, "here").render({"messages": messages, **variables}) == theirs


def test_broken_templates_name_their_file() -> None:
    with pytest.raises(ModelError, match="here: the chat template does not compile"):
        ChatTemplate("{% for %}", "here")
    with pytest.raises(ModelError, match="limit"):
        ChatTemplate("x" * (chat_template.MAX_TEMPLATE + 1), "here")
