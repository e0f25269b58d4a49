"""What names a session: requests of one conversation belong to one server, whatever their prompts say."""

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

_FIELDS = ("prompt_cache_key", "session_id")
_ARGUMENTS = ("session_id", "prompt_cache_key")
"""Of `vllm_xargs`."""
_HEADERS = (b"x-session-affinity", b"x-claude-code-session-id", b"session-id", b"session_id", b"x-session-id")
"""Codex, Claude Code, OpenCode and gateways each have a header of their own."""


def session_name(body: Mapping[str, msgspec.Raw], headers: Iterable[tuple[bytes, bytes]]) -> str | None:
    """The name of a request's session, 32 hexadecimal digits; None where it has none. Each model and `cache_salt` has
    its own. `headers`: with names in lower case.

    The first of these that is a text counts: `prompt_cache_key`, `session_id`, those two in `vllm_xargs`, the headers,
    and last `metadata.user_id`, in which Claude Code has its session. It says who asks together, and nothing else: what
    a client may see depends on its prompt and its salt alone.
    """
    sent = dict(headers)
    arguments, metadata = _object(body, "vllm_xargs"), _object(body, "metadata")
    names = [
        *(_value(body, name) for name in _FIELDS),
        *(arguments.get(name) for name in _ARGUMENTS),
        *(sent.get(name, b"").decode("latin-1") for name in _HEADERS),
        metadata.get("user_id"),
    ]
    name = next((text for text in names if isinstance(text, str) and text), None)
    if name is None:
        return None
    owner = [_value(body, field) for field in ("model", "cache_salt")]
    return hashlib.blake2b(msgspec.json.encode([*owner, name]), digest_size=16).hexdigest()


def _object(body: Mapping[str, msgspec.Raw], name: str) -> dict[str, Any]:
    value = _value(body, name, dict[str, Any])
    return value if isinstance(value, dict) else {}


def _value(body: Mapping[str, msgspec.Raw], name: str, form: Any = str) -> Any:
    """A field's value; None where it is missing or of another kind, which is for a server to say."""
    try:
        return msgspec.json.decode(body[name], type=form) if name in body else None
    except (msgspec.DecodeError, RecursionError):
        return None
