"""The load: who is sent when, how many at a time, what history a turn has, and what is left when it is stopped."""

import pytest

from bench.scripted import DONE, Answer, Server, answer_at, run, token, virtually
from cairn.bench.client import Failure
from cairn.bench.work import Conversation, Turn

ONE = Conversation((Turn((1, 2), 2, 4),))


def chat(*texts, system=""):
    return Conversation(tuple(Turn(text, 3, 5) for text in texts), system=system)


def test_requests_go_when_they_are_due():
    server = Server([answer_at(10.0)])
    ran = virtually(run(server, [ONE] * 3, due=[0.0, 1.5, 4.0]))
    assert server.times == [0.0, 1.5, 4.0]
    assert [outcome.sent for outcome in ran.records] == [0.0, 1.5, 4.0]
    assert (ran.seconds, ran.num_interrupted, ran.num_unsent, ran.stopped) == (14.0, 0, 0, False)
    assert server.bodies[0] == {
        "model": "m",
        "prompt": [1, 2],
        "max_tokens": 4,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def test_no_more_are_open_than_allowed():
    server = Server([answer_at(1.0, 2.0)])
    ran = virtually(run(server, [ONE] * 7, concurrency=3))
    assert server.most_open == 3 and server.open_now == 0
    assert server.times == [0.0] * 3 + [2.0] * 3 + [4.0]
    assert [outcome.queue_time for outcome in ran.records] == [0.0] * 3 + [2.0] * 3 + [4.0]
    assert [outcome.latency for outcome in ran.records] == [2.0] * 7


def test_outcomes_are_in_the_order_of_the_work():
    server = Server([answer_at(9.0, prompt=1), answer_at(1.0, prompt=2), answer_at(5.0, prompt=3)])
    seen = []
    ran = virtually(run(server, [ONE] * 3, ended=seen.append))
    assert [outcome.prompt_tokens for outcome in ran.records] == [1, 2, 3]
    assert [outcome.prompt_tokens for outcome in seen] == [2, 3, 1]


def test_a_chat_grows_by_the_servers_own_answers():
    server = Server([Answer(((1.0, token("yes")), (2.0, token("!", "stop")))), answer_at(1.0)])
    ran = virtually(run(server, [chat("one", "two", system="be kind")], kind="chat"))
    first, second = (body["messages"] for body in server.bodies)
    assert first == [{"role": "system", "content": "be kind"}, {"role": "user", "content": "one"}]
    assert second == [*first, {"role": "assistant", "content": "yes!"}, {"role": "user", "content": "two"}]
    assert server.bodies[0]["max_completion_tokens"] == 5 and "max_tokens" not in server.bodies[0]
    assert server.times == [0.0, 2.0] and [outcome.queue_time for outcome in ran.records] == [0.0, 0.0]


def test_a_conversation_in_completions_goes_on_from_what_was_sent():
    server = Server([Answer(((1.0, token("yes", "stop")),)), Answer(((1.0, token("no", "stop")),))])
    virtually(run(server, [chat("one", "two", "three", system="be kind")]))
    prompts = [body["prompt"] for body in server.bodies]
    assert prompts[0] == "System: be kind\nUser: one\nAssistant: "
    assert prompts[1].startswith(prompts[0] + "yes") and prompts[2].startswith(prompts[1] + "no")


def test_after_a_turn_that_failed_none_follows():
    server = Server([answer_at(1.0), Answer((), 500), answer_at(1.0)])
    ran = virtually(run(server, [chat("one", "two", "three", "four")], kind="chat"))
    kinds = [outcome.failure and outcome.failure.kind for outcome in ran.records]
    assert kinds == [None, "HTTP 500", "not sent", "not sent"]
    assert ran.records[3].failure == Failure("not sent", "an earlier turn of the conversation failed")
    assert len(server.bodies) == 2 and ran.num_unsent == 0


def test_a_failure_stops_nobody_else():
    server = Server([Answer((), 500), Answer(((1.0, token()), (1.0, DONE)))])
    ran = virtually(run(server, [ONE] * 5))
    assert [outcome.failure is None for outcome in ran.records] == [False, True, True, True, True]


@pytest.mark.parametrize(
    ("stop_at", "ended", "interrupted", "unsent"), [(0.5, 0, 2, 4), (3.5, 2, 2, 2), (4.0, 2, 2, 2), (9.0, 4, 2, 0)]
)
def test_what_there_is_when_it_is_stopped(stop_at, ended, interrupted, unsent):
    """Two places, answers of 3 seconds, the last two due at 8."""
    server = Server([answer_at(1.0, 3.0)])
    ran = virtually(run(server, [ONE] * 6, due=[0, 0, 0, 0, 8, 8], concurrency=2, stop_at=stop_at))
    assert (len(ran.records), ran.num_interrupted, ran.num_unsent) == (ended, interrupted, unsent)
    assert (ran.stopped, ran.seconds, server.open_now) == (True, stop_at, 0)


def test_a_load_that_is_stopped_before_it_starts_sends_nothing():
    server = Server([answer_at(1.0)])
    ran = virtually(run(server, [ONE, chat("a", "b")], stop_at=0.0))
    assert (ran.records, ran.num_unsent + ran.num_interrupted, ran.stopped) == ([], 3, True)


def test_a_bug_of_the_sender_is_not_swallowed():
    class Broken(Server):
        async def handle_async_request(self, request):
            raise RuntimeError("a bug")

    with pytest.raises(ExceptionGroup, match="unhandled"):
        virtually(run(Broken(), [ONE]))
