"""Templates from strangers' files: the same text as transformers, no way out, and every bound holds."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator

import pytest
from tests.support.chat_templates import DIVIDES, HANGS, TEMPLATES, template_processes
from tests.support.waiting import until

from wavecore.frontend.text import chat_template, template_child, template_process
from wavecore.frontend.text.chat_template import ChatTemplate
from wavecore.frontend.text.template_process import TemplateProcesses
from wavecore.transport.errors import ModelError, ValidationError, WavecoreError

MESSAGES = [{"role": "user", "content": "hi"}]


PROCESSES = TemplateProcesses()


@pytest.fixture(autouse=True)
def no_process_left() -> Iterator[None]:
    yield
    PROCESSES.close()


@pytest.fixture
def quick_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second and 256 MiB, so that the suite is quick; the defaults bound the same way."""
    monkeypatch.setattr(template_process, "MAX_SECONDS", 1)
    monkeypatch.setattr(template_process, "MAX_MEMORY", 256 << 20)


def render(source: str, **variables: object) -> str:
    conversation = json.dumps([{}, {"messages": MESSAGES, **variables}, False])
    return "".join(ChatTemplate(source, "here").render(PROCESSES, [], conversation))


def test_the_environment_is_that_of_transformers() -> None:
    from transformers.utils.chat_template_utils import _compile_jinja_template

    theirs, ours = _compile_jinja_template("x").environment, template_child.environment()
    for names in ("filters", "globals", "tests", "policies", "extensions"):
        found = [{name.rpartition(".")[2].strip("_") for name in getattr(env, names)} for env in (theirs, ours)]
        if names == "extensions":
            assert [len(found[0]), found[0] & found[1]] == [len(found[1]), {"LoopControlExtension"}]
            found = [{tag for e in env.extensions.values() for tag in e.tags} for env in (theirs, ours)]
        assert found[0] == found[1]
    for name in ("trim_blocks", "lstrip_blocks", "keep_trailing_newline", "autoescape", "undefined", "sandboxed"):
        assert getattr(theirs, name) == getattr(ours, name)
    assert type(ours) is type(theirs)
    assert theirs.filters.keys() - {n for n in ours.filters if ours.filters[n] is theirs.filters[n]} == {"tojson"}


FILTERS = [
    "{{ (messages | selectattr('role', 'equalto', 'user') | list)[-1].content }}",
    "{{ messages | rejectattr('role', 'equalto', 'tool') | map(attribute='content') | join(', ') }}",
    "{{ [1, 2, 3, 4] | select('odd') | list }}{{ [1, 2, 3] | reject('odd') | list }}{{ ['a'] | map('upper') | list }}",
    "{{ ['a', 'b'] | join(d=', ') }} {{ messages | join('; ', attribute='role') }}",
    "{{ 'a b c' | wordwrap(3) }}{{ {'b': [1]} | pprint }}{{ '<p>x &amp;</p>' | striptags }}{{ 'http://a.b' | urlize }}",
    "{{ 'x' | center(9) }}{{ '%5.2f' | format(3.14159) }}{{ '{:>8}'.format('r') }}{{ 'a\nb' | indent(2) }}{{ 5 // 2 }}",
    "{{ 'ü' | urlencode }}{{ 3.7 | round(0, 'floor') }}{{ [3, 1] | sort | batch(2) | list }}{{ 'abc' | truncate(2) }}",
    "{{ messages | tojson }}{{ messages | tojson(indent=2) }}{{ {'b': '<ü>', 'a': 1} | tojson(sort_keys=true) }}",
    "{{ messages | tojson(separators=(',', ':'), ensure_ascii=true) }}{{ 1e400 | tojson }}{{ 'x'.encode('latin-1') }}",
    "{{ dict(a=1) }}{{ namespace(a=1).a }}{{ lipsum(1, false, 2, 3) | length > 2 }}{{ strftime_now('%Y') | int > 9 }}",
    "{{ messages[0] | items | list }}{{ messages | groupby('role') | length }}{{ 7 | filesizeformat }}",
    "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "{% for x in range(9) %}{% if x == 2 %}{% continue %}{% elif x > 4 %}{% break %}{% endif %}{{ x }}{% endfor %}",
    "{% macro show(m, end='!') %}<{{ m.content ~ end }}>{{ caller() if caller }}{% endmacro %}{{ show(messages[0]) }}",
    "{% set x %}a{{ 1 }}{% endset %}{{ x }}{% filter upper %}b{% endfilter %}{% with y = 1 %}{{ y }}{% endwith %}",
]


@pytest.mark.parametrize("source", FILTERS)
def test_filters_and_statements_do_what_they_do_in_transformers(source: str) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        [[theirs], _] = render_jinja_template(conversations=[MESSAGES], chat_template=source)
    except Exception:
        with pytest.raises((ValidationError, ModelError)):
            render(source)
    else:
        assert render(source) == theirs


@pytest.mark.parametrize("name", TEMPLATES)
def test_conversations_come_out_as_in_transformers(name: str) -> None:
    from compare_templates import differences  # imports transformers

    assert not list(differences(TEMPLATES[name]))


SECRETS = ("class '", "<function", "<built-in", "__builtins__", "<module", "root:", "environ", "Popen", "object at 0x")
PAYLOADS = [
    "{{ ''.__class__.__mro__ }}",
    "{{ ''.__class__.__base__.__subclasses__() }}",
    "{{ [].__class__.mro() }}",
    "{{ messages.__class__ }}",
    "{{ messages[0].__class__.__init__.__globals__ }}",
    "{{ cycler.__init__.__globals__ }}",
    "{{ joiner.__init__.__globals__.os }}",
    "{{ lipsum.__globals__ }}",
    "{{ lipsum['__globals__']['os'].popen('id').read() }}",
    "{{ range.__self__ }}",
    "{{ raise_exception.__globals__['os'] }}",
    "{{ strftime_now.__globals__ }}",
    "{{ strftime_now.__code__.co_consts }}",
    "{{ dict.__subclasses__() }}",
    "{{ dict.mro() }}",
    "{{ namespace.__init__.__globals__ }}",
    "{{ namespace(__class__=1) }}",
    "{{ namespace(__html__=cycler)|e }}",
    "{% set ns = namespace() %}{% set ns.__class__ = dict %}{{ ns.__class__.__base__ }}",
    "{{ self.__init__ }}",
    "{{ self._TemplateReference__context }}",
    "{{ self.__dict__ }}",
    "{{ loop.__class__ }}",
    "{% for m in messages %}{{ loop._Context__self }}{{ loop.__init__.__globals__ }}{% endfor %}",
    "{{ ''|attr('__class__') }}",
    "{{ messages|map(attribute='__class__')|list }}",
    "{{ [messages]|map('attr', '__class__')|list }}",
    "{{ ['']|map(attribute='__class__.__mro__')|list }}",
    "{{ messages|groupby('__class__') }}",
    "{{ messages|sort(attribute='__class__') }}",
    "{{ messages|selectattr('__class__')|list|length }}",
    "{{ messages|sum(attribute='__class__') }}",
    "{{ '{0.__class__}'.format(1) }}",
    "{{ '{0.__class__.__mro__}'.format_map({'0': 1}) }}",
    "{{ '{x.__class__}'|format(x=1) }}",
    "{{ ''.format.__self__.__class__ }}",
    "{{ ('{0.__cl' ~ 'ass__}').format(cycler) }}",
    "{% set f = '{0.__class__}'.format %}{{ f(1) }}",
    "{{ ['{0.__class__}']|map('format', 1)|list }}",
    "{% macro m() %}{% endmacro %}{{ m.__init__.__globals__ }}{{ m._environment }}{{ m._func }}",
    "{% macro m() %}{{ caller.__class__ }}{% endmacro %}{% call m() %}{% endcall %}",
    "{{ tojson.__globals__ }}{{ ('x'|tojson).__class__ }}",
    "{{ (messages|first).__getattribute__('keys') }}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update({'a': 1}) }}",
    "{{ messages[0].pop('role') }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}{{ os.environ }}",
    "{% extends '/etc/passwd' %}",
    "{% from 'os' import environ %}{{ environ }}",
    "{{ (''|string).encode.__self__.__class__ }}",
    "{{ undefined_thing.__init__.__globals__ }}",
    "{{ undefined_thing._fail_with_undefined_error.__globals__ }}",
]


@pytest.mark.parametrize("source", PAYLOADS)
def test_no_way_out_of_the_sandbox(source: str) -> None:
    try:
        shown = render(source)
    except (ValidationError, ModelError):
        return
    assert not any(secret in shown for secret in SECRETS), shown


BOMBS = [
    "{% set _wavecore_tick = dict %}" + HANGS,
    DIVIDES,
    "{% macro m() %}{{ m() }}{{ m() }}{% endmacro %}{{ m() }}",
    "{% set x = ('f' * (9999999 * messages | length)) | int(0, 16) %}{{ x // 3 }}",
    "{{ 1 | round(1000000000, 'ceil') }}",
    "{% set n = namespace(x='\\\\' * 9) %}{% for i in range(60) %}{% set n.x = n.x | tojson %}{% endfor %}",
    "{{ range(99) | list | tojson(separators=('a' * 8000000, ':')) }}",
    "{{ ('a\r' * 100000) | indent(100000) }}",
    "{% set n = namespace(s=['a']) %}{% for i in range(60) %}{% set n.s = [n.s] * 300 %}{% endfor %}{{ n.s | string }}",
    "{% set n = namespace(x='a') %}{% for i in range(60) %}{% set n.x %}{{ n.x }}{{ n.x }}{% endset %}{% endfor %}",
    "".join(f"{{% for x{i} in messages %}}" for i in range(25)) + "{% endfor %}" * 25,
    "{{ 'a' * 10**9 }}",
    "{{ [1] * 10**9 }}",
    "{% set ns = namespace(x='aaaaaaaa') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "{% set n = namespace(x='aaaa') %}{% for i in range(60) %}{% set n.x = n.x.replace('a', n.x) %}{% endfor %}",
    "{{ '%1000000000d' % 1 }}",
    "{{ 'x' | center(1000000000) }}",
    "{{ '{:1000000000d}'.format(1) }}",
    "{{ messages | tojson(indent=1000000000) }}",
    "{% for i in range(99999) %}" + "x" * 2000 + "{% endfor %}",
    "{{ range(90000) | join('x' * 1000000) }}",
    "{{ ('ab' * 40000000) | list | unique | list }}",
    "{{ (5).to_bytes(1000000000, 'big') }}",
    "{{ ['a'] | batch(1000000000, 'x') | list }}",
    "(" * 9999 + "{{ " + "(" * 99999 + "1" + ")" * 99999 + " }}",
    "{{ " + "-" * 200000 + "1 }}",
    "{{ [" * 3000 + "1" + "]}}" * 3000,
]
# They end as some of the above do, when their time is up
SLOW_BOMBS = [
    "{% set x = ('f' * (9999999 * messages | length)) | int(0, 16) %}{% for i in range(999) %}{{ x % 7 }}{% endfor %}",
    "{% if messages[0].x %}{{ 1 | round(1000000000, 'ceil') }}{% endif %}",
    "{{ 10**(10**10) }}",
    "{% set ns = namespace(x=10) %}{% for i in range(60) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "{% set n = namespace(x=1) %}{% for i in range(60) %}{% set n.x = {'a': n.x, 'b': n.x} %}{% endfor %}{{ n.x }}",
    "{% set n = namespace(x=1) %}{% for i in range(60) %}{% set n.x = namespace(a=n.x, b=n.x) %}{% endfor %}{{ n.x }}",
]


@pytest.mark.usefixtures("quick_limits")
@pytest.mark.parametrize("source", [*BOMBS, *(pytest.param(bomb, marks=pytest.mark.slow) for bomb in SLOW_BOMBS)])
def test_a_bomb_ends_with_a_typed_error(source: str) -> None:
    with pytest.raises((ValidationError, ModelError)):
        render(source)
    assert render("{{ messages[0].content }}") == "hi"


def test_others_render_while_a_template_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_process, "MAX_SECONDS", 60)
    failed: list[Exception] = []
    before = set(template_processes())  # those of other tests' tokenizers

    def hang() -> None:
        try:
            render(HANGS)
        except WavecoreError as error:
            failed.append(error)

    thread = threading.Thread(target=hang)
    thread.start()
    [hanging] = until(lambda: set(template_processes()) - before)
    assert [render("{{ messages[0].content }}") for _ in range(20)] == ["hi"] * 20
    assert not failed  # it still runs
    hanging.kill()
    thread.join()
    assert len(failed) == 1


def test_a_refusal_is_told_as_it_is() -> None:
    with pytest.raises(ValidationError, match="messages: the chat template refused them: roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(ValidationError, match=r"messages: the chat template refused them: \?") as told:
        render("{{ raise_exception('\\ud800') }}")
    assert str(told.value).encode()  # it can be printed


def test_what_is_wrong_with_a_template_is_told_by_whose_it_is() -> None:
    with pytest.raises(ModelError, match=r"here: the chat template does not compile: .*line 1|TemplateSyntaxError"):
        render("{% for %}")
    with pytest.raises(ValidationError, match=r"chat_template: the chat template does not compile"):
        ChatTemplate("{% for %}").render(PROCESSES, [], "[{}, {}, false]")
    with pytest.raises(ValidationError, match=r"messages: the chat template failed: UndefinedError.*\(here\)"):
        render("{{ messages.x.y }}")
    with pytest.raises(ModelError, match="limit"):
        render("x" * (chat_template.MAX_TEMPLATE + 1))


def test_a_template_is_chosen_by_name_or_for_tools() -> None:
    template = ChatTemplate("d", "here", {"tool_use": "t", "rag": "r"})
    chosen = [template.choose(*by).source for by in ((None, False), (None, True), ("rag", True), ("default", True))]
    assert chosen == ["d", "t", "r", "d"]
    assert ChatTemplate("d", "here").choose(None, True).source == "d"
    with pytest.raises(ValidationError, match=r"'tools' is neither jinja2 text nor one of .*: default, tool_use, rag"):
        template.choose("tools", True)
    with pytest.raises(ValidationError, match="chat_template"):
        ChatTemplate("", "here", {"rag": "r"}).choose(None, False)
