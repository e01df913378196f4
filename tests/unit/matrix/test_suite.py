"""Suites: what is read, what is refused and how, and which cells come of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchctl.matrix.plan import arrival_label, plan_matrix
from benchctl.matrix.suite import load_suite, shipped_suites
from benchctl.matrix.traffic import TrafficFactory
from reports.metrics import METRICS
from server.errors import UserError

MINIMAL = """
models = ["tiny"]
backends = ["TORCH_SDPA"]
[[loads]]
workload = { name = "synthetic", num_requests = 4, input_len = 8, output_len = 2 }
arrivals = [{ name = "burst" }, { name = "poisson", rate = 4.0 }]
"""


def write(folder: Path, text: str) -> str:
    path = folder / "suite.toml"
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize("name", ["quick", "full", "startup", "h200"])
def test_shipped_suites_can_be_built(name: str) -> None:
    # The tiny preset stands in for models that would have to be pulled: it changes nothing that a suite can get wrong.
    assignments = [] if name == "h200" else ['models=["tiny"]']
    plan = plan_matrix(load_suite(name, assignments))
    servers = [server.cells for server in plan.servers]
    TrafficFactory().prepare(max(servers, key=len))
    ids = [cell.id for cell in plan.cells]
    assert len(set(ids)) == len(ids)
    for figure in plan.reference:
        assert figure.cell_id in ids
        assert figure.metric in METRICS


def test_shipped_suites_are_listed_with_a_line_each() -> None:
    suites = shipped_suites()
    assert set(suites) == {"quick", "full", "startup", "h200"}
    assert all(suites.values())


def test_cells_are_the_product_grouped_by_server(tmp_path: Path) -> None:
    plan = plan_matrix(load_suite(write(tmp_path, MINIMAL)))
    assert [server.name for server in plan.servers] == [
        "benchctl/tiny/compile/TORCH_SDPA",
        "benchctl/tiny/eager/TORCH_SDPA",
    ]
    assert [cell.id for cell in plan.servers[1].cells] == [
        "benchctl/tiny/eager/TORCH_SDPA/synthetic/burst",
        "benchctl/tiny/eager/TORCH_SDPA/synthetic/rate-4",
    ]
    assert len({cell.digest for cell in plan.cells}) == 4


def test_set_overrides_reach_into_tables_and_lists(tmp_path: Path) -> None:
    suite = load_suite(
        write(tmp_path, MINIMAL),
        ["seed=7", "server.max_model_len=64", "loads.0.workload.num_requests=9", 'modes=["eager"]', "name=mine"],
    )
    assert (suite.seed, suite.server, suite.modes, suite.name) == (7, {"max_model_len": 64}, ["eager"], "mine")
    assert suite.loads[0].workload["num_requests"] == 9


def test_an_override_changes_the_digest_of_the_cells_it_touches(tmp_path: Path) -> None:
    before = plan_matrix(load_suite(write(tmp_path, MINIMAL)))
    after = plan_matrix(load_suite(write(tmp_path, MINIMAL), ["loads.0.arrivals.1.rate=5"]))
    assert before.cells[0].digest == after.cells[0].digest
    assert before.cells[1].digest != after.cells[1].digest


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("models = [", r"invalid TOML: .*line 1, column 11"),
        ("models = ['tiny']", "`loads` is missing"),
        (MINIMAL.replace("backends", "backend"), "unknown key `backend`; did you mean `backends`"),
        (MINIMAL.replace("arrivals", "arivals"), r"unknown key `loads\[0\].arivals`; did you mean `arrivals`"),
        (MINIMAL.replace("TORCH_SDPA", "TORCH_SPDA"), "attention backend 'TORCH_SPDA' is unknown; did you mean"),
        (MINIMAL.replace('["tiny"]', "[]"), "`models` is empty"),
        (MINIMAL.replace('["tiny"]', '["tiny", "tiny"]'), "`models` names an entry twice"),
        ("engines = ['url']\n" + MINIMAL, 'engine "url" needs `url`'),
        ("starts = ['warm', 'cold']\n" + MINIMAL, "a warm start needs a cold one"),
        ("start_repeats = 0\n" + MINIMAL, "`start_repeats` must be a finite number above 0"),
        ("cell_timeout_s = inf\n" + MINIMAL, "`cell_timeout_s` must be a finite number"),
        ("server.max_model_length = 4\n" + MINIMAL, "server flag 'max_model_length' is unknown; did you mean"),
        (MINIMAL + "models = ['other']\n", r"loads\[0\]: model 'other' is unknown"),
        (MINIMAL.replace("arrivals = [", "arrivals = [] # ["), "`arrivals` is empty"),
        ("seed = 'x'\n" + MINIMAL, "`seed`: Expected `int`, got `str`"),
    ],
)
def test_bad_suites_are_one_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        load_suite(write(tmp_path, text))
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("quik", "did you mean `quick`"),
        ("nothing-like-it", "known: full, h200, quick, startup"),
        ("no/such.toml", "no/such.toml: No such file"),
    ],
)
def test_unknown_suites(name: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_suite(name)


@pytest.mark.parametrize("assignment", ["seed", "=1", "a..b=1", "loads.9.label=x", "models.0.x=1", "loads.x=1"])
def test_bad_assignments(tmp_path: Path, assignment: str) -> None:
    with pytest.raises(UserError, match="--set"):
        load_suite(write(tmp_path, MINIMAL), [assignment])


def test_a_bad_workload_names_its_cell(tmp_path: Path) -> None:
    plan = plan_matrix(load_suite(write(tmp_path, MINIMAL), ["loads.0.workload.input_len=-1"]))
    with pytest.raises(UserError, match=r"cell benchctl/tiny/compile/TORCH_SDPA/synthetic/burst: .*input_len"):
        TrafficFactory().prepare(plan.cells)


def test_arrival_labels() -> None:
    assert arrival_label({"name": "poisson", "rate": 0.5}) == "rate-0.5"
    assert arrival_label({"name": "concurrency", "concurrency": 8}) == "concurrency-8"
    assert arrival_label({"name": "burst"}) == "burst"
    assert arrival_label({"name": "constant", "rate": 2.0, "duration_s": 9.0}) == "constant-rate-2"
    assert arrival_label({"name": "steps", "steps": [{"rate": 1}]}).startswith("steps-steps-")
