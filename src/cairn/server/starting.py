"""What a server says before it can serve: it listens from the first moment, and answers 503 while the engine starts."""

from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from cairn.errors import Overloaded
from cairn.http.failures import error_response
from cairn.http.unread import UnreadBodies

_PROBES = frozenset({"/health", "/ping", "/ready"})


class Stage:
    """An application in two acts: until `show`, one that has nothing to tell, then the one that it is given."""

    def __init__(self) -> None:
        self._app: ASGIApp = UnreadBodies(_starting)

    def show(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)


async def _starting(scope: Scope, receive: Receive, send: Send) -> None:
    text = "the server is starting: the model is being loaded"
    response: Response = error_response(Overloaded(f"{text}; try again later"))
    if scope["path"] in _PROBES:
        response = JSONResponse({"status": text}, 503)
    await response(scope, receive, send)
