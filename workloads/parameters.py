"""Typed parameters from loosely typed input: TOML suites, `--set key=value` options, JSON headers."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import msgspec

from server.errors import UserError

T = TypeVar("T")

_UNKNOWN_FIELD = re.compile(r"unknown field `(?P<field>[^`]*)`(?: - at `\$(?P<path>[^`]*)`)?")
_AT_PATH = re.compile(r" - at `\$\.?(?P<path>[^`]*)`$")


def near_matches(name: str, known: Iterable[str]) -> str:
    """Text such as "did you mean `rate`?" or, when nothing is close, the list of what is known."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=3, cutoff=0.55)
    if close:
        return "did you mean " + " or ".join(f"`{match}`" for match in close) + "?"
    return "known: " + ", ".join(names)


def convert(type_: Any, values: Mapping[str, Any], *, where: str) -> Any:
    """`values` as `type_` (a msgspec Struct that forbids unknown fields, or a tagged union of them).

    Strings are read as numbers and booleans where the field wants one, so that command-line text needs no quoting.

    Raises:
        UserError: unknown key (with near matches) or a value that does not fit; names `where` and the key.
    """
    try:
        return msgspec.convert(dict(values), type_, strict=False)
    except msgspec.ValidationError as error:
        raise UserError(f"{where}: {_explain(str(error), type_, values)}") from None


def _explain(message: str, type_: Any, values: Any) -> str:
    if unknown := _UNKNOWN_FIELD.search(message):
        path = (unknown["path"] or "").strip(".")
        known = _fields_at(type_, values, path)
        prefix = f"{path}." if path else ""
        return f"unknown key `{prefix}{unknown['field']}`; {near_matches(unknown['field'], known)}"
    if at := _AT_PATH.search(message):
        return f"`{at['path']}`: {message[: at.start()]}"
    return message


def _fields_at(type_: Any, values: Any, path: str) -> list[str]:
    """Names of the fields that the struct at `path` ("a.b", "" for the top, list indices ignored) has."""
    node = msgspec.inspect.type_info(type_)
    for key in [part for part in path.split(".") if part]:
        struct = _struct_for(node, values)
        if struct is None:
            return []
        name = key.split("[")[0]
        node = next((field.type for field in struct.fields if field.encode_name == name), node)
        values = values.get(name) if isinstance(values, Mapping) else None
        if "[" in key and isinstance(node, msgspec.inspect.ListType | msgspec.inspect.VarTupleType):
            node = node.item_type
            values = values[0] if values else None
    struct = _struct_for(node, values)
    return [] if struct is None else [field.encode_name for field in struct.fields]


def _struct_for(node: msgspec.inspect.Type, values: Any) -> msgspec.inspect.StructType | None:
    if isinstance(node, msgspec.inspect.StructType):
        return node
    if isinstance(node, msgspec.inspect.UnionType):
        structs = [member for member in node.types if isinstance(member, msgspec.inspect.StructType)]
        for struct in structs:
            if isinstance(values, Mapping) and values.get(struct.tag_field) == struct.tag:
                return struct
        return structs[0] if len(structs) == 1 else None
    return None


def parse_assignments(assignments: Iterable[str]) -> dict[str, Any]:
    """`["num_requests=10", "input_len.mean=200"]` as a nested dict: values are JSON where they parse, else text.

    Dots nest. Later assignments win.

    Raises:
        UserError: no `=`, an empty key, or a key below a plain value.
    """
    result: dict[str, Any] = {}
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        parts = key.strip().split(".")
        if not equals or not all(parts):
            raise UserError(f"--set {assignment!r}: expected key=value")
        try:
            value = json.loads(text)
        except ValueError:
            value = text
        target = result
        for part in parts[:-1]:
            target = target.setdefault(part, {})
            if not isinstance(target, dict):
                raise UserError(f"--set {assignment!r}: `{part}` was set to a plain value before")
        target[parts[-1]] = value
    return result


def with_defaults(struct: msgspec.Struct) -> dict[str, Any]:
    """The struct as a JSON-able dict, defaults filled in."""
    builtins = msgspec.to_builtins(struct)
    assert isinstance(builtins, dict)
    return builtins
