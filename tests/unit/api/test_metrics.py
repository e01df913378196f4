from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from server.api.metrics import Histogram, Metrics
from server.ipc.engine_to_api import EngineStats

VLLM_NAMES = {
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
    "prompt_tokens",
    "generation_tokens",
    "num_preemptions",
    "prefix_cache_queries",
    "prefix_cache_hits",
    "request_success",
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "e2e_request_latency_seconds",
    "request_queue_time_seconds",
    "request_prefill_time_seconds",
    "request_decode_time_seconds",
    "request_prompt_tokens",
    "request_generation_tokens",
    "iteration_tokens_total",
}


def samples(metrics: Metrics) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    text = metrics.exposition()[0].decode()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_vllms_names_are_all_there() -> None:
    text = Metrics("m").exposition()[0].decode()
    names = {family.name for family in text_string_to_metric_families(text)}
    assert {f"benchctl:{name}" for name in VLLM_NAMES} <= names


def test_engine_stats_are_shown() -> None:
    metrics = Metrics("m")
    metrics.stats = EngineStats(num_running=3, kv_cache_usage=0.25, num_preemptions=2, step_seconds={"forward": 1.5})
    found = samples(metrics)
    model = ("model_name", "m")
    assert found["benchctl:num_requests_running", (model,)] == 3
    assert found["benchctl:kv_cache_usage_perc", (model,)] == 0.25
    assert found["benchctl:num_preemptions_total", (model,)] == 2
    assert found["benchctl:step_seconds_total", (model, ("phase", "forward"))] == 1.5


def test_histogram_buckets_are_cumulative_and_bounds_inclusive() -> None:
    histogram = Histogram("h", "help", (1.0, 2.0))
    histogram.observe(1.0)
    histogram.observe(1.5, 3)
    histogram.observe(9.0)
    values = {(sample.name, sample.labels.get("le")): sample.value for sample in histogram.family("m").samples}
    assert values == {
        ("h_bucket", "1.0"): 1,
        ("h_bucket", "2.0"): 4,
        ("h_bucket", "+Inf"): 5,
        ("h_count", None): 5,
        ("h_sum", None): 14.5,
    }


def test_other_processes_are_added() -> None:
    ours, theirs = Metrics("m"), Metrics("m")
    ours.stats = EngineStats(num_running=3)
    for metrics, tokens in ((ours, 5), (theirs, 7)):
        metrics.generation_tokens = tokens
        metrics.finished["stop"] = 1
        metrics.ttft.observe(0.03, tokens)
    text = ours.exposition([theirs.snapshot()])[0].decode()
    assert 'benchctl:generation_tokens_total{model_name="m"} 12.0' in text
    assert 'benchctl:request_success_total{finished_reason="stop",model_name="m"} 2.0' in text
    assert 'benchctl:time_to_first_token_seconds_count{model_name="m"} 12.0' in text
    assert 'benchctl:num_requests_running{model_name="m"} 3.0' in text, "the engine's figures are not summed"
    assert ours.generation_tokens == 5, "a scrape changes nothing"
