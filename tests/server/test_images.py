"""Images in chat requests over HTTP: what is taken, what the engine gets, and what becomes of everything else."""

import base64
import contextlib
import http.client
import inspect
import io
import json
import struct
import threading
import zlib

import httpx
import numpy as np
import pytest
from fastapi import FastAPI, Request
from fastapi.responses import RedirectResponse, Response, StreamingResponse
from PIL import Image

from cairn.server.images import MediaConnector
from cairn.server.images.fetch import ImageFetcher
from cairn.server.images.named import NamedImages
from cairn.server.options import ImageOptions
from doubles.byte_tokenizer import ByteTokenizer

IMAGE_TOKENS = 5
HOST = "pictures.example"
PUBLIC = "203.0.112.7"
LIMITS = ImageOptions(limit=8, max_bytes=1 << 20, max_pixels=1 << 16, max_request_pixels=3 << 15, fetch_seconds=2.0)


class Names:
    """A resolver of given names; an address stands for itself."""

    def __init__(self):
        self.known = {HOST: [PUBLIC], "two.example": [PUBLIC, "10.0.0.1"], "inner.example": ["192.168.1.5"]}
        self.asked = []

    async def addresses(self, host, port):
        self.asked.append(host)
        if host in self.known:
            return self.known[host]
        if host[0].isdigit() or ":" in host:
            return [host]
        raise OSError("no such name")


class Detour(httpx.AsyncBaseTransport):
    """What is sent to the public address goes to a server on loopback; anything else is noted and not sent."""

    def __init__(self):
        self.inner = httpx.AsyncHTTPTransport(trust_env=False, limits=httpx.Limits(max_keepalive_connections=0))
        self.port = None
        self.elsewhere = []
        self.requests = []

    async def handle_async_request(self, request):
        if request.url.host != PUBLIC:
            self.elsewhere.append(str(request.url))
            raise httpx.ConnectError("the test sends nothing there")
        self.requests.append(request)
        request.url = request.url.copy_with(scheme="http", host="127.0.0.1", port=self.port)
        return await self.inner.handle_async_request(request)

    async def aclose(self):
        await self.inner.aclose()


def pixels(width=6, height=4, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def packed(array=None, kind="PNG", **options):
    out = io.BytesIO()
    Image.fromarray(pixels() if array is None else array).save(out, kind, **options)
    return out.getvalue()


def uri(data, kind="image/png"):
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def part(url, form="image_url"):
    return {"type": form, "image_url": url if form == "input_image" else {"url": url, "detail": "high"}}


def chat(*parts, role="user"):
    return {"messages": [{"role": role, "content": list(parts)}], "max_tokens": 1}


class Outside:
    """A web server of pictures and of trouble."""

    def __init__(self):
        self.app = FastAPI()
        self.answers = {}
        self.seen = []
        self.release = threading.Event()
        self.app.add_api_route("/{path:path}", self._answer, methods=["GET"])

    def _answer(self, request: Request, path: str):
        self.seen.append((path, dict(request.headers)))
        answer = self.answers[path]
        return answer(self) if inspect.isfunction(answer) else answer


def image_answer(data=None, kind="image/png", **headers):
    return Response(packed() if data is None else data, media_type=kind, headers=headers)


def with_images(kind, options, names, transport, others=None, **config):
    return kind(
        options={"images": options} | (others or {}),
        tokenizer=ByteTokenizer(IMAGE_TOKENS),
        images=lambda given: MediaConnector(given, ImageFetcher(given, names, transport)),
        **config,
    )


@pytest.fixture
def other(world, running_server):
    """Starts one more server, with other options, and another way out if need be."""
    started = []

    def start(options, transport=None, others=None, **config):
        transport = transport or Detour()
        transport.port = world.detour.port
        started.append(with_images(running_server, options, world.names, transport, others, **config))
        return started[-1]

    yield start
    for server in started:
        server.drain()
        assert server.join() == 0


@pytest.fixture(scope="module")
def world(running_server, running_app):
    """A server whose model reads images, and the web around it."""
    names, detour, outside = Names(), Detour(), Outside()
    running = running_app(outside.app)
    detour.port = int(running.url.rpartition(":")[2])
    server = with_images(running_server, LIMITS, names, detour)
    server.names, server.detour, server.outside = names, detour, outside
    yield server
    outside.release.set()
    server.drain()
    assert server.join() == 0
    running.end()


@pytest.fixture(autouse=True)
def nothing_is_left(world):
    world.detour.elsewhere.clear()
    world.detour.requests.clear()
    yield
    assert world.post("/v1/chat/completions", chat({"type": "text", "text": "still there"})).status_code == 200
    world.assert_nothing_is_held()
    assert world.detour.elsewhere == [], "something was sent to an address that is not public"


def taken(server, body):
    """The images that the engine was given for a request."""
    response = server.post("/v1/chat/completions", body)
    assert response.status_code == 200, response.text
    return server.requests[-1].images


def refused(server, body, where="messages[0].content[0]"):
    before = len(server.requests)
    response = server.post("/v1/chat/completions", body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["code"] == 400 and error["param"] == "messages"
    assert error["message"].startswith(where), error["message"]
    assert len(server.requests) == before, "the engine was asked all the same"
    return error["message"]


def rgb(image):
    return np.frombuffer(image.rgb, np.uint8).reshape(image.height, image.width, 3)


# -- what is taken ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "made",
    [
        part(uri(packed())),
        part(uri(packed()), "input_image"),
        {"type": "input_image", "image_url": {"url": uri(packed())}},
        part(uri(packed()).replace("data:image/png", "DATA:IMAGE/PNG")),
        part(uri(packed(), "image/jpeg")),  # clients often say so of anything
    ],
)
def test_every_form_of_an_image_part(world, made):
    image, *others = taken(world, chat({"type": "text", "text": "look: "}, made))
    assert not others and (rgb(image) == pixels()).all()
    assert (image.start, image.length) == (len("look: ") + 1 + len("user\n"), IMAGE_TOKENS)


@pytest.mark.parametrize(
    ("kind", "options"), [("PNG", {}), ("WEBP", {"lossless": True}), ("GIF", {}), ("JPEG", {"quality": 95})]
)
def test_every_format_is_decoded_as_pillow_does(world, kind, options):
    data = packed(kind=kind, **options)
    (image,) = taken(world, chat(part(uri(data, f"image/{kind.lower()}"))))
    assert (rgb(image) == np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))).all()


def test_images_of_several_messages_in_order(world):
    pictures = [pixels(seed=seed) for seed in range(4)]
    parts = [part(uri(packed(picture))) for picture in pictures]
    text = {"type": "text", "text": "and"}
    messages = [
        {"role": "user", "content": [parts[0], text, parts[1]]},
        {"role": "assistant", "content": "two"},
        {"role": "user", "content": [text, parts[2], parts[3]]},
    ]
    images = taken(world, {"messages": messages, "max_tokens": 1})
    assert all((rgb(image) == picture).all() for image, picture in zip(images, pictures, strict=True))
    assert [image.start for image in images] == sorted(image.start for image in images)


def test_a_prompt_with_images_is_not_cut(world):
    body = chat(part(uri(packed())))
    length = world.post("/tokenize", {"messages": body["messages"]}).json()["count"]
    assert len(taken(world, body | {"truncate_prompt_tokens": length})) == 1
    before = len(world.requests)
    answer = world.post("/v1/chat/completions", body | {"truncate_prompt_tokens": length - 1})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "truncate_prompt_tokens"
    assert "is 1 tokens longer" in answer.json()["error"]["message"] and len(world.requests) == before


def test_tokenize_counts_the_placeholders(world):
    body = {"messages": chat(part(uri(packed())))["messages"], "add_generation_prompt": False}
    assert world.post("/tokenize", body).json()["count"] == len("user\n") + 2 + IMAGE_TOKENS


def test_fetched_from_the_address_that_was_looked_at(world):
    world.outside.answers["a.png"] = image_answer()
    (image,) = taken(world, chat(part(f"http://{HOST}/a.png?x=1#part")))
    assert (rgb(image) == pixels()).all()
    (request,) = world.detour.requests
    assert request.headers["host"] == HOST and request.extensions["sni_hostname"] == HOST
    path, headers = world.outside.seen[-1]
    assert path == "a.png" and headers["accept-encoding"] == "identity"
    assert "cookie" not in headers and "authorization" not in headers


def test_octet_streams_are_looked_into(world):
    world.outside.answers["stream"] = image_answer(kind="binary/octet-stream")
    assert taken(world, chat(part(f"http://{HOST}/stream")))


def test_cookies_are_not_kept(world):
    world.outside.answers["cookie"] = image_answer(**{"set-cookie": "id=1"})
    for _ in range(2):
        assert taken(world, chat(part(f"http://{HOST}/cookie")))
    assert all("cookie" not in headers for path, headers in world.outside.seen if path == "cookie")


def test_redirects_to_public_hosts_are_followed(world):
    world.outside.answers["old"] = RedirectResponse("/older", 302)
    world.outside.answers["older"] = RedirectResponse(f"//{HOST}/new.png", 308)
    world.outside.answers["new.png"] = image_answer()
    assert taken(world, chat(part(f"http://{HOST}/old")))
    assert [request.headers["host"] for request in world.detour.requests] == [HOST] * 3


def test_another_address_is_tried_when_one_does_not_answer(world, other):
    class Half(Detour):
        async def handle_async_request(self, request):
            if request.url.host == "203.0.112.8":
                raise httpx.ConnectError("down")
            return await super().handle_async_request(request)

    world.names.known["half.example"] = ["203.0.112.8", PUBLIC]
    world.outside.answers["a.png"] = image_answer()
    assert taken(other(LIMITS, Half()), chat(part("http://half.example/a.png")))


# -- where images may not come from -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1/a.png",
        "http://169.254.169.254/latest/meta-data/",
        "http://[::1]/a.png",
        "http://[::ffff:10.0.0.1]/a.png",
        "http://inner.example/a.png",
        "http://two.example/a.png",
        "http://nowhere.example/a.png",
        "ftp://pictures.example/a.png",
        "file:///etc/passwd",
        "gopher://pictures.example/",
        "/etc/passwd",
        "http://user:secret@pictures.example/a.png",
        "http://127.0.0.1\\@pictures.example/a.png",
        "http://pictures.example /a.png",
        "http:///a.png",
        "http://pictures.example:99999/a.png",
        "http://",
        "javascript:alert(1)",
        "x" * 9000,
    ],
)
def test_urls_that_are_not_followed(world, url):
    refused(world, chat(part(url)))
    assert world.detour.requests == []


@pytest.mark.parametrize(
    "target",
    [
        "http://127.0.0.1/secret",
        "http://169.254.169.254/latest/meta-data/",
        "http://inner.example/",
        "http://two.example/",
        "file:///etc/passwd",
        "data:image/png;base64,aGk=",
        "http://u:p@pictures.example/",
        "",
    ],
)
def test_redirects_that_are_not_followed(world, target):
    world.outside.answers["away"] = Response(status_code=302, headers={"location": target})
    refused(world, chat(part(f"http://{HOST}/away")))
    assert len(world.detour.requests) == 1


def test_redirects_end(world):
    world.outside.answers["again"] = RedirectResponse("/again", 302)
    assert "redirects more than 3 times" in refused(world, chat(part(f"http://{HOST}/again")))
    assert len(world.detour.requests) == 4


def test_only_the_named_hosts(world, other):
    world.outside.answers["a.png"] = image_answer()
    world.outside.answers["away"] = Response(status_code=302, headers={"location": "http://other.example/a.png"})
    world.names.known["other.example"] = [PUBLIC]
    server = other(ImageOptions(domains=(HOST,), fetch_seconds=2.0))
    assert taken(server, chat(part(f"http://{HOST.upper()}./a.png")))
    assert "--allowed-media-domains" in refused(server, chat(part("http://other.example/a.png")))
    assert "--allowed-media-domains" in refused(server, chat(part(f"http://{HOST}/away")))
    assert taken(server, chat(part(uri(packed()))))


# -- what is no image -------------------------------------------------------------------------------------------------


def chunk(kind, data):
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width, height, *chunks):
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + b"".join(chunks) + chunk(b"IEND", b"")


def large_webp(width, height):
    body = b"VP8X" + struct.pack("<I", 10) + b"\0" * 4 + struct.pack("<I", width - 1)[:3]
    body += struct.pack("<I", height - 1)[:3]
    return b"RIFF" + struct.pack("<I", len(body) + 4) + b"WEBP" + body


BOMB = zlib.compress(b"\0" * (1 << 24))
FITS = b"SIMPLE  =                    T / a FITS file".ljust(2880) + b"\0" * 2880
WRONG = {
    "nothing": b"",
    "text": b"<html>no image</html>",
    "corrupt": packed()[:30] + b"\xff" * 40 + packed()[70:],
    "cut short": packed(pixels(100, 100))[:-2000],
    "jpeg cut short": packed(pixels(100, 100), "JPEG")[:-1000],
    "head alone": packed()[:20],
    "huge header": png(20_000, 20_000, chunk(b"IDAT", BOMB)),
    "huge webp": large_webp(16_000, 16_000),
    "wide header": png(2**31 - 1, 1, chunk(b"IDAT", BOMB)),
    "no pixels": png(0, 4, chunk(b"IDAT", BOMB)),
    "large gif frame": b"GIF89a" + struct.pack("<HH", 65_000, 65_000) + b"\0\0\0;",
    "text bomb": png(4, 4, chunk(b"zTXt", b"k\0\0" + zlib.compress(b"x" * (1 << 26)))),
    "fits": FITS,
    "zip": b"PK\x03\x04" + BOMB,
    "gzip": b"\x1f\x8b\x08" + b"\0" * 100,
    "svg": b"<svg xmlns='http://www.w3.org/2000/svg'/>",
    "tiff": b"II*\0" + b"\0" * 100,
    "bmp": packed(kind="BMP"),
    "icon": packed(kind="ICO"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_image(world, name):
    refused(world, chat({"type": "text", "text": "x"}, part(uri(WRONG[name]))), "messages[0].content[1]")
    world.outside.answers["wrong"] = image_answer(WRONG[name])
    refused(world, chat(part(f"http://{HOST}/wrong")))


@pytest.mark.parametrize(
    "url",
    [
        "data:text/html;base64,aGk=",
        "data:image/svg+xml;base64,aGk=",
        "data:application/pdf;base64,aGk=",
        "data:;base64,aGk=",
        "data:image/png,aGk=",
        "data:image/png;base64",
        "data:image/png;base64,%%%",
        "data:image/png;base64,aGk",
        "data:",
    ],
)
def test_data_uris_of_a_wrong_form(world, url):
    refused(world, chat(part(url)))


def test_the_head_of_a_data_uri_is_bounded(world):
    head, _, body = uri(packed()).partition(";")
    assert len(taken(world, chat(part(f"{head};{body}")))) == 1
    assert "must have the form" in refused(world, chat(part(f"{head}{';x' * 200};{body}")))


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (Response("<html>", media_type="text/html"), "'text/html'"),
        (Response("{}", media_type="application/json"), "'application/json'"),
        (Response(packed()), "''"),
        (Response("no", status_code=404, media_type="image/png"), "status 404"),
        (Response(b"", status_code=204), "status 204"),
        (Response("no", status_code=500), "status 500"),
        (image_answer(zlib.compress(packed()), **{"content-encoding": "deflate"}), "packed"),
        (image_answer(b"\x89PNG\r\n\x1a\n" + b"\0" * (1 << 20)), "more than 1048576 bytes"),
    ],
)
def test_answers_that_are_no_image(world, answer, said):
    world.outside.answers["answer"] = answer
    assert said in refused(world, chat(part(f"http://{HOST}/answer")))


def test_endless_answers_are_cut(world):
    def endless(outside):
        def pieces():
            while not outside.release.is_set():
                yield b"\0" * 65536

        return StreamingResponse(pieces(), media_type="image/png")

    world.outside.answers["endless"] = endless
    assert "more than 1048576 bytes" in refused(world, chat(part(f"http://{HOST}/endless")))


def test_silent_servers_are_given_up(world, other):
    held = threading.Event()

    def silent(outside):
        def pieces():
            yield b"\x89PNG"
            held.wait(20)

        return StreamingResponse(pieces(), media_type="image/png")

    world.outside.answers["silent"] = silent
    try:
        assert "within 0.2 s" in refused(other(ImageOptions(fetch_seconds=0.2)), chat(part(f"http://{HOST}/silent")))
    finally:
        held.set()


def test_more_bytes_than_one_image_or_one_request_may_have(world, other):
    assert "more than 1048576 bytes" in refused(world, chat(part(uri(b"\0" * ((1 << 20) + 1)))))
    data = packed(pixels(50, 50))
    server = other(ImageOptions(max_request_bytes=2 * len(data)))
    assert len(taken(server, chat(*[part(uri(data))] * 2))) == 2
    assert "together" in refused(server, chat(*[part(uri(data))] * 3), "messages[0].content[2]")
    world.outside.answers["data"] = image_answer(data)
    assert "together" in refused(server, chat(*[part(f"http://{HOST}/data")] * 3), "messages[0].content[")


def asked(server, body):
    return server.post("/v1/chat/completions", body).status_code


def test_images_of_all_open_requests_have_one_room(world, other):
    """Counted until the answer is out, given back after answers, refusals and clients that leave."""
    data = packed(np.zeros((64, 64, 3), np.uint8))
    world.outside.answers["counted"] = image_answer(data)
    num_bytes = len(data) + 3 * 64 * 64
    server = other(ImageOptions(max_open_bytes=num_bytes + len(data) - 1), model="echo:pause_after=1")
    one = chat(part(uri(data))) | {"max_tokens": 5}
    with httpx.Client(timeout=10) as client:
        with client.stream("POST", f"{server.url}/v1/chat/completions", json=one | {"stream": True}):
            server.until(lambda: server.requests)
            for url in (uri(data), f"http://{HOST}/counted"):
                response = server.post("/v1/chat/completions", chat(part(url)))
                assert response.status_code == 503 and "images of open requests" in response.json()["error"]["message"]
        server.core.resume()
        server.until(lambda: asked(server, one) == 200)
    for _ in range(3):
        assert asked(server, one | {"max_tokens": 1 << 30}) == 400
        assert asked(server, chat(part(uri(data)), part(uri(b"no image")))) == 400
        assert server.post("/tokenize", {"messages": one["messages"]}).status_code == 200
        assert asked(server, one) == 200
    assert asked(server, chat(*[part(uri(data))] * 2)) == 503


def test_a_cookie_that_comes_with_an_image_is_never_sent(world):
    """Neither behind the redirect that has set it, nor with the next client's image from the same host."""
    cookie = {"Set-Cookie": "session=of-client-a; Path=/"}
    world.outside.answers["picture"] = image_answer(**cookie)
    world.outside.answers["moved"] = RedirectResponse("/picture", headers=cookie)
    for _ in range(2):
        assert len(taken(world, chat(part(f"http://{HOST}/moved")))) == 1
    seen = [headers for path, headers in world.outside.seen if path in ("picture", "moved")]
    assert len(seen) == 4 and not any("cookie" in headers for headers in seen)


def test_one_clients_silent_servers_keep_no_other_client_waiting(world, other):
    held = threading.Event()

    def silent(outside):
        held.wait(20)
        return image_answer()

    world.outside.answers.update(silent=silent, quick=image_answer())
    before = len(world.outside.seen)
    server = other(ImageOptions(fetch_seconds=30, max_fetches=3, max_client_fetches=2))
    url, quick = f"{server.url}/v1/chat/completions", chat(part(f"http://{HOST}/quick"))
    statuses = []

    def ask_silent():
        with httpx.Client(transport=httpx.HTTPTransport(local_address="127.0.0.2"), timeout=20) as client:
            statuses.append(client.post(url, json=chat(*[part(f"http://{HOST}/silent")] * 4)).status_code)

    asking = [threading.Thread(target=ask_silent) for _ in range(2)]
    for thread in asking:
        thread.start()
    server.until(lambda: len(world.outside.seen) == before + 2)
    for _ in range(3):
        assert server.post("/v1/chat/completions", quick).status_code == 200
    assert [path for path, _ in world.outside.seen[before:]] == ["silent"] * 2 + ["quick"] * 3
    held.set()
    for thread in asking:
        thread.join(20)
    assert statuses == [200, 200]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
def test_a_client_that_leaves_while_its_images_are_fetched(world, other, path):
    held = threading.Event()

    def silent(outside):
        held.wait(20)
        return image_answer()

    world.outside.answers["left"] = silent
    server = other(ImageOptions(fetch_seconds=60), others={"max_open": 1})
    before = len(world.outside.seen)
    try:
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)) as client:
            body = json.dumps(chat(part(f"http://{HOST}/left")))
            client.request("POST", path, body, {"Content-Type": "application/json"})
            server.until(lambda: len(world.outside.seen) > before)
        server.until(lambda: asked(server, chat({"type": "text", "text": "next"})) == 200)
    finally:
        held.set()


def test_more_pixels_than_one_image_or_one_request_may_have(world):
    large = part(uri(packed(np.zeros((256, 256, 3), np.uint8))))
    assert len(taken(world, chat(large))) == 1
    assert "at most 65536 pixels" in refused(world, chat(part(uri(packed(np.zeros((257, 256, 3), np.uint8))))))
    assert "at most 32768 pixels" in refused(world, chat(large, large), "messages[0].content[1]")


def test_too_many_images(world):
    few = part(uri(packed()))
    assert len(taken(world, chat(*[few] * 8))) == 8
    assert "at most 8" in refused(world, chat(*[few] * 9), "messages[0].content[8]")
    world.outside.seen.clear()
    refused(world, chat(*[part(f"http://{HOST}/a.png")] * 50), "messages[0].content[8]")
    assert world.outside.seen == []


@pytest.mark.parametrize(
    "wrong",
    [
        {"type": "image_url"},
        {"type": "image_url", "image_url": None},
        {"type": "image_url", "image_url": {}},
        {"type": "image_url", "image_url": {"url": 5}},
        {"type": "image_url", "image_url": ""},
        {"type": "image_url", "image_url": ["a"]},
        {"type": "image_url", "image_url": uri(packed())},
        {"type": "image_url", "image_url": {"url": uri(packed())}, "uuid": ""},
        {"type": "image_url", "image_url": {"url": uri(packed())}, "uuid": 5},
        {"type": "image_url", "image_url": {}, "uuid": "never seen"},
        {"type": "input_image", "uuid": "never seen"},
        {"type": "input_image", "file_id": "file-1"},
        {"type": "video_url", "video_url": {"url": "http://pictures.example/a.mp4"}},
        {"type": "input_video", "video_url": "http://pictures.example/a.mp4"},
        {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}},
        {"type": "image", "image": "aGk="},
        {"type": "image", "image": {"width": 1, "height": 1, "rgb": "AAAA"}},
        {"type": ["image_url"], "image_url": "x"},
        {},
        None,
        5,
    ],
)
def test_parts_of_a_wrong_form(world, wrong):
    refused(world, chat({"type": "text", "text": "x"}, wrong), "messages[0].content[1]")


def test_an_image_is_sent_again_by_its_uuid(world):
    """vLLM's: to who has sent it, with the same salt. A file that cannot be read has no name."""
    named = part(uri(packed(pixels(seed=7)))) | {"uuid": "a name"}
    taken(world, chat(named))
    for form in ({"image_url": {}}, {"image_url": None}, {}, {"image_url": {"url": None}}):
        image, other = taken(world, chat({"type": "image_url", "uuid": "a name"} | form, part(uri(packed()))))
        assert (rgb(image) == pixels(seed=7)).all() and (rgb(other) == pixels()).all()
    alone = chat({"type": "image_url", "uuid": "a name"})
    assert "send image_url.url" in refused(world, alone | {"cache_salt": "s"}, "messages[0].content[0]")
    taken(world, chat(part(uri(packed(pixels(seed=8)))) | {"uuid": "a name"}) | {"cache_salt": "s"})
    assert [
        (rgb(taken(world, alone | more)[0]) == pixels(seed=seed)).all()
        for more, seed in (({}, 7), ({"cache_salt": "s"}, 8))
    ] == [True, True]
    taken(world, chat(part(uri(packed(pixels(seed=9)))) | {"uuid": "a name"}))
    assert (rgb(taken(world, alone)[0]) == pixels(seed=9)).all(), "what is sent counts, not what was"
    refused(world, chat(part(uri(b"\x89PNG\r\n\x1a\n...")) | {"uuid": "broken"}))
    assert "no image with this uuid" in refused(world, chat({"type": "image_url", "uuid": "broken"}))


def test_images_by_uuid_are_bounded():
    images, mine, yours = NamedImages(max_bytes=4096), ("key:me", ""), ("key:you", "")
    for number in range(3):
        images.put(mine, f"{number}", bytes(512))
    assert images.num_bytes == 3 * 1024 and images.get(yours, "0") is None
    assert images.get(mine, "0") == bytes(512)
    images.put(yours, "0", bytes(1500))
    assert images.num_bytes == 2 * 1024 + 1500 + 512 and images.get(mine, "1") is None, "the least recently used one"
    assert images.get(mine, "0") and images.get(mine, "2") and images.get(yours, "0")
    images.put(mine, "0", bytes(4096))
    assert images.get(mine, "0") is None and images.num_bytes == 1024 + 1500 + 512, "too large, and not what it was"


@pytest.mark.parametrize("role", ["system", "assistant"])
def test_only_users_and_tools_have_images(world, role):
    refused(world, chat(part(uri(packed())), role=role))


# -- placeholders -----------------------------------------------------------------------------------------------------

MARKER = "\0"


@pytest.mark.parametrize(
    ("body", "where"),
    [
        ({"messages": [{"role": "user", "content": f"see {MARKER} here"}]}, "messages[0].content"),
        (chat({"type": "text", "text": MARKER}, part(uri(packed()))), "messages[0].content[0]"),
        (chat(part(uri(packed())), {"type": "text", "text": MARKER}), "messages[0].content[1]"),
    ],
)
def test_placeholders_typed_as_text(world, body, where):
    assert "stands for an image" in refused(world, body, where)


def test_placeholders_put_together_from_several_texts():
    from cairn.errors import InvalidRequest
    from cairn.server.images.connector import _refuse_markers
    from cairn.server.openai.messages import Message

    def message(*texts):
        return Message(role="user", content=[{"type": "text", "text": text} for text in texts])

    for texts, where in ((("<|im", "age|>"), 1), (("a<", "|", "i", "m", "age|>b"), 4)):
        with pytest.raises(InvalidRequest, match=rf"messages\[0\]\.content\[{where}\]"):
            _refuse_markers([message(*texts)], ("<|image|>",))
    _refuse_markers([message("<|im", "x", "age|>"), message("<|image"), message("|>")], ("<|image|>",))
    _refuse_markers([message("<|image|>")], ())


def test_a_model_without_images_says_so(server):
    body = chat({"type": "text", "text": "x"}, part(uri(packed())))
    response = server.post("/v1/chat/completions", body)
    assert response.status_code == 400
    assert response.json()["error"]["message"].startswith(
        "messages[0].content[1] is an image, but this model reads text"
    )


def test_images_that_are_switched_off(other):
    assert "at most 0" in refused(other(ImageOptions(limit=0)), chat(part(uri(packed()))))


def test_json_of_the_answer_is_openais(world):
    response = world.client().chat.completions.create(
        model="echo", messages=[{"role": "user", "content": [part(uri(packed()))]}], max_tokens=2
    )
    assert response.usage.prompt_tokens > IMAGE_TOKENS
    assert json.loads(response.model_dump_json())["choices"][0]["finish_reason"] == "length"
