"""The page at `GET /cache/ui`: three files beside this one, put together at start-up. It asks nobody but its own server
for anything, and its content security policy says so."""

import base64
import hashlib
from dataclasses import dataclass
from importlib.resources import files


@dataclass(frozen=True, slots=True)
class CachePage:
    """One HTML document, and the headers that it is sent with."""

    body: bytes
    headers: dict[str, str]


def cache_page() -> CachePage:
    """The document, with its style and its script inside and allowed by their digests."""
    folder = files(__name__)
    style, script = folder.joinpath("page.css").read_text("utf-8"), folder.joinpath("page.js").read_text("utf-8")
    document = folder.joinpath("page.html").read_text("utf-8")
    document = document.replace("/*STYLE*/", style).replace("/*SCRIPT*/", script)
    policy = "; ".join(
        (
            "default-src 'none'",
            f"script-src '{_digest(script)}'",
            f"style-src '{_digest(style)}'",
            "connect-src 'self'",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        )
    )
    headers = {
        "Content-Security-Policy": policy,
        "Cache-Control": "no-store",
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
    }
    return CachePage(document.encode(), headers)


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
