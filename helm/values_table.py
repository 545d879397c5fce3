"""Writes the table of values into helm/ostrya/README.md, from the comments of values.yaml and the types of its schema.

`make chart-docs` runs it; `--check` writes nothing and fails where the table is not current. Either way it fails where
the two disagree: a value without a comment that begins with `# -- `, a value without a schema, a property without a
default.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml

CHART = Path(__file__).parent / "ostrya"
BEGIN = "<!-- values: written by helm/values_table.py -->"
END = "<!-- end of values -->"
_MARK = "# -- "


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """One row. A mapping or list under a documented key is one value."""

    path: tuple[str, ...]
    text: str
    """Empty if nothing says what it does."""
    default: object


def main() -> int:
    parser = argparse.ArgumentParser(description="Table of the chart's values.")
    parser.add_argument("--check", action="store_true", help="write nothing; 1 if the table is not current")
    check = parser.parse_args().check
    values = list(documented((CHART / "values.yaml").read_text()))
    schema = json.loads((CHART / "values.schema.json").read_text())
    found = problems(values, schema)
    if found:
        print("\n".join(found), file=sys.stderr)
        return 1
    readme = CHART / "README.md"
    before = readme.read_text()
    after = with_table(before, table(values, schema))
    if check and before != after:
        print(f"{readme.name} is not current; run helm/values_table.py", file=sys.stderr)
        return 1
    if before != after:
        readme.write_text(after)
    return 0


def documented(text: str) -> Iterator[Value]:
    """The values of a values.yaml in its order: leaves, and whatever has a comment of its own."""
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    assert isinstance(root, yaml.MappingNode)
    yield from _documented(root, text.splitlines(), ())


def problems(values: list[Value], schema: Mapping[str, object]) -> list[str]:
    """What values.yaml and its schema do not agree on."""
    found = []
    for value in values:
        name = ".".join(value.path)
        if not value.text:
            found.append(f"{name} has no comment in values.yaml that begins with {_MARK!r}")
        if not lookup(value.path, schema):
            found.append(f"{name} is not in values.schema.json")
    paths = {value.path for value in values}
    for path in _properties(schema, schema, ()):
        # {} as a default stands for its own schema, as that of affinity.
        covered = any(path[: len(one)] == one for one in paths)
        if not covered and not any(one[: len(path)] == path for one in paths):
            found.append(f"{'.'.join(path)} is in values.schema.json but not in values.yaml")
    return found


def lookup(path: tuple[str, ...], schema: Mapping[str, object]) -> Mapping[str, object]:
    """The schema of one value; empty if it has none."""
    node = schema
    for key in path:
        properties = _mapping(_resolved(node, schema).get("properties"))
        node = _mapping(properties.get(key))
    return _resolved(node, schema)


def table(values: list[Value], schema: Mapping[str, object]) -> str:
    """A table for each top-level key that holds several values, after one for those that stand alone."""
    alone = [value for value in values if len(value.path) == 1]
    groups = {"General": alone}
    for value in values:
        if len(value.path) > 1:
            groups.setdefault(f"`{value.path[0]}`", []).append(value)
    parts = []
    for title, rows in groups.items():
        lines = [f"### {title}", "", "| value | type | default | what it does |", "|---|---|---|---|"]
        lines += [_row(value, lookup(value.path, schema), schema) for value in rows]
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def with_table(readme: str, written: str) -> str:
    """The README with what is between its markers replaced."""
    head, begin, rest = readme.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"README.md has no {BEGIN} … {END}")
    return f"{head}{begin}\n\n{written}\n\n{end}{tail}"


def _documented(node: yaml.MappingNode, lines: list[str], path: tuple[str, ...]) -> Iterator[Value]:
    for key, value in node.value:
        own = (*path, key.value)
        text = _comment(lines, key.start_mark.line)
        if isinstance(value, yaml.MappingNode) and value.value and not text:
            yield from _documented(value, lines, own)
        else:
            yield Value(path=own, text=text, default=_constructed(value))


def _constructed(node: yaml.Node) -> object:
    value: object = yaml.safe_load(yaml.serialize(node, Dumper=yaml.SafeDumper))
    return value


def _comment(lines: list[str], line: int) -> str:
    """The comment block that ends above this line, if it begins with the mark."""
    block: list[str] = []
    while line and lines[line - 1].strip().startswith("#"):
        line -= 1
        stripped = lines[line].strip()
        if stripped.startswith(_MARK):
            return " ".join([stripped.removeprefix(_MARK), *block])
        block.insert(0, stripped.removeprefix("#").strip())
    return ""


def _properties(
    node: Mapping[str, object], schema: Mapping[str, object], path: tuple[str, ...]
) -> Iterator[tuple[str, ...]]:
    """Paths of all leaves that the schema lists by name."""
    properties = _mapping(_resolved(node, schema).get("properties"))
    if not properties and path:
        yield path
    for key, below in properties.items():
        yield from _properties(_mapping(below), schema, (*path, key))


def _resolved(node: Mapping[str, object], schema: Mapping[str, object]) -> Mapping[str, object]:
    while "$ref" in node:
        node = _mapping(_mapping(schema["definitions"])[str(node["$ref"]).rpartition("/")[2]])
    return node


def _row(value: Value, node: Mapping[str, object], schema: Mapping[str, object]) -> str:
    default = json.dumps(value.default, ensure_ascii=False)
    name = ".".join(value.path)
    return f"| `{name}` | {_kind(node, schema)} | `{default}` | {value.text.replace('|', '&#124;')} |"


def _kind(node: Mapping[str, object], schema: Mapping[str, object]) -> str:
    node = _resolved(node, schema)
    options = node.get("enum")
    if isinstance(options, list):
        return ", ".join(f"`{one}`" if one != "" else "empty" for one in options)
    choices = node.get("anyOf")
    if isinstance(choices, list):
        return " or ".join(dict.fromkeys(_kind(_mapping(one), schema) for one in choices))
    kinds = node.get("type")
    return " or ".join(map(str, kinds)) if isinstance(kinds, list) else str(kinds)


def _mapping(value: object) -> Mapping[str, object]:
    """Empty for what is no mapping."""
    return value if isinstance(value, dict) else {}


if __name__ == "__main__":
    raise SystemExit(main())
