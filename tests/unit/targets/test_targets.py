"""Launching, watching and stopping servers; the servers are real processes with a stand-in inside."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from benchctl import targets
from benchctl.targets import TargetFailed, TargetTimeout, UnsupportedTarget, bundled
from benchctl.targets.base import flag_arguments, server_info, start_kind, startup_report
from benchctl.targets.process import ServerProcess, tail_of
from benchctl.targets.sglang import SglangTarget
from benchctl.targets.vllm import VllmTarget
from reports.schema import CellConfig
from server.errors import UserError

FAKE = [sys.executable, str(Path(__file__).with_name("fake_server.py"))]


def config(**changes: object) -> CellConfig:
    return CellConfig(**{"model": "tiny", "workload": {}, "arrival": {}, **changes})  # type: ignore[arg-type]


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def logged_child(log: Path) -> int:
    wait_for(lambda: log.exists() and "child" in log.read_text())
    return int(log.read_text().split()[1])


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Make the bundled target run the stand-in with the given flags."""

    def use(*flags: str) -> None:
        monkeypatch.setattr(
            bundled,
            "serve_command",
            lambda config, ready_file, cold_caches: [*FAKE, "--ready-file", str(ready_file), *flags],
        )

    return use


def test_launch_reports_the_start_and_stops_cleanly(fake: Callable[..., None], tmp_path: Path) -> None:
    fake()
    with targets.launch(config(mode="eager"), log_dir=tmp_path) as server:
        assert server.pid is not None
        assert server.exit_code() is None
        report = server.startup
        assert report is not None
        assert report.kind == "unknown"
        assert report.to_healthy_s is not None
        assert report.to_first_token_s is not None
        assert 0 < report.to_healthy_s < report.to_first_token_s
        assert [phase.name for phase in report.phases] == ["attention-backend", "kv-cache", "weights", "first token"]
        assert report.unaccounted_s == pytest.approx(0.005, abs=0.0001)
        assert server.info is not None
        assert server.info.engine_version == "9.9"
        assert (server.info.attention_backend, server.info.num_blocks) == ("TORCH_SDPA", 7)
        assert server.info.mode == "eager"
        pid = server.pid
    assert not alive(pid)
    assert server.exit_code() == -signal.SIGTERM
    server.stop()  # a second stop does nothing


def test_exit_with_a_user_error_is_unsupported(fake: Callable[..., None], tmp_path: Path) -> None:
    fake("--exit", "2", "--say", "benchctl: --attention-backend FLASH_ATTN: needs a CUDA device")
    with pytest.raises(UnsupportedTarget) as caught:
        targets.launch(config(), log_dir=tmp_path)
    assert caught.value.reason == "--attention-backend FLASH_ATTN: needs a CUDA device"
    assert caught.value.status == "unsupported"


@pytest.mark.parametrize(("code", "said"), [("1", "Segmentation what"), ("2", "Usage: serve [OPTIONS]")])
def test_any_other_exit_is_a_failure_with_the_log(
    fake: Callable[..., None], tmp_path: Path, code: str, said: str
) -> None:
    fake("--exit", code, "--say", said)
    with pytest.raises(TargetFailed, match=f"exited with status {code}") as caught:
        targets.launch(config(), log_dir=tmp_path)
    assert caught.value.log_tail == [said]


def test_a_server_that_never_gets_ready_times_out_and_is_gone(fake: Callable[..., None], tmp_path: Path) -> None:
    fake("--never-ready", "--child")
    with pytest.raises(TargetTimeout, match="not healthy after 2 s"):
        targets.launch(config(), log_dir=tmp_path, timeout_s=2.0, log_name="it.log")
    child = logged_child(tmp_path / "it.log")
    wait_for(lambda: not alive(child))


def test_stop_kills_a_stubborn_server_and_its_children(tmp_path: Path) -> None:
    process = ServerProcess([*FAKE, "--ignore-term", "--child"], log_path=tmp_path / "log")
    child = logged_child(tmp_path / "log")
    assert process.stop(timeout_s=0.2) == -signal.SIGKILL
    assert not alive(process.pid)
    wait_for(lambda: not alive(child))


@pytest.mark.parametrize("ending", ["os._exit(1)", "raise RuntimeError('lost')", "os.kill(os.getpid(), 9)"])
def test_no_server_outlives_us(tmp_path: Path, ending: str) -> None:
    script = f"""
        import os
        from pathlib import Path
        from benchctl.targets.process import ServerProcess
        process = ServerProcess({FAKE!r}, log_path=Path({str(tmp_path / "log")!r}))
        print(process.pid, flush=True)
        {ending}
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=False)
    pid = int(done.stdout)
    wait_for(lambda: not alive(pid))


def test_url_target_names_the_only_model_and_explains_silence(tmp_path: Path) -> None:
    process = ServerProcess([*FAKE, "--ready-file", str(tmp_path / "ready")], log_path=tmp_path / "log")
    try:
        wait_for((tmp_path / "ready").exists)
        url = json.loads((tmp_path / "ready").read_text())["url"]
        server = targets.launch(config(engine="url", model="", url=f"{url}/v1"), log_dir=tmp_path)
        assert (server.url, server.model, server.pid, server.startup) == (url, "fake", None, None)
        server.stop()
        assert process.exit_code() is None
    finally:
        process.stop()
    with pytest.raises(TargetFailed, match="does not answer"):
        targets.launch(config(engine="url", url=url), log_dir=tmp_path)
    with pytest.raises(UserError, match="needs a url"):
        targets.launch(config(engine="url"), log_dir=tmp_path)


def test_serve_command_has_the_flags_of_the_cell(tmp_path: Path) -> None:
    cell = config(mode="eager", attention_backend="TORCH_SDPA", server_args={"max_model_len": 512, "dtype": None})
    argv = bundled.serve_command(cell, ready_file=tmp_path / "r", cold_caches=tmp_path / "c")
    text = " ".join(argv[3:])
    assert text.startswith("serve tiny --port 0")
    assert "--mode eager --attention-backend TORCH_SDPA" in text
    assert f"--compilation-cache-dir {tmp_path / 'c' / 'benchctl'} --max-model-len 512" in text
    assert "dtype" not in text


def test_flag_arguments() -> None:
    arguments = {"a_b": 1, "on": True, "off": False, "sizes": [1, 2], "none": None}
    assert flag_arguments(arguments) == ["--a-b", "1", "--on", "--no-off", "--sizes", "1,2"]


def test_rivals_get_equal_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchctl.targets.vllm._executable", lambda: "vllm")
    settings = {"max_model_len": 512, "max_num_seqs": 8, "enable_prefix_caching": False}
    cell = config(mode="eager", attention_backend="TRITON_ATTN", server_args=settings)
    vllm = " ".join(VllmTarget().command(cell, model="/m", host="h", port=1))
    assert "--enforce-eager --attention-backend TRITON_ATTN --max-model-len 512 --max-num-seqs 8" in vllm
    assert "--no-enable-prefix-caching --served-model-name tiny" in vllm
    sglang = " ".join(SglangTarget().command(cell, model="/m", host="h", port=1))
    assert "--disable-radix-cache --disable-cuda-graph --attention-backend triton --context-length 512" in sglang
    with pytest.raises(UnsupportedTarget, match="async_scheduling"):
        SglangTarget().command(config(server_args={"async_scheduling": False}), model="/m", host="h", port=1)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_an_engine_that_is_not_installed_is_unsupported(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchctl.targets.vllm._executable", lambda: None)
    with pytest.raises(UnsupportedTarget, match="not installed"):
        targets.launch(config(engine=engine), log_dir=tmp_path)


def rival(folder: Path, engine: str, monkeypatch: pytest.MonkeyPatch, *flags: str) -> None:
    """Install a stand-in for `vllm` or `sglang` that takes their command lines and prints them."""
    body = f"""
import os, sys
print(" ".join(sys.argv[1:]), flush=True)
port = sys.argv[sys.argv.index("--port") + 1]
os.execv(sys.executable, {[*FAKE, *flags, "--port"]!r} + [port])
"""
    if engine == "vllm":
        script = folder / "vllm"
        script.write_text(f"#!{sys.executable}\n{body}")
        script.chmod(0o755)
        monkeypatch.setattr("benchctl.targets.vllm._executable", lambda: str(script))
    else:
        (folder / "sglang").mkdir()
        (folder / "sglang" / "__init__.py").touch()
        (folder / "sglang" / "launch_server.py").write_text(body)
        monkeypatch.setenv("PYTHONPATH", str(folder))
        monkeypatch.syspath_prepend(str(folder))


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_rival_is_launched_timed_and_stopped(engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rival(tmp_path, engine, monkeypatch)
    model = tmp_path / "model"
    model.mkdir()
    cell = config(engine=engine, model=str(model), mode="eager", server_args={"max_model_len": 64})
    with targets.launch(cell, log_dir=tmp_path, cold_caches=tmp_path / "caches", log_name="log") as server:
        assert server.startup is not None
        assert server.startup.kind == "cold"
        assert [phase.name for phase in server.startup.phases] == ["first token"]
        assert server.startup.unaccounted_s is None
        assert server.info is not None
        assert (server.info.engine_version, server.info.mode) == ("9.9", "eager")
        assert server.model == str(model)
        pid = server.pid
    assert pid is not None
    assert not alive(pid)
    said = (tmp_path / "log").read_text().split("\n")[0]
    assert ("--enforce-eager" if engine == "vllm" else "--disable-cuda-graph") in said
    assert f"{model}" in said


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_rival_that_exits_is_a_failure_with_its_log(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rival(tmp_path, engine, monkeypatch, "--exit", "3", "--say", "no such architecture")
    (tmp_path / "model").mkdir()
    with pytest.raises(TargetFailed, match=f"{engine} exited with status 3") as caught:
        targets.launch(config(engine=engine, model=str(tmp_path / "model")), log_dir=tmp_path)
    assert caught.value.log_tail[-1] == "no such architecture"


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_preset_is_nothing_that_a_rival_could_load(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rival(tmp_path, engine, monkeypatch)
    with pytest.raises(UnsupportedTarget, match="preset 'tiny' is built in"):
        targets.launch(config(engine=engine), log_dir=tmp_path)


def test_what_the_system_refuses_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(TargetFailed, match=r"could not be started: .*file/logs"):
        targets.launch(config(), log_dir=tmp_path / "file" / "logs")
    monkeypatch.setattr(bundled, "serve_command", lambda *_, **__: ["/no/such/python"])
    with pytest.raises(TargetFailed, match="could not be started: /no/such/python: No such file"):
        targets.launch(config(), log_dir=tmp_path)


def test_caches_that_the_user_chose_do_not_warm_a_cold_start(
    fake: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR")
    for name in names:
        monkeypatch.setenv(name, "/the/users/own")
    fake()
    for caches in (tmp_path / "caches", None):
        with targets.launch(config(), log_dir=tmp_path, cold_caches=caches) as server:
            lines = Path(f"/proc/{server.pid}/environ").read_text().split("\0")
            environment = dict(line.split("=", 1) for line in lines if line)
        expected = "/the/users/own" if caches is None else str(caches)
        assert all(environment[name].startswith(expected) for name in names)


def test_start_kind_follows_the_cache_directory(tmp_path: Path) -> None:
    assert start_kind(None) == "unknown"
    assert start_kind(tmp_path / "missing") == start_kind(tmp_path) == "cold"
    (tmp_path / "entry").touch()
    assert start_kind(tmp_path) == "warm"


def test_an_engine_without_a_timeline_has_unknown_phases() -> None:
    report = startup_report(kind="cold", exec_ns=0, healthy_ns=2_000_000_000, token_ns=2_500_000_000, server={})
    assert report.to_healthy_s == 2.0
    assert report.unaccounted_s is None
    assert server_info({"version": "1"}, {"mode": "eager"}).mode == "eager"


def test_tail_of_survives_binary_and_missing_logs(tmp_path: Path) -> None:
    assert tail_of(tmp_path / "missing") == []
    (tmp_path / "log").write_bytes(b"\xff\n" * 100_000 + b"10%\r90%\rlast")
    assert tail_of(tmp_path / "log", 2) == ["90%", "last"]
    assert os.path.getsize(tmp_path / "log") > 65536
