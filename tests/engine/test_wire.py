"""The process wire: every message survives the trip, nothing else gets through."""

import numpy as np
import pytest

from cairn.engine.contract import (
    MAX_LOGPROB_ENTRIES,
    CacheReport,
    EngineConfig,
    EngineStats,
    GenerateOutput,
    KvTransferConfig,
    PrefixCacheStats,
    RequestLogConfig,
    TokenLogprobs,
    TransferReport,
)
from cairn.engine.core_loop import run_core
from cairn.engine.specs import check_request, key_tokens, transfer_params
from cairn.engine.wire import (
    MAX_FRAME_BYTES,
    Abort,
    AwaitTools,
    BuildRefused,
    Fatal,
    Outputs,
    Ready,
    Refusal,
    Reset,
    ResetReply,
    Shutdown,
    StatsQuery,
    StatsReply,
    Submit,
    decode_config,
    encode_config,
    frames_from_core,
    frames_to_core,
)
from cairn.errors import ConfigError, EngineDead, InvalidRequest, ModelError, NotFound, Overloaded, QueueFull
from cairn.types import Boundary
from doubles.echo_core import build_echo_core
from doubles.engine_requests import generate_request


def request(**fields):
    fields = {"request_id": "r", "prompt": np.arange(5, dtype="<i8").tobytes()} | fields
    return generate_request(**fields)


@pytest.mark.parametrize(
    "message",
    [
        Submit(
            [
                request(
                    stop=["a", "ü"],
                    seed=-(2**63),
                    boundaries=[Boundary(2, "system_end", 300), Boundary(5)],
                    cache_salt="s",
                    temperature=0.5,
                )
            ]
        ),
        Submit([request(kv_transfer_params=b'{"do_remote_decode":true}')]),
        Submit([request(client="c" * 64)]),
        Abort("r"),
        AwaitTools("r", 3),
        StatsQuery(7),
        Reset(8),
        Shutdown(),
    ],
)
def test_messages_to_the_core_survive(message):
    frames = frames_to_core()
    assert frames.decode(frames.encode(message)) == message


@pytest.mark.parametrize(
    "message",
    [
        Ready(build_echo_core(EngineConfig(model="echo")).info),
        BuildRefused("model", "no config.json"),
        ResetReply(8, 3),
        Outputs([GenerateOutput(request_id="r", token_ids=[1], text="x", finish_reason="stop", stop_reason=3)]),
        Outputs(
            [
                GenerateOutput(
                    request_id="r",
                    finish_reason="length",
                    cache=CacheReport(
                        prompt_tokens=9,
                        matched_tokens=4,
                        cached_tokens=3,
                        computed_tokens=0,
                        reason="none",
                        received_tokens=6,
                        prefill_cached_tokens=5,
                    ),
                    kv_transfer_params=b'{"cairn_decode_hint":null}',
                    transfer=TransferReport(seconds=0.25, num_bytes=1 << 40, num_descriptors=3),
                )
            ]
        ),
        Refusal("r", "overloaded", "full", None),
        StatsReply(7, EngineStats(prefix_cache=PrefixCacheStats(miss_reasons={"none": 2}))),
        Fatal("bug"),
    ],
)
def test_messages_from_the_core_survive(message):
    frames = frames_from_core()
    assert frames.decode(frames.encode(message)) == message


def test_an_output_of_tokens_alone_is_sent_without_what_it_has_not():
    frames = frames_from_core()
    frame = frames.encode(Outputs([GenerateOutput(request_id="a", token_ids=[5])]))
    assert b"token_ids" in frame and not any(
        name in frame for name in (b"finish_reason", b"timings", b"index", b"text")
    )
    (output,) = frames.decode(frame).outputs
    assert (output.finish_reason, output.index, output.text, output.status) == (None, 0, "", 500)


def test_the_configuration_survives():
    transfer = KvTransferConfig(host="::1", port=0, secret_file="/s", peers=("a", "10.0.0.0/8"), on_failure="fail")
    config = EngineConfig(
        model="m", block_size=32, exact=True, max_model_len=77, kv_transfer=transfer, tensor_parallel_size=4
    )
    assert decode_config(encode_config(config)) == config
    with pytest.raises(EngineDead, match="configuration cannot be read"):
        decode_config(frames_to_core().encode(Abort("r")))


def test_key_tokens_are_read_in_place():
    keys = np.arange(131_072, dtype=np.int64) * 3 - 5
    frames = frames_to_core()
    message = frames.decode(frames.encode(Submit([request(prompt=keys.tobytes())])))
    read = key_tokens(message.requests[0])
    assert (read == keys).all()
    assert not read.flags.owndata and not read.flags.writeable


@pytest.mark.parametrize(
    "frame",
    [b"", b"\x80\x04K\x01.", b"\xc1", frames_from_core().encode(Fatal("x")), frames_to_core().encode(Abort("r"))[:-1]],
)
def test_a_foreign_frame_is_an_error(frame):
    with pytest.raises(EngineDead, match="cannot be read"):
        frames_to_core().decode(frame)


@pytest.mark.parametrize(
    "bad", [Abort(""), Abort("x" * 257), StatsQuery(-1), Reset(-1), Submit([request(client="c" * 65)])]
)
def test_bounds_are_checked_on_arrival(bad):
    frames = frames_to_core()
    with pytest.raises(EngineDead):
        frames.decode(frames.encode(bad))


def test_a_frame_that_is_too_large_is_refused_where_it_is_made():
    with pytest.raises(InvalidRequest, match="at most"):
        frames_to_core().encode(Submit([request(prompt=bytes(MAX_FRAME_BYTES))]))


def test_text_that_is_no_unicode_is_refused_where_it_is_made():
    with pytest.raises(InvalidRequest, match="Unicode"):
        frames_to_core().encode(Submit([request(stop=["\ud800"])]))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": b""}, "prompt"),
        ({"prompt": b"1234567"}, "prompt"),
        ({"request_id": ""}, "request_id"),
        ({"request_id": "x" * 257}, "request_id"),
        ({"stop": ["x"] * 1025}, "stop"),
        ({"stop_token_ids": [1] * 1025}, "stop_token_ids"),
        ({"boundaries": [Boundary(1)] * 65537}, "boundaries"),
        ({"kv_transfer_params": b" " * ((4 << 20) + 1)}, "kv_transfer_params"),
    ],
)
def test_a_request_is_held_to_its_bounds(fields, param):
    with pytest.raises(InvalidRequest) as caught:
        check_request(request(**fields))
    assert caught.value.param == param


def test_transfer_params_are_read():
    assert transfer_params(None) is None
    assert transfer_params(b'{"a":[1,null]}') == {"a": [1, None]}


@pytest.mark.parametrize(
    "text", [b"", b"{", b"\xff", b'"\\ud800"', b'"\xff"', b"NaN", b"[" * 100_000, b"[" * 100_000 + b"]" * 100_000]
)
def test_transfer_params_that_cannot_be_read(text):
    with pytest.raises(InvalidRequest) as caught:
        transfer_params(text)
    assert caught.value.param == "kv_transfer_params"


@pytest.mark.parametrize("error", [InvalidRequest("a", "p"), NotFound("b", "model"), Overloaded("c"), QueueFull("d")])
def test_a_refusal_is_raised_as_what_it_was(error):
    raised = Refusal.of("r", error).error()
    assert type(raised) is type(error)
    assert (raised.message, raised.param) == (error.message, error.param)


@pytest.mark.parametrize("error", [ConfigError("a"), ModelError("b")])
def test_a_build_error_is_raised_as_what_it_was(error):
    raised = BuildRefused.of(error).error()
    assert type(raised) is type(error) and str(raised) == str(error)


class WideCore:
    """Three requests, each told of a vocabulary at once, in one step."""

    def __init__(self, num_entries, link):
        self.has_work, self._num, self._link = True, num_entries, link
        self.sent_when_settled = []

    def start(self, wake):
        pass

    def close(self):
        pass

    def write_back(self):
        pass

    def poll_ready(self):
        return ()

    def poll(self):
        return ()

    def step(self):
        self.has_work = False
        packed = TokenLogprobs(width=self._num, token_ids=b"", values=b"", ranks=bytes(4))
        return [GenerateOutput(request_id=name, logprobs=packed) for name in "abc"]

    def settle(self):
        self.sent_when_settled.append(len(self._link.sent))


class Recorder:
    """A core's link to a client that ends once something has come."""

    def __init__(self):
        self.sent = []
        self.send = self.sent.append

    def wake(self):
        pass

    def receive(self, seconds):
        return Shutdown() if self.sent else None


@pytest.mark.parametrize(
    ("num_entries", "frames"),
    [
        (MAX_LOGPROB_ENTRIES // 3, ["abc"]),
        (MAX_LOGPROB_ENTRIES // 2, ["ab", "c"]),
        (MAX_LOGPROB_ENTRIES, ["a", "b", "c"]),
    ],
)
def test_outputs_with_many_log_probabilities_come_in_several_frames(num_entries, frames):
    link = Recorder()
    core = WideCore(num_entries, link)
    run_core(core, link)
    assert ["".join(output.request_id for output in frame.outputs) for frame in link.sent] == frames
    # what a step leaves for later waits until its outputs are on their way
    assert core.sent_when_settled == [len(frames)]
    assert 8 * MAX_LOGPROB_ENTRIES < MAX_FRAME_BYTES // 2


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logprobs": 1023, "max_tokens": 1025}, "logprobs"),
        ({"logprobs": 1023, "max_tokens": 513, "n": 2}, "logprobs"),
        ({"logprobs": 21}, "logprobs"),
        ({"prompt_logprobs": MAX_LOGPROB_ENTRIES // 5}, "prompt_logprobs"),
    ],
)
def test_log_probabilities_of_one_request_are_bounded(fields, param):
    for allowed in (
        {"logprobs": 1023, "max_tokens": 1024},
        {"logprobs": 20},
        {"prompt_logprobs": MAX_LOGPROB_ENTRIES // 5 - 1},
    ):
        check_request(request(**allowed))
    with pytest.raises(InvalidRequest) as raised:
        check_request(request(**fields))
    assert raised.value.param == param


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model", "/cache/m\udcff"),
        ("tokenizer", "/cache/t\udcff"),
        ("request_log", RequestLogConfig(path="/logs/\udcff/log")),
        ("kv_transfer", KvTransferConfig(secret_file="/run/\udcff")),
    ],
)
def test_a_folder_that_is_no_text_is_named(field, value):
    """A cache or a working directory may be called so, whatever the settings say."""
    with pytest.raises(ConfigError, match=f"^{field}: must be valid UTF-8"):
        encode_config(EngineConfig(model="m").model_copy(update={field: value}))
