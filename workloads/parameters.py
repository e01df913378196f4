"""Typed parameters from loosely typed input: TOML suites, `--set key=value` options, JSON headers."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from server.errors import UserError

MAX_REQUESTS = 50_000_000
"""Bound on a workload or a schedule, so that a slipped digit is an error and not a full memory."""

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
        struct = _struct_of(*_at(type_, values, path))
        known = [] if struct is None else [field.encode_name for field in struct.fields]
        prefix = f"{path}." if path else ""
        return f"unknown key `{prefix}{unknown['field']}`; {near_matches(unknown['field'], known)}"
    if at := _AT_PATH.search(message):
        choices = _choices(type_, values, at["path"])
        value = _at(type_, values, at["path"])[1]
        hint = f"; {near_matches(str(value), choices)}" if choices and message.startswith("Invalid") else ""
        if tagged := [member for member in _members(_at(type_, values, at["path"])[0]) if member.tag_field]:
            tags = ", ".join(sorted(str(member.tag) for member in tagged))
            hint = hint or f"; an object has a `{tagged[0].tag_field}`: {tags}"
        return f"`{at['path']}`: {message[: at.start()]}{hint}"
    return message


def _at(type_: Any, values: Any, path: str) -> tuple[msgspec.inspect.Type | None, Any]:
    """Type and value at `path`, such as "a.b[2].c" ("" for the top), as far as both are known.

    msgspec writes list indices as `[...]`; the first item then stands for all.
    """
    node: msgspec.inspect.Type | None = msgspec.inspect.type_info(type_)
    for key in filter(None, path.split(".")):
        struct = _struct_of(node, values)
        name, index, _ = key.partition("[")
        fields = [] if struct is None else [field.type for field in struct.fields if field.encode_name == name]
        node = fields[0] if fields else None
        values = values.get(name) if isinstance(values, Mapping) else None
        if index:
            node = node.item_type if isinstance(node, msgspec.inspect.ListType) else None
            values = values[0] if isinstance(values, list) and values else None
    return node, values


def _struct_of(node: msgspec.inspect.Type | None, values: Any) -> msgspec.inspect.StructType | None:
    """The struct that `values` is meant as: `node` itself, or the member of the union that the tag names."""
    structs = _members(node)
    if len(structs) == 1:
        return structs[0]
    tagged = [s for s in structs if isinstance(values, Mapping) and values.get(s.tag_field) == s.tag]
    return tagged[0] if tagged else None


def _members(node: msgspec.inspect.Type | None) -> list[msgspec.inspect.StructType]:
    types = node.types if isinstance(node, msgspec.inspect.UnionType) else (node,)
    return [member for member in types if isinstance(member, msgspec.inspect.StructType)]


def _choices(type_: Any, values: Any, path: str) -> list[str]:
    """What may stand at `path` when that is a closed choice: a literal's values, or the tags of a union."""
    node, _ = _at(type_, values, path)
    types = node.types if isinstance(node, msgspec.inspect.UnionType) else (node,)
    literals = [str(value) for t in types if isinstance(t, msgspec.inspect.LiteralType) for value in t.values]
    if literals:
        return literals
    parent, _, last = path.rpartition(".")
    return [str(struct.tag) for struct in _members(_at(type_, values, parent)[0]) if struct.tag_field == last]


def parse_assignments(assignments: Iterable[str], option: str = "--set") -> dict[str, Any]:
    """`["num_requests=10", "input_len.mean=200"]` as a nested dict: values are JSON where they parse, else text.

    Dots nest. Later assignments win. `option` is what messages name.

    Raises:
        UserError: no `=`, an empty key, or a key below a plain value.
    """
    result: dict[str, Any] = {}
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        parts = key.strip().split(".")
        if not equals or not all(parts):
            raise UserError(f"{option} {assignment!r}: expected key=value")
        try:
            value = json.loads(text)
        except ValueError:
            value = text
        target = result
        for part in parts[:-1]:
            target = target.setdefault(part, {})
            if not isinstance(target, dict):
                raise UserError(f"{option} {assignment!r}: `{part}` was set to a plain value before")
        target[parts[-1]] = value
    return result


def parse_workload(text: str) -> dict[str, Any]:
    """A specification from `NAME`, `NAME:key=value,...` or a JSON object. Raises UserError."""
    if text.lstrip().startswith("{"):
        try:
            return msgspec.json.decode(text, type=dict[str, Any])
        except msgspec.DecodeError as error:
            raise UserError(f"workload {text!r}: not a JSON object ({error})") from None
    name, _, rest = text.partition(":")
    return {"name": name, **parse_assignments((part for part in rest.split(",") if part), "workload")}


def check_num_requests(num_requests: int | None, *, where: str) -> None:
    """Raise UserError unless there is at least one request and no more than a machine can plan; None: no limit."""
    if num_requests is not None and not 1 <= num_requests <= MAX_REQUESTS:
        raise UserError(f"{where}: num_requests {num_requests} must be from 1 to {MAX_REQUESTS}")


def with_defaults(struct: msgspec.Struct) -> dict[str, Any]:
    """The struct as a JSON-able dict, defaults filled in."""
    builtins = msgspec.to_builtins(struct)
    assert isinstance(builtins, dict)
    return builtins
