"""What others build on, written down: a change here is a change for somebody."""

import argparse
import ast
import importlib
import re

import pytest
from msgspec.structs import replace

from cairn.bench.command import add_bench_flags
from cairn.engine.contract import EngineConfig, EngineStats, PrefixCacheStats, TierStats
from cairn.proxy.options import ProxyOptions
from cairn.proxy.service import ProxyService
from cairn.server.metrics import Metrics
from cairn.settings.proxy import add_proxy_flags
from cairn.settings.serve import add_flags
from doubles.echo_core import build_echo_core
from source_scan import sources

FLAGS = """
--allow-credentials --allowed-headers --allowed-media-domains --allowed-methods --allowed-origins --api-key
--attention-backend
--block-size --chat-template --check-plans --checkpoint-dtype --config --cpu-threads --cudagraph-capture-sizes
--default-chat-template-kwargs
--device --disk-cache --disk-cache-bytes --disk-cache-read-only
--disable-fastapi-docs --disable-log-stats --download-dir --dtype --enable-auto-tool-choice --enable-docs
--enable-force-include-usage --enable-per-request-metrics --enable-prefix-caching --enable-prompt-tokens-details
--enable-request-id-headers
--enable-tokenizer-info-endpoint --enforce-eager --eviction --exact
--forwarded-allow-ips --generation-config --help --host --host-cache-bytes --image-fetch-timeout --in-flight-sharing
--gdn-prefill-backend --gpu-memory-utilization --kv-cache-memory-bytes --kv-events-config --kv-peer-allowlist
--kv-secret-file --kv-transfer-config
--language-model-only --lenient-schemas --limit-mm-per-prompt --log-level --mamba-cache-mode
--mamba-ssm-cache-dtype --max-body-bytes --max-cudagraph-capture-size --max-image-bytes
--max-image-pixels --max-logprobs --max-model-len --max-num-batched-tokens --max-num-seqs --max-stored-responses
--max-waiting --mm-encoder-cache-bytes --model --no-allow-credentials --no-check-plans --no-disable-fastapi-docs
--no-disable-log-stats --no-disk-cache-read-only
--no-enable-auto-tool-choice --no-enable-docs --no-enable-force-include-usage
--no-enable-per-request-metrics --no-enable-prefix-caching --no-enable-prompt-tokens-details
--no-enable-request-id-headers
--no-enable-tokenizer-info-endpoint --no-enforce-eager --no-exact --no-in-flight-sharing
--no-language-model-only --no-return-tokens-as-token-ids --no-strict-tools --no-trust-request-chat-template
--override-generation-config
--port --quantization --reasoning-parser --request-log --request-log-bytes --request-timeout
--return-tokens-as-token-ids --revision --root-path --scheduling-policy --seed --served-model-name --shutdown-timeout
--speculative-config --ssl-ca-certs
--ssl-cert-reqs --ssl-certfile --ssl-ciphers --ssl-keyfile --start-timeout --stored-response-bytes --stream-interval
--strict-tools --tensor-parallel-size --tokenizer --tokenizer-revision --tool-call-parser --trust-request-chat-template
--uvicorn-log-level
"""

PROXY_FLAGS = """
--api-key --connect-timeout --decode --forwarded-allow-ips --health-interval --health-timeout --help
--hint-timeout --host
--log-level --max-attempts --max-body-bytes --max-hints --max-open --port --prefill
--prefill-timeout --request-timeout --running-tokens --shutdown-timeout --stall-timeout
"""

BENCH_FLAGS = """
--api-key --append-result --backend --base-url --burstiness --chat-num-systems --chat-output-len --chat-system-len
--chat-turns --chat-user-len --dataset-name --dataset-path --disable-tqdm --download-dir --endpoint --extra-body
--frequency-penalty --goodput --header --help --host --ignore-eos --input-len --insecure --label --max-concurrency
--metadata --metric-percentiles --min-p --model --num-prompts --num-warmups --output-len --percentile-metrics --port
--prefix-repetition-num-prefixes --prefix-repetition-output-len --prefix-repetition-prefix-len
--prefix-repetition-suffix-len --presence-penalty --random-input-len --random-output-len --random-prefix-len
--random-range-ratio --ready-check-timeout-sec --repetition-penalty --request-rate --request-timeout --result-dir
--result-filename --revision --save-detailed --save-result --seed --served-model-name --sharegpt-output-len
--temperature --tokenizer --top-k --top-p --trace-duration --trace-length-divisor --trace-speedup --trust-remote-code
--vocab-size
"""

METRICS = """
cairn:audits_total cairn:cached_pages cairn:checkpoints_evicted_total cairn:checkpoints_hit_total
cairn:checkpoints_taken_total cairn:computed_prompt_tokens_total cairn:forward_passes_total cairn:free_pages
cairn:held_checkpoints cairn:held_pages cairn:lost_tokens_total cairn:miss_requests_total cairn:open_leases
cairn:pending_prefill_tokens cairn:recomputed_tokens_total cairn:request_bypasses_total
cairn:second_sighting_hit_tokens_total cairn:second_sighting_tokens_total cairn:session_requests_total
cairn:session_wait_seconds_total cairn:steps_total
vllm:admission_rejections_total vllm:cache_config_info vllm:e2e_request_latency_seconds vllm:generation_tokens_total
vllm:inter_token_latency_seconds vllm:iteration_tokens_total vllm:kv_cache_usage_perc vllm:num_preemptions_total
vllm:num_requests_running vllm:num_requests_waiting vllm:num_requests_waiting_by_reason vllm:prefix_cache_hits_total
vllm:prefix_cache_queries_total vllm:prompt_tokens_by_source_total vllm:prompt_tokens_cached_by_source_total
vllm:prompt_tokens_cached_total vllm:prompt_tokens_total vllm:request_decode_time_seconds
vllm:request_generation_tokens vllm:request_inference_time_seconds vllm:request_max_num_generation_tokens
vllm:request_num_preemptions vllm:request_params_max_tokens vllm:request_params_n
vllm:request_prefill_kv_computed_tokens vllm:request_prefill_time_seconds vllm:request_prompt_tokens
vllm:request_queue_time_seconds vllm:request_success_total vllm:request_time_per_output_token_seconds
vllm:time_to_first_token_seconds
"""

TRANSFER_METRICS = """
cairn:hand_overs_refused_total cairn:leased_pages cairn:open_transfers cairn:quarantined_pages
cairn:side_channel_dropped_total cairn:skipped_transfers_total
vllm:external_prefix_cache_hits_total vllm:external_prefix_cache_queries_total vllm:nixl_bytes_transferred
vllm:nixl_num_descriptors vllm:nixl_num_failed_transfers_total vllm:nixl_num_kv_expired_reqs_total
vllm:nixl_xfer_time_seconds vllm:num_requests_kv_fetch_by_stage
"""

IMAGE_METRICS = """
cairn:image_bytes cairn:image_hits_total cairn:images_encoded_total
vllm:mm_cache_hits_total vllm:mm_cache_queries_total
"""

SHARING_METRICS = """
cairn:in_flight_shared_requests_total cairn:in_flight_shared_tokens_total
"""

SPEC_DECODE_METRICS = """
vllm:spec_decode_num_accepted_tokens_per_pos_total vllm:spec_decode_num_accepted_tokens_total
vllm:spec_decode_num_draft_tokens_total vllm:spec_decode_num_drafts_total
"""

LOG_METRICS = """
cairn:request_log_dropped_total
"""

TIER_METRICS = """
cairn:tier_bytes cairn:tier_drops_total cairn:tier_entries cairn:tier_hit_tokens_total cairn:tier_hits_total
cairn:tier_read_bytes_total cairn:tier_read_seconds_total cairn:tier_skipped_paths_total cairn:tier_write_seconds_total
cairn:tier_written_bytes_total
"""

PROXY_METRICS = """
cairn_proxy:decode_only_total cairn_proxy:expected_cached_tokens_total cairn_proxy:first_byte_seconds cairn_proxy:hints
cairn_proxy:hints_sent_total cairn_proxy:prefixes cairn_proxy:routed_tokens_total
cairn_proxy:hints_stored_total cairn_proxy:prefill_seconds cairn_proxy:request_seconds cairn_proxy:requests_total
cairn_proxy:retries_total cairn_proxy:upstream_failures_total cairn_proxy:upstream_open cairn_proxy:upstream_up
"""

EXPORTED = {
    "cairn": "__version__",
    "cairn.errors": "AuditError CairnError ConfigError DownloadError EngineDead InvalidBody InvalidRequest LeasesFull "
    "ModelError NotFound Overloaded QueueFull RequestError",
    "cairn.types": "Boundary BoundaryKind Clock Count Keys ManualClock Pages Positive RequestId SamplingParams "
    "ShortText Size SystemClock first_in_reach",
    "cairn.step": "Admit DRAFTED DecodeRows Fold FoldSnapshot GRID Image Index Logprobs PageCopy PrefillRow Restore "
    "SAMPLED SampledToken Samples Save Score Scored Snapshot StepPlan StepResult TableUpdate TokenMask TokenMasks "
    "VerifiedTokens VerifyRow",
    "cairn.cache.audit": "audit",
    "cairn.cache.awaited": "AwaitedHits MAX_AWAITED WaitingPrompt",
    "cairn.deploy.ray": "app",
    "cairn.cache.checkpoint": "Kind Lineage Origin",
    "cairn.cache.divergence": "DivergenceStats",
    "cairn.cache.eviction": "EvictionPolicy LeastRecentlyUsed ValuePerByte eviction_for",
    "cairn.cache.layout": "AttentionGroup CacheLayout reach_name",
    "cairn.cache.sequence_blocks": "MissSpan Namespace PagePin PageTable PageTables PendingState "
    "PrefixMatch SequenceBlocks",
    "cairn.cache.placement": "Align All Auto CheckpointPoint Granular Junction PlacementPolicy PromptFacts "
    "placement_for",
    "cairn.cache.prefix_cache": "CacheCounters CachePolicy PrefixCache",
    "cairn.cache.reasons": "HintFacts Reason first_reason hint",
    "cairn.scheduler.state": "Counters RequestObserver SchedulerConfig SchedulerState SchedulingPolicy",
    "cairn.scheduler.request": "ARRIVALS_PER_PRIORITY Constraint Finish Phase PromptOffer PromptSpec Request "
    "RequestOutcome RequestStats RequestTransfer Spec TRANSITIONS",
    "cairn.scheduler.scheduler": "Progress Scheduler",
    "cairn.runner.contract": "EncoderCounters StepRunner",
    "cairn.runner.runner": "Observe Runner",
    "cairn.models.contract": "Family StoredLoader TensorLoader",
    "cairn.models.families": "FAMILIES FAMILY_RECIPES family_of",
    "cairn.models.registry": "Kept MOST_HEAD_SHARE OpenModel open_model",
    "cairn.replay.bounds": "Paths footprint_bytes unlimited_hits",
    "cairn.replay.command": "POLICIES add_replay_flags run_replay",
    "cairn.replay.layouts": "LAYOUT_NAMES UNNEEDED layout_for sizes_for",
    "cairn.replay.replay": "Replay ReplayOutcome",
    "cairn.replay.traces": "MAX_ID read_trace",
    "cairn.trace_rows": "Line MOONCAKE_UNIT TraceBounds TraceRow has_header parse_integer trace_lines trace_rows",
    "cairn.bench.command": "add_bench_flags run_bench",
    "cairn.bench.work": "Conversation FIRST_TOKEN Ids MAX_PROMPTS MAX_TOKENS Speller TokenizerSpeller Turn "
    "Vocabulary WordSpeller draw_arrival_times flag spell_prompts",
    "cairn.engine.build": "build_core make_drafter",
    "cairn.engine.contract": "Breakpoint CacheInfo CacheReport CacheView DraftReport EngineClient EngineConfig "
    "EngineInfo EngineOptions EngineStats FREE_LOGPROBS FinishReason GenerateOutput GenerateRequest ImageInput "
    "ImageStats KvEventsConfig KvTransferConfig LeaseOptions MAX_ANSWERS MAX_BAD_WORDS MAX_BREAKPOINTS "
    "MAX_LOGPROBS MAX_LOGPROB_ENTRIES MAX_PATTERN_SIZE MAX_RETAIN_SECONDS MAX_SHOWN Pixels PoolStats "
    "PrefixCacheStats QueueStats RANGES RenderedPrompt RepetitionDetection RequestLogConfig STEP_SIZES SYSTEM_ROLES "
    "SpecDecodeStats SpeculativeConfig StepStats StopConditions Structure TakeOutput TemplateValue TextStream "
    "TextTokenizer ThinkingBudget TierOptions TierStats Timings TokenLogprobs TokenStats TransferReport TransferStats "
    "check_token_ids",
    "cairn.engine.core": "Core",
    "cairn.engine.step_pipeline": "StepPipeline",
    "cairn.engine.text.tokenizer": "IncrementalText MARKS ModelTokenizer marks_of",
    "cairn.check.generation": "GenerationReport check_generation render_generation",
    "cairn.cli": "engine_config image_options main",
    "cairn.engine.client": "CoreClient EngineDeadlines OutputQueue Transport",
    "cairn.engine.process": "ProcessTransport",
    "cairn.proxy.app": "ProxyServer create_app",
    "cairn.proxy.options": "HINT_SECONDS MAX_HINTS ProxyOptions",
    "cairn.settings.proxy": "PROXY_ENV_PREFIX ProxySettings add_proxy_flags load_proxy_settings",
    "cairn.server.app": "create_app find_open_paths",
    "cairn.server.options": "CertificateOptions CorsOptions ImageOptions ServerLimits ServerOptions",
    "cairn.server.run": "HttpServer tls_options",
    "cairn.settings.serve": "ENV_PREFIX ServeSettings add_flags load_settings read_settings_file sort_settings",
    "cairn.settings.images": "MAX_IMAGES image_limit media_domains",
    "cairn.server.images": "MediaConnector",
    "cairn.settings.kv": "KvEventsSettings KvTransferExtra KvTransferSettings free_side_channel_port "
    "kv_events_settings kv_transfer_settings peer_names side_channel",
}


@pytest.mark.parametrize(("add", "expected"), [(add_flags, FLAGS), (add_proxy_flags, PROXY_FLAGS)])
def test_flags(add, expected):
    parser = argparse.ArgumentParser()
    add(parser)
    actions = [action for action in parser._actions if action.dest != "flags_without_effect"]
    flags = {flag for action in actions for flag in action.option_strings if flag.startswith("--")}
    assert flags == set(expected.split())


@pytest.mark.parametrize(
    ("add", "expected"),
    [(add_flags, ["--served-model-name", "--api-key", "--cudagraph-capture-sizes"]), (add_proxy_flags, ["--api-key"])],
)
def test_flags_that_take_several_words(add, expected):
    parser = argparse.ArgumentParser()
    add(parser)
    actions = [action for action in parser._actions if action.dest != "flags_without_effect"]
    assert [flag for action in actions if action.nargs == "+" for flag in action.option_strings] == expected


def test_bench_flags():
    parser = argparse.ArgumentParser()
    add_bench_flags(parser)
    (commands,) = (action.choices for action in parser._actions if action.dest == "bench_command")
    flags = {flag for action in commands["serve"]._actions for flag in action.option_strings if flag.startswith("--")}
    assert flags == set(BENCH_FLAGS.split())
    assert set(commands) == {"serve", "compare"}


def names_of(exposition):
    names = set(re.findall(r"^# TYPE (\S+)", exposition.decode(), flags=re.MULTILINE))
    return {name for name in names if not name.endswith("_created")}


def test_proxy_metrics():
    service = ProxyService(ProxyOptions(prefill=["http://p:1"], decode=["http://d:1"]))
    assert names_of(service.metrics.exposition()) == set(PROXY_METRICS.split())


def test_metrics():
    cache = PrefixCacheStats(
        miss_reasons={"none": 1},
        lost_tokens={"evicted": 1},
        checkpoints_taken={"grid": 1},
        checkpoints_hit={"grid": 1},
        checkpoints_evicted={"grid": 1},
    )
    stats = EngineStats(prefix_cache=cache)
    metrics = Metrics(build_echo_core(EngineConfig(model="echo")).info, "m")
    assert names_of(metrics.exposition(stats)) == set(METRICS.split())
    metrics = Metrics(replace(build_echo_core(EngineConfig(model="echo")).info, side_channel="localhost:5600"), "m")
    assert names_of(metrics.exposition(stats)) == {*METRICS.split(), *TRANSFER_METRICS.split()}
    metrics = Metrics(replace(build_echo_core(EngineConfig(model="echo")).info, reads_images=True), "m")
    assert names_of(metrics.exposition(stats)) == {*METRICS.split(), *IMAGE_METRICS.split()}
    metrics = Metrics(replace(build_echo_core(EngineConfig(model="echo")).info, logs_requests=True), "m")
    assert names_of(metrics.exposition(stats)) == {*METRICS.split(), *LOG_METRICS.split()}
    info = build_echo_core(EngineConfig(model="echo")).info
    metrics = Metrics(replace(info, num_speculative_tokens=1), "m")
    assert names_of(metrics.exposition(stats)) == {*METRICS.split(), *SPEC_DECODE_METRICS.split()}
    tiers = TierStats(
        **{name: {"host": 1} for name in ("num_bytes", "num_entries", "hits", "hit_tokens", "read_bytes")},
        **{name: {"host": 1} for name in ("written_bytes", "read_seconds", "write_seconds")},
        drops={"host": {"replaced": 1}},
        skipped={"gone": 0},
    )
    metrics = Metrics(replace(info, tiers=("host",)), "m")
    assert names_of(metrics.exposition(replace(stats, tiers=tiers))) == {*METRICS.split(), *TIER_METRICS.split()}
    metrics = Metrics(replace(info, cache=replace(info.cache, shares_in_flight=True)), "m")
    assert names_of(metrics.exposition(stats)) == {*METRICS.split(), *SHARING_METRICS.split()}


def public_names(name):
    """What a module lists, or else all that it binds without an underscore; a package, all that it imports of ours."""
    (module,) = (each for each in sources() if each.name == name)
    names = set()
    for node in module.tree.body:
        match node:
            case ast.Assign(targets=[ast.Name(id="__all__")], value=listed):
                return set(ast.literal_eval(listed))
            case ast.FunctionDef(name=bound) | ast.ClassDef(name=bound) | ast.AnnAssign(target=ast.Name(id=bound)):
                names.add(bound)
            case ast.Assign(targets=targets):
                names |= {part.id for target in targets for part in ast.walk(target) if isinstance(part, ast.Name)}
            case ast.ImportFrom(module=origin) if module.is_package and origin.startswith("cairn."):
                names |= {each.asname or each.name for each in node.names}
    return {each for each in names if not each.startswith("_") and each != "logger"}


@pytest.mark.parametrize("module", EXPORTED)
def test_exported_names(module):
    names = public_names(module)
    assert sorted(names) == EXPORTED[module].split()
    assert all(hasattr(importlib.import_module(module), name) for name in names)
