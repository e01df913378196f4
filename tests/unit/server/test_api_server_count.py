"""`--api-server-count`: a number, or one that fits the machine."""

from __future__ import annotations

from typing import Any, cast

import pytest
from typer.testing import CliRunner

from benchctl.commands.serve import _parse_api_server_count
from server import supervisor
from server.child import LogMessage
from server.config import ApiOptions, ServerConfig
from server.errors import UserError
from server.supervisor import Observer, Supervisor, api_servers_for
from server.timeline import Timeline


@pytest.mark.parametrize(("cores", "count"), [(1, 1), (2, 1), (15, 1), (16, 4), (192, 4)])
def test_automatic(cores: int, count: int) -> None:
    assert api_servers_for(cores) == count


class Messages:
    def __init__(self) -> None:
        self.texts: list[str] = []

    def on_status(self, process: str, message: Any) -> None:
        assert isinstance(message, LogMessage)
        self.texts.append(f"{process} {message.level} {message.text}")


@pytest.mark.parametrize(
    ("cores", "wanted", "count", "told"),
    [(32, None, 4, "4 (auto, 32 usable cores)"), (1, None, 1, "1 (auto, 1 usable core)"), (32, 2, 2, "2")],
)
def test_children_hear_a_number_and_the_report_how_it_came_about(
    monkeypatch: pytest.MonkeyPatch, cores: int, wanted: int | None, count: int, told: str
) -> None:
    monkeypatch.setattr(supervisor, "usable_cores", lambda: cores)
    config = ServerConfig(api=ApiOptions(api_server_count=wanted))
    messages = Messages()
    chosen, report = Supervisor(config, cast(Observer, messages), Timeline("s"))._choose_api_server_count()
    assert (chosen.api.api_server_count, report) == (count, told)
    assert config.api.api_server_count == wanted, "a restart chooses again"
    assert messages.texts == ([] if wanted else [f"supervisor info API processes: {told}"])


@pytest.mark.parametrize(("text", "count"), [("auto", None), ("1", 1), ("64", 64)])
def test_values(text: str, count: int | None) -> None:
    assert _parse_api_server_count(text) == count


@pytest.mark.parametrize("text", ["0", "65", "-1", "many", "", "1.5"])
def test_bad_values_are_one_line(text: str) -> None:
    with pytest.raises(UserError, match=r"--api-server-count .*: give auto, or a number from 1 to 64"):
        _parse_api_server_count(text)


def test_help_names_the_default() -> None:
    import typer

    from benchctl.commands.serve import register

    app = typer.Typer()
    register(app)
    shown = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "200", "TERM": "dumb"}).stdout
    (line,) = [line for line in shown.splitlines() if "--api-server-count" in line]
    assert "auto" in line
