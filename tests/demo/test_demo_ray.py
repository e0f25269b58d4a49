"""The demo of the fleet against replicas that answer by rote."""

import json
from dataclasses import replace

import httpx
import pytest
from demo.corpus import Corpus
from demo.demo_ray import check_turns, turns_table
from demo.demo_ray_job import CONVERSATIONS, TURNS, FleetClient, converse
from demo.server import DemoError
from demo.terminal import make_console


class RoteFleet:
    """A character is a token; replica b has the odd conversations, and has all that it ever saw cached."""

    def __init__(self):
        self.prompt_tokens = {"a": 0, "b": 0}
        self.seen = []
        self.killed = None

    def __call__(self, request):
        if request.url.path == "/metrics":
            lines = ["# TYPE vllm:prompt_tokens counter"]
            lines += [f'vllm:prompt_tokens_total{{replica="{name}"}} {n}' for name, n in self.prompt_tokens.items()]
            return httpx.Response(200, text="\n".join(lines) + "\n")
        body = json.loads(request.content)
        if request.url.path == "/tokenize":
            text = body["prompt"] if "prompt" in body else "".join(m["content"] for m in body["messages"]) + ">"
            return httpx.Response(200, json={"tokens": [ord(character) for character in text]})
        prompt = body["prompt"]
        number = len(self.seen) % CONVERSATIONS
        replica = sorted(self.prompt_tokens)[number % len(self.prompt_tokens)]
        self.prompt_tokens[replica] += len(prompt)
        tokens = [2_000_000 + 100 * len(self.seen) + i for i in range(body["max_tokens"])]
        cached = max((self.common(path, prompt) for name, path in self.seen if name == replica), default=0)
        self.seen.append((replica, [*prompt, *tokens[:-1]]))
        usage = {"prompt_tokens_details": {"cached_tokens": cached}}
        return httpx.Response(200, json={"choices": [{"token_ids": tokens}], "usage": usage})

    @staticmethod
    def common(left, right):
        return next(
            (i for i, (x, y) in enumerate(zip(left, right, strict=False)) if x != y), min(len(left), len(right))
        )

    def kill(self, replica):
        del self.prompt_tokens[replica]
        self.killed = replica


def played():
    fleet = RoteFleet()
    with FleetClient("http://fleet", httpx.MockTransport(fleet)) as client:
        return fleet, converse(client, Corpus(), fleet.kill)


def test_a_fleet_that_does_what_it_should_keeps_every_promise():
    fleet, turns = played()
    assert fleet.killed == turns[0].replica == "a" and len(turns) == CONVERSATIONS * (TURNS + 1)
    assert [check.promise for check in check_turns(turns, 2) if not check.kept] == []
    console = make_console()
    with console.capture() as captured:
        console.print(turns_table(turns))
    assert "A killed" in captured.get() and "conversation 4" in captured.get()


@pytest.mark.parametrize(
    ("index", "change", "broken"),
    [
        (5, {"replica": "a"}, 0),
        (5, {"cached": 0}, 1),
        (5, {"cached": 1 << 20}, 1),
        (-1, {"cached": 0}, 1),
        (-1, {"replica": "a"}, 3),
        (-1, {"answer_ids": ()}, 3),
    ],
)
def test_every_promise_can_be_broken(index, change, broken):
    _, turns = played()
    turns[index] = replace(turns[index], **change)
    assert not check_turns(turns, 2)[broken].kept


def test_one_replica_that_has_them_all_and_one_that_stays_away_are_told():
    _, turns = played()
    alone = [replace(one, replica="a") for one in turns]
    assert not check_turns(alone, 2)[2].kept and not check_turns(turns, 1)[4].kept


def test_a_prompt_that_no_replica_has_counted_is_an_error():
    fleet = RoteFleet()

    def uncounted(request):
        answer = fleet(request)
        fleet.prompt_tokens = {"a": 0, "b": 0}
        return answer

    with (
        FleetClient("http://fleet", httpx.MockTransport(uncounted)) as client,
        pytest.raises(DemoError, match="0 replicas have counted"),
    ):
        converse(client, Corpus(), fleet.kill)


def test_a_refusal_is_told_with_what_the_fleet_said():
    refuse = httpx.MockTransport(lambda request: httpx.Response(503, text="no replica is there"))
    with (
        FleetClient("http://fleet", refuse) as client,
        pytest.raises(DemoError, match=r"/tokenize answered 503: no replica is there"),
    ):
        converse(client, Corpus(), lambda replica: None)
