"""OpenAI's `prediction`, and what `usage` says of drafts."""

import msgspec
import numpy as np
import pytest

from cairn.engine.contract import EngineConfig
from cairn.engine.specs import as_prefill, check_request
from cairn.errors import InvalidRequest
from doubles.echo_core import build_echo_core
from doubles.engine_requests import generate_request

PATH = "/v1/chat/completions"
CHAT = {"messages": [{"role": "user", "content": "ab"}], "max_tokens": 4}
TEXT = {"type": "content", "content": "expected"}


@pytest.fixture
def drafting(serve):
    """A server whose scheduler says that 5 tokens were drafted for each answer and 3 of them accepted; what the
    scheduler was given is in `specs`."""
    specs = []

    def build(config):
        core = build_echo_core(config)
        submit = core._scheduler.submit_together

        def submit_together(groups):
            submit(groups)
            for group in groups:
                specs.extend(group)
                for spec in group:
                    stats = core._scheduler.state.requests[spec.request_id].stats
                    stats.num_draft_tokens, stats.num_accepted_draft_tokens = 5, 3

        core._scheduler.submit_together = submit_together
        return core

    server = serve(build=build)
    server.specs = specs
    return server


@pytest.mark.parametrize("content", ["expected", [{"type": "text", "text": "exp"}, {"type": "text", "text": "ected"}]])
def test_the_scheduler_is_given_the_tokens(drafting, content):
    body = CHAT | {"n": 2, "prediction": {"type": "content", "content": content}}
    assert drafting.post(PATH, body).status_code == 200
    tokenizer = drafting.core._tokenizer
    assert len(drafting.specs) == 2
    for spec in drafting.specs:
        assert spec.prediction.dtype == np.int64
        assert spec.prediction.tolist() == tokenizer.encode("expected", False)


@pytest.mark.parametrize("prediction", [None, {"type": "content", "content": ""}, {"type": "content", "content": []}])
def test_none_is_expected(drafting, prediction):
    assert drafting.post(PATH, CHAT | {"prediction": prediction}).status_code == 200
    assert drafting.specs[0].prediction.tolist() == []


def test_the_answer_is_the_same(server):
    answers = [server.post(PATH, CHAT | more).json() for more in ({}, {"prediction": TEXT})]
    assert answers[0]["choices"] == answers[1]["choices"]


@pytest.mark.parametrize(
    ("prediction", "said"),
    [
        ("expected", "prediction"),
        ({}, "prediction.type"),
        ({"type": "content"}, "prediction.content"),
        ({"type": "content", "content": 5}, "prediction.content"),
        ({"type": "content", "content": None}, "prediction.content"),
        ({"type": "text", "content": "x"}, "prediction.type"),
        ({"type": "content", "content": [{"type": "image_url"}]}, "prediction.content"),
        ({"type": "content", "content": "x" * ((1 << 20) + 1)}, "prediction.content"),
        ({"type": "content", "content": [{"type": "text", "text": ""}] * 1025}, "prediction.content"),
    ],
)
def test_what_is_no_prediction(server, prediction, said):
    answer = server.post(PATH, CHAT | {"prediction": prediction})
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"].startswith("prediction") and said in error["message"]


def test_a_prediction_that_no_answer_can_be(server):
    answer = server.post(PATH, CHAT | {"prediction": {"type": "content", "content": "x" * 200_000}})
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == "prediction"
    assert "prediction has 200000 tokens" in error["message"] and error["message"].endswith("shorten it")


def test_completions_have_none(server):
    answer = server.post("/v1/completions", {"prompt": "ab", "max_tokens": 2, "prediction": TEXT})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "prediction"


@pytest.mark.parametrize(("path", "body"), [(PATH, CHAT), ("/v1/completions", {"prompt": "ab", "max_tokens": 4})])
@pytest.mark.parametrize("n", [1, 3])
def test_usage_counts_drafts_of_all_answers(drafting, path, body, n):
    usage = drafting.post(path, body | {"n": n}).json()["usage"]
    details = {"accepted_prediction_tokens": 3 * n, "rejected_prediction_tokens": 2 * n}
    assert usage["completion_tokens_details"].items() >= details.items()


def test_a_stream_counts_them_at_its_end(drafting):
    with drafting.client() as client:
        chunks = client.chat.completions.create(
            model="echo", stream=True, stream_options={"include_usage": True}, prediction=TEXT, **CHAT
        )
        details = [chunk.usage.completion_tokens_details for chunk in chunks if chunk.usage is not None]
    assert [(one.accepted_prediction_tokens, one.rejected_prediction_tokens) for one in details] == [(3, 2)]


def test_a_prediction_that_nothing_was_drafted_from_is_counted_as_such(server):
    details = server.post(PATH, CHAT | {"prediction": TEXT}).json()["usage"]["completion_tokens_details"]
    assert (details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]) == (0, 0)
    details = server.post(PATH, CHAT).json()["usage"]["completion_tokens_details"] or {}
    assert "accepted_prediction_tokens" not in details


def test_the_core_trusts_nobody():
    request = generate_request(request_id="r", prompt=b"\0" * 24)
    check_request(msgspec.structs.replace(request, prediction=b"\0" * 16))
    with pytest.raises(InvalidRequest, match="prediction must be int64 tokens"):
        check_request(msgspec.structs.replace(request, prediction=b"\0" * 15))
    core = build_echo_core(EngineConfig(model="echo"))
    tokens = np.array([1, core.info.vocab_size]).astype("<i8").tobytes()
    with pytest.raises(InvalidRequest, match=r"prediction\[1\] is .* out of vocabulary"):
        core.submit(msgspec.structs.replace(request, prediction=tokens))


def test_a_prompt_for_another_server_needs_none():
    request = msgspec.structs.replace(generate_request(request_id="r", prompt=b"\0" * 24), prediction=b"\0" * 16)
    assert as_prefill(request).prediction == b""
