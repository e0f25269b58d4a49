"""The server's words: what the memory is good for, and how it is going."""

import msgspec

from cairn.engine.contract import (
    EngineConfig,
    EngineStats,
    PoolStats,
    PrefixCacheStats,
    SpecDecodeStats,
    TokenStats,
    TransferStats,
)
from cairn.server.stat_logger import SecondSightingsLogger, ThroughputLogger, format_startup_lines
from doubles.echo_core import build_echo_core


def test_the_throughput_line_has_the_words_that_people_look_for():
    line = ThroughputLogger(100.0)
    stats = EngineStats(
        tokens=TokenStats(prompt=2000, generation=50),
        prefix_cache=PrefixCacheStats(queries=2000, hits=500),
        transfers=TransferStats(queried_tokens=800, received_tokens=600),
        num_running=2,
        num_waiting=1,
        pool=PoolStats(num_pages=200, held_pages=25),
    )
    assert line.update(stats, 110.0) == (
        "Avg prompt throughput: 200.0 tokens/s, Avg generation throughput: 5.0 tokens/s, "
        "Running: 2 reqs, Waiting: 1 reqs, KV cache usage: 12.5%, Prefix cache hit rate: 25.0%, "
        "External prefix cache hit rate: 75.0%"
    )


def test_it_is_silent_while_nothing_happens():
    line = ThroughputLogger(0.0)
    busy = EngineStats(
        tokens=TokenStats(prompt=10),
        prefix_cache=PrefixCacheStats(queries=10, hits=5),
        num_running=1,
        pool=PoolStats(num_pages=10),
    )
    idle = msgspec.structs.replace(busy, num_running=0)
    assert line.update(EngineStats(), 10.0) is None
    assert "Running: 1 reqs" in line.update(busy, 20.0)
    last = line.update(idle, 30.0)
    assert "Running: 0 reqs" in last and "Prefix cache hit rate: 50.0%" in last
    assert line.update(idle, 40.0) is None


def test_the_hit_rates_are_of_late():
    line = ThroughputLogger(0.0)
    first = EngineStats(
        tokens=TokenStats(prompt=100),
        prefix_cache=PrefixCacheStats(queries=100, hits=10),
        transfers=TransferStats(queried_tokens=100, received_tokens=10),
    )
    line.update(first, 10.0)
    later = EngineStats(
        tokens=TokenStats(prompt=200),
        prefix_cache=PrefixCacheStats(queries=200, hits=90),
        transfers=TransferStats(queried_tokens=120, received_tokens=19),
    )
    said = line.update(later, 20.0)
    assert "Prefix cache hit rate: 80.0%" in said and "External prefix cache hit rate: 45.0%" in said
    nobody_asked = msgspec.structs.replace(later, tokens=TokenStats(prompt=201))
    assert "External prefix cache hit rate: 45.0%" in line.update(nobody_asked, 30.0)


def test_what_drafts_have_brought_is_of_the_interval():
    line = ThroughputLogger(0.0)

    def said(now, num_drafts, num_draft_tokens, num_accepted_tokens):
        drafts = SpecDecodeStats(
            num_drafts=num_drafts, num_draft_tokens=num_draft_tokens, num_accepted_tokens=num_accepted_tokens
        )
        return line.update(EngineStats(num_running=1, spec_decode=drafts), now)

    assert "acceptance" not in said(10.0, 0, 0, 0)
    assert said(20.0, 10, 40, 15).endswith(", Mean acceptance length: 2.50, Avg draft acceptance rate: 37.5%")
    assert said(30.0, 20, 60, 25).endswith(", Mean acceptance length: 2.00, Avg draft acceptance rate: 50.0%")
    assert "acceptance" not in said(40.0, 20, 60, 25)


def test_the_start_lines_of_a_server_that_drafts():
    info = build_echo_core(EngineConfig(model="echo")).info
    assert not any("speculation" in line for line in format_startup_lines(info))
    lines = format_startup_lines(msgspec.structs.replace(info, num_speculative_tokens=7))
    assert "speculation: up to 7 tokens are drafted at a time where that pays" in lines


def test_the_start_lines_say_what_the_pool_holds():
    info = build_echo_core(EngineConfig(model="echo", block_size=16, kv_cache_memory_bytes=1 << 20)).info
    cache = msgspec.structs.replace(
        info.cache,
        num_pages=8192,
        page_bytes=128,
        bytes_per_token=8.0,
        checkpoint_bytes=300,
        pages_per_checkpoint=3,
        min_cacheable_tokens=64,
        mamba_cache_mode="align",
        checkpoint_dtype="float16",
    )
    text = "\n".join(format_startup_lines(msgspec.structs.replace(info, cache=cache)))
    assert "8192 pages of 128 bytes (1 MiB in all)" in text
    assert "8 bytes per token; the pool alone would hold 131072 tokens" in text
    small = msgspec.structs.replace(cache, state_dtype="float16")
    lines = format_startup_lines(msgspec.structs.replace(info, cache=small))
    assert any("(3 pages, states in float16, running ones in float16)" in line for line in lines)
    assert (
        "300 bytes per state checkpoint (3 pages, states in float16); the pool alone would hold 2730 checkpoints"
        in text
    )
    assert "the smallest prefix that can be hit, in tokens: 64" in text and "'align'" in text


def test_the_start_lines_of_quantized_weights():
    info = build_echo_core(EngineConfig(model="echo")).info
    assert "weights in" not in format_startup_lines(info)[0]
    said = format_startup_lines(msgspec.structs.replace(info, dtype="bfloat16", quantization="int8"))[0]
    assert "in bfloat16, weights in int8: " in said


def test_the_start_lines_of_other_models():
    info = build_echo_core(EngineConfig(model="echo", enable_prefix_caching=False)).info
    cache = msgspec.structs.replace(info.cache, bytes_per_token=0.0, checkpoint_bytes=0)
    text = "\n".join(format_startup_lines(msgspec.structs.replace(info, cache=cache)))
    assert "no attention layers" in text and "no recurrent state" in text and "prefix caching is off" in text


def test_the_start_lines_of_models_with_windows():
    info = build_echo_core(EngineConfig(model="echo")).info
    for bytes_per_token, words in ((4.0, "4 bytes per token"), (0.0, None)):
        cache = msgspec.structs.replace(
            info.cache, bytes_per_token=bytes_per_token, checkpoint_bytes=0, window_bytes=3 << 20
        )
        text = "\n".join(format_startup_lines(msgspec.structs.replace(info, cache=cache)))
        assert "3 MiB within the reach of windows" in text and "as long as there is memory for all windows" in text
        assert "no attention layers" not in text and (words is None or words in text)


def test_the_start_lines_of_a_server_that_takes_part_in_transfers():
    plain = "\n".join(format_startup_lines(build_echo_core(EngineConfig(model="echo")).info))
    assert "transfers" not in plain and "tensor parallel" not in plain
    info = build_echo_core(EngineConfig(model="echo", tensor_parallel_size=4)).info
    text = "\n".join(format_startup_lines(msgspec.structs.replace(info, side_channel="localhost:5601")))
    assert "other servers ask for pages at localhost:5601" in text and "tensor parallel over 4 processes" in text


def test_every_hour_it_is_said_what_second_sightings_hit():
    line = SecondSightingsLogger(0.0)

    def update(shared, hits, now):
        return line.update(EngineStats(prefix_cache=PrefixCacheStats(second_shared=shared, second_hits=hits)), now)

    assert update(1000, 600, 3599.0) is None
    assert update(2000, 1500, 3600.0) == (
        "cache: second sightings hit 1500 of 2000 shared tokens in the last hour (75.0%), 1500 of 2000 since the start"
    )
    assert update(3000, 2500, 3700.0) is None
    assert "1000 of 1000 shared" in update(3000, 2500, 7200.0)
    assert update(3000, 2500, 10_800.0) is None, "nobody came"
