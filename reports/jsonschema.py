"""The result schema as JSON Schema (2020-12), for readers in other languages."""

from __future__ import annotations

import json

import msgspec

from reports.schema import SCHEMA_VERSION, CellResult, MatrixIndex, ReportDocument


def json_schema() -> str:
    """JSON Schema whose definitions hold `CellResult` (the root), `MatrixIndex` and `ReportDocument`; indented text."""
    kinds = [CellResult, MatrixIndex, ReportDocument]
    (root, *_), definitions = msgspec.json.schema_components(kinds, ref_template="#/$defs/{name}")
    document = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"benchctl result, schema version {SCHEMA_VERSION}",
        **root,
        "$defs": dict(sorted(definitions.items())),
    }
    return json.dumps(document, indent=2)
