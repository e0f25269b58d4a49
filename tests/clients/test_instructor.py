"""instructor: a pydantic model from tools, from JSON and from a schema, whole and in parts."""

from typing import Literal

import instructor
import openai
import pytest
from instructor.v2.core.errors import IncompleteOutputException, InstructorRetryException
from pydantic import BaseModel, ConfigDict

from conftest import ENOUGH

HELLO = [{"role": "user", "content": "Which city?"}]


class Place(BaseModel):
    model_config = ConfigDict(extra="forbid")
    city: Literal["Oslo", "Rome"]
    warm: bool


@pytest.mark.parametrize("mode", ["TOOLS", "TOOLS_STRICT", "JSON_SCHEMA"])
def test_a_model_is_made(server, mode):
    with openai.OpenAI(base_url=server.url, api_key=server.key, max_retries=0) as plain:
        client = instructor.from_openai(plain, mode=instructor.Mode[mode])
        made, answer = client.chat.completions.create_with_completion(
            model=server.model, messages=HELLO, response_model=Place, max_tokens=ENOUGH, max_retries=0
        )
    assert isinstance(made, Place) and answer.usage.completion_tokens > 1


def test_a_model_is_made_part_by_part(server):
    with openai.OpenAI(base_url=server.url, api_key=server.key, max_retries=0) as plain:
        client = instructor.from_openai(plain, mode=instructor.Mode.TOOLS)
        parts = list(
            client.chat.completions.create_partial(
                model=server.model, messages=HELLO, response_model=Place, max_tokens=ENOUGH, max_retries=0
            )
        )
    assert len(parts) > 1 and parts[-1].city in ("Oslo", "Rome")


def test_an_answer_that_is_cut_off_is_told(server):
    with openai.OpenAI(base_url=server.url, api_key=server.key, max_retries=0) as plain:
        client = instructor.from_openai(plain, mode=instructor.Mode.TOOLS)
        with pytest.raises((IncompleteOutputException, InstructorRetryException)):
            client.chat.completions.create(
                model=server.model, messages=HELLO, response_model=Place, max_tokens=2, max_retries=0
            )
