"""What a proxy and the servers behind it tell each other of a prompt that is handed over, beside the client's fields.

A prefill server is asked for one token, and not for a stream, whatever it is: that is how servers of other makes are
asked, too. The client's own values of the fields that are replaced, or left out, go along in CLIENT_FIELDS of
`kv_transfer_params`, and the prefill server puts them back: so it refuses what the decode server would refuse, before
it computes anything.
"""

import re
from collections.abc import Mapping
from typing import Any

CLIENT_FIELDS = "cairn_client_fields"

RELEASE_KEY = "cairn_release_key"
"""In `kv_transfer_params` of a request to a prefill server: 32 hexadecimal digits that only its sender knows. By them
the sender lets go of a prompt whose answer it has not waited for: it does not know what that is called."""

REPLACED_FIELDS = frozenset(
    (
        *("max_tokens", "max_completion_tokens", "max_output_tokens", "min_tokens", "min_completion_tokens", "n"),
        *("stream", "stream_options", "echo", "logprobs", "top_logprobs", "prompt_logprobs", "include"),
        *("background", "store"),
    )
)
"""Fields of a client that say how it is answered: a prefill server answers with one token that nobody reads."""

RELEASE_PATH = "/release_kv_transfer"
"""Where a server is told that what it, or another server, has handed over is not fetched by anybody."""


ITEM_ID = "(?:msg|rs|fc|ctc|lsh|in)_([0-9a-f]{32})_[0-9]+"
"""Of an item of a stored response, with the response's own. `in`: of an input; the others are of answers."""

_KEY = re.compile("[0-9a-f]{32}")


def restore_client_fields(body: Any) -> Any:
    """The body of a request as its client sent it, if a proxy has put fields aside; else the body itself. An empty
    CLIENT_FIELDS stays behind."""
    params = body.get("kv_transfer_params") if isinstance(body, Mapping) else None
    if not isinstance(params, Mapping) or params.get("do_remote_decode") is not True:
        return body
    given = params.get(CLIENT_FIELDS)
    if not isinstance(given, Mapping):
        return body
    kept = {name: value for name, value in body.items() if name not in REPLACED_FIELDS}
    fields = {name: value for name, value in given.items() if name in REPLACED_FIELDS}
    return kept | fields | {"kv_transfer_params": {**params, CLIENT_FIELDS: {}}}


def find_release_key(params: Mapping[str, Any]) -> str | None:
    """The sender's key among a request's `kv_transfer_params`; None for none, and for what is no key."""
    key = params.get(RELEASE_KEY)
    return key if isinstance(key, str) and _KEY.fullmatch(key) else None
