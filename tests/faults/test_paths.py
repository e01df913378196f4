"""Names that are not what they seem: they lead nowhere outside, and are never followed through links."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reports.directory import load_results
from reports.results import result_name, write_index
from server.compilation.store import CacheEntryError, CompileCache
from server.config import ModelOptions
from server.errors import UserError
from server.models import registry
from server.models.pull import pull
from server.models.registry import models_dir, must_be_pulled, resolve_model
from server.runtime_dir import create_runtime_dir, remove_stale
from tests.fuzz.budget import fuzz
from tests.unit.reports.samples import matrix

EVIL = [
    "..",
    ".",
    "../x",
    "../../etc",
    "a/../../x",
    "org/..",
    "../org/x",
    "~root/x",
    "/etc",
    "a\0b",
    "",
    "x" * 300,
    "a/b/c",
]


@pytest.mark.parametrize("name", EVIL)
def test_model_names_lead_nowhere(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BENCHCTL_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)

    def no_hub(name: str, *, refresh: bool = False) -> Path:
        raise AssertionError(f"{name!r} was taken for a hub id")

    monkeypatch.setattr(registry, "hub_folder", no_hub)
    monkeypatch.setattr("server.models.pull.hub_folder", no_hub)
    with pytest.raises(UserError):
        resolve_model(ModelOptions(model=name))
    with pytest.raises(UserError):
        pull(name)
    assert not must_be_pulled(name)
    assert list(tmp_path.iterdir()) == [], "nothing is created for a bad name"


def test_a_pulled_name_stays_in_the_folder_of_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BENCHCTL_CACHE_DIR", str(tmp_path / "cache"))
    models_dir().mkdir(parents=True)
    (tmp_path / "cache" / "config.json").write_text("{}")
    with pytest.raises(UserError, match="neither a folder"):
        resolve_model(ModelOptions(model="..."))


@given(cell_id=st.text(max_size=400) | st.sampled_from(["../../x", "/etc/passwd", "a/../b", "..", "", "x" * 999, "\0"]))
@fuzz(200)
def test_results_stay_in_their_directory(cell_id: str) -> None:
    name = result_name(cell_id)
    assert Path("/results") / name == Path(os.path.normpath(f"/results/{name}"))
    assert "/" not in name
    assert not name.startswith("..")
    assert len(name) < 200
    assert name.isascii()
    assert name.isprintable()


def test_an_index_reads_nothing_outside_its_directory(tmp_path: Path) -> None:
    folder = tmp_path / "results"
    folder.mkdir()
    (tmp_path / "secret.json").write_text("{}")
    index = matrix().index
    assert index is not None
    index.cells = ["../secret.json", "/etc/passwd"]
    write_index(index, folder)
    results = load_results(folder)
    assert results.results == []
    assert results.missing == ["secret.json", "passwd"]


def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "piece.bin").write_bytes(b"code")
    return folder


@pytest.mark.parametrize("link", ["compile", "compile/key", "compile/key/piece.bin", "compile/key/manifest.json"])
def test_links_in_the_compile_cache_are_not_followed(tmp_path: Path, link: str) -> None:
    """Whoever can place a link does not choose what code is loaded."""
    cache = CompileCache(tmp_path / "compile")
    cache.publish("key", source(tmp_path), {})
    path = tmp_path / link
    elsewhere = tmp_path / "elsewhere"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)
    destination = tmp_path / "copy"
    destination.mkdir()
    with pytest.raises(CacheEntryError):
        cache.fetch("key", destination)


@pytest.mark.parametrize("entry", ["compile", "compile/key", "compile/key/piece.bin"])
def test_what_others_could_have_written_is_not_loaded(tmp_path: Path, entry: str) -> None:
    cache = CompileCache(tmp_path / "compile")
    cache.publish("key", source(tmp_path), {})
    (tmp_path / entry).chmod(0o777)
    destination = tmp_path / "copy"
    destination.mkdir()
    with pytest.raises(CacheEntryError, match="writable by others"):
        cache.fetch("key", destination)


def test_an_entry_replaced_by_a_link_is_not_deleted_through(tmp_path: Path) -> None:
    cache = CompileCache(tmp_path / "compile")
    cache.publish("key", source(tmp_path), {})
    precious = tmp_path / "precious"
    (tmp_path / "compile" / "key").rename(precious)
    (tmp_path / "compile" / "key").symlink_to(precious)
    cache.publish("key", tmp_path / "source", {})
    assert (precious / "piece.bin").read_bytes() == b"code"
    assert not (tmp_path / "compile" / "key").is_symlink()


def test_clearing_the_cache_follows_no_link(tmp_path: Path) -> None:
    cache = CompileCache(tmp_path / "compile")
    cache.publish("key", source(tmp_path), {})
    (tmp_path / "compile" / "link").symlink_to(tmp_path / "source")
    cache.clear()
    assert (tmp_path / "source" / "piece.bin").exists()
    assert [path.name for path in (tmp_path / "compile").iterdir() if not path.name.startswith(".")] == ["link"]


def test_stale_runtime_directories_are_not_removed_through_links(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    link = tmp_path / "benchctl-999999999-x"
    link.symlink_to(precious)
    remove_stale(tmp_path)
    assert precious.is_dir()
    assert link.is_symlink()


def test_a_runtime_directory_is_never_one_that_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    first, second = create_runtime_dir(), create_runtime_dir()
    assert first != second
    assert {first.parent, second.parent} == {tmp_path}
