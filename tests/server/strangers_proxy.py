"""A proxy by somebody who has read the protocol's page on the HTTP flow, and nothing else: P first, then D."""

import contextlib

import httpx
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

NOT_FOR_P = ("stream_options", "min_tokens", "min_completion_tokens")
ADDRESS = ("remote_engine_id", "remote_block_ids", "remote_host", "remote_port")


def create_app(prefill: str, decode: str) -> Starlette:
    """In front of two base URLs."""
    client = httpx.AsyncClient(timeout=60, trust_env=False, verify=False)

    async def generate(request):
        body, path = await request.json(), request.url.path
        headers = {name: request.headers[name] for name in ("x-request-id", "authorization") if name in request.headers}
        asks_p = {name: value for name, value in body.items() if name not in NOT_FOR_P}
        asks_p |= {"stream": False, "max_tokens": 1}
        asks_p |= {"max_completion_tokens": 1} if "max_completion_tokens" in body else {}
        asks_p["kv_transfer_params"] = {"do_remote_decode": True, "do_remote_prefill": False} | dict.fromkeys(ADDRESS)
        reply = await client.post(prefill + path, json=asks_p, headers=headers)
        if reply.status_code != 200:
            return Response(reply.content, reply.status_code, media_type="application/json")
        asks_d = body | {"kv_transfer_params": reply.json()["kv_transfer_params"]}
        to_d = client.build_request("POST", decode + path, json=asks_d, headers=headers)
        answer = await client.send(to_d, stream=True)
        kind, close = answer.headers["content-type"], BackgroundTask(answer.aclose)
        return StreamingResponse(answer.aiter_raw(), answer.status_code, media_type=kind, background=close)

    @contextlib.asynccontextmanager
    async def lifespan(app):
        async with client:
            yield

    paths = ("/v1/completions", "/v1/chat/completions")
    return Starlette(routes=[Route(path, generate, methods=["POST"]) for path in paths], lifespan=lifespan)
