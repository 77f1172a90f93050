"""YAML in which a word means one thing: strict about booleans, numbers, repeated keys and size.

PyYAML reads `off` as False, `1e-4` as a string, and keeps the last of two equal keys without a
word. Here a boolean is `true` or `false` only, numbers are numbers, a repeated key is a problem.
"""

from __future__ import annotations

import re
from copy import deepcopy
from functools import lru_cache
from typing import Any

import yaml

# At most so many digits as a float can hold: one beyond is no number, but a word.
_INT = re.compile(r"^[-+]?(?:0|[1-9][0-9_]{0,299})$")
_FLOAT = re.compile(
    r"^[-+]?(?:[0-9][0-9_]*\.[0-9_]*(?:[eE][-+]?[0-9]+)?"
    r"|[0-9][0-9_]*[eE][-+]?[0-9]+|\.[0-9]+(?:[eE][-+]?[0-9]+)?)$"
)
_BOOL = re.compile(r"^(?:true|false|True|False)$")
_NULL = re.compile(r"^(?:~|null|Null|)$")


# A tag that is written down means no more than what the value would be read as without it.
_STANDARD = "tag:yaml.org,2002:"
_FITS: dict[str, re.Pattern[str] | type[yaml.Node]] = {
    "bool": _BOOL,
    "int": _INT,
    "float": _FLOAT,
    "null": _NULL,
    "str": yaml.ScalarNode,
    "seq": yaml.SequenceNode,
    "map": yaml.MappingNode,
}

# libyaml's parser takes a tenth of the time; PyYAML has it where it was built with it.
_Safe: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _Loader(_Safe):  # type: ignore[misc]
    problems: list[str]

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        kind = node.tag.removeprefix(_STANDARD)
        fits = _FITS.get(kind)
        if not isinstance(fits, re.Pattern):
            right = isinstance(node, fits or ())
        else:
            right = isinstance(node, yaml.ScalarNode) and fits.match(node.value) is not None
        if not right:
            tag = f"!!{kind}" if node.tag.startswith(_STANDARD) else node.tag
            line = node.start_mark.line + 1
            raise yaml.YAMLError(f"line {line}: the tag {tag} is not read; write the value alone")
        return super().construct_object(node, deep=deep)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: dict[Any, int] = {}
        for key_node, _ in node.value:
            line = key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode):
                raise yaml.YAMLError(f"line {line}: a key is a word, not a list or a mapping")
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                self.problems.append(f"line {line}: key {key!r} repeats line {seen[key]}")
            seen.setdefault(key, line)
        made: dict[Any, Any] = super().construct_mapping(node, deep=deep)
        return made


_Loader.yaml_implicit_resolvers = {}
for _kind, _pattern, _first in (
    ("bool", _BOOL, "tfTF"),
    ("int", _INT, "-+0123456789"),
    ("float", _FLOAT, "-+0123456789."),
    ("null", _NULL, ["~", "n", "N", ""]),
):
    _Loader.add_implicit_resolver(f"{_STANDARD}{_kind}", _pattern, list(_first))


def load_strict(text: str) -> tuple[Any, list[str]]:
    """Parse one YAML document. Returns the data (None where unreadable) and the problems.

    A text is parsed once in a process: a run asks for the same profiles a dozen times.
    """
    return deepcopy(_parsed(text))


# More values than any profile or config has, with every alias written out, and deeper than any.
_MOST_NODES, _DEEPEST = 100_000, 64
# A longer text is not parsed: whoever reads a file needs no more of it than one beyond.
MOST_BYTES = 1 << 20
_TOO_DEEP = f"its lists and maps are nested over {_DEEPEST} deep"


def _outsize(root: yaml.Node) -> str:
    """What is too much of the document once its aliases stand for what they name, if anything."""
    left, count = [(root, 1)], 0
    while left:
        node, depth = left.pop()
        count += 1
        if depth > _DEEPEST:
            return _TOO_DEEP
        if count > _MOST_NODES:
            return f"its aliases stand for over {_MOST_NODES} values"
        if isinstance(node, yaml.MappingNode):
            left += [(one, depth + 1) for pair in node.value for one in pair]
        elif isinstance(node, yaml.SequenceNode):
            left += [(one, depth + 1) for one in node.value]
    return ""


@lru_cache(maxsize=32)
def _parsed(text: str) -> tuple[Any, list[str]]:
    if len(text) > MOST_BYTES:
        return None, [f"not usable YAML: longer than {MOST_BYTES} characters"]
    loader = _Loader(text)
    loader.problems = []
    try:
        node = loader.get_single_node()
        if node is not None and (outsize := _outsize(node)):
            return None, [f"not usable YAML: {outsize}"]
        data = None if node is None else loader.construct_document(node)
    except RecursionError:
        return None, [f"not usable YAML: {_TOO_DEEP}"]
    except yaml.YAMLError as error:
        text = " ".join(str(error).split())
        # libyaml's own bound, in versions that have one.
        if "exceeded maximum nesting depth" in text:
            return None, [f"not usable YAML: {_TOO_DEEP}"]
        return None, [f"not valid YAML: {text}"]
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
