"""Chat templates that use what those of real models use, each in a way of its own; and the processes they run in."""

from __future__ import annotations

import contextlib

import psutil

from wavecore.frontend.text.template_process import PROGRAM

HANGS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
DIVIDES = (  # holds Python's lock for long in one call of C code
    "{% set x = ('f' * (9999999 * messages | length)) | int(0, 16) %}"
    "{% for a in range(99999) %}{% for b in range(99999) %}{{ x // 7 > 3 }}{% endfor %}{% endfor %}"
)


def template_processes() -> list[psutil.Process]:
    found = []
    for process in psutil.Process().children():
        with contextlib.suppress(psutil.Error):  # it ends just now
            if PROGRAM in process.cmdline():
                found.append(process)
    return found


TEMPLATES = {
    "filters over messages": """{%- set asked = messages | selectattr('role', 'equalto', 'user') | list -%}
{%- set rest = messages | rejectattr('role', 'in', ['user', 'assistant']) -%}
{%- set others = rest | map(attribute='role') | unique | join(', ') -%}
{{ bos_token }}last: {{ asked[-1].content if asked else 'nothing' }} others: {{ others | default('none', true) }}
{% for role, turns in messages | groupby('role') %}
{{ role }} {{ turns | length }}{{ ' and more' if not loop.last }}
{% endfor %}
""",
    "turns and tools": """{%- if tools is not none and tools | length > 0 %}
<|tools|>
    {%- for tool in tools %}
{{ loop.index }}. {{ tool.function.name }}: {{ tool.function | tojson(indent=2) }}
    {%- endfor %}
<|end|>
{%- endif %}
{%- set ns = namespace(first=true, calls=0) %}
{%- for message in messages %}
    {%- if message.role == 'assistant' and message.tool_calls is defined and message.tool_calls %}
        {%- for call in message.tool_calls %}
            {%- set ns.calls = ns.calls + 1 %}
            {%- set arguments = call.function.arguments %}
            {%- if arguments is not string %}{% set arguments = arguments | tojson %}{% endif %}
<|call|>{{ call.function.name }}({{ arguments }})#{{ call.id[-3:] }}
        {%- endfor %}
    {%- elif message.role in ('tool', 'ipython', 'function') %}
<|result|>{{ message.content | string | trim }}
    {%- else %}
<|{{ message.role }}|>{{ message.content if message.content is not none else 'None' }}<|end|>
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
<|assistant|>
{% endif %}
calls: {{ ns.calls }}""",
    "what is given and what is not": """{% if documents is none %}no documents{% else %}{{ documents | length }}
{% endif %}
{% if tools is none %}no tools{% elif not tools %}empty tools{% endif %}
{% for m in messages %}
{{ m.keys() | list }} {{ m.content is none }} {{ m.content is defined }} {{ m.content is string }}
{{ m.get('name', '?') }}
{{ m.reasoning_content | default('-') }} {{ m.thinking or '-' }} {{ m.reasoning if m.reasoning is defined else '-' }}
{% endfor %}
{{ enable_thinking is defined }} {{ builtin_tools | default([]) | join('+') }}
{{ (options | default({})).a }}
{% for d in documents or [] %}[{{ loop.index0 }}] {{ d.title | upper }}: {{ d['text'] | replace('.', '!') }}
{% endfor %}
{{- date_string | default(strftime_now('%Y')[:0] ~ 'today') }}""",
    "parts": """{% macro show(content) -%}
{%- if content is string -%}{{ content }}
{%- elif content is iterable and content is not mapping -%}
{%- for part in content if part.type == 'text' -%}{{ part['text'] }}{%- endfor -%}
{%- endif -%}
{%- endmacro %}
{% for m in messages %}{{ '<' + m['role'] + '>' }}{{ show(m.content) | trim }}{{ eos_token }}
{% endfor %}""",
    "strict": """{% if messages[0].role == 'system' %}
{% set system = messages[0].content %}{% set rest = messages[1:] %}
{% else %}{% set rest = messages %}{% endif %}
{% for m in rest %}
{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('turns must alternate, but ' ~ m.role ~ ' came at ' ~ loop.index) }}
{% endif %}
{% set b = system ~ '\\n\\n' if loop.first and system is defined else '' %}
{{ '[Q] ' ~ b ~ m.content if m.role == 'user' else m.content + eos_token }}
{% endfor %}""",
    "content that is cut": """{% for m in messages[::-1] | reverse %}{% generation %}
{%- set text = m.content or '' -%}
{% if '</think>' in text %}{% set text = text.split('</think>')[-1].lstrip('\\n') %}{% endif %}
{{- loop.cycle('a', 'b') }}:{{ text.strip() }}|{{ m.role.capitalize() }}{% endgeneration %}
{% if loop.index > 6 %}{% break %}{% endif %}
{% if m.role == 'tool' %}{% continue %}{% endif %}
--
{% endfor %}""",
    "printed as they are": "{# content #}{{ messages }}{{ tools }}{{ tools | tojson(ensure_ascii=true) }}",
}
