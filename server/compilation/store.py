"""The on-disk cache of compiled graphs: one immutable directory per key.

    <root>/<key>/manifest.json     size and SHA-256 of every other file
    <root>/<key>/factors.json      what the key was made from
    <root>/<key>/plan.json, piece-*.bin, inductor/...

Loading a compiled piece runs code out of its files (torch unpickles them and dlopens shared objects), so an entry is
trusted as far as its owner is, and no further:

- The root, the entry and every directory and file in it must belong to us (the effective user id), must not be
  writable by group or others, and must not be symbolic links (the cache directory above may be reached through some).
  Nothing is read, made, locked, listed or removed through a link. Files are opened relative to directory descriptors
  with O_NOFOLLOW and checked on the open descriptor, so nothing can be swapped between check and use.
- Torch never reads the cache itself. `fetch` copies the checked bytes into a private directory of this server, whose
  digests must match the manifest there; torch loads the copy. A truncated or foreign entry is found before anything
  in it runs, and a cache on a read-only file system serves as well as any other.
- Entries are written to a temporary directory beside and renamed into place, so a reader sees all of one or nothing.
  An exclusive flock per key lets one of several servers that start at once compile while the others wait for it.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from server.errors import UserError

MANIFEST = "manifest.json"
FACTORS = "factors.json"
_TEMPORARY = ".tmp-"
_LOCKS = ".locks"
_ABANDONED_S = 24 * 3600
"""Age at which a temporary directory can only be a leftover of a killed server."""


LINK_REFUSED = (
    "is a symbolic link, and links in the cache are not followed: remove it; to keep the cache elsewhere, set "
    "--compilation-cache-dir or BENCHCTL_CACHE_DIR"
)


class CacheEntryError(Exception):
    """An entry that must not or cannot be used; the message says why."""


class FileRecord(msgspec.Struct, frozen=True):
    size: int
    sha256: str


class Manifest(msgspec.Struct, frozen=True):
    files: dict[str, FileRecord]


class EntryInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What `benchctl cache ls` shows of an entry."""

    key: str
    bytes: int
    modified: float
    """Seconds since the epoch."""
    factors: dict[str, str]
    """Empty when unreadable."""


def _check_ours(status: os.stat_result, name: str) -> None:
    if status.st_uid != os.geteuid():
        raise CacheEntryError(f"{name} belongs to user id {status.st_uid}")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise CacheEntryError(f"{name} is writable by others (mode {stat.S_IMODE(status.st_mode):04o})")


def _unopened(name: str | Path, dir_fd: int | None, error: OSError) -> CacheEntryError:
    """What to say of `name`, which could not be opened: of a link the kernel says other things."""
    try:
        is_link = stat.S_ISLNK(os.lstat(name, dir_fd=dir_fd).st_mode)
    except OSError:
        is_link = False
    return CacheEntryError(f"{name} {LINK_REFUSED}" if is_link else f"{name}: {error.strerror}")


def _open_dir(name: str | Path, dir_fd: int | None = None) -> int:
    try:
        descriptor = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=dir_fd)
    except OSError as error:
        raise _unopened(name, dir_fd, error) from error
    try:
        _check_ours(os.fstat(descriptor), str(name))
    except CacheEntryError:
        os.close(descriptor)
        raise
    return descriptor


def _read_file(directory: int, name: str, limit: int) -> bytes:
    try:
        descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=directory)
    except OSError as error:
        raise _unopened(name, directory, error) from error
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise CacheEntryError(f"{name} is not a regular file")
        _check_ours(status, name)
        if status.st_size > limit:
            raise CacheEntryError(f"{name} has {status.st_size} bytes, more than the {limit} expected")
        return file.read()


def _read_below(root: int, path: str, limit: int) -> bytes:
    """Read `path` (relative, no `..`), checking every directory on the way."""
    *directories, name = path.split("/")
    if any(part in ("", ".", "..") for part in (*directories, name)):
        raise CacheEntryError(f"manifest names the path {path!r}")
    opened: list[int] = []
    try:
        current = root
        for directory in directories:
            current = _open_dir(directory, current)
            opened.append(current)
        return _read_file(current, name, limit)
    finally:
        for descriptor in opened:
            os.close(descriptor)


_MAX_JSON_BYTES = 16 * 1024 * 1024


class CompileCache:
    """Entries below `root` (`<cache dir>/compile`)."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def fetch(self, key: str, destination: Path) -> bool:
        """Copy entry `key` into the existing private directory `destination`; False when there is no such entry.

        Raises CacheEntryError when it is damaged or not to be trusted.
        """
        if not os.path.lexists(self.root / key):
            return False
        root = _open_dir(self.root)
        try:
            entry = _open_dir(key, root)
        finally:
            os.close(root)
        try:
            try:
                manifest = msgspec.json.decode(_read_file(entry, MANIFEST, _MAX_JSON_BYTES), type=Manifest)
            except msgspec.DecodeError as error:
                raise CacheEntryError(f"{MANIFEST}: {error}") from error
            for path, record in manifest.files.items():
                data = _read_below(entry, path, record.size)
                if len(data) != record.size or hashlib.sha256(data).hexdigest() != record.sha256:
                    raise CacheEntryError(f"{path} is not what was stored (truncated or changed)")
                target = destination / path
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(data)
            return True
        finally:
            os.close(entry)

    def publish(self, key: str, source: Path, factors: dict[str, str]) -> None:
        """Store the files below `source` as entry `key`, replacing an entry of that name.

        Raises OSError, or CacheEntryError when the root is not one whose entries would be trusted.
        """
        os.close(self._make_root())
        self._remove_leftovers()
        temporary = Path(tempfile.mkdtemp(prefix=_TEMPORARY, dir=self.root))
        try:
            records: dict[str, FileRecord] = {}
            for path in sorted(p for p in source.rglob("*") if p.is_file() and not _is_scratch(p.relative_to(source))):
                name = path.relative_to(source).as_posix()
                records[name] = _write_private(temporary / name, path.read_bytes())
            records[FACTORS] = _write_private(
                temporary / FACTORS, msgspec.json.format(msgspec.json.encode(factors, order="sorted"))
            )
            _write_private(temporary / MANIFEST, msgspec.json.encode(Manifest(records)))
            self._swap_in(temporary, self.root / key)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)

    def _make_root(self) -> int:
        """Descriptor of the root, made if it is missing. Raises OSError, CacheEntryError."""
        with contextlib.suppress(FileExistsError):  # also of a link to nothing, or a file: opening says so
            self.root.mkdir(parents=True, mode=0o700)
        return _open_dir(self.root)

    def _swap_in(self, temporary: Path, entry: Path) -> None:
        """Rename `temporary` to `entry`; a directory can only replace an empty one, so an old entry moves aside."""
        if os.path.lexists(entry):
            aside = self.root / f"{_TEMPORARY}old-{entry.name}-{os.getpid()}"
            os.rename(entry, aside)
            if aside.is_symlink() or not aside.is_dir():
                aside.unlink()
            else:
                shutil.rmtree(aside, ignore_errors=True)
        os.rename(temporary, entry)

    def _remove_leftovers(self) -> None:
        for path in self.root.glob(f"{_TEMPORARY}*"):
            with contextlib.suppress(OSError):
                if time.time() - path.lstat().st_mtime > _ABANDONED_S:
                    shutil.rmtree(path, ignore_errors=True)

    @contextlib.contextmanager
    def lock(self, key: str, timeout_s: float) -> Iterator[bool]:
        """Hold the exclusive lock of `key`. Yields False without it: another server kept it for `timeout_s`, or the
        cache cannot be written to or trusted (then nothing will be stored either)."""
        descriptor = self._open_lock(key)
        if descriptor is None:
            yield False
            return
        try:
            yield _acquire(descriptor, timeout_s)
        finally:
            os.close(descriptor)

    def _open_lock(self, key: str) -> int | None:
        with contextlib.ExitStack() as opened:
            try:
                root = self._make_root()
                opened.callback(os.close, root)
                with contextlib.suppress(FileExistsError):
                    os.mkdir(_LOCKS, 0o700, dir_fd=root)
                locks = _open_dir(_LOCKS, root)
                opened.callback(os.close, locks)
                return os.open(key, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=locks)
            except (OSError, CacheEntryError):
                return None

    def entries(self) -> list[EntryInfo]:
        """All entries, newest first. Reads nothing but sizes and `factors.json`.

        Raises UserError when the root is a link, or no directory.
        """
        infos = []
        if self.root.is_symlink():
            raise UserError(f"{self.root} {LINK_REFUSED}")
        try:
            paths = [p for p in self.root.iterdir() if not p.name.startswith(".")]
            directories = [p for p in paths if p.is_dir() and not p.is_symlink()]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise UserError(f"{self.root}: cannot be listed ({error.strerror}); remove it, or mend its mode") from None
        for directory in directories:
            try:
                size = sum(p.lstat().st_size for p in directory.rglob("*") if p.is_file())
                modified = directory.lstat().st_mtime
            except FileNotFoundError:  # removed meanwhile
                continue
            infos.append(EntryInfo(key=directory.name, bytes=size, modified=modified, factors=_read_factors(directory)))
        return sorted(infos, key=lambda info: info.modified, reverse=True)

    def clear(self) -> tuple[int, int]:
        """Remove every entry and leftover; returns how many entries and how many bytes. A running server has its own
        copy and is not disturbed. Raises OSError, and UserError as `entries` does."""
        infos = self.entries()
        for info in infos:
            shutil.rmtree(self.root / info.key)
        for path in self.root.glob(f"{_TEMPORARY}*"):
            shutil.rmtree(path, ignore_errors=True)
        return len(infos), sum(info.bytes for info in infos)


def _read_factors(entry: Path) -> dict[str, str]:
    try:
        directory = _open_dir(entry)
        try:
            return msgspec.json.decode(_read_file(directory, FACTORS, _MAX_JSON_BYTES), type=dict[str, str])
        finally:
            os.close(directory)
    except (OSError, CacheEntryError, msgspec.DecodeError):
        return {}


def _is_scratch(path: Path) -> bool:
    """Lock files and bytecode that torch leaves beside its artifacts."""
    return "locks" in path.parts or "__pycache__" in path.parts


def _make_private(directory: Path) -> None:
    """Make `directory` and what is missing above it for us alone; `parents=True` would leave those to the umask."""
    if not directory.is_dir():
        _make_private(directory.parent)
        directory.mkdir(mode=0o700)


def _write_private(path: Path, data: bytes) -> FileRecord:
    _make_private(path.parent)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with open(descriptor, "wb") as file:
        file.write(data)
        file.flush()
        # A crash of the machine must not leave a renamed entry with empty files; the digests would catch it, but the
        # next start would pay for a compilation.
        os.fsync(descriptor)
    return FileRecord(len(data), hashlib.sha256(data).hexdigest())


def _acquire(descriptor: int, timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.05)
