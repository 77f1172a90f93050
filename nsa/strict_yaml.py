"""YAML in which a word means one thing: strict about booleans, numbers, repeated keys and size.

PyYAML reads `off` as False, `1e-4` as a string, and keeps the last of two equal keys without a
word. Here a boolean is `true` or `false` only, numbers are numbers, a repeated key is a problem.
"""

from __future__ import annotations

import re
from functools import cache, lru_cache
from pathlib import Path
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


# More values than any profile or config has, with every alias written out, and deeper than any.
_MOST_NODES, _DEEPEST = 100_000, 64
# A longer text is not parsed: whoever reads a file needs no more of it than one beyond.
MOST_BYTES = 1 << 20
_TOO_DEEP = f"its lists and maps are nested over {_DEEPEST} deep"

# libyaml's parser takes a tenth of the time; PyYAML has it where it was built with it.
_Safe: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
# In the place of tags: what a scalar means is told by it alone, or it is text.
_PLAIN, _AS_IT_IS = "plain", "as it is"


class _Loader(_Safe):  # type: ignore[misc]
    def resolve(self, kind: type[yaml.Node], _value: object, implicit: Any) -> str:
        return _PLAIN if kind is yaml.ScalarNode and implicit[0] else _AS_IT_IS


class _Reader:
    """The values of one document's nodes."""

    def __init__(self) -> None:
        self.problems: list[str] = []
        self._count = 0

    def value(self, node: yaml.Node, depth: int = 1) -> Any:
        """Raises YAMLError for what has no meaning here, and for what is too much."""
        self._count += 1
        if depth > _DEEPEST:
            raise yaml.YAMLError(_TOO_DEEP)
        if self._count > _MOST_NODES:
            raise yaml.YAMLError(f"its aliases stand for over {_MOST_NODES} values")
        if node.tag not in (_PLAIN, _AS_IT_IS):
            tag = node.tag.replace("tag:yaml.org,2002:", "!!")
            raise yaml.YAMLError(f"{_line(node)}: the tag {tag} is not read; write the value alone")
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, depth + 1)
        if isinstance(node, yaml.SequenceNode):
            return [self.value(one, depth + 1) for one in node.value]
        if node.tag == _AS_IT_IS:
            return node.value
        return None if _NULL.match(node.value) else scalar(node.value)

    def _mapping(self, node: yaml.MappingNode, depth: int) -> dict[Any, Any]:
        made: dict[Any, Any] = {}
        lines: dict[Any, str] = {}
        for key_node, value_node in node.value:
            line = _line(key_node)
            if not isinstance(key_node, yaml.ScalarNode):
                raise yaml.YAMLError(f"{line}: a key is a word, not a list or a mapping")
            key = self.value(key_node, depth)
            if key in lines:
                self.problems.append(f"{line}: key {key!r} repeats {lines[key]}")
            lines.setdefault(key, line)
            made[key] = self.value(value_node, depth)
        return made


def _line(node: yaml.Node) -> str:
    return f"line {node.start_mark.line + 1}"


@cache
def shipped(path: Path) -> Any:
    """What a document of this program holds, read once. Raises YAMLError for one that is wrong."""
    document, problems = load_strict(path.read_text("utf-8"))
    if problems:
        raise yaml.YAMLError(f"{path}: {'; '.join(problems)}")
    return document


def load_strict(text: str) -> tuple[Any, list[str]]:
    """Parse one YAML document. Returns the data (None where unreadable) and the problems."""
    reader = _Reader()
    try:
        node = _parsed(text)
        return (None if node is None else reader.value(node)), reader.problems
    except RecursionError:
        return None, [f"not valid YAML: {_TOO_DEEP}"]
    except yaml.YAMLError as error:
        told = " ".join(str(error).split())
        # libyaml's own bound, in versions that have one.
        deep = "exceeded maximum nesting depth" in told
        return None, [f"not valid YAML: {_TOO_DEEP if deep else told}"]


@lru_cache(maxsize=32)
def _parsed(text: str) -> yaml.Node | None:
    """Once in a process: a run asks for the same profiles a dozen times."""
    if len(text) > MOST_BYTES:
        raise yaml.YAMLError(f"longer than {MOST_BYTES} characters")
    loader = _Loader(text)
    try:
        node: yaml.Node | None = loader.get_single_node()
    finally:
        loader.dispose()
    return node


def scalar(text: str) -> Any:
    """What a single word means by the same rules: a number, a boolean, or the text itself."""
    if _BOOL.match(text):
        return text.lower() == "true"
    if _INT.match(text):
        return int(text.replace("_", ""))
    return float(text.replace("_", "")) if _FLOAT.match(text) else text
