"""Result files: round trips, and every way in which a file can be wrong."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import jsonschema_rs
import msgspec
import pytest

from reports.directory import load_results
from reports.jsonschema import json_schema
from reports.results import cannot_be_replaced, read_result, result_name, write_bytes, write_index, write_result
from reports.schema import SCHEMA_VERSION
from reports.writers import FORMATS, parse_formats, write_reports
from server.errors import UserError
from tests.unit.reports import samples
from tests.unit.reports.published_schema import violations


def test_a_result_survives_the_file(tmp_path: Path) -> None:
    result = samples.cell("compile", "TRITON_ATTN", 8.0, failed=2)
    path = write_result(result, tmp_path)
    assert path.name == result_name(result.cell_id)
    assert read_result(path) == result


def test_names_are_safe_and_unique() -> None:
    names = {result_name(cell) for cell in ("../../etc/x", "a/b", "a_b", "a__b", "ä", "ö", "x" * 999)}
    assert len(names) == 7
    assert all("/" not in name and not name.startswith(".") and len(name) < 200 for name in names)


def test_a_newer_minor_version_is_read_a_newer_major_refused(tmp_path: Path) -> None:
    path = write_result(samples.cell("eager", "TORCH_SDPA", 2.0), tmp_path)
    document = json.loads(path.read_text())
    document |= {"schema_version": "1.99", "added_later": 1}
    path.write_text(json.dumps(document))
    assert read_result(path).status == "ok"
    document["schema_version"] = "2.0"
    path.write_text(json.dumps(document))
    with pytest.raises(UserError, match=r"schema version 2.0, this benchctl reads 1\.x"):
        read_result(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b'{"schema_version": "1.0",\n  oops}', "line 2, column 3"),
        (b'{"schema_version": "1.0"', "broken JSON in line 1"),
        (b"\xff", "broken JSON"),
        (b"", "broken JSON in line 1, column 1"),
        (b"[]", "not a benchctl result"),
        (b'{"a": 1}', "not a benchctl result"),
        (b'{"schema_version": "1.0"}', "not a valid CellResult: .*cell_id"),
    ],
)
def test_broken_files_are_one_line(tmp_path: Path, text: bytes, message: str) -> None:
    path = tmp_path / "r.json"
    path.write_bytes(text)
    with pytest.raises(UserError, match=message) as caught:
        read_result(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("number", "message"),
    [(errno.ENOSPC, "disk is full"), (errno.EROFS, "cannot be written"), (errno.EIO, "Input/output error")],
)
def test_a_failed_write_leaves_the_old_file_and_no_litter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, message: str
) -> None:
    path = write_bytes(tmp_path / "r", b"old")

    def fail(fd: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(UserError, match=message):
        write_bytes(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_devices_and_streams_are_written_to_and_not_replaced(tmp_path: Path) -> None:
    device = tmp_path / "device"
    device.symlink_to("/dev/full")
    with pytest.raises(UserError, match="disk is full"):
        write_bytes(device, b"text")
    assert list(tmp_path.iterdir()) == [device]
    assert device.is_char_device()
    file = tmp_path / "file"
    with file.open("wb") as opened:
        stream = Path(f"/dev/fd/{opened.fileno()}")
        write_bytes(stream, b"text")
        assert stream.exists()
    assert file.read_bytes() == b"text"
    assert not cannot_be_replaced(file)
    assert not cannot_be_replaced(tmp_path / "new")


def test_reports_that_fit_are_written_beside_one_that_does_not(tmp_path: Path) -> None:
    (tmp_path / "report.html").mkdir()
    with pytest.raises(UserError, match=r"report\.html"):
        write_reports(samples.matrix(), tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"report.html", "report.md", "report.csv"}


def test_directories_with_and_without_an_index(tmp_path: Path) -> None:
    made = samples.matrix()
    for result in made.results:
        write_result(result, tmp_path)
    write_reports(made, tmp_path, ["json", "csv"])
    assert len(load_results(tmp_path).results) == len(made.results)
    assert made.index is not None
    made.index.cells = ["../outside.json", *(result_name(result.cell_id) for result in made.results)]
    write_index(made.index, tmp_path)
    (tmp_path.parent / "outside.json").write_text("{}")
    loaded = load_results(tmp_path)
    assert [result.cell_id for result in loaded.results] == [result.cell_id for result in made.results]
    assert loaded.missing == ["outside.json"]


def test_paths_without_results(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such result directory"):
        load_results(tmp_path / "missing")
    with pytest.raises(UserError, match="holds no results"):
        load_results(tmp_path)


def test_the_json_schema_describes_what_is_written() -> None:
    schema = json.loads(json_schema())
    properties = schema["$defs"]["CellResult"]["properties"]
    written = json.loads(msgspec.json.encode(samples.cell("eager", "TORCH_SDPA", 2.0)))
    assert set(written) == set(properties)
    assert properties["schema_version"]["default"] == SCHEMA_VERSION
    references = {word for word in json_schema().split('"') if word.startswith("#/$defs/")}
    assert {reference.removeprefix("#/$defs/") for reference in references} <= set(schema["$defs"])


@pytest.mark.parametrize("broken", ["status", "metrics", "config"])
def test_the_json_schema_takes_what_is_written_and_nothing_else(broken: str) -> None:
    made = samples.matrix()
    documents = [json.loads(msgspec.json.encode(result)) for result in made.results]
    assert [violations(document) for document in documents] == [[]] * 24
    assert violations(json.loads(msgspec.json.encode(made.index)), "MatrixIndex") == []
    assert violations(json.loads(FORMATS["json"](made)), "ReportDocument") == []
    jsonschema_rs.meta.validate(json.loads(json_schema()))
    documents[-1][broken] = 1
    assert violations(documents[-1])


def test_formats() -> None:
    assert parse_formats("md, html,md") == ["md", "html"]
    for text in ("", "pdf", "html,pdf"):
        with pytest.raises(UserError, match="choose from html, md, csv, json"):
            parse_formats(text)
