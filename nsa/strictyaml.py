"""YAML read without its traps.

PyYAML reads `off` as False, `1e-4` as a string, and keeps the last of two equal keys without a
word. Here a boolean is `true` or `false` only, numbers are numbers, and a repeated key is a
problem with its line. Torch-free.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

_INT = re.compile(r"^[-+]?(?:0|[1-9][0-9_]*)$")
_FLOAT = re.compile(
    r"^[-+]?(?:[0-9][0-9_]*\.[0-9_]*(?:[eE][-+]?[0-9]+)?"
    r"|[0-9][0-9_]*[eE][-+]?[0-9]+|\.[0-9]+(?:[eE][-+]?[0-9]+)?)$"
)
_BOOL = re.compile(r"^(?:true|false|True|False)$")
_NULL = re.compile(r"^(?:~|null|Null|)$")


class _Loader(yaml.SafeLoader):
    problems: list[str]

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: dict[Any, int] = {}
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            line = key_node.start_mark.line + 1
            if key in seen:
                self.problems.append(f"line {line}: key {key!r} repeats line {seen[key]}")
            seen.setdefault(key, line)
        return super().construct_mapping(node, deep=deep)


_Loader.yaml_implicit_resolvers = {}
for _tag, _pattern, _first in (
    ("tag:yaml.org,2002:bool", _BOOL, "tfTF"),
    ("tag:yaml.org,2002:int", _INT, "-+0123456789"),
    ("tag:yaml.org,2002:float", _FLOAT, "-+0123456789."),
    ("tag:yaml.org,2002:null", _NULL, ["~", "n", "N", ""]),
):
    _Loader.add_implicit_resolver(_tag, _pattern, list(_first))


def load_strict(text: str) -> tuple[Any, list[str]]:
    """Parse one YAML document. Returns the data (None where unreadable) and the problems."""
    loader = _Loader(text)
    loader.problems = []
    try:
        data = loader.get_single_data()
    except yaml.YAMLError as error:
        return None, [f"not valid YAML: {' '.join(str(error).split())}"]
    finally:
        loader.dispose()
    return data, loader.problems


def scalar(text: str) -> Any:
    """What a single word means by the same rules: a number, a boolean, or the text itself."""
    if _BOOL.match(text):
        return text.lower() == "true"
    if _INT.match(text):
        return int(text.replace("_", ""))
    return float(text.replace("_", "")) if _FLOAT.match(text) else text
