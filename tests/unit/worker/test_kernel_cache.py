"""Where kernels are cached: below a directory that nobody else could have put anything in, links included."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from server.compilation.kernels import clear_kernel_caches, kernel_caches
from server.worker.kernel_cache import use_kernel_cache

VARIABLES = ("TRITON_CACHE_DIR", "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED")


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        # Set first, so that what the test sets is undone as well.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def chosen() -> list[Path]:
    return [Path(os.environ[name]) for name in VARIABLES[:2]]


def test_directories_are_made_for_us_alone(tmp_path: Path) -> None:
    before = os.umask(0o002)
    try:
        use_kernel_cache(tmp_path / "cache" / "kernels", tmp_path / "private")
    finally:
        os.umask(before)
    root = tmp_path / "cache" / "kernels"
    assert chosen() == [root / "triton", root / "flash_attn_cute"]
    assert {path.stat().st_mode & 0o777 for path in (root, *chosen())} == {0o700}


@pytest.mark.parametrize("link", ["kernels", "kernels/triton"])
def test_links_are_not_followed(tmp_path: Path, link: str, caplog: pytest.LogCaptureFixture) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    (tmp_path / link).parent.mkdir(mode=0o700, exist_ok=True)
    (tmp_path / link).symlink_to(elsewhere)
    with caplog.at_level(logging.WARNING):
        use_kernel_cache(tmp_path / "kernels", tmp_path / "private")
    assert chosen()[0] == tmp_path / "private" / "triton"
    assert list(elsewhere.iterdir()) == []
    assert f"{tmp_path / link}, every start compiles them: it is a symbolic link" in caplog.messages[0]
    assert "--compilation-cache-dir" in caplog.messages[0]


@pytest.mark.parametrize("place", ["kernels", "kernels/triton"])
@pytest.mark.parametrize("mode", [0o775, 0o777, 0o1777])
def test_what_others_can_write_to_is_not_used(
    tmp_path: Path, place: str, mode: int, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "kernels" / "triton").mkdir(parents=True)
    (tmp_path / place).chmod(mode)
    use_kernel_cache(tmp_path / "kernels", tmp_path / "private")
    assert chosen()[0] == tmp_path / "private" / "triton"
    assert f"chmod go-w {tmp_path / place}" in caplog.messages[0]


def test_clearing_removes_nothing_through_a_link(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    (precious / "folder").mkdir(parents=True)
    (precious / "folder" / "file").write_bytes(b"x")
    cache = tmp_path / "cache"
    cache.mkdir()
    (cache / "kernels").symlink_to(precious)
    assert kernel_caches(str(cache)) == []
    assert clear_kernel_caches(str(cache)) == (0, 0)
    assert (precious / "folder" / "file").exists()
