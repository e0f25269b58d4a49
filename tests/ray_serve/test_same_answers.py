"""Through Ray comes what the same server alone answers: status, headers, and every byte of the body."""

import httpx
import pytest
from exchanges import EXCHANGES, comparable


@pytest.fixture(scope="module")
def http(one_replica):
    with httpx.Client(base_url=one_replica.url, timeout=60, trust_env=False) as http:
        yield http


@pytest.mark.parametrize("exchange", EXCHANGES, ids=lambda exchange: exchange.name.replace(" ", "-"))
def test_the_answer_is_that_of_the_server_alone(http, expected, contract, exchange):
    answer = exchange.send(http)
    assert comparable(answer, exchange.added) == comparable(expected[exchange.name], exchange.added)
    contract.check(answer)


def test_the_list_has_every_refusal_and_every_kind_of_answer(expected):
    assert {200, 400, 401, 404, 405, 413, 415} <= {answer.status_code for answer in expected.values()}
    kinds = {
        (answer.request.url.path, answer.headers.get("content-type", "").partition(";")[0])
        for answer in expected.values()
    }
    for path in ("/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses"):
        assert {(path, "application/json"), (path, "text/event-stream")} <= kinds
