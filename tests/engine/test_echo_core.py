"""What the echoing core adds to the real one: its answers, and what goes wrong to order."""

import numpy as np
import pytest

from cairn.engine.contract import EngineConfig, Structure
from cairn.errors import AuditError, ConfigError, ModelError
from doubles.byte_tokenizer import END_OF_SEQUENCE, ByteTokenizer
from doubles.echo_core import BYTES_PER_TOKEN, EchoCore, build_echo_core
from doubles.engine_requests import NEVER, generate_request
from doubles.faults import Faults

FORM = Structure(kind="json", text="{}", field="response_format")


def core(faults=None, **config):
    return EchoCore(EngineConfig(model="echo", **config), faults, sleep=lambda seconds: None)


def request(text="hello", request_id="r", **fields):
    prompt = np.array(ByteTokenizer().encode(text), dtype="<i8").tobytes()
    return generate_request(request_id=request_id, prompt=prompt, **{"stop": [NEVER], **fields})


def answer(core, a_request):
    core.submit(a_request)
    outputs = []
    while core.has_work:
        outputs += core.step()
    core.idle()
    return "".join(output.text for output in outputs), outputs[-1]


def test_it_echoes():
    text, last = answer(core(), request("Grüße, 世界"))
    assert (text, last.finish_reason, last.token_ids) == ("Grüße, 世界", "stop", [END_OF_SEQUENCE])


def test_it_goes_on_when_told_to():
    text, last = answer(core(), request("abc", ignore_eos=True, max_tokens=9))
    assert (text, last.finish_reason) == ("abcabca", "length")
    text, last = answer(core(), request("abc", min_tokens=5))
    assert (text, last.finish_reason) == ("abcabc", "stop")


def test_a_cached_prompt_and_one_that_had_to_give_way_are_echoed_the_same():
    echoing = core()
    assert [answer(echoing, request("hello" * 20))[0] for _ in range(2)] == ["hello" * 20] * 2
    assert echoing.stats().prefix_cache.hits == 100
    tight = core(block_size=16, kv_cache_memory_bytes=24 * 16 * BYTES_PER_TOKEN)
    texts = {"ab" * 50: "", "cd" * 50: ""}
    tight.submit(*(request(text, text[0], ignore_eos=True, max_tokens=180) for text in texts))
    while tight.has_work:
        for output in tight.step():
            texts[next(text for text in texts if text[0] == output.request_id)] += output.text
    assert tight.stats().num_preemptions >= 1
    assert texts == {text: (text * 2)[:179] for text in texts}  # one token was an end-of-sequence


def test_several_answers_begin_one_byte_later_each():
    echoing, texts = core(), ["", "", ""]
    echoing.submit(request("abc", n=3))
    while echoing.has_work:
        for output in echoing.step():
            texts[output.index] += output.text
    assert texts == ["abc", "bca", "cab"]


def test_what_may_not_come_is_left_out():
    assert answer(core(), request("abc", bad_words=[[ord("b")]], max_tokens=3))[0] == "aac"
    assert answer(core(), request("abc", allowed_token_ids=[ord("c"), END_OF_SEQUENCE], max_tokens=2))[0] == "cc"


def test_a_form_is_not_kept_to():
    assert answer(core(), request("abc", structure=FORM))[0] == "abc"


def test_faults_are_read_from_the_models_name():
    assert Faults.parse("echo") == Faults()
    assert Faults.parse("echo:pause_after=3,bad_audit=true") == Faults(pause_after=3, bad_audit=True)
    with pytest.raises(ConfigError, match="cannot be read"):
        build_echo_core(EngineConfig(model="echo:pause_after=x"))
    with pytest.raises(ModelError, match="refuse"):
        build_echo_core(EngineConfig(model="echo:refuse=true"))


def test_a_pause_can_be_ended():
    paused = core(Faults(pause_after=1))
    paused.submit(request("abcdef"))
    said = [output.text for _ in range(3) for output in paused.step()]
    assert said == ["a"]
    paused.submit(request("x", "s"))  # a pause holds nobody off who comes later
    said += [output.text for _ in range(3) for output in paused.step() if output.request_id == "r"]
    assert paused.stats().num_running == 2 and len(said) < 6
    paused.abort("s")
    assert paused.step() == [] and paused.stats().num_running == 1
    paused.resume()
    while paused.has_work:
        said += [output.text for output in paused.step()]
    assert "".join(said) == "abcdef"


def test_faults_to_order():
    failing = core(Faults(fail_at_step=2))
    failing.submit(request())
    failing.step()
    with pytest.raises(RuntimeError, match="told to fail"):
        failing.step()
    with pytest.raises(AuditError, match="told"):
        core(Faults(bad_audit=True)).idle()
