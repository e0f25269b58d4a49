"""The demo of two servers against servers that answer by rote."""

import json
from dataclasses import replace

import httpx
import pytest
from demo.checks import Check
from demo.corpus import Corpus
from demo.demo_pd_checks import check_pair, check_same_answers, due, due_back
from demo.demo_pd_job import AGAIN, FIRST, LONELY, TURNS, Asked, Pages, Place, converse, pages_of
from demo.server import DemoError
from demo.shared_prefix import Shared

from demo import demo_pd as program

PAGES = Pages(block_size=16, page_bytes=100, checkpoint=3)
EXPOSITION = """# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="16",page_bytes="100",pages_per_checkpoint="3"} 1.0
# TYPE vllm:prefix_cache_hits_total counter
vllm:prefix_cache_hits_total{engine="0"} %d
# TYPE vllm:nixl_bytes_transferred histogram
vllm:nixl_bytes_transferred_bucket{engine="0",le="+Inf"} 1
vllm:nixl_bytes_transferred_count{engine="0"} 1
vllm:nixl_bytes_transferred_sum{engine="0"} %d
"""


class RoteServers:
    """P, D and a proxy: a character is a token, every answer adds 7 to D's hits, 1,000 to its bytes, 50 to P's."""

    def __init__(self):
        self.asked = []
        self.prefill_is_up = True

    def __call__(self, request):
        host, path = request.url.host, request.url.path
        if path == "/metrics":
            assert host in ("d", "p") and (host == "d" or self.prefill_is_up)
            bytes_read = {"d": 1_000, "p": 50}[host] * len(self.asked)
            return httpx.Response(200, text=EXPOSITION % (7 * len(self.asked), bytes_read))
        body = json.loads(request.content)
        if path == "/tokenize":
            assert host == "d"
            text = body["prompt"] if "prompt" in body else "".join(m["content"] for m in body["messages"]) + ">"
            return httpx.Response(200, json={"tokens": [ord(character) for character in text]})
        assert (host, path) == ("x", "/v1/completions")
        self.asked.append(body)
        tokens = [2_000_000 + 100 * len(self.asked) + i for i in range(body["max_tokens"])]
        cache = {"received_tokens": 3, "computed_tokens": 4}
        answer = {"choices": [{"token_ids": tokens}], "cairn": {"cache": cache}, "prompt_token_ids": body["prompt"]}
        return httpx.Response(200, json=answer)


def test_the_conversation_is_what_it_says():
    servers = RoteServers()

    def kill():
        assert len(servers.asked) == TURNS + 1
        servers.prefill_is_up = False

    with Place("http://x", "http://d", "http://p", httpx.MockTransport(servers)) as place:
        asked = converse(place, Corpus(), kill)
    assert not servers.prefill_is_up
    assert [one.label for one in asked] == [FIRST, AGAIN, *(f"turn {turn + 2}" for turn in range(TURNS - 1)), LONELY]
    assert all(body["ignore_eos"] and body["temperature"] == 0 for body in servers.asked)
    first, again, *turns = asked
    assert again.prompt_ids == first.prompt_ids and first.shared == Shared(0, 0)
    assert again.shared.prompts == again.shared.paths == len(first.prompt_ids)
    for before, after in zip((again, *turns), turns, strict=False):
        length = len(before.prompt_ids)
        assert after.shared == Shared(length, length + len(before.answer_ids) - 1)
        assert after.prompt_ids[: length + len(before.answer_ids)] == before.prompt_ids + before.answer_ids
    assert {(one.hit, one.received, one.computed, one.pulled) for one in asked} == {(7, 3, 4, 1_000)}
    assert [one.pulled_back for one in asked] == [50] * (TURNS + 1) + [0]


def test_a_lone_server_pulls_nothing_and_is_asked_for_no_such_number():
    def answer(request):
        return httpx.Response(200, text="# TYPE vllm:prefix_cache_hits counter\nvllm:prefix_cache_hits_total 5\n")

    with Place("http://d", "http://d", transport=httpx.MockTransport(answer)) as place:
        assert (place.hits(), place.pulled(), place.pulled_back()) == (5, 0, 0)
        with pytest.raises(DemoError, match="vllm:cache_config_info"):
            place.pages()


def test_a_refusal_is_told_with_what_the_server_said():
    transport = httpx.MockTransport(lambda request: httpx.Response(503, text="no decode server is up"))
    with (
        Place("http://x", "http://d", transport=transport) as place,
        pytest.raises(DemoError, match=r"/v1/completions answered 503: no decode server is up"),
    ):
        place.complete([1])


def test_pages_are_counted_whole_and_with_one_checkpoint():
    assert pages_of(EXPOSITION % (0, 0)) == PAGES
    counts = [PAGES.num_bytes(start, end) // 100 for start, end in ((0, 16), (0, 17), (15, 17), (16, 17), (17, 17))]
    assert counts == [3 + 1, 3 + 2, 3 + 2, 3 + 1, 3 + 1]


def good(exact):
    """A run that keeps every promise to the byte."""

    def one(label, number, prompts, paths, received, computed=0):
        prompt = tuple(range(number))
        asked = Asked(
            label, prompt, (7,), Shared(prompts, paths), number - received - computed, received, computed, 0, 0
        )
        back = 0 if exact or not prompts else due_back(asked, PAGES)
        return replace(asked, pulled=due(asked, PAGES, exact=exact) if received else 0, pulled_back=back)

    first, again = one(FIRST, 100, 0, 0, 100), one(AGAIN, 100, 100, 100, 0)
    return [first, again, one("turn 2", 200, 100, 149, 51), one(LONELY, 300, 200, 249, 0, 300 - 249)]


def test_what_may_be_pulled_depends_on_whether_answers_are_shared():
    turn = next(one for one in good(exact=False) if one.label == "turn 2")
    # 200 tokens are 13 pages; 100 of them, or 149, fill 6 or 9
    assert (due(turn, PAGES, exact=True), due(turn, PAGES, exact=False)) == ((7 + 3) * 100, (4 + 3) * 100)
    assert due_back(turn, PAGES) == (4 + 3) * 100


def broken(asked, exact):
    return [number for number, check in enumerate(check_pair(asked, PAGES, exact=exact)) if not check.kept]


WORSE = [
    (AGAIN, {"hit": 99, "received": 1}, 0),
    (AGAIN, {"pulled": 1}, 0),
    ("turn 2", {"computed": 1}, 1),
    ("turn 2", {"received": 50}, 1),
    ("turn 2", {"pulled": 0}, 2),
    (FIRST, {"pulled": (7 + 3) * 100 + 1}, 2),
    (LONELY, {"answer_ids": ()}, 3),
    (LONELY, {"computed": 0}, 3),
    (LONELY, {"received": 1}, 3),
]


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize(("label", "change", "promise"), WORSE)
def test_every_promise_can_be_broken(label, change, promise, exact):
    asked = good(exact)
    assert broken(asked, exact) == []
    assert broken([replace(one, **change) if one.label == label else one for one in asked], exact) == [promise]


@pytest.mark.parametrize(("pulled", "pulled_back", "promises"), [(1, 0, [2]), (0, 1, [4]), (0, -10_000, [4])])
def test_a_byte_too_many_is_told_in_either_direction(pulled, pulled_back, promises):
    first, again, turn, lonely = good(exact=False)
    back = max(0, turn.pulled_back + pulled_back)
    worse = replace(turn, pulled=turn.pulled + pulled, pulled_back=back)
    assert broken([first, again, worse, lonely], exact=False) == promises


def test_answers_are_compared_token_for_token():
    asked = good(exact=True)
    assert check_same_answers(asked, good(exact=False)).kept
    other = [*asked[:-1], replace(asked[-1], answer_ids=(8,))]
    assert check_same_answers(asked, other).against == (LONELY,)


@pytest.mark.parametrize(("lone_answer", "code", "verdict"), [((7,), 0, "kept"), ((9,), 1, "BROKEN")])
def test_the_exit_code_says_whether_the_promises_were_kept(tmp_path, monkeypatch, capsys, lone_answer, code, verdict):
    lone = [replace(one, answer_ids=lone_answer) for one in good(exact=True)]
    monkeypatch.setattr(program, "_ask_one", lambda *_: lone)
    monkeypatch.setattr(program, "_ask_pair", lambda name, *_: (good(name == program.EXACT), PAGES))
    assert program.main(["--model", "m", "--out", str(tmp_path)]) == code
    out = capsys.readouterr().out
    assert f"{verdict}  " in out and LONELY in out
    result = json.loads((tmp_path / "result.json").read_text())
    assert [check["kept"] for check in result["checks"]] == [code == 0] + [True] * 9
    assert result["requests"][program.EXACT][0]["hit"] == 0


@pytest.mark.more
@pytest.mark.timeout(120)
def test_a_server_that_cannot_start_fails_the_demo_and_names_its_log(tmp_path, capsys):
    assert program.main(["--model", str(tmp_path / "nowhere"), "--out", str(tmp_path / "out")]) == 1
    log = tmp_path / "out" / "lone.log"
    assert "nowhere" in log.read_text()
    error = capsys.readouterr().err
    assert "exit code 2" in error and str(log) in error


def test_a_broken_promise_says_what_speaks_against_it():
    first, again, turn, lonely = good(exact=False)
    checks = check_pair([first, replace(again, hit=90, received=10), turn, lonely], PAGES, exact=False)
    told = [check for check in checks if not check.kept]
    assert told == [Check(told[0].promise, told[0].against)] and "D had 90, received 10" in told[0].against[0]
