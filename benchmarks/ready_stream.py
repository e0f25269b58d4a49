"""Streams of events that are ready-made, from the web server that cairn uses: what no server of this kind can go below.

    python -m benchmarks.ready_stream SECONDS

It answers each POST with as many events as the body's `max_tokens`, one every SECONDS and those of all streams at once,
as an engine's steps would bring them; the last one says how many there were. `benchmarks.step_overhead` starts it.
"""

import asyncio
import json
import sys

from starlette.types import Message, Receive, Scope, Send

from cairn.http.middleware import read_body
from cairn.http.web_server import create_server_socket, create_web_server

__all__ = ["PACE_SECONDS", "serve"]

PACE_SECONDS = 0.05
BODY_BYTES, BODY_SECONDS = 1 << 20, 10.0
EVENT = (
    b'data: {"id":"cmpl-00000000000000000000000000000000","object":"text_completion","created":1700000000,'
    b'"model":"none","choices":[{"index":0,"text":" word","logprobs":null,"finish_reason":null,"stop_reason":null,'
    b'"prompt_token_ids":null,"token_ids":null}]}\n\n'
)


class Metronome:
    """Wakes all that wait for it at the same time."""

    def __init__(self) -> None:
        self._waiting: list[asyncio.Future[None]] = []

    def wait(self) -> "asyncio.Future[None]":
        self._waiting.append(asyncio.get_running_loop().create_future())
        return self._waiting[-1]

    async def run(self, seconds: float) -> None:
        """Until it is cancelled."""
        while True:
            await asyncio.sleep(seconds)
            waiting, self._waiting = self._waiting, []
            for future in waiting:
                if not future.done():
                    future.set_result(None)


def _body(data: bytes, *, more_body: bool) -> Message:
    return {"type": "http.response.body", "body": data, "more_body": more_body}


async def serve(seconds: float) -> None:
    """Until it is cancelled. Says where it listens once it does."""
    metronome = Metronome()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        fields = [(b"content-type", b"text/event-stream")]
        start = {"type": "http.response.start", "status": 200, "headers": fields}
        body = await read_body(receive, BODY_BYTES, BODY_SECONDS)
        num_events = json.loads(body)["max_tokens"] if body else 0
        await send(start)
        for _ in range(num_events):
            await metronome.wait()
            await send(_body(EVENT, more_body=True))
        usage = json.dumps({"usage": {"completion_tokens": num_events}}).encode()
        await send(_body(b"data: " + usage + b"\n\ndata: [DONE]\n\n", more_body=False))

    listener = create_server_socket("127.0.0.1", 0)
    server = create_web_server(app, forwarded_allow_ips=(), lifespan="off", log_level="warning")
    print(f"serving ready-made events on http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
    ticking = asyncio.create_task(metronome.run(seconds))
    await server.serve([listener])
    ticking.cancel()


if __name__ == "__main__":
    asyncio.run(serve(float(sys.argv[1])))
