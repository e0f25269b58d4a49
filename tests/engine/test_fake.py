"""The core in memory behaves like one: batching, stops, cache reports, transfers and bounds."""

import json

import numpy as np
import pytest

from cairn.engine.contract import EngineConfig, GenerateRequest, KvTransferConfig, TransferReport
from cairn.errors import ConfigError, InvalidRequest, Overloaded
from cairn.types import ManualClock
from doubles.byte_tokenizer import END_OF_SEQUENCE, ByteTokenizer
from doubles.fake_core import FakeCore, build_fake_core
from doubles.fake_faults import FakeFaults


def core(faults=None, clock=None, **config):
    return FakeCore(EngineConfig(model="fake", **config), faults, clock, sleep=lambda seconds: None)


def request(text="hello", request_id="r", **fields):
    prompt = np.array(ByteTokenizer().encode(text), dtype="<i8").tobytes()
    return GenerateRequest(request_id=request_id, prompt=prompt, **fields)


def answer(core, a_request):
    core.submit(a_request)
    outputs = []
    while core.has_work:
        outputs += core.step()
    return "".join(output.text for output in outputs), outputs[-1]


def test_it_echoes():
    text, last = answer(core(), request("Grüße, 世界"))
    assert (text, last.finish_reason, last.token_ids) == ("Grüße, 世界", "stop", [END_OF_SEQUENCE])


def test_it_goes_on_when_told_to():
    text, last = answer(core(), request("abc", ignore_eos=True, max_tokens=9))
    assert (text, last.finish_reason) == ("abcabca", "length")


def test_it_stops_where_the_model_ends():
    text, last = answer(core(max_model_len=8), request("abcde", ignore_eos=True))
    assert (text, last.finish_reason) == ("abc", "length")


def test_a_cut_character_is_shown_as_such():
    assert answer(core(), request("世", max_tokens=2))[0] == "\ufffd"


@pytest.mark.parametrize(
    ("stop", "text", "reason"), [(["lo"], "hel", "lo"), (["lx", "ll"], "he", "ll"), (["lox"], "hello", None)]
)
def test_stop_strings(stop, text, reason):
    got, last = answer(core(), request("hello", stop=stop))
    assert (got, last.finish_reason, last.stop_reason) == (text, "stop", reason)


def test_what_may_become_a_stop_string_is_held_back():
    fake = core()
    fake.submit(request("abc", stop=["bcd"]))
    assert [fake.step()[0].text for _ in range(3)] == ["a", "", ""]
    assert fake.step()[0].text == "bc"


def test_the_cache_report():
    fake = core()
    reports = [answer(fake, request(text, cache_salt=salt))[1].cache for text, salt in (("abc", None), ("abd", None))]
    other = answer(fake, request("abc", cache_salt="s"))[1].cache
    assert [report.cached_tokens for report in (*reports, other)] == [0, 2, 0]
    assert (reports[1].computed_tokens, reports[1].reason) == (1, "never_seen")
    assert answer(fake, request("abc"))[1].cache.reason == "none"
    off = core(enable_prefix_caching=False)
    assert [answer(off, request("abc"))[1].cache.reason for _ in range(2)] == ["disabled"] * 2


def test_batching_and_counts():
    fake = core(max_num_seqs=2, block_size=4)
    for i in range(3):
        fake.submit(request("abcde", str(i)))
    assert {output.request_id for output in fake.step()} == {"0", "1"}
    stats = fake.stats()
    assert (stats.num_running, stats.num_waiting, stats.held_pages) == (2, 1, 4)
    fake.abort("0")
    fake.abort("unknown")
    while fake.has_work:
        fake.step()
    stats = fake.stats()
    assert (stats.held_pages, stats.generation_tokens, stats.reasons) == (0, 13, {"never_seen": 2})


def test_timings_come_from_the_clock():
    clock = ManualClock()
    fake = core(clock=clock, max_num_seqs=1)
    fake.submit(request("ab"))
    clock.advance(2)
    fake.step()
    clock.advance(3)
    fake.step()
    timings = fake.step()[0].timings
    assert (timings.queue, timings.prefill, timings.decode) == (2, 0, 3)


@pytest.mark.parametrize(
    ("prompt", "said"),
    [([1] * 16, "at most 15 fit"), ([1, 259], r"prompt\[1\]"), ([-1], r"prompt\[0\]"), ([], "empty")],
)
def test_wrong_prompts(prompt, said):
    with pytest.raises(InvalidRequest, match=said):
        core(max_model_len=16).submit(GenerateRequest(request_id="r", prompt=np.array(prompt, dtype="<i8").tobytes()))


def test_its_queue_has_a_bound():
    fake = core(max_waiting=1)
    fake.submit(request())
    with pytest.raises(Overloaded):
        fake.submit(request(request_id="s"))


def test_faults_are_read_from_the_models_name():
    assert FakeFaults.parse("fake") == FakeFaults()
    assert FakeFaults.parse("fake:pause_after=3,bad_audit=true") == FakeFaults(pause_after=3, bad_audit=True)
    with pytest.raises(ConfigError, match="cannot be read"):
        build_fake_core(EngineConfig(model="fake:pause_after=x"))


def test_a_pause_can_be_ended():
    fake = core(FakeFaults(pause_after=1))
    fake.submit(request("ab"))
    assert [len(fake.step()) for _ in range(3)] == [1, 0, 0]
    fake.resume()
    assert fake.step()[0].text == "b"


TAKES_PART = KvTransferConfig(port=5601)
ASKS_FOR_DECODE = b'{"do_remote_decode": true}'


def handed_over(text="hello", **config):
    """What a core hands over for a prompt."""
    _, last = answer(core(kv_transfer=TAKES_PART, **config), request(text, kv_transfer_params=ASKS_FOR_DECODE))
    return json.loads(last.kv_transfer_params)


def test_a_prompt_that_is_handed_over():
    params = handed_over(block_size=2, tensor_parallel_size=4)
    assert params.pop("remote_request_id").startswith("r~")
    assert params == {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [[0, 1, 2]],
        "remote_engine_id": "fake-engine",
        "remote_host": "localhost",
        "remote_port": 5601,
        "tp_size": 4,
        "dcp_size": 1,
        "pp_size": 1,
        "remote_num_tokens": 5,
        "remote_blocks_expiry_time": None,
        "transfer_mode": "pull",
        "remote_prefill_cached_tokens": 0,
    }


def test_a_prompt_that_arrives():
    fake = core(kv_transfer=TAKES_PART, block_size=2)
    text, last = answer(fake, request("hello", kv_transfer_params=json.dumps(handed_over()).encode()))
    assert text == "hello" and last.transfer == TransferReport(seconds=0.001, num_bytes=40, num_descriptors=3)
    assert (last.cache.cached_tokens, last.cache.received_tokens, last.cache.computed_tokens) == (0, 5, 0)
    assert (last.cache.prefill_cached_tokens, last.cache.reason) == (0, "none")
    assert json.loads(last.kv_transfer_params) == {
        "cairn_decode_hint": {"engine": "fake-engine", "host": "localhost", "port": 5601}
    }
    stats = fake.stats()
    assert (stats.external_prefix_cache_queries, stats.external_prefix_cache_hits, stats.failed_transfers) == (5, 5, 0)
    _, last = answer(fake, request("hello", kv_transfer_params=json.dumps(handed_over()).encode()))
    assert (last.cache.cached_tokens, last.cache.received_tokens, last.transfer) == (5, 0, None)


@pytest.mark.parametrize(("told", "believed"), [(5, 5), (6, None), (1 << 26, None)])
def test_no_more_was_cached_there_than_the_prompt_has(told, believed):
    params = json.dumps(handed_over() | {"remote_prefill_cached_tokens": told}).encode()
    _, last = answer(core(kv_transfer=TAKES_PART), request("hello", kv_transfer_params=params))
    assert last.cache.prefill_cached_tokens == believed


@pytest.mark.parametrize("on_failure", ["recompute", "fail"])
def test_a_prompt_that_does_not_arrive(on_failure):
    fake = core(FakeFaults(lose_transfers=True), kv_transfer=KvTransferConfig(on_failure=on_failure))
    text, last = answer(fake, request("hello", kv_transfer_params=json.dumps(handed_over()).encode()))
    if on_failure == "recompute":
        assert (text, last.cache.reason, last.cache.computed_tokens) == ("hello", "remote_failed", 5)
        assert last.cache.prefill_cached_tokens is None
    else:
        assert (text, last.finish_reason, last.status) == ("", "error", 502) and "did not arrive" in last.error
    stats = fake.stats()
    assert (stats.external_prefix_cache_hits, stats.failed_transfers, stats.num_running) == (0, 1, 0)


def test_an_ordinary_request_hands_nothing_over():
    for params in (None, b"null", b"{}", b'{"do_remote_decode": false}'):
        _, last = answer(core(kv_transfer=TAKES_PART), request(kv_transfer_params=params))
        assert last.kv_transfer_params is None and last.transfer is None
    with pytest.raises(InvalidRequest, match="takes no part"):
        core().submit(request(kv_transfer_params=ASKS_FOR_DECODE))
