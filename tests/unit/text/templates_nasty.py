"""Templates that ask for more than there is: time, memory, stack, or Python itself. For test_chat_bounds.py."""

DEEP = "{% set n = namespace(v=0) %}{% for i in range(100) %}{% set n.v = (n.v,) %}{% endfor %}"
TREE = "{% set n = namespace(v='x') %}{% for i in range(50) %}{% set n.v = [n.v, n.v] %}{% endfor %}"
TUPLES = "{% set n = namespace(v='x') %}{% for i in range(50) %}{% set n.v = (n.v, n.v) %}{% endfor %}"


VIEWS = "{{ {'a': a}.items() == {'a': n.v}.items() }}"


def _again(first: str, body: str) -> str:
    return f"{{% set n = namespace(v='{first}') %}}{{% for i in range(99) %}}{body}{{% endfor %}}"


LONG = "{% set s = 'ab' * 500000 %}"

REFUSED = {
    # Time.
    "a power of a power": "{{ 7 ** (10 ** 9) }}",
    "a power in a condition": "{% if 7 ** (10 ** 9) > 1 %}x{% endif %}",
    "powers in turn": "{% set n = namespace(v=7) %}{% for i in range(64) %}{% set n.v = n.v ** 99 %}{% endfor %}",
    "products in turn": "{% set n = namespace(v=7) %}{% for i in range(64) %}{% set n.v = n.v * n.v %}{% endfor %}",
    "a long range": "{% for i in range(10 ** 9) %}{% endfor %}",
    "loops in loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "loops that skip all": "{% for a in range(9999) %}{% for b in range(99999) if false %}{% endfor %}{% endfor %}",
    "loops of the request": "{% for a in range(99999) %}{% for m in messages %}{{ m.content * 99 }}{% endfor %}"
    "{% endfor %}",
    "filters in filters": "{% for a in range(9999) %}"
    + "{{ range(99999)"
    + "|map('string')" * 50
    + "|list|length }}{% endfor %}",
    "selecting again and again": "{{ range(99999)" + "|select('string')" * 1000 + "|list|length }}",
    "a macro that calls itself": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "a macro that calls itself twice": "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}"
    "{{ f(60) }}",
    "a recursive loop": "{% for x in [[[]]] recursive %}{{ loop([x, x]) }}{{ loop([x]) }}{% endfor %}",
    "rounding to a billion": "{{ 5|round(-1000000000) }}",
    "searching from the right": LONG + "{{ ('a' * 1000000).rsplit('b' + 'a' * 500000) }}",
    "a long sum of comparisons": LONG + "{% for i in range(99999) %}{% if s == 'ab' * 500000 %}{% endif %}{% endfor %}",
    "comparing trees": TREE + "{% set a = n.v %}" + TREE.replace("x", "y") + "{{ a == n.v }}",
    "a tree in a list of trees": TREE + "{% set a = n.v %}" + TREE.replace("x", "y") + "{{ a in [n.v] }}",
    "hashing a tree": TUPLES + "{{ {n.v: 1} }}",
    "looking up a tree": TUPLES + "{{ {}[n.v] }}",
    "getting a tree": TUPLES + "{{ {}.get(n.v) }}",
    "a dict of a tree": TUPLES + "{{ dict([(n.v, 1)]) }}",
    "a unique tree": TUPLES + "{{ [n.v]|unique|list|length }}",
    "sorting trees": TREE + "{% set a = n.v %}" + TREE.replace("x", "y") + "{{ [a, n.v]|sort|length }}",
    "a changed tree": TREE + "{% for i in [1, 2] %}{{ loop.changed(n.v) }}{% endfor %}",
    "hashing what is deep": DEEP + "{{ {n.v: 1} }}",
    "hashing what is very deep": DEEP.replace("100", "99999") + "{{ {n.v: 1} }}",
    "comparing the views of trees": TREE + "{% set a = n.v %}" + TREE.replace("x", "y") + VIEWS,
    "an error about a tree": TREE + "{{ {}[n.v].x }}",
    "the index of a tree": TREE + "{{ [1].index(n.v) }}",
    "a filter called like a tree": TUPLES + "{{ [1] | map(n.v) | list }}",
    "a test called like a tree": TUPLES + "{{ [1] | select(n.v) | list }}",
    "a method called like a tree": TUPLES + "{{ 5 | round(0, n.v) }}",
    "a sum of trees": TREE + "{{ '%s' % n.v }}",
    "searching ranges": "{{ 0"
    + " or 0.5 in range(99999)" * 190
    + " }}{% for i in range(99) %}{{ 0.5 in range(99999) }}"
    "{% endfor %}",
    "stripping many letters": "{{ ('a' * 999999).strip('b' * 999999 + 'a') }}",
    "trimming many letters": "{{ ('a' * 999999) | trim('b' * 999999 + 'a') }}",
    "many beginnings": "{% set s = 'a' * 999999 %}{{ (s + 'b').startswith(([s + 'c'] * 99999) | list) }}"
    "{% for i in range(99999) %}{{ s.isalpha() }}{% endfor %}",
    "attributes of attributes": "{{ range(99999) | map(attribute='a.' * 99999) | list }}",
    "an endless attribute": "{% set n = namespace(v=1) %}{% set n.a = n %}"
    "{{ [n] | join(attribute='a.' * 999999 + 'v') }}"
    "{{ [n] | map(attribute='a.' * 999999 + 'v') | list }}",
    "sorting by attributes of attributes": "{{ range(99999) | sort(attribute='a.' * 99999) | list }}",
    # Memory.
    "arguments kept": "{% set n = namespace(v=[]) %}{% set s = [1] * 99999 %}"
    "{% macro f() %}{% set n.v = [n.v, varargs] %}{% endmacro %}{% for i in range(99999) %}{{ f(*s) }}{% endfor %}",
    "a long text": "{{ 'a' * 10 ** 10 }}",
    "a text times a text's length": "{{ ('a' * 9999999) * ('a' * 9999999)|length }}",
    "a long list": "{{ ([1] * 10 ** 10)|length }}",
    "a list of lists": "{{ (range(99999)|list * 99999)|length }}",
    "doubling": _again("ab", "{% set n.v = n.v + n.v %}"),
    "doubling with ~": _again("ab", "{% set n.v = n.v ~ n.v %}"),
    "doubling by join": _again("ab", "{% set n.v = [n.v, n.v]|join %}"),
    "doubling by a method": _again("ab", "{% set n.v = n.v.join([n.v, n.v]) %}"),
    "doubling by replace": _again("aa", "{% set n.v = n.v|replace('a', n.v) %}"),
    "doubling by a replace method": _again("aa", "{% set n.v = n.v.replace('a', n.v) %}"),
    "doubling by a block": _again("ab", "{% set x %}{{ n.v }}{{ n.v }}{% endset %}{% set n.v = x %}"),
    "doubling by indent": _again("a\n", "{% set n.v = n.v|indent(n.v) + n.v %}"),
    "doubling by format": _again("%s%s", "{% set n.v = '%s%s' % (n.v, n.v) %}"),
    "many copies kept": LONG
    + "{% set n = namespace(v=[]) %}{% for i in range(9999) %}{% set n.v = [n.v, s[i:]] %}{% endfor %}",
    "many upper cases kept": LONG
    + "{% set n = namespace(v=[]) %}{% for i in range(9999) %}{% set n.v = [n.v, s|upper] %}{% endfor %}",
    "much printed": LONG + "{% for i in range(99999) %}{{ s }}{% endfor %}",
    "much of the template printed": "{% for i in range(99999) %}" + "a" * 200_000 + "{% endfor %}",
    "much of a macro printed": "{% macro f() %}"
    + "a" * 200_000
    + "{% endmacro %}{% for i in range(99999) %}{{ f() }}{% endfor %}",
    "printing a tree": TREE + "{{ n.v }}",
    "a tree to JSON": TREE + "{{ n.v|tojson }}",
    "a tree as a string": TREE + "{{ n.v|string|length }}",
    "a tree in upper case": TREE + "{{ n.v|upper|length }}",
    "a tree joined": TREE + "{{ [n.v]|join|length }}",
    "JSON with a wide indent": "{{ [1]|tojson(indent=10 ** 9) }}",
    "JSON with a long separator": "{{ [1, 2]|tojson(separators=('a' * 9999999, 'a' * 9999999)) }}",
    "JSON indented deep": DEEP.replace("(n.v,)", "[n.v]").replace("100", "900") + "{{ n.v|tojson(indent=16) }}",
    "a wide % format": "{{ '%99999999999d' % 1 }}",
    "a width given to a % format": "{{ '%*d' % (10 ** 9, 1) }}",
    "a wide format filter": "{{ '%099999999d'|format(1) }}",
    "a wide % format with a name": "{{ '%(a)99999999999d' % {'a': 1} }}",
    "a wide % format with a name in a name": "{{ '%(a(b))99999999999d' % {'a(b)': 1} }}",
    "rounding a text": "{{ 'a' | round(9, 'floor') }}",
    "parts kept": LONG
    + "{% set n = namespace(v=[]) %}{% for i in range(9999) %}{% set n.v = [n.v, s.partition('b')] %}"
    "{% endfor %}",
    "an odd format": "{{ '%99999999999d' is odd }}",
    "a format that divides": "{{ '%99999999999d' is divisibleby(3) }}",
    "str.format": "{{ '{:>9999999999}'.format(1) }}",
    "str.format with a width given": "{{ '{:>{}}'.format(1, 9999999999) }}",
    "str.format_map": "{{ '{a:>9999999999}'.format_map({'a': 1}) }}",
    "ljust": "{{ 'a'.ljust(10 ** 10) }}",
    "zfill": "{{ 'a'.zfill(10 ** 10) }}",
    "expandtabs": "{{ '\t'.expandtabs(10 ** 10) }}",
    "to_bytes": "{{ (1).to_bytes(10 ** 10, 'big') }}",
    "center": "{{ 'a'|center(99999999999) }}",
    "center in an autoescape": "{% autoescape 'a'|center(99999999999) %}x{% endautoescape %}",
    "a wide indent": "{{ 'a\nb'|indent(10 ** 10) }}",
    "a big batch": "{{ [1]|batch(10 ** 9, 'x')|list }}",
    "many slices": "{{ [1]|slice(10 ** 9)|list }}",
    "lipsum": "{{ lipsum(10 ** 9) }}",
    "a long text in pieces": LONG + "{% for i in range(99) %}{{ s.split('a')|length }}{% endfor %}",
    "words of a long text": "{% set s = 'a ' * 500000 %}{{ s.split()|length }}{{ s.split()|length }}",
    "titles": LONG + "{{ s|title|length }}{{ (s * 3)|title }}",
    # Stack and numbers.
    "25 nested loops": "{% for a in messages %}" * 25 + "{% endfor %}" * 25,
    "1,000 nested loops": "{% for a in messages %}" * 1000 + "{% endfor %}" * 1000,
    "10,000 parentheses": "{{ " + "(" * 10_000 + "1" + ")" * 10_000 + " }}",
    "10,000 nots": "{{ " + "not " * 10_000 + "1 }}",
    "a long sum": "{{ 1" + " + 1" * 10_000 + " }}",
    "a number of 5,000 digits": "{{ " + "9" * 5000 + " }}",
    "a text of 5,000 digits": "{{ ('9' * 5000)|int + 1 }}{{ 10 ** 4500 }}",
    "a number in base 2": "{{ ('1' * 9999999)|int(base=2) }}",
    "a long message": "{{ raise_exception('x' * 100000) }}",
    "a message of several lines": "{{ raise_exception('one\n\x1b[31mtwo\x00') }}",
    "no text as a message": "{{ raise_exception(messages) }}",
    "a name of 100 kB": "{{ " + "x" * 100_000 + ".y }}",
    "a template of a megabyte": "x" * (1 << 20),
    "a comparison of 100,000 values": "{{ a" + " < a" * 100_000 + " }}",
    "100,000 conditions": "{% if a %}" + "{% elif a %}" * 2_500 + "{% endif %}" + "{% if a %}{% endif %}" * 10_000,
    # Nonsense, and the way out.
    "division by zero": "{{ 1 / 0 }}",
    "an undefined value": "{{ nothing.there }}",
    "an unknown filter": "{{ 1|nothing }}",
    "an unknown test": "{{ 1 is nothing }}",
    "a broken tag": "{% for %}",
    "an unknown tag": "{% nothing %}",
    "an unclosed text": "{{ 'a",
    "the class of a text": "{{ ''.__class__.__mro__ }}",
    "changing the messages": "{{ messages.append(1) }}",
    "calling a text": "{{ 'a'() }}",
    "calling what an attribute is": "{{ messages.sort() }}",
    "an include": "{% include 'a' %}",
    "an import": "{% import 'a' as a %}",
    "a parent": "{% extends 'a' %}",
    "printing a namespace": "{{ namespace(a=1) }}",
    "printing a function": "{{ range }}",
    "a bad time format": "{{ strftime_now(1) }}",
}
