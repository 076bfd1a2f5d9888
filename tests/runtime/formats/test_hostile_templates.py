"""A stranger's template: whatever it tries, an error in time and without the machine's memory."""

from __future__ import annotations

import subprocess
import sys

import pytest

RUN = """
import resource, sys, time
from runtime.formats.chat.jinja import JinjaChatTemplate
from runtime.protocol.errors import TemplateError

JinjaChatTemplate({"default": "{{ messages | tojson }}"}).render([{"role": "user", "content": "x"}])
pages = int(open("/proc/self/statm").read().split()[0])
limit = pages * resource.getpagesize() + (160 << 20)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
failed = []
for source in sys.argv[1:]:
    begun = time.process_time()
    try:
        text = JinjaChatTemplate({"default": source}).render([{"role": "user", "content": "x" * 1000}])
    except TemplateError as error:
        if "MemoryError" in str(error):
            failed.append(f"memory: {source}")
    else:
        failed.append(f"{len(text)} characters came out: {source}")
    took = time.process_time() - begun
    if took > 2.3:
        failed.append(f"{took:.1f} s: {source}")
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10
    if grown > 110:
        failed.append(f"{grown} MB: {source}")
        before += grown << 10
print("\\n".join(failed))
"""

BIG = "{% set ns = namespace(x='abcdefgh') %}"
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
        "(" * 5000,
        "{{ " + "(" * 5000 + ")" * 5000 + " }}",
        "{{ " + "1+" * 20000 + "1 }}",
        "{% for i in x %}" * 200 + "{% endfor %}" * 200,
        "a" * (1 << 20),
    ],
}


@pytest.mark.parametrize("kind", [kind for kind in ATTACKS if kind != "time"])
def test_attacks_end_in_an_error_soon_and_small(kind: str) -> None:
    attacks = ATTACKS[kind]
    if kind == "parser":
        attacks = attacks[1:]
    if kind == "parser":
        attacks = [attack for attack in attacks if len(attack) < 100_000]  # an argument's length has a limit
    assert _run(attacks) == ""


@pytest.mark.parametrize("attack", ATTACKS["time"])
def test_endless_templates_are_stopped(attack: str) -> None:
    assert _run([attack]) == ""


def _run(attacks: list[str]) -> str:
    done = subprocess.run(
        [sys.executable, "-c", RUN, *attacks], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip()
