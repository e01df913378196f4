"""The on-disk cache: whole or nothing, ours or nothing, and never a reason to fail."""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from server.compilation import store as store_module
from server.compilation.store import CacheEntryError, CompileCache
from server.errors import UserError

KEY = "0123456789abcdef0123456789abcdef"
FILES = {"plan.json": b"{}", "piece-0.bin": bytes(range(256)) * 40, "inductor/ab/code.py": b"print(1)\n"}


@pytest.fixture
def cache(tmp_path: Path) -> CompileCache:
    return CompileCache(tmp_path / "cache")


@pytest.fixture
def stored(cache: CompileCache, tmp_path: Path) -> Path:
    """The directory of an entry."""
    cache.publish(KEY, make_source(tmp_path / "source"), {"torch": "2.11.0", "dtype": "bfloat16"})
    return cache.root / KEY


def make_source(directory: Path) -> Path:
    for name, data in FILES.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    (directory / "inductor" / "locks").mkdir()
    (directory / "inductor" / "locks" / "x.lock").touch()
    return directory


def fetch(cache: CompileCache, tmp_path: Path) -> Path:
    destination = tmp_path / "destination"
    destination.mkdir(mode=0o700)
    assert cache.fetch(KEY, destination)
    return destination


def test_what_is_published_is_fetched(cache: CompileCache, stored: Path, tmp_path: Path) -> None:
    destination = fetch(cache, tmp_path)
    found = {p.relative_to(destination).as_posix(): p.read_bytes() for p in destination.rglob("*") if p.is_file()}
    assert json.loads(found.pop("factors.json")) == {"torch": "2.11.0", "dtype": "bfloat16"}
    assert found == FILES  # lock files stay behind
    assert all(p.stat().st_mode & 0o077 == 0 for p in [cache.root, stored, *stored.rglob("*")])


def test_an_absent_entry_is_a_miss(cache: CompileCache, tmp_path: Path) -> None:
    assert not cache.fetch(KEY, tmp_path)
    assert cache.entries() == []
    assert cache.clear() == (0, 0)


def damage_truncate(entry: Path) -> None:
    path = entry / "piece-0.bin"
    path.write_bytes(path.read_bytes()[:-1])


def damage_change(entry: Path) -> None:
    path = entry / "inductor/ab/code.py"
    path.write_bytes(b"print(2)\n")


def damage_remove(entry: Path) -> None:
    (entry / "plan.json").unlink()


def damage_grow(entry: Path) -> None:
    with open(entry / "piece-0.bin", "ab") as file:
        file.write(b"more")


def damage_manifest(entry: Path) -> None:
    (entry / "manifest.json").write_text('{"files": ')


def damage_no_manifest(entry: Path) -> None:
    (entry / "manifest.json").unlink()


def damage_symlink(entry: Path) -> None:
    path = entry / "plan.json"
    path.rename(entry / "other")
    path.symlink_to(entry / "other")


def damage_fifo(entry: Path) -> None:
    (entry / "plan.json").unlink()
    os.mkfifo(entry / "plan.json", 0o600)


def damage_writable_file(entry: Path) -> None:
    (entry / "plan.json").chmod(0o666)


def damage_writable_folder(entry: Path) -> None:
    (entry / "inductor").chmod(0o777)


def damage_writable_entry(entry: Path) -> None:
    entry.chmod(0o770)


def damage_writable_root(entry: Path) -> None:
    entry.parent.chmod(0o777)


def damage_escape(entry: Path) -> None:
    manifest = json.loads((entry / "manifest.json").read_text())
    manifest["files"]["../../elsewhere"] = manifest["files"]["plan.json"]
    (entry / "manifest.json").write_text(json.dumps(manifest))


DAMAGES = [value for name, value in sorted(globals().items()) if name.startswith("damage_")]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__.removeprefix("damage_"))
def test_a_damaged_or_untrusted_entry_is_refused(
    damage: object, cache: CompileCache, stored: Path, tmp_path: Path
) -> None:
    assert callable(damage)
    damage(stored)
    destination = tmp_path / "destination"
    destination.mkdir(mode=0o700)
    with pytest.raises(CacheEntryError):
        cache.fetch(KEY, destination)
    assert not (tmp_path / "elsewhere").exists()


def test_an_entry_of_another_user_is_refused(
    cache: CompileCache, stored: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: mine + 1)
    with pytest.raises(CacheEntryError, match="belongs to user id"):
        cache.fetch(KEY, tmp_path)
    with pytest.raises(CacheEntryError, match="belongs to user id"):
        cache.publish(KEY, make_source(tmp_path / "again"), {})


def test_a_link_in_the_place_of_an_entry_is_refused(cache: CompileCache, stored: Path, tmp_path: Path) -> None:
    stored.rename(tmp_path / "moved")
    stored.symlink_to(tmp_path / "moved")
    with pytest.raises(CacheEntryError):
        cache.fetch(KEY, tmp_path)


LINK = "is a symbolic link, and links in the cache are not followed: remove it; .* set --compilation-cache-dir"


def test_a_link_in_the_place_of_the_root_is_refused(cache: CompileCache, stored: Path, tmp_path: Path) -> None:
    """Nothing is made, locked, listed or removed behind it, and the reason is named."""
    elsewhere = tmp_path / "elsewhere"
    cache.root.rename(elsewhere)
    cache.root.symlink_to(elsewhere)
    before = sorted(elsewhere.rglob("*"))
    named = re.escape(str(cache.root)) + " " + LINK
    destination = tmp_path / "destination"
    destination.mkdir(mode=0o700)
    with cache.lock(KEY, 60.0) as held:
        assert not held
    for use in (
        lambda: cache.fetch(KEY, destination),
        lambda: cache.publish(KEY, make_source(tmp_path / "again"), {}),
    ):
        with pytest.raises(CacheEntryError, match=named):
            use()
    for look in (cache.entries, cache.clear):
        with pytest.raises(UserError, match=named):
            look()
    assert sorted(elsewhere.rglob("*")) == before
    assert list(destination.iterdir()) == []


def test_a_link_to_nothing_is_not_made_good(cache: CompileCache, tmp_path: Path) -> None:
    cache.root.symlink_to(tmp_path / "absent")
    with cache.lock(KEY, 60.0) as held:
        assert not held
    with pytest.raises(CacheEntryError, match=LINK):
        cache.publish(KEY, make_source(tmp_path / "source"), {})
    assert not (tmp_path / "absent").exists()


@pytest.mark.parametrize("name", [".locks", f".locks/{KEY}"])
def test_locks_are_not_taken_through_links(cache: CompileCache, tmp_path: Path, name: str) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    path = cache.root / name
    path.parent.mkdir(parents=True, mode=0o700)
    cache.root.chmod(0o700)
    path.symlink_to(elsewhere if name == ".locks" else elsewhere / "file")
    with cache.lock(KEY, 60.0) as held:
        assert not held
    assert list(elsewhere.iterdir()) == []


def test_a_link_inside_an_entry_is_named_as_one(cache: CompileCache, stored: Path, tmp_path: Path) -> None:
    damage_symlink(stored)
    with pytest.raises(CacheEntryError, match=r"^plan\.json is a symbolic link"):
        cache.fetch(KEY, tmp_path)


def test_the_cache_directory_itself_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "cache").symlink_to(tmp_path / "disk")
    cache = CompileCache(tmp_path / "cache" / "compile")
    with cache.lock(KEY, 0.0) as held:
        assert held
    cache.publish(KEY, make_source(tmp_path / "source"), {})
    fetch(cache, tmp_path)


def test_a_root_that_is_no_directory_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"file: cannot be listed \(Not a directory\)"):
        CompileCache(tmp_path / "file").entries()


def test_listing_reads_no_pipe_and_follows_no_link(cache: CompileCache, stored: Path, tmp_path: Path) -> None:
    (tmp_path / "factors.json").write_text('{"torch": "of another"}')
    (stored / "factors.json").unlink()
    (stored / "factors.json").symlink_to(tmp_path / "factors.json")
    assert cache.entries()[0].factors == {}
    (stored / "factors.json").unlink()
    os.mkfifo(stored / "factors.json")
    # In a process of its own: one that opened the pipe would wait for ever.
    code = (
        "import sys; from pathlib import Path; from server.compilation.store import CompileCache\n"
        "print(CompileCache(Path(sys.argv[1])).entries()[0].factors)"
    )
    command = [sys.executable, "-c", code, str(cache.root)]
    assert subprocess.run(command, capture_output=True, text=True, timeout=60).stdout == "{}\n"


def test_a_full_disk_leaves_nothing_behind(
    cache: CompileCache, stored: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(store_module.os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        cache.publish("f" * 32, make_source(tmp_path / "again"), {})
    monkeypatch.undo()
    assert [path.name for path in cache.root.iterdir()] == [KEY]
    fetch(cache, tmp_path)


def test_an_entry_is_replaced_whole(cache: CompileCache, stored: Path, tmp_path: Path) -> None:
    damage_truncate(stored)
    cache.publish(KEY, make_source(tmp_path / "again"), {"torch": "2.13.0"})
    fetch(cache, tmp_path)
    (entry,) = cache.entries()
    assert entry.factors == {"torch": "2.13.0"}
    assert [path.name for path in cache.root.iterdir()] == [KEY]


def test_leftovers_of_killed_servers_are_removed(cache: CompileCache, stored: Path, tmp_path: Path) -> None:
    old, new = cache.root / ".tmp-old", cache.root / ".tmp-new"
    for path in (old, new):
        path.mkdir()
    os.utime(old, (0, 0))
    cache.publish(KEY, make_source(tmp_path / "again"), {})
    assert not old.exists()
    assert new.exists()  # perhaps another server writes it just now
    assert cache.clear()[0] == 1
    assert not new.exists()
    assert cache.entries() == []


def test_a_cache_that_cannot_be_locked_is_used_without(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with CompileCache(tmp_path / "file").lock(KEY, 1.0) as held:
        assert not held


def test_a_second_server_waits_for_the_first(cache: CompileCache) -> None:
    code = (
        "import sys; from pathlib import Path; from server.compilation.store import CompileCache\n"
        f"with CompileCache(Path(sys.argv[1])).lock('{KEY}', 1) as held:\n"
        "    print(held, flush=True); sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", code, str(cache.root)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdin is not None
        assert other.stdout.readline() == "True\n"
        with cache.lock(KEY, 0.0) as held:
            assert not held
        with cache.lock("e" * 32, 0.0) as held:
            assert held  # another key
        threading.Timer(0.1, other.stdin.close).start()
        with cache.lock(KEY, 30.0) as held:
            assert held


def test_entries_are_listed_newest_first(cache: CompileCache, stored: Path, tmp_path: Path) -> None:
    os.utime(stored, (1, 1))
    cache.publish("a" * 32, make_source(tmp_path / "again"), {"dtype": "float32"})
    (cache.root / ("b" * 32)).mkdir()  # holds no factors
    os.utime(cache.root / ("b" * 32), (0, 0))
    entries = cache.entries()
    assert [entry.key[0] for entry in entries] == ["a", "0", "b"]
    assert entries[0].bytes > sum(map(len, FILES.values()))
    assert entries[0].modified <= time.time() + 1
    assert entries[2].factors == {}
