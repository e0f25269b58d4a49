"""What several tests of the APIs ask, and how."""

import json

XML = "<think> <tool_call> <function=...>"
"""A chat template by which a server knows that its model writes reasoning and calls as XML."""
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
CALL = "<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n</function>\n</tool_call>"
"""A call of the tool `weather` by a model of that kind."""


def ask(server, path, **body):
    answer = server.post(path, body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def stream(server, path, **body):
    answer = server.post(path, body | {"stream": True})
    assert answer.status_code == 200, answer.text
    lines = [line for line in answer.text.split("\n\n") if line]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
