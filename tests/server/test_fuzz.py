"""Whatever JSON comes, the answer is 200 or a 4xx that says why, and nothing is left in the engine."""

import json
import string

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from cairn.server.openai.requests import ChatRequest, CompletionRequest

FIELDS = sorted({*ChatRequest.model_fields, *CompletionRequest.model_fields, "n", "tools", "logit_bias", "unknown"})
NUMBERS = st.one_of(st.integers(), st.integers(-3, 20), st.floats())
TEXTS = st.text(st.characters() | st.sampled_from(["\ud800", "\x00"]), max_size=8) | st.sampled_from(["echo", "user"])
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(string.ascii_letters, max_size=5), inner),
    max_leaves=8,
)
MESSAGES = st.lists(st.fixed_dictionaries({"role": TEXTS, "content": VALUES}), max_size=3)
BODIES = st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=5)


@pytest.mark.more
@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(body=BODIES, prompt=st.text(max_size=5) | st.lists(st.integers(-1, 260), max_size=5), messages=MESSAGES)
@example(body={"allowed_token_ids": [False]}, prompt=[0], messages=[])
@example(body={"temperature": True, "stop_token_ids": ["5", 6.0]}, prompt=[0], messages=[])
def test_any_json(server, body, prompt, messages):
    for path, needed in (("/v1/completions", {"prompt": prompt}), ("/v1/chat/completions", {"messages": messages})):
        content = json.dumps(needed | {"max_tokens": 5} | body).encode()
        response = server.post(path, content=content, headers={"Content-Type": "application/json"})
        assert response.status_code in (200, 400, 404), response.text
        if response.status_code != 200:
            assert response.json()["error"]["message"]
    assert server.core.stats().num_running == 0
