"""Holds documents against the JSON Schema that `benchctl report --schema` prints, with a validator that is not ours."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema_rs  # schemathesis brings it

from reports.jsonschema import json_schema
from reports.results import INDEX_NAME


def violations(document: Any, kind: str = "CellResult") -> list[str]:
    """How `document` departs from the schema of `kind`; what it holds beyond the schema counts, too."""
    schema = json.loads(json_schema()) | {"$ref": f"#/$defs/{kind}"}
    for definition in schema["$defs"].values():
        if "properties" in definition:
            definition["additionalProperties"] = False
    found = jsonschema_rs.validator_for(schema).iter_errors(document)
    return [f"{'/'.join(map(str, error.instance_path))}: {error.message}" for error in found]


def assert_published(directory: Path) -> int:
    """Every result in `directory`, their index and report are as published; the number of files."""
    files = sorted(directory.glob("*.json"))
    for path in files:
        kind = {INDEX_NAME: "MatrixIndex", "report.json": "ReportDocument"}.get(path.name, "CellResult")
        assert violations(json.loads(path.read_text()), kind) == [], path.name
    return len(files)
