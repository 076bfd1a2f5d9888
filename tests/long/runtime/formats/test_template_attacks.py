"""A stranger's template that attacks: an error in time and without the machine's memory, in a process with a limit."""

# ruff: noqa: E501 - a table of templates

from __future__ import annotations

import json
import subprocess
import sys

import pytest

RUN = """
import json, resource, sys, time
from runtime.formats.chat.jinja import JinjaChatTemplate
from runtime.formats.chat.render import render_prompt
from runtime.protocol.messages import Message
from runtime.protocol.errors import TemplateError

JinjaChatTemplate({"default": "{{ messages | tojson }}"}).render([{"role": "user", "content": "x"}])
pages = int(open("/proc/self/statm").read().split()[0])
limit = pages * resource.getpagesize() + (160 << 20)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
failed = []
for source in json.load(sys.stdin):
    begun = time.thread_time()
    template = JinjaChatTemplate({"default": source})
    asked = [Message("user", "x" * 1000), Message("assistant", open=True)]
    try:
        text = render_prompt(asked, template, tools=[{"name": "f"}], template_kwargs={"thinking": True})
    except TemplateError as error:
        if "MemoryError" in str(error):
            failed.append(f"memory: {source[:300]}")
    else:
        failed.append(f"{len(text)} characters came out: {source[:300]}")
    took = time.thread_time() - begun
    if took > 8.0:
        failed.append(f"{took:.1f} s: {source[:300]}")
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10
    if grown > 110:
        failed.append(f"{grown} MB: {source[:300]}")
        before += grown << 10
print("\\n".join(failed))
"""

TWO = "{% set b = 'a' * 1000000 %}{% set c = ('a' * 999999) ~ 'b' %}"
BIG = "{% set ns = namespace(x='abcdefgh') %}"
TWO_LISTS = "{% set l = range(90000)|list %}{% set k = range(90000)|list %}"
HELD = "{{ raise_exception('held') }}"  # these may end, but soon and small
ATTACKS: dict[str, list[str]] = {
    "time": [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% for i in range(10**15) %}{% endfor %}",
        "{% set l = [0]*1000 %}{% for a in l %}{% for b in l %}{% for c in l %}{% endfor %}{% endfor %}"
        "{% endfor %}",
        "{% macro m(n) %}{{ m(n) }}{% endmacro %}{{ m(1) }}",
        "{% macro m(n) %}{% if n %}{{ m(n-1) }}{{ m(n-1) }}{% endif %}{% endmacro %}{{ m(60) }}",
        "{% set l = [[1,2,3]]*9 %}{% for a in l recursive %}{{ loop(l) }}{% endfor %}",
        "{% set l = range(90000)|list %}{% for a in l %}{{ l|sort|length }}{% endfor %}",
        "{% set l = [1]*90000 %}{{ l|map('string')|map('upper')|map('lower')|list|length }}"
        "{% for i in l %}{{ l|sum }}{% endfor %}",
        "{% for i in range(90000) %}{{ messages|tojson|length }}{{ messages|tojson|upper|lower|length }}"
        "{% for j in range(9999) %}{% endfor %}{% endfor %}",
        "{% for i in range(99999) %}{{ loop.cycle(*range(99999)) }}{% endfor %}",
        "".join(
            f"{{% block a{i} %}}{{{{ self.a{i + 1}() }}}}{{{{ self.a{i + 1}() }}}}{{% endblock %}}"
            for i in range(40)
        )
        + "{% block a40 %}x{% endblock %}",
        "{% macro m() %}{{ caller() }}{{ caller() }}{% endmacro %}"
        + "{% call m() %}" * 18
        + "x"
        + "{% endcall %}" * 18
        + "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% for a in [[[1]]] recursive %}{{ loop(range(99999)) }}{{ loop([[1]] * 9999) }}{% endfor %}",
        "{# image #}{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% for m in messages %}{% for c in m.content %}{% for i in range(99999) %}{% for j in range(99999) %}"
        "{% endfor %}{% endfor %}{% endfor %}{% endfor %}",
        "{% set ns = namespace(x=(1,)) %}{% for i in range(18) %}{% set ns.x = (ns.x, ns.x) %}{% endfor %}"
        "{% for i in range(99999) %}{{ {ns.x: 1} | length }}{% endfor %}",
        "image{% if a %}b{{ c | d }}{% endif %}".replace("d", "list") * 1100
        + "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        TWO + "{{ ([b, c] * 45000) | select('equalto', c) | list | length }}",
    ],
    "comparing": [
        TWO + "{{ c in [b] * 90000 }}",
        TWO + "{{ c is in([b] * 90000) }}",
        TWO + "{{ ([b] * 90000).count(c) }}",
        TWO + "{{ ([b] * 90000).index(c) }}",
        TWO + "{{ ([b, c] * 45000) | sort | length }}",
        TWO + "{{ ([b, c] * 45000) | max | length }}",
        TWO + "{{ ([b, c] * 45000) | unique | list | length }}",
        TWO + "{{ ([{'k': b}, {'k': c}] * 40000) | sort(attribute='k') | length }}",
        TWO + "{{ ([{'k': b}, {'k': c}] * 40000) | groupby('k') | length }}",
        "{% set b = 'a' * 999999 ~ 'a' %}{% set d = 'a' * 1000000 %}{{ [b] * 90000 == [d] * 90000 }}",
        "{% set b = 'a' * 999999 ~ 'a' %}{% set d = 'a' * 1000000 %}{{ [b] * 90000 is eq([d] * 90000) }}",
    ],
    "text": [
        "{{ 'a' * 1000000000 }}",
        "{{ 1000000000 * 'a' }}",
        "{{ [1] * 1000000000 }}",
        "{{ 10 ** 1000000000 }}",
        BIG + "{% for i in range(40) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x|length }}",
        BIG + "{% for i in range(40) %}{% set ns.x = ns.x + ns.x %}{% endfor %}{{ ns.x|length }}",
        BIG + "{% for i in range(40) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}",
        BIG + "{% for i in range(40) %}{% set ns.x = {'a': ns.x, 'b': ns.x} %}{% endfor %}{{ ns.x|tojson }}",
        BIG + "{% for i in range(40) %}{% set ns.x = dict(a=ns.x, b=ns.x) %}{% endfor %}{{ ns.x|string }}",
        BIG + "{% for i in range(40) %}{% set ns.x = namespace(a=ns.x, b=ns.x) %}{% endfor %}"
        "{{ raise_exception('end') }}{{ ns.x }}",
        BIG + "{% for i in range(40) %}{% set ns.x = [ns.x]|batch(2, ns.x)|list %}{% endfor %}{{ ns.x }}",
        BIG + "{% for i in range(40) %}{% set ns.x = ns.x|replace('a', 'aaaaaaaaaa') %}{% endfor %}",
        BIG + "{% for i in range(40) %}{% set ns.x = ns.x.replace('a', 'aaaaaaaaaa') %}{% endfor %}",
        BIG + "{% for i in range(40) %}{% set ns.x = ns.x.join([ns.x, ns.x]) %}{% endfor %}",
        BIG + "{% for i in range(40) %}{% set ns.x = [ns.x, ns.x]|join(ns.x) %}{% endfor %}",
        BIG + "{% for i in range(40) %}{% set ns.x %}{{ ns.x }}{{ ns.x }}{% endset %}{% endfor %}",
        BIG + "{% for i in range(40) %}{% set ns.x = '%s%s'|format(ns.x, ns.x) %}{% endfor %}",
        BIG + "{% for i in range(40) %}{% set ns.x = '%s%s' % (ns.x, ns.x) %}{% endfor %}",
        BIG + "{% for i in range(40) %}{% set ns.x = '{0}{0}'.format(ns.x) %}{% endfor %}",
        "{{ '%9999999999d'|format(1) }}",
        "{{ '%999999999d' % 1 }}",
        "{{ '%*d' % (999999999, 1) }}",
        "{{ '%.999999999f' % 1.0 }}",
        "{{ '{:999999999d}'.format(1) }}",
        "{{ '{:{}}'.format(1, '999999999') }}",
        "{{ '{:>{}}'.format('x', 999999999) }}",
        "{{ ('{:>' ~ 999999999 ~ '}').format('x') }}",
        "{{ 'a'.center(999999999) }}",
        "{{ 'a'.ljust(width=999999999) }}",
        "{{ 'a'.ljust(999999999) }}",
        "{{ 'a'.zfill(999999999) }}",
        "{{ 'a\\tb'.expandtabs(999999999) }}",
        "{{ 'a'.translate({97: 'b' * 100000}) }}",
        "{{ (1).to_bytes(999999999, 'big') }}",
        "{{ 'a'|center(999999999) }}",
        "{{ 'a\\nb'|indent(999999999, first=true) }}",
        "{{ 'a'|indent('b' * 999999999) }}",
        "{{ [1]|batch(999999999, 'x')|list }}",
        "{{ [1]|slice(999999999)|list }}",
        "{{ messages|tojson(indent=999999999) }}",
        "{{ strftime_now('%999999999d') }}",
        "{% set b = 'a' * 1000000 %}{% for i in range(9999) %}{{ b }}{% endfor %}",
        "{% macro m() %}{% for i in range(99999) %}" + "y" * 5000 + "{% endfor %}{% endmacro %}{{ m() }}",
        "{% set b = 'a' * 1000000 %}{% set ns = namespace(l=[]) %}"
        "{% for i in range(999) %}{% set ns.l = ns.l + [b[1:]] %}{% endfor %}",
        "{% set b = 'a' * 1000000 %}{% set ns = namespace(l=[]) %}"
        "{% for i in range(999) %}{% set ns.l = ns.l + [b|upper] %}{% endfor %}",
        "{% set b = 'a' * 1000000 %}{{ b.split('a') * 9999 }}",
        "{% set b = 'a' * 1000000 %}{{ [b] * 90000 }}",
        "{% set b = [1] * 90000 %}{{ ([b] * 90000)|sum(start=[])|length }}",
        "{{ lipsum(n=1000000) }}",
        "{{ 'x' * (2 ** 30) }}",
        "{{ 'x' | center(10 ** 9) }}",
        "{{ '{a:>999999999}'.format_map({'a': 'x'}) }}",
        "{{ ('{:>999999999}' | attr('format'))('x') }}",
        "{% set f = '{:>999999999}'.format %}{{ f('x') }}",
        "{{ (['{:>999999999}'] | map('attr', 'format') | first)('x') }}",
        "{{ '{:>٩٩٩٩٩٩٩٩٩}'.format('x') }}",
        "{{ '{:>0999999999}'.format('x') }}",
        "{{ ('{0:>9999}' * 90000).format(1) | length }}",
        "{{ ('%(a)9999d' * 90000) % {'a': 1} }}",
        "{{ ['a'] | map('center', 999999999) | list }}",
        "{% set ns = namespace(x=[1]) %}{% for i in range(150) %}{% set ns.x = [ns.x] %}{% endfor %}"
        "{{ ([ns.x] * 900) | tojson(indent=64) | length }}",
        "{% set ns = namespace(x=[]) %}{% for i in range(5000) %}{% set ns.x = [ns.x] %}{% endfor %}"
        "{{ ns.x | tojson }}",
    ],
    "one operation": [
        "{% set l = range(90000)|list %}{{ l|select('in', l[1:] + [-1])|list|length }}" + HELD,
        TWO_LISTS + "{% if " + " and ".join(["l == k"] * 3500) + " %}{% endif %}" + HELD,
        TWO_LISTS + "{% if " + " and ".join(["-1 not in l"] * 2500) + " %}{% endif %}" + HELD,
        TWO_LISTS + "{% if " + " and ".join(["-1 is not in l"] * 2500) + " %}{% endif %}" + HELD,
        "{% for a in [[1]] recursive %}{% if loop.depth < 4 %}{{ loop(range(99999)) }}{% endif %}{% endfor %}",
        "{{ ('f' * 90000)|int(base=16) // 3 }}",
        "{{ 1|round(10 ** 9) }}",
        BIG + "{% for i in range(40) %}{% set ns.x = (ns.x ~ ns.x ~ '&')|e %}{% endfor %}",
        "{{ ('é' * 9000000)|select|reverse|first }}" + HELD,
        "{{ ('é' * 9000000)|select|list|length }}" + HELD,
        "{{ ('é,' * 4000000).split(',')|length }}" + HELD,
        "{{ ('é ' * 4000000).split()|length }}" + HELD,
        "{% set l = ['x' * 1000] * 1000 %}{% set s %}{% for i in range(9999) %}{{ l }}{% endfor %}{% endset %}",
        "{{ range(99999)|join('x' * 1000)|length }}",
        "{{ ('🦊' * 2000000)|tojson(ensure_ascii=true)|length }}" + HELD,
        "{% macro m(x) %}{% set y = x[1:] %}{{ m(y) }}{% endmacro %}{{ m('a' * 4000000) }}",
        "{% set ns = namespace(x=(1,)) %}{% for i in range(40) %}{% set ns.x = (ns.x, ns.x) %}{% endfor %}",
        BIG + "{% for i in range(40) %}{% set ns.x = [ns.x, ns.x]|tojson %}{% endfor %}",
        "{{ ('%s' * 90000)|format(*(['x' * 10000] * 90000))|length }}",
        "{% filter upper %}{% for i in range(99999) %}" + "z" * 4000 + "{% endfor %}{% endfilter %}",
        "{% block a %}{% for i in range(99999) %}" + "z" * 4000 + "{% endfor %}{% endblock %}",
        "{{ ('x' * 20000)|wordwrap(1, wrapstring='y' * 9999)|length }}",
        "{{ ('http://a.b ' * 8000)|urlize(target='y' * 99999)|length }}",
        "{{ {}.fromkeys(range(99999), 'x' * 9000)|string|length }}",
    ],
    "escape": [
        "{{ ''.__class__ }}{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages|attr('__class__')|attr('__base__')|attr('x') }}",
        "{{ raise_exception.__globals__['os'].system('true') }}",
        "{{ strftime_now.__globals__ .x }}",
        "{{ range.__globals__.x }}",
        "{{ namespace.__init__.__globals__.x }}",
        "{{ self.__init__.__globals__.x }}",
        "{{ self._TemplateReference__context.environment.x }}",
        "{{ '{0.__class__.__mro__}'.format('') }}{{ ''.x.y }}",
        "{{ messages.append({}) }}",
        "{{ messages[0].update(role='x') }}",
        "{% include 'x' %}",
        "{% import 'os' as os %}",
        "{{ sandbox_counted.__globals__.x }}",
        "{{ ['__class__']|map('attr', '__class__')|map(attribute='__x__.y')|list }}"
        "{{ raise_exception('held') }}",
    ],
    "parser": [
        "(" * 5000 + "{{ (",
        "{{ " + "(" * 5000 + ")" * 5000 + " }}",
        "{{ " + "(" * 100_000 + ")" * 100_000 + " }}",
        "{{ " + "[" * 200_000,
        "{{ " + "1+" * 20000 + "1 }}",
        "{{ " + "not " * 7000 + "a }}",
        "{{ " + "-" * 9000 + "1 }}",
        "{{ a" + "|list" * 5000 + " }}",
        "{{ a" + ".b" * 7000 + " }}",
        "{{ " + "a if b else " * 5000 + "c }}",
        "{{ " + "a and " * 11000 + "b }}",
        "{{ f(" + "a," * 11000 + "a) }}",
        "{{ " + "9" * 5000 + " }}",
        "{{ " + "9" * 250_000 + " }}",
        "{{ 1e999 }}",
        "{% if a %}" + "{% elif b %}" * 5000 + "{% endif %}",
        "{% for i in x %}" * 200 + "{% endfor %}" * 200,
        "{% for i in x %}" * 60 + "{% endfor %}" * 60,
        "{% set x %}" * 8000 + "{% endset %}" * 8000,
        "{% if a %}" * 20_000,
        "{% raw %}" * 25_000,
        "{{ a }}" * 30_000,
        "{# a #}" * 30_000,
        "{%" * 100_000,
        "{{ '" * 60_000,
        "a" * (1 << 20),
        "\U0001f98a" * 70_000,
        "{{ a }}" * (1 << 18),
    ],
}


@pytest.mark.parametrize("kind", [kind for kind in ATTACKS if kind != "time"])
def test_attacks_end_in_an_error_soon_and_small(kind: str) -> None:
    assert _run(ATTACKS[kind]) == ""


@pytest.mark.parametrize("attack", ATTACKS["time"], ids=range(len(ATTACKS["time"])))
def test_endless_templates_are_stopped(attack: str) -> None:
    assert _run([attack]) == ""


def _run(attacks: list[str]) -> str:
    done = subprocess.run(
        [sys.executable, "-c", RUN],
        input=json.dumps(attacks),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip()
