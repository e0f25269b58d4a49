"""/metrics beside vLLM's: the names, labels and buckets, and what the numbers are."""

import json
import re
from concurrent.futures import ThreadPoolExecutor

import pytest
from msgspec.structs import replace
from prometheus_client import Histogram
from prometheus_client.parser import text_string_to_metric_families

from cairn.engine.contract import EngineConfig, EngineStats, GenerateOutput, ImageStats, PoolStats, SpecDecodeStats
from cairn.server.load_report import format_load_report
from cairn.server.metrics import _TOKEN_BUCKETS, Metrics, RequestMeter
from doubles.echo_core import BYTES_PER_TOKEN, build_echo_core
from doubles.engine_requests import generate_request
from source_scan import ROOT

VLLM = json.loads((ROOT / "tests" / "data" / "vllm_metrics.json").read_text())
"""Names in vLLM's metrics and in its own test of them: facts about the version that is named there."""

ABSENT = {
    "vllm:corrupted_requests": "vLLM has it with an environment variable alone, which counts NaN in logits",
    "vllm:engine_sleep_state": "no engine here sleeps",
    "vllm:estimated_flops_per_gpu_total": "vLLM has it with a flag alone (--enable-mfu-metrics)",
    "vllm:estimated_read_bytes_per_gpu_total": "as estimated_flops_per_gpu_total",
    "vllm:estimated_write_bytes_per_gpu_total": "as estimated_flops_per_gpu_total",
    "vllm:kv_block_idle_before_evict_seconds": "vLLM has it with a flag alone; blocks are no unit of eviction here",
    "vllm:kv_block_lifetime_seconds": "as kv_block_idle_before_evict_seconds",
    "vllm:kv_block_reuse_gap_seconds": "as kv_block_idle_before_evict_seconds",
    "vllm:lora_requests_info": "there are no adapters",
    "vllm:nixl_num_failed_notifications": "an end of a transfer is confirmed on the side channel, not notified by NIXL",
    "vllm:nixl_num_notifications_after_expiry": "as nixl_num_failed_notifications",
    "vllm:nixl_post_time_seconds": "what posting takes is not measured apart from the transfer",
    "vllm:watermark_requests": "there are no watermarks",
}
N_BUCKETS = [1.0, 2.0, 5.0, 10.0, 20.0]
PREEMPTION_BUCKETS = [1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 20.0]
TEXT = "/v1/completions"
CHAT = {"messages": [{"role": "user", "content": "ab"}]}


@pytest.fixture(scope="module")
def families():
    """By name, of a server with images, transfers and drafts."""
    info = build_echo_core(EngineConfig(model="echo")).info
    info = replace(info, side_channel="localhost:5600", reads_images=True, num_speculative_tokens=2)
    images = ImageStats(num_encoded=3, num_hits=4)
    drafts = SpecDecodeStats(num_drafts=3, num_draft_tokens=6, num_accepted_tokens=4, accepted_per_pos={"0": 3, "1": 1})
    text = Metrics(info, "m").exposition(EngineStats(images=images, spec_decode=drafts)).decode()
    return {family.name: family for family in text_string_to_metric_families(text)}


def test_every_name_of_vllms_is_there_or_has_a_reason_not_to_be(families):
    assert set(VLLM["families"]) - families.keys() == ABSENT.keys()
    assert set(VLLM["families"]) >= ABSENT.keys()


def test_drafts_are_counted_by_vllms_names(families):
    names = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
    samples = {name: families[f"vllm:spec_decode_{name}"].samples[0].value for name in names}
    assert samples == {"num_drafts": 3, "num_draft_tokens": 6, "num_accepted_tokens": 4}
    by_position = families["vllm:spec_decode_num_accepted_tokens_per_pos"].samples
    assert {sample.labels["position"]: sample.value for sample in by_position} == {"0": 3, "1": 1}


def test_every_sample_that_vllms_own_test_looks_for_is_there(server):
    assert server.post(TEXT, {"prompt": "ab", "max_tokens": 2}).status_code == 200
    text = server.get("/metrics").text
    assert [name for name in VLLM["text_samples"] if f"\n{name}" not in text] == []
    (info,) = next(f for f in text_string_to_metric_families(text) if f.name == "vllm:cache_config_info").samples
    num_tokens = (128 << 20) // BYTES_PER_TOKEN
    assert info.labels["kv_cache_size_tokens"] == str(num_tokens)
    assert info.labels["kv_cache_max_concurrency"] == str(num_tokens / 4096)


def test_images(families):
    assert set(VLLM["image_samples"]) <= families.keys()
    values = [families[name].samples[0].value for name in ("vllm:mm_cache_queries", "vllm:mm_cache_hits")]
    assert values == [7, 4]


def test_a_model_without_attention_has_room_for_as_many_requests_as_slots():
    info = build_echo_core(EngineConfig(model="echo", max_num_seqs=7, max_model_len=512)).info
    metrics = Metrics(replace(info, cache=replace(info.cache, bytes_per_token=0)), "m")
    text = metrics.exposition(EngineStats()).decode()
    assert 'kv_cache_max_concurrency="7.0"' in text and 'kv_cache_size_tokens="3584"' in text


@pytest.mark.parametrize(
    ("name", "expected"), [("request_params_n", N_BUCKETS), ("request_num_preemptions", PREEMPTION_BUCKETS)]
)
def test_buckets(families, name, expected):
    samples = families[f"vllm:{name}"].samples
    bounds = [float(sample.labels["le"]) for sample in samples if sample.name.endswith("_bucket")]
    assert bounds == [*expected, float("inf")]


def test_what_requests_ask_for_and_get(serve):
    """The figures of vLLM's own test, where there is one."""
    server = serve(model="echo", max_model_len=256)
    for _ in range(3):
        assert server.post(TEXT, {"prompt": [7] * 9, "max_tokens": 10, "ignore_eos": True}).status_code == 200
    metric = server.metric
    assert (metric("vllm:request_params_max_tokens_sum"), metric("vllm:request_params_max_tokens_count")) == (30, 3)
    assert (metric("vllm:request_params_n_sum"), metric("vllm:request_params_n_count")) == (3, 3)
    assert (metric("vllm:request_num_preemptions_sum"), metric("vllm:request_num_preemptions_count")) == (0, 3)
    assert metric("vllm:request_max_num_generation_tokens_sum") == 30
    assert metric("vllm:request_inference_time_seconds_count") == 3
    spent = [metric(f"vllm:request_{phase}_time_seconds_sum") for phase in ("inference", "prefill", "decode")]
    assert spent[0] == pytest.approx(spent[1] + spent[2])
    assert metric("vllm:prompt_tokens_cached_total") == metric("vllm:prefix_cache_hits_total") == 18
    assert metric('vllm:prompt_tokens_cached_by_source_total{engine="0",model_name="echo",source="device"') == 18
    assert (metric("vllm:request_prefill_kv_computed_tokens_sum"), metric("vllm:prompt_tokens_total")) == (9, 27)
    chat = {"messages": [{"role": "user", "content": "ab"}], "n": 3, "ignore_eos": True, "max_tokens": 2}
    answer = server.post("/v1/chat/completions", chat).json()
    assert (metric("vllm:request_params_n_sum"), metric("vllm:request_params_n_count")) == (6, 4)
    assert (metric("vllm:request_params_max_tokens_sum"), metric("vllm:request_params_max_tokens_count")) == (36, 6)
    assert metric("vllm:request_max_num_generation_tokens_sum") == 32
    # without max_tokens a chat may have what is left of the context
    assert server.post("/v1/chat/completions", chat | {"n": 1, "max_tokens": None, "stop": ["a"]}).status_code == 200
    assert metric("vllm:request_params_max_tokens_sum") == 36 + 256 - answer["usage"]["prompt_tokens"]


def test_preemptions_of_a_request(serve):
    server = serve(model="echo", block_size=16, kv_cache_memory_bytes=24 * 16 * BYTES_PER_TOKEN)
    body = {"prompt": ["ab" * 50, "cd" * 50], "ignore_eos": True, "max_tokens": 180}
    assert server.post(TEXT, body).status_code == 200
    assert server.metric("vllm:request_num_preemptions_count") == 2
    assert server.metric("vllm:request_num_preemptions_sum") == server.metric("vllm:num_preemptions_total") >= 1


def test_requests_that_find_no_place(serve):
    name = 'vllm:admission_rejections_total{model_name="echo",reason="max_num_queued_reqs"}'
    server = serve(model="echo:pause_after=1", max_num_seqs=1, max_waiting=2)
    assert server.metric(name) == 0
    body = {"prompt": "ab", "max_tokens": 2}
    with ThreadPoolExecutor() as beside:
        open_now = [beside.submit(server.post, TEXT, body)]
        server.until(lambda: server.core.stats().num_running == 1)
        open_now.append(beside.submit(server.post, TEXT, body))
        server.until(lambda: server.core.stats().num_waiting == 1)
        assert server.core.stats().waiting_by_reason == {"capacity": 1, "deferred": 0}
        assert server.post(TEXT, body | {"prompt": ["ab", "cd"]}).status_code == 429  # the engine's queue
        assert server.post(TEXT, body | {"n": 3}).status_code == 400  # never
        assert server.metric(name) == 1
        open_now.append(beside.submit(server.post, TEXT, body))
        server.until(lambda: server.core.stats().num_waiting == 2)
        assert server.post(TEXT, body).status_code == 429  # the gate
        assert server.metric(name) == 2
        waiting = 'vllm:num_requests_waiting_by_reason{engine="0",model_name="echo",reason='
        assert server.metric(waiting + '"capacity"') == server.metric("vllm:num_requests_waiting{") == 2
        server.core.resume()
        assert [one.result().status_code for one in open_now] == [200, 200, 200]


@pytest.mark.parametrize(("path", "body"), [(TEXT, {"prompt": "ab"}), ("/v1/chat/completions", CHAT)])
def test_a_response_reports_the_load_where_the_request_asks_for_it(serve, path, body):
    """As vLLM's, in ORCA's two formats of a header; a stream has none."""
    server, body = serve(model="echo", max_model_len=256), {**body, "max_tokens": 2}

    def report(format_name, **fields):
        answer = server.post(path, body | fields, headers={"endpoint-load-metrics-format": format_name})
        assert answer.status_code == 200
        return answer.headers.get("endpoint-load-metrics")

    kind, _, named = report("TEXT").partition(" ")
    assert kind == "TEXT"
    assert re.fullmatch(r"named_metrics\.kv_cache_usage_perc=\S+, named_metrics\.num_requests_waiting=0\.0", named)
    kind, _, text = report("json").partition(" ")
    assert kind == "JSON"
    assert json.loads(text)["named_metrics"].keys() == {"kv_cache_usage_perc", "num_requests_waiting"}
    assert report("BIN") is None and report("TEXT", stream=True) is None
    assert "endpoint-load-metrics" not in server.post(path, body).headers


def test_a_load_report_tells_pages_and_the_queue():
    stats = EngineStats(pool=PoolStats(num_pages=8, held_pages=2), num_waiting=3)
    assert format_load_report(stats, "Text") == (
        "TEXT named_metrics.kv_cache_usage_perc=0.25, named_metrics.num_requests_waiting=3.0"
    )
    assert format_load_report(stats, "Json") == (
        'JSON {"named_metrics": {"kv_cache_usage_perc": 0.25, "num_requests_waiting": 3.0}}'
    )


def test_intervals_between_tokens_are_counted_as_a_histogram_counts_them():
    """A value on a bucket's bound belongs to it; several tokens of one output came after the same time each."""
    metrics = Metrics(build_echo_core(EngineConfig(model="echo")).info, "m")
    histogram = Histogram("expected", "", buckets=_TOKEN_BUCKETS, registry=None)
    meter = RequestMeter(metrics, 0.0, generate_request(request_id="r", prompt=b""), 0, [], 256)
    now = 7.0
    meter.record(GenerateOutput(request_id="r", token_ids=[1]), now)
    for seconds, num_tokens in ((0.0, 1), (0.25, 1), (0.5, 1), (0.5, 2), (0.375, 1), (80.0, 1), (81.0, 1)):
        now += seconds
        meter.record(GenerateOutput(request_id="r", token_ids=[1] * num_tokens), now)
        histogram.observe(seconds / num_tokens)
    families = text_string_to_metric_families(metrics.exposition(EngineStats()).decode())
    (family,) = (family for family in families if family.name == "vllm:inter_token_latency_seconds")
    (expected,) = histogram.collect()
    told, counted = (
        {(sample.name.rpartition("_")[2], sample.labels.get("le")): sample.value for sample in each.samples}
        for each in (family, expected)
    )
    del counted["created", None]
    assert told == pytest.approx(counted)
