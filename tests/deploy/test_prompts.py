"""The names of a prompt's blocks in the ingress are those of the prompt that a server's engine gets."""

import asyncio
import json

import pytest

from cairn.cache.events import BlockNames, block_hash, root_digest
from cairn.cache.sequence_blocks import Namespace
from cairn.deploy.ray.exchange import AsgiExchange, RelayedRequest
from cairn.deploy.ray.prompts import create_prompt_reader
from cairn.deploy.ray.settings import load_ray_settings
from cairn.engine.contract import CacheInfo, EngineInfo
from cairn.engine.text.tokenizer import ModelTokenizer
from cairn.errors import ModelError, QueueFull
from cairn.proxy.prefixes import routed_request
from cairn.proxy.protocol import parse_body
from cairn.routing.rule import RoutedRequest
from cairn.server.app import create_app
from cairn.server.options import ServerLimits
from cairn.server.service import Service

BLOCK = 16
JSON = [(b"content-type", b"application/json")]
TEXT = "one two three four five six seven " * 12
CHAT = [{"role": "system", "content": TEXT}, {"role": "user", "content": "hello"}]
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
KWARGS = {"enable_thinking": False}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


class CapturingEngine:
    """Remembers what it is asked to generate, and is full."""

    dead = None

    def __init__(self, folder, vocab_size=1 << 20):
        cache = CacheInfo(
            block_size=BLOCK,
            num_pages=10,
            page_bytes=1,
            bytes_per_token=1.0,
            checkpoint_bytes=1,
            pages_per_checkpoint=1,
            min_cacheable_tokens=1,
            mamba_cache_mode="auto",
            enable_prefix_caching=True,
        )
        self.info = EngineInfo(
            model="m",
            architecture="a",
            dtype="float32",
            vocab_size=vocab_size,
            max_model_len=8192,
            max_num_seqs=8,
            exact=False,
            cache=cache,
        )
        self.tokenizer = ModelTokenizer(folder)
        self.requests = []

    async def generate(self, *requests, **options):
        self.requests += requests
        raise QueueFull("full")
        yield


@pytest.fixture(scope="module")
def settings(tiny_model):
    return load_ray_settings({"model": str(tiny_model), "max_model_len": 8192, "block_size": BLOCK})


@pytest.fixture(scope="module")
def engine(tiny_model):
    return CapturingEngine(tiny_model)


def names_in_the_engine(engine, settings, path, body):
    async def ask():
        app = create_app(Service(engine, settings, ServerLimits()))
        request = RelayedRequest("POST", path, path.encode(), b"", JSON, None, body=json.dumps(body).encode())
        return [item async for item in AsgiExchange(app, request).run()]

    engine.requests.clear()
    (head,) = asyncio.run(ask())
    assert head.status == 429, head
    request = engine.requests[0]
    chain = BlockNames(BLOCK).chain(root_digest(Namespace(cache_salt=request.cache_salt)), request.prompt)
    return tuple(map(block_hash, chain)), len(request.prompt) // 8


def read(settings, path, body, **options):
    async def run():
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return await create_prompt_reader(settings, **options).read(path, content)

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": TEXT}),
        ("/v1/completions", {"prompt": TEXT, "cache_salt": "s1"}),
        ("/v1/completions", {"prompt": list(range(5, 105)), "truncate_prompt_tokens": 50}),
        ("/v1/completions", {"prompt": [TEXT, "another"]}),
        ("/v1/chat/completions", {"messages": CHAT}),
        (
            "/v1/chat/completions",
            {"messages": CHAT, "tools": [TOOL], "chat_template_kwargs": KWARGS},
        ),
        ("/v1/messages", {"model": "m", "max_tokens": 5, "system": TEXT, "messages": CHAT[1:]}),
        ("/v1/responses", {"input": "hello", "instructions": TEXT}),
        ("/v1/responses", {"input": [{"type": "message", "role": "user", "content": TEXT}]}),
    ],
)
def test_blocks_have_the_names_of_those_in_the_engine(settings, engine, path, body):
    if path == "/v1/messages":
        body = {**body, "model": settings.model}
    hashes, num_tokens = names_in_the_engine(engine, settings, path, body)
    found = read(settings, path, body)
    assert (tuple(found.block_hashes), found.block_ends, found.num_tokens) == (hashes, BLOCK, num_tokens)
    assert len(hashes) >= 3


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt_cache_key": "s"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [IMAGE]}], "prompt_cache_key": "s"}),
        ("/v1/chat/completions", {"messages": "none"}),
        ("/v1/completions", b"\xff{"),
        ("/v1/models", b""),
    ],
)
def test_what_cannot_be_read_has_no_names(settings, path, body):
    found = read(settings, path, body)
    assert (tuple(found.block_hashes), found.num_tokens) == ((), 0)


@pytest.mark.parametrize("more", [{"prompt_cache_key": "s1"}, {"vllm_xargs": {"session_id": "s1"}}])
@pytest.mark.parametrize("salt", [{}, {"cache_salt": "t1"}])
def test_a_session_has_the_name_that_it_has_in_cairn_proxy(settings, more, salt):
    body = {"messages": CHAT, **more}
    session = read(settings, "/v1/chat/completions", body | salt).session
    assert session is not None
    assert session == routed_request(parse_body(json.dumps(body | salt).encode()), None).session
    assert session != read(settings, "/v1/chat/completions", body | {"cache_salt": "t2"}).session


def test_a_session_stays_where_its_images_cannot_be_read(settings):
    body = {"messages": [{"role": "user", "content": [IMAGE]}], "prompt_cache_key": "s1"}
    assert read(settings, "/v1/chat/completions", body).session is not None


def test_a_prompt_with_images_has_the_names_of_what_comes_before_the_first(settings):
    text = {"type": "text", "text": TEXT}
    after = [{"role": "assistant", "content": "a flower"}, {"role": "user", "content": TEXT}]
    images = [*CHAT[:1], {"role": "user", "content": [text, IMAGE, text, IMAGE]}, *after]
    plain = [*CHAT[:1], {"role": "user", "content": [text]}]
    found, alone = (read(settings, "/v1/chat/completions", {"messages": one}) for one in (images, plain))
    assert len(found.block_hashes) > 8
    assert (found.block_hashes, found.num_tokens) == (alone.block_hashes, alone.num_tokens)
    beside = read(settings, "/v1/chat/completions", {"messages": [*CHAT[:1], {"role": "user", "content": [IMAGE]}]})
    system = read(settings, "/v1/chat/completions", {"messages": CHAT[:1]})
    assert beside.block_hashes == system.block_hashes and len(system.block_hashes) > 4


def test_no_more_prompts_are_read_at_once_than_there_is_room_for(settings):
    async def run():
        reader = create_prompt_reader(settings)
        content = json.dumps({"prompt": TEXT}).encode()
        return await asyncio.gather(*(reader.read("/v1/completions", content) for _ in range(70)))

    found = asyncio.run(run())
    assert sum(bool(one.block_hashes) for one in found) == 64


def test_a_prompt_that_takes_too_long_has_no_names(settings):
    async def run():
        reader = create_prompt_reader(settings)
        reader._seconds = 0.0
        return await reader.read("/v1/completions", json.dumps({"prompt": TEXT}).encode())

    assert tuple(asyncio.run(run()).block_hashes) == RoutedRequest().block_hashes


def test_a_folder_without_a_tokenizer_is_named(tmp_path):
    with pytest.raises(ModelError, match=r"tokenizer\.json: missing"):
        create_prompt_reader(load_ray_settings({"model": str(tmp_path)}))


@pytest.mark.parametrize(
    ("prompt", "num_runs"),
    [([20] * 64, 0), (TEXT[:100], 1), ([20] * 4_000, 2)],
    ids=["small ids: at once", "small text: to be tokenized", "large ids: parsed and named"],
)
def test_small_bodies_do_not_wait_for_a_thread(settings, monkeypatch, prompt, num_runs):
    reader, runs = create_prompt_reader(settings), []
    tokenizer = reader._renderer.tokenizer
    run = tokenizer.run

    async def counted(work):
        runs.append(work)
        return await run(work)

    monkeypatch.setattr(tokenizer, "run", counted)
    content = json.dumps({"model": "m", "prompt": prompt}).encode()
    found = asyncio.run(reader.read("/v1/completions", content))
    assert found.num_tokens > 0 and len(runs) == num_runs
