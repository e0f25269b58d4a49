"""Requests of every kind, good and bad, for which two servers have to give the same answers."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

import httpx

__all__ = ["EXCHANGES", "KEY", "MAX_BODY_BYTES", "MODEL", "Exchange", "comparable"]

MODEL, KEY = "tiny", "a-key"
MAX_BODY_BYTES = 65_536

CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": CITY}}
NAMED = {"type": "function", "function": {"name": "weather"}}
HELLO = [{"role": "user", "content": "Say hello to everybody."}]
FORM = {"type": "json_schema", "json_schema": {"name": "place", "schema": CITY}}
USAGE = {"stream": True, "stream_options": {"include_usage": True}}


@dataclass(frozen=True)
class Exchange:
    """A request. `body`: sent as JSON, bytes as they are. `added`: headers of the answer that are Ray's proxy's own."""

    name: str
    path: str
    body: dict | bytes | None = None
    method: str = "POST"
    headers: dict[str, str] = field(default_factory=dict)
    added: tuple[str, ...] = ()

    def send(self, http: httpx.Client) -> httpx.Response:
        headers = {
            "Authorization": f"Bearer {KEY}",
            "X-Request-Id": f"id-of-{self.name.replace(' ', '-')}",
        } | self.headers
        headers = {name: value for name, value in headers.items() if value}
        content = json.dumps(self.body).encode() if isinstance(self.body, dict) else self.body
        if content is not None:
            headers = {"Content-Type": "application/json"} | headers
        return http.request(self.method, self.path, content=content, headers=headers)


def completion(name, **fields):
    body = {"model": MODEL, "prompt": f"{name}: once upon a time", "max_tokens": 6, "temperature": 0}
    return Exchange(name, "/v1/completions", body | {"cache_salt": name} | fields)


def chat(name, **fields):
    body = {"model": MODEL, "messages": HELLO, "max_tokens": 6, "temperature": 0, "cache_salt": name}
    return Exchange(name, "/v1/chat/completions", body | fields)


def refused(name, path="/v1/completions", body=None, **options):
    return Exchange(name, path, body, **options)


def get(name, path, **options):
    return Exchange(name, path, method="GET", **options)


EXCHANGES = (
    completion("plain"),
    completion("ids", prompt=list(range(30, 130)), return_token_ids=True),
    completion("many", n=2, seed=3, temperature=0.8),
    completion("batch", prompt=["one", "two", "three"], logprobs=2),
    completion("echo", echo=True, logprobs=1, max_tokens=2),
    completion("stream", **USAGE),
    completion("stream of many", n=2, seed=3, temperature=0.8, **USAGE),
    completion("every chunk", stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True}),
    chat("chat"),
    chat("chat with logprobs", logprobs=True, top_logprobs=3),
    chat("chat stream", **USAGE),
    chat("tool", tools=[TOOL], tool_choice=NAMED, max_tokens=48),
    chat("tool stream", tools=[TOOL], tool_choice=NAMED, max_tokens=48, **USAGE),
    chat("form", response_format=FORM, max_tokens=48),
    Exchange("gzip", "/v1/completions", bytes.fromhex("1f8b0800"), headers={"Content-Encoding": "gzip"}),
    Exchange("messages", "/v1/messages", {"model": MODEL, "max_tokens": 6, "messages": HELLO, "temperature": 0}),
    Exchange(
        "messages stream",
        "/v1/messages",
        {"model": MODEL, "max_tokens": 6, "messages": HELLO, "temperature": 0, "stream": True, "cache_salt": "m"},
    ),
    Exchange("count", "/v1/messages/count_tokens", {"model": MODEL, "messages": HELLO}),
    Exchange(
        "responses",
        "/v1/responses",
        {"model": MODEL, "input": "Hello", "max_output_tokens": 16, "temperature": 0, "store": False},
    ),
    Exchange(
        "responses stream",
        "/v1/responses",
        {"model": MODEL, "input": "Hullo", "max_output_tokens": 16, "temperature": 0, "store": False, "stream": True},
    ),
    Exchange("tokenize", "/tokenize", {"model": MODEL, "prompt": "Hello, world"}),
    Exchange("detokenize", "/detokenize", {"model": MODEL, "tokens": [40, 41, 42]}),
    get("models", "/v1/models"),
    get("model", f"/v1/models/{MODEL}"),
    get("version", "/version"),
    get("health", "/health", headers={"Authorization": ""}),
    Exchange("anybody there", "/", method="HEAD", headers={"Authorization": ""}),
    get("document", "/openapi.json"),
    refused("not json", body=b'{"prompt": [1, 2'),
    refused("not utf-8", body=b'{"prompt": "\xff"}'),
    refused("no body", body=b""),
    refused("a list", body=b"[]"),
    refused("empty prompt", body={"model": MODEL, "prompt": ""}),
    refused("wrong type", body={"model": MODEL, "prompt": "a", "max_tokens": "many"}),
    refused("out of range", body={"model": MODEL, "prompt": "a", "temperature": -1}),
    refused("too many tokens", body={"model": MODEL, "prompt": [40] * 9_000}),
    refused("unknown token", body={"model": MODEL, "prompt": [1 << 40]}),
    refused("refused stream", body={"model": MODEL, "prompt": "", "stream": True}),
    refused("bad tools", "/v1/chat/completions", {"model": MODEL, "messages": HELLO, "tools": [{"type": "no"}]}),
    refused("no messages", "/v1/chat/completions", {"model": MODEL, "messages": []}),
    refused(
        "no such image",
        "/v1/chat/completions",
        {
            "model": MODEL,
            "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}],
        },
    ),
    refused("anthropic's errors", "/v1/messages", {"model": MODEL, "messages": HELLO, "max_tokens": -1}),
    refused("no key", body={"model": MODEL, "prompt": "a"}, headers={"Authorization": ""}),
    refused("another key", body={"model": MODEL, "prompt": "a"}, headers={"Authorization": "Bearer other"}),
    refused("no such model", body={"model": "other", "prompt": "a"}),
    refused("no such path", "/v1/nothing", {"model": MODEL}),
    get("no such model either", "/v1/models/other"),
    get("no such response", "/v1/responses/resp_0123456789abcdef0123456789abcdef"),
    get("not by get", "/v1/completions"),
    refused("not by delete", method="DELETE"),
    refused("too large", body={"model": MODEL, "prompt": "a" * MAX_BODY_BYTES}),
    refused("unknown encoding", body=b"{}", headers={"Content-Encoding": "br"}),
    refused(
        "long id", body={"model": MODEL, "prompt": "a"}, headers={"X-Request-Id": "i" * 129}, added=("x-request-id",)
    ),
    refused("wrong kind", body=b"prompt=a", headers={"Content-Type": "application/x-www-form-urlencoded"}),
    refused("transfer", body={"model": MODEL, "prompt": "a", "kv_transfer_params": {"do_remote_prefill": True}}),
)

CHANGING = (
    (re.compile(rb'"(created|created_at|completed_at)": ?\d+(\.\d+)?'), rb'"\1":0'),
    (re.compile(rb"\b(call|chatcmpl-tool|msg|resp|rs|fc|toolu)_?-?[0-9a-f]{16,}"), rb"\1-x"),
    (re.compile(rb',?"completion_tokens_details": ?(null|\{[^}]*\})'), b""),
)
"""Moments, ids that are drawn, and how much was drafted: that depends on how long steps have taken."""


TEXTS = {"text", "content", "arguments", "delta", "partial_json"}
"""Names of strings that a stream sends in pieces. Where they are cut depends on how busy the reader was."""


def comparable(response: httpx.Response, without: Sequence[str] = ()) -> tuple[int, dict[str, str], object]:
    """Status, headers but for those in `without`, and body, without what no two answers share: the date, the
    proxy's own name, moments, drawn ids, and where a stream's text is cut into events."""
    headers = {name: value for name, value in response.headers.items() if name not in ("date", "server", *without)}
    body = response.content
    for pattern, instead in CHANGING:
        body = pattern.sub(instead, body)
    if "content-length" in headers:
        headers["content-length"] = str(int(headers["content-length"]) - len(response.content) + len(body))
    is_stream = headers.get("content-type", "").startswith("text/event-stream")
    return response.status_code, headers, with_whole_texts(body) if is_stream else body


def with_whole_texts(stream: bytes) -> list[tuple[bytes, object]]:
    """The events of a stream, each as what stands before its JSON, and the JSON: events with pieces of one text are
    one, those of a choice stand together, and the events are not numbered."""
    events: dict[object, list[tuple[bytes, object]]] = {}
    for line in stream.split(b"\n\n"):
        head, brace, rest = line.partition(b"{")
        data = json.loads(brace + rest) if brace else None
        choices = data.get("choices") if data else None
        events_of_choice = events.setdefault(choices[0]["index"] if choices else None, [])
        if data:
            data.pop("sequence_number", None)
        if events_of_choice and (whole := join(*events_of_choice[-1], head, data)) is not None:
            events_of_choice[-1] = head, whole
        else:
            events_of_choice.append((head, data))
    return [event for events_of_choice in events.values() for event in events_of_choice]


def join(head, data, next_head, next_data):
    """One event for two with pieces of one text: None for others. The later one may say more, as a last one's usage
    does."""
    leaves, next_leaves = dict(leaves_of(data)), dict(leaves_of(next_data))
    texts = [path for path, leaf in leaves.items() if TEXTS & {*path[-1:]} and isinstance(leaf, str)]
    if head != next_head or not texts or not leaves.keys() <= next_leaves.keys() or has_finished(data):
        return None
    for path in texts:
        place = next_data
        for name in path[:-1]:
            place = place[name]
        place[path[-1]] = leaves[path] + next_leaves[path]
    return next_data


def leaves_of(value, path=()):
    if isinstance(value, dict):
        inner = value.items()
    elif isinstance(value, list):
        inner = enumerate(value)
    else:
        inner = ()
        yield path, value
    for name, part in inner:
        yield from leaves_of(part, (*path, name))


def has_finished(data):
    return any(choice["finish_reason"] for choice in data.get("choices", ()))
