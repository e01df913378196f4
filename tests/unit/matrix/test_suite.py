"""Suites: what is read, what is refused and how, and which cells come of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchctl.matrix.plan import arrival_label, plan_matrix
from benchctl.matrix.suite import load_suite, shipped_suites
from benchctl.matrix.traffic import TrafficFactory
from reports.metrics import METRICS
from server.errors import UserError
from tests.unit.workloads.conftest import byte_level_bpe
from workloads import build_workload
from workloads.export import export_workload

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


@pytest.mark.parametrize("name", ["quick", "full", "startup", "gate", "h200"])
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
    assert set(suites) == {"quick", "full", "startup", "gate", "h200"}
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


def test_every_traffic_has_its_own_seed_and_every_server_the_same_traffic(tmp_path: Path) -> None:
    text = MINIMAL.replace('["TORCH_SDPA"]', '["TORCH_SDPA", "TRITON_ATTN"]')
    plan = plan_matrix(load_suite(write(tmp_path, text)))
    seeds = [[cell.config.seed for cell in server.cells] for server in plan.servers]
    assert len({tuple(row) for row in seeds}) == 1
    assert len(set(seeds[0])) == 2, "the second cell must not find the first one's prompts in the prefix cache"
    traffic = TrafficFactory().prepare(plan.cells)
    first, second = (traffic[cell.id].workload.requests[0] for cell in plan.servers[0].cells)
    assert first.prompt_token_ids != second.prompt_token_ids
    assert first.prompt_tokens == second.prompt_tokens
    other = plan_matrix(load_suite(write(tmp_path, text), ["seed=1"]))
    assert other.cells[0].config.seed != plan.cells[0].config.seed


def test_prompts_of_a_file_are_said_to_be_cached_the_second_time(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "one two three", "max_tokens": 2}\n')
    custom = f'workload = {{ name = "custom", path = "{prompts}" }}'
    text = MINIMAL.replace('workload = { name = "synthetic", num_requests = 4, input_len = 8, output_len = 2 }', custom)
    plan = plan_matrix(load_suite(write(tmp_path, text)))
    traffic = TrafficFactory().prepare(plan.cells)
    noted = [any("prefix cache" in note for note in traffic[cell.id].info.notes) for cell in plan.cells]
    assert noted == [False, True, False, True]


def test_an_exported_workload_is_sent_as_it_is_to_a_model_whose_vocabulary_is_known(tmp_path: Path) -> None:
    made = build_workload({"name": "synthetic", "num_requests": 3, "input_len": 4}, seed=5, tokenizer=None)
    export = tmp_path / "export.jsonl"
    with export.open("wb") as file:
        export_workload(made, file)
    replayed = f'workload = {{ name = "trace", path = "{export}" }}'
    text = MINIMAL.replace(
        'workload = { name = "synthetic", num_requests = 4, input_len = 8, output_len = 2 }', replayed
    )
    plan = plan_matrix(load_suite(write(tmp_path, text)))
    traffic = TrafficFactory().prepare(plan.cells)
    infos = [traffic[cell.id].info for cell in plan.cells]
    assert {info.digest for info in infos} == {made.digest}
    noted = [any("prefix cache" in note for note in info.notes) for info in infos]
    assert noted == [False, True, False, True]


@pytest.mark.parametrize("workload", ["synthetic", "sharegpt-like"])
def test_token_ids_stay_within_the_models_vocabulary(tmp_path: Path, workload: str) -> None:
    specification = f'name = "{workload}", num_requests = 4, prompt_format = "ids"'
    text = MINIMAL.replace('name = "synthetic", num_requests = 4, input_len = 8, output_len = 2', specification)
    for model, least, most in (("tiny", 0, 512), ("qwen3-0.6b", 32_000, 151_936)):
        plan = plan_matrix(load_suite(write(tmp_path, text), [f'models=["{model}"]']))
        requests = TrafficFactory().prepare(plan.cells)[plan.cells[0].id].workload.requests
        largest = max(max(request.prompt_token_ids or []) for request in requests)
        assert least <= largest < most
    plan = plan_matrix(load_suite(write(tmp_path, text), ["loads.0.workload.vocab_size=100"]))
    requests = TrafficFactory().prepare(plan.cells)[plan.cells[0].id].workload.requests
    assert max(max(request.prompt_token_ids or []) for request in requests) < 100


def test_what_an_endpoint_calls_its_model_is_not_looked_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.models.registry.hub_folder", lambda *_, **__: pytest.fail("a download was started"))
    text = 'engines = ["url"]\nurl = "http://127.0.0.1:9"\n' + MINIMAL.replace('"tiny"', '"some/model"')
    plan = plan_matrix(load_suite(write(tmp_path, text)))
    assert [cell.id for cell in plan.cells] == ["url/some/model/synthetic/burst", "url/some/model/synthetic/rate-4"]
    assert TrafficFactory().prepare(plan.cells)


def test_client_options_are_part_of_the_experiment(tmp_path: Path) -> None:
    plain = plan_matrix(load_suite(write(tmp_path, MINIMAL)))
    client = plan_matrix(load_suite(write(tmp_path, MINIMAL), ["client.warmup=2s", "client.workers=3"]))
    assert client.cells[0].config.client == {"warmup": "2s", "workers": 3}
    assert client.cells[0].digest != plain.cells[0].digest


def test_a_duration_makes_enough_requests(tmp_path: Path) -> None:
    text = MINIMAL.replace("num_requests = 4, ", "").replace("rate = 4.0", "rate = 40, duration_s = 10")
    plan = plan_matrix(load_suite(write(tmp_path, text), ['modes=["eager"]']))
    traffic = TrafficFactory().prepare(plan.cells)[plan.cells[1].id]
    assert traffic.schedule.times_s is not None
    assert 300 < len(traffic.schedule.times_s) < 500
    assert traffic.info.requests > len(traffic.schedule.times_s)


def test_a_list_of_rates_is_a_sweep(tmp_path: Path) -> None:
    text = MINIMAL.replace("rate = 4.0", "rate = [1, 2.5, 4.0], max_concurrency = 9")
    suite = load_suite(write(tmp_path, text))
    assert suite.loads[0].arrivals[1:] == [
        {"name": "poisson", "rate": rate, "max_concurrency": 9} for rate in (1, 2.5, 4.0)
    ]
    cells = plan_matrix(suite).servers[0].cells
    assert [cell.id.rpartition("/")[2] for cell in cells[1:]] == [
        f"rate-{rate}-max_concurrency-9" for rate in (1, 2.5, 4)
    ]


def test_parts_of_a_suite(tmp_path: Path) -> None:
    text = MINIMAL + 'models = ["tiny"]\n'
    plan = plan_matrix(load_suite(write(tmp_path, text), ['only=["*/eager/*/burst", "nothing"]']))
    assert [cell.id for cell in plan.cells] == ["benchctl/tiny/eager/TORCH_SDPA/synthetic/burst"]
    with pytest.raises(UserError, match="matches no cell"):
        plan_matrix(load_suite(write(tmp_path, text), ['only=["nothing"]']))
    with pytest.raises(UserError, match="no load is meant for any of the models"):
        plan_matrix(load_suite(write(tmp_path, text), ['models=["qwen3-0.6b"]']))


def test_the_reference_table_follows_the_selected_cells() -> None:
    whole = plan_matrix(load_suite("h200"))
    part = plan_matrix(load_suite("h200", ['models=["qwen3-0.6b"]', 'modes=["compile"]']))
    assert {figure.cell_id.split("/")[1] for figure in whole.reference} == {"llama-3.1-8b", "qwen3-0.6b"}
    assert {figure.cell_id.split("/")[1] for figure in part.reference} == {"qwen3-0.6b"}
    assert len(part.reference) == 3


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
        ("client.worker = 1\n" + MINIMAL, "client option 'worker' is unknown; did you mean `workers`"),
        ("client.workers = 0\n" + MINIMAL, "client: --workers 0: must be from 1"),
        ("client.warmup = 'x'\n" + MINIMAL, "client: --warmup 'x': expected a time"),
        ("client.retries = 'x'\n" + MINIMAL, r"client: Expected `int`, got `str` - at `\$.retries`"),
        (MINIMAL + "slos = ['ttft:soon']\n", "SLO 'ttft:soon': "),
        ("server.max_num_seqs = 'x'\n" + MINIMAL, "server.max_num_seqs = 'x': Expected `int`, got `str`"),
        ("server.max_num_seqs = 0\n" + MINIMAL, "server.max_num_seqs = 0: must be at least 1"),
        ("server.gpu_memory_utilization = 1.5\n" + MINIMAL, "must be at least 0.05 and at most 1"),
        ("server.dtype = 'float8'\n" + MINIMAL, "server.dtype = 'float8': Invalid enum value"),
        (MINIMAL.replace("rate = 4.0", "rate = []"), r"loads\[0\]: arrival `rate` = \[\]: a sweep needs"),
        (MINIMAL.replace("rate = 4.0", "rate = [1, 1]"), "a sweep needs different values"),
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
        ("nothing-like-it", "known: full, gate, h200, quick, startup"),
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


def test_a_suites_tokenizer_counts_what_an_endpoints_model_cannot(tmp_path: Path) -> None:
    byte_level_bpe().save(str(tmp_path / "tokenizer.json"))
    endpoint = ['engines=["url"]', "url=http://127.0.0.1:9", 'models=["theirs"]', 'only=["*/burst"]']
    text = [*endpoint, "loads.0.workload.prompt_format=text"]
    cells = plan_matrix(load_suite(write(tmp_path, MINIMAL), text)).cells
    with pytest.raises(UserError, match="give --tokenizer"):
        TrafficFactory().prepare(cells)
    (cell,) = plan_matrix(load_suite(write(tmp_path, MINIMAL), [*text, f"client.tokenizer={tmp_path}"])).cells
    TrafficFactory().check([cell])
    traffic = TrafficFactory().prepare([cell])[cell.id]
    assert traffic.workload.requests[0].prompt is not None
    assert traffic.info.prompt_tokens_total == 4 * 8
