"""What servers and files say cannot steer a terminal."""

from __future__ import annotations

import http.server
import io
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from reports.console import print_report
from reports.directory import load_results
from reports.results import write_result
from server.errors import UserError, printable
from tests.unit.reports.samples import matrix

EVIL = "evil \x1b[2J\x1b]0;title\x07\x9b31m\x7f\u202e text"
CONTROLS = ("\x1b", "\x07", "\x9b", "\x7f")


class _Evil(http.server.BaseHTTPRequestHandler):
    def log_message(self, *arguments: Any) -> None:
        pass

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        body = json.dumps({"error": {"message": EVIL}}).encode()
        self.send_response(500)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        body = json.dumps({"data": [{"id": self.server.model}]}).encode()  # type: ignore[attr-defined]
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def evil() -> Iterator[http.server.ThreadingHTTPServer]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Evil) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(("model", "code"), [("m", 1), (EVIL, 2)])
def test_a_measured_server_that_speaks_in_escapes(tmp_path: Path, evil: Any, model: str, code: int) -> None:
    evil.model = model
    url = f"http://127.0.0.1:{evil.server_address[1]}"
    command = [sys.executable, "-m", "benchctl", "run", "--url", url, "--output", str(tmp_path / "out")]
    command += ["-w", "synthetic:input_len=4,output_len=4", "-n", "2", "--concurrency", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == code, done.stderr
    files = [path.read_text() for path in (tmp_path / "out").rglob("*") if path.suffix in (".md", ".csv", ".json")]
    for text in (done.stdout, done.stderr, *files):
        assert not any(control in text for control in CONTROLS)
    assert r"\x1b[2J" in done.stdout + done.stderr


def test_a_result_file_that_speaks_in_escapes(tmp_path: Path) -> None:
    result = matrix().results[0]
    result.reason = result.cell_id = rf"C:\u001b {EVIL}"
    result.status = "failed"
    write_result(result, tmp_path / "result.json")
    loaded = load_results(tmp_path / "result.json")
    assert (loaded.results[0].reason or "").startswith(rf"C:\u001b evil {chr(0xFFFD)}[2J"), "plain backslashes stay"
    console = Console(file=io.StringIO(), width=200)
    print_report(loaded, console)
    output = console.file.getvalue()  # type: ignore[attr-defined]
    assert "evil" in output
    assert not any(control in output for control in CONTROLS)


@pytest.mark.parametrize("text", ["a\nb", "\x1b[31m", "\x07", "\ud800", "\u202e", "\r", "\x9b"])
def test_errors_are_one_line_without_controls(text: str) -> None:
    shown = str(UserError(f"file {text}: bad"))
    assert shown.isprintable()
    assert shown.encode()
    assert printable("plain é 漢字") == "plain é 漢字"
