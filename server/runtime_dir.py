"""The private directory of one running server: its ipc sockets and `startup.json`."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from server.errors import UserError

_PREFIX = "benchctl-"
# sun_path of a UNIX socket holds 108 bytes with the final NUL; the longest name we put below the directory is
# "/worker-0-in.sock".
_MAX_DIR_BYTES = 107 - len("/worker-000-in.sock")


def _base_dirs() -> list[Path]:
    candidates = [os.environ.get("XDG_RUNTIME_DIR"), os.environ.get("TMPDIR"), "/tmp"]
    return [Path(c) for c in candidates if c and os.path.isdir(c) and os.access(c, os.W_OK | os.X_OK)]


def create_runtime_dir() -> Path:
    """Make `benchctl-<pid>-<random>`, mode 0700, in the first base directory whose paths fit into a socket address.

    Leftovers of servers whose supervisor was killed are removed on the way. Raises UserError when no base directory
    can be used.
    """
    reason = ""
    for base in _base_dirs():
        if len(os.fsencode(base)) + len(f"/{_PREFIX}{os.getpid()}-12345678") > _MAX_DIR_BYTES:
            continue
        remove_stale(base)
        try:
            return Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=base))
        except OSError as error:
            reason = f" ({base}: {error.strerror})"
    raise UserError(f"no directory for ipc sockets{reason}: set TMPDIR to a short, writable path")


def remove_stale(base: Path) -> None:
    """Remove our own runtime directories in `base` whose supervisor is gone."""
    for path in base.glob(f"{_PREFIX}*-*"):
        pid = path.name.removeprefix(_PREFIX).split("-")[0]
        try:
            if not pid.isdigit() or path.is_symlink() or path.stat().st_uid != os.getuid():
                continue
            os.kill(int(pid), 0)
        except ProcessLookupError:
            shutil.rmtree(path, ignore_errors=True)
        except OSError:
            continue
