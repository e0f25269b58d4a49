"""Which server a prompt belongs to: prompts that begin alike belong to the same one."""

import hashlib
import struct
from collections.abc import Sequence
from typing import Any

import msgspec

from cairn.proxy.protocol import Body, text_field


def affinity_key(body: Body, limit: int) -> bytes:
    """A digest of what a request shares with others, of at most `limit` bytes of its prompt.

    The client's `prompt_cache_key` is taken where there is one. Of a chat it is the messages up to the first of the
    user: they stay the same from turn to turn, however short they are.
    """
    hasher = hashlib.blake2b(digest_size=16)
    given = text_field(body, "prompt_cache_key")
    parts = [text_field(body, "model"), text_field(body, "cache_salt"), given]
    beginning = b"" if given else _beginning(body)[:limit]
    for part in (*(part.encode(errors="surrogatepass") for part in parts), beginning):
        hasher.update(struct.pack("<Q", len(part)))
        hasher.update(part)
    return hasher.digest()


def ranked(key: bytes, names: Sequence[str]) -> list[str]:
    """The names in this key's order of preference: when one goes, only the keys that had it first move.

    Rendezvous hashing (Thaler and Ravishankar, "Using name-based mappings to increase hit rates", 1998).
    """
    return sorted(names, key=lambda name: hashlib.blake2b(name.encode(), key=key, digest_size=8).digest())


def prompt_bytes(body: Body) -> tuple[bytes, int]:
    """A completion's prompt as bytes, and how many of them make one unit: 1 for text, 8 for token ids.

    A list with exactly one prompt is that prompt. Raises ValueError for anything else.
    """
    prompt = _decoded(body.get("prompt"))
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return prompt.encode(errors="surrogatepass"), 1
    if isinstance(prompt, list) and all(type(token) is int for token in prompt):
        try:
            return struct.pack(f"<{len(prompt)}q", *prompt), 8
        except struct.error:
            pass
    raise ValueError("neither text nor token ids")


def is_batch(body: Body) -> bool:
    """Whether these are several prompts in one request, which cannot be handed over. What cannot be read is no batch: a
    server will say what is wrong with it."""
    try:
        prompt = _decoded(body.get("prompt"))
    except ValueError:
        return False
    return isinstance(prompt, list) and len(prompt) > 1 and isinstance(prompt[0], str | list)


def message_bytes(message: dict[str, Any]) -> bytes:
    """A message in one form, whichever way a client writes it: nulls left out, text parts joined."""
    content = message.get("content")
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        content = "".join(str(part.get("text", "")) for part in content)
    rest = {name: message[name] for name in ("name", "tool_calls", "tool_call_id") if message.get(name)}
    return msgspec.json.encode([message.get("role"), content or "", rest])


def _beginning(body: Body) -> bytes:
    try:
        if "messages" not in body:
            return prompt_bytes(body)[0]
        parts: list[bytes] = []
        for message in msgspec.json.decode(body["messages"], type=list[dict[str, Any]]):
            parts.append(message_bytes(message))
            if message.get("role") == "user":
                break
        return b"\n".join(parts)
    except (ValueError, RecursionError):
        return b""


def _decoded(value: msgspec.Raw | None) -> Any:
    """Raises ValueError, also for numbers that are too large and what is nested too deeply."""
    try:
        return None if value is None else msgspec.json.decode(value)
    except RecursionError:
        raise ValueError("nested too deeply") from None
