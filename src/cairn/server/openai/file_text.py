"""The text of a file that a client sends as a part of a message. Files of anything but text are not read."""

import base64
import binascii
import re
from urllib.parse import unquote_to_bytes

from pydantic_core import PydanticCustomError

NO_TEXT_FILE = "no_text_file"
"""pydantic's error type for a file that is not read."""

_HEAD = re.compile(r"data:([\w.+/-]{0,128})((?:;[^,;]{0,128}){0,8}),", re.IGNORECASE)
_TYPE = re.compile(r"(text/.*|application/(.*\+)?(json|xml|yaml|toml|javascript|typescript))?", re.IGNORECASE)


def read_file_text(data: str | None, name: str | None = None) -> str:
    """The text of a file, after its name where it has one. `data`: a data URL of a type that is text, or UTF-8 in
    base64. Raises PydanticCustomError for anything else."""
    if data is None:
        raise _refusal("needs file_data or a file_url that is a data URL: files are kept nowhere here")
    head = _HEAD.match(data)
    if head is None and data[:16].partition(":")[1]:
        raise _refusal("must be a data URL, or base64: files are fetched from nowhere")
    if head is not None and not _TYPE.fullmatch(head[1]):
        raise _refusal(f"must be a file of text, not of the type {head[1]}")
    try:
        if head is None or head[2].lower().endswith(";base64"):
            content = base64.b64decode(data[0 if head is None else head.end() :], validate=True)
        else:
            content = unquote_to_bytes(data[head.end() :])
        return title_text(name, content.decode())
    except (binascii.Error, ValueError):
        raise _refusal("must be a file of text: UTF-8, in base64 or as a data URL") from None


def title_text(title: str | None, text: str) -> str:
    """A document's text after what it is called."""
    return f"{title}\n\n{text}" if title else text


def _refusal(message: str) -> PydanticCustomError:
    return PydanticCustomError(NO_TEXT_FILE, message)
