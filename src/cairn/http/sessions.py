"""What names a session: requests of one conversation belong together, whatever their prompts say."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
from starlette.types import Scope

_SCOPE_KEY = "cairn.session"

_FIELDS = ("prompt_cache_key", "session_id")
_ARGUMENTS = ("session_id", "prompt_cache_key")
"""Of `vllm_xargs`."""
SESSION_HEADERS = (b"x-session-affinity", b"x-claude-code-session-id", b"session-id", b"session_id", b"x-session-id")
"""Codex, Claude Code, OpenCode and gateways each have a header of their own."""


def record_session(scope: Scope, body: Mapping[str, Any]) -> None:
    """Note the session of a request with this body, which has been decoded and not been checked."""
    scope[_SCOPE_KEY] = name_session(body, scope["headers"])


def get_session(scope: Scope) -> str:
    """The name of a request's session; empty where it has none."""
    return scope.get(_SCOPE_KEY) or ""


def session_name(body: Mapping[str, msgspec.Raw], headers: Iterable[tuple[bytes, bytes]]) -> str | None:
    """`name_session` of a body whose fields have not been decoded."""
    objects = {name: _decode(body, name, dict[str, Any]) for name in ("vllm_xargs", "metadata")}
    return name_session(objects | {name: _decode(body, name) for name in (*_FIELDS, "model", "cache_salt")}, headers)


def name_session(body: Mapping[str, Any], headers: Iterable[tuple[bytes, bytes]]) -> str | None:
    """The name of a request's session, 32 hexadecimal digits; None where it has none. Each model and `cache_salt` has
    its own. `headers`: with names in lower case.

    The first of these that is a text counts: `prompt_cache_key`, `session_id`, those two in `vllm_xargs`, the headers,
    and last `metadata.user_id`, in which Claude Code has its session. It says who asks together, and nothing else: what
    a client may see depends on its prompt and its salt alone.
    """
    sent = dict(headers)
    given = (body.get(name) for name in ("vllm_xargs", "metadata"))
    arguments, metadata = (value if isinstance(value, Mapping) else {} for value in given)
    names = [
        *(body.get(name) for name in _FIELDS),
        *(arguments.get(name) for name in _ARGUMENTS),
        *(sent.get(name, b"").decode("latin-1") for name in SESSION_HEADERS),
        metadata.get("user_id"),
    ]
    name = next((text for text in names if isinstance(text, str) and text), None)
    if name is None:
        return None
    owner = [value if isinstance(value, str) else None for value in map(body.get, ("model", "cache_salt"))]
    # escaped, as half a surrogate pair, which some decoders let through, has no bytes of its own
    return hashlib.blake2b(json.dumps([*owner, name]).encode(), digest_size=16).hexdigest()


def _decode(body: Mapping[str, msgspec.Raw], name: str, form: Any = str) -> Any:
    """A field's value; None where it is missing or of another kind, which is for a server to say."""
    try:
        return msgspec.json.decode(body[name], type=form) if name in body else None
    except (msgspec.DecodeError, RecursionError):
        return None
