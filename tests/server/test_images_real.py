"""Images over HTTP into a real tiny model in a process of its own."""

import base64
import io
import os
import socket
import subprocess
import sys
import time

import httpx
import numpy as np
import openai
import pytest
from PIL import Image

START_SECONDS = 90


@pytest.fixture(scope="module")
def client(tiny_vl_model, tmp_path_factory):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = tmp_path_factory.mktemp("images") / "log"
    command = [sys.executable, "-m", "cairn", "serve", str(tiny_vl_model), "--port", str(port)]
    command += ["--served-model-name", "tiny", "--kv-cache-memory-bytes", "64MiB", "--max-num-seqs", "4"]
    with log.open("wb") as out:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        process = subprocess.Popen(command, stdout=out, stderr=out, env=environment)
    http = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60)
    try:
        deadline = time.monotonic() + START_SECONDS
        while True:
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()
            try:
                if http.get("/health").status_code == 200:
                    break
            except httpx.TransportError:
                pass
            time.sleep(0.1)
        yield http
    finally:
        http.close()
        process.terminate()
        assert process.wait(30) == 0, log.read_text()


def uri(seed, kind="PNG", size=(160, 96), **options):
    rgb = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    out = io.BytesIO()
    Image.fromarray(rgb).save(out, kind, **options)
    return f"data:image/{kind.lower()};base64,{base64.b64encode(out.getvalue()).decode()}"


def image(*arguments, **options):
    return {"type": "image_url", "image_url": {"url": uri(*arguments, **options)}}


def text(value):
    return {"type": "text", "text": value}


def chat(client, *parts, **fields):
    body = {"model": "tiny", "messages": [{"role": "user", "content": list(parts)}], "max_tokens": 4, "temperature": 0}
    return client.post("/v1/chat/completions", json=body | fields)


def cache_of(response):
    assert response.status_code == 200, response.text
    return response.json()["cairn"]["cache"]


def metric(client, start):
    return sum(
        float(line.rsplit(" ", 1)[1]) for line in client.get("/metrics").text.splitlines() if line.startswith(start)
    )


QUESTION = "What do these images show, and in which order were they taken? " * 4


@pytest.mark.more
def test_the_same_pixels_hit_whatever_their_url(client):
    first = chat(client, image(1), image(2), text(QUESTION))
    assert cache_of(first)["cached_tokens"] == 0
    again = chat(client, image(1, "WEBP", lossless=True), image(2, compress_level=1), text(QUESTION))
    report = cache_of(again)
    assert report["cached_tokens"] == report["prompt_tokens"] > 30
    assert again.json()["choices"][0]["message"] == first.json()["choices"][0]["message"]
    other = cache_of(chat(client, image(3), image(2), text(QUESTION)))
    assert other["cached_tokens"] < 15
    assert metric(client, "cairn:images_encoded_total") == 3


@pytest.mark.more
def test_a_request_says_how_large_its_images_are_seen(client):
    """Other sizes are other images to the cache; the same size by another name is the same one."""
    small = {"mm_processor_kwargs": {"max_pixels": 64 * 64}}
    plain = cache_of(chat(client, image(11), text(QUESTION)))
    first = chat(client, image(11), text(QUESTION), **small)
    assert cache_of(first)["prompt_tokens"] < plain["prompt_tokens"] and cache_of(first)["cached_tokens"] < 15
    again = chat(client, image(11), text(QUESTION), mm_processor_kwargs={"size": {"longest_edge": 64 * 64}})
    assert cache_of(again)["cached_tokens"] == cache_of(first)["prompt_tokens"]
    assert again.json()["choices"][0]["message"] == first.json()["choices"][0]["message"]
    body = {"messages": [{"role": "user", "content": [image(11), text(QUESTION)]}]}
    assert client.post("/tokenize", json=body | small).json()["count"] == cache_of(first)["prompt_tokens"]
    for wrong in ({"fps": 2}, {"max_pixels": 0}, {"min_pixels": 1 << 25}, {"max_pixels": 100, "min_pixels": 200}):
        refused = chat(client, image(11), text(QUESTION), mm_processor_kwargs=wrong)
        assert refused.status_code == 400 and "mm_processor_kwargs" in refused.json()["error"]["message"]


@pytest.mark.more
def test_a_stream_by_openais_client(client):
    sdk = openai.OpenAI(base_url=f"{client.base_url}/v1", api_key="none", max_retries=0, timeout=60)
    messages = [{"role": "user", "content": [image(4), text("Describe it.")]}]
    pieces = list(sdk.chat.completions.create(model="tiny", messages=messages, max_tokens=5, stream=True))
    assert pieces[-1].choices[0].finish_reason in ("length", "stop")


@pytest.mark.more
@pytest.mark.parametrize("marker", ["<|image_pad|>", "<|vision_start|><|image_pad|><|vision_end|>", "<|video_pad|>"])
def test_placeholders_typed_as_text(client, marker):
    response = chat(client, text("see"), text(f"this {marker} one"), image(1))
    assert response.status_code == 400
    assert response.json()["error"]["message"].startswith("messages[0].content[1]")


@pytest.mark.more
def test_bad_images_leave_nothing_behind(client):
    wrong = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGVsbG8="}}
    local = {"type": "image_url", "image_url": {"url": f"{client.base_url}/metrics"}}
    metadata = {"type": "input_image", "image_url": "http://169.254.169.254/latest/meta-data/"}
    for parts, index in (([text("x"), wrong], 1), ([local], 0), ([image(1), metadata], 1), ([image(1)] * 50, 16)):
        response = chat(client, *parts)
        assert response.status_code == 400, response.text
        assert response.json()["error"]["message"].startswith(f"messages[0].content[{index}]")
    assert cache_of(chat(client, text("still there")))["prompt_tokens"] > 0
    assert metric(client, "vllm:num_requests_running") == metric(client, "cairn:held_pages") == 0


@pytest.mark.more
def test_a_large_image_goes_through_the_engines_wire(client):
    """3 million pixels are resized to what the processor takes, 1,024 tokens at most."""
    rgb = np.zeros((1500, 2000, 3), np.uint8)
    rgb[::7] = 200
    out = io.BytesIO()
    Image.fromarray(rgb).save(out, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(out.getvalue()).decode()}"
    part = {"type": "image_url", "image_url": {"url": url}}
    report = cache_of(chat(client, part, text("How large is it?")))
    assert 900 < report["prompt_tokens"] < 1060
