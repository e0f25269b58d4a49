"""`GET /cache` and `GET /cache/ui`, without a browser: form, bounds, who may look, and what the page may not do."""

import base64
import hashlib
import json
import re
from html.parser import HTMLParser

import msgspec
import pytest

from cairn.engine.contract import CacheView
from cairn.server.cache_page import cache_page
from doubles.echo_core import build_echo_core

KEY = {"api_key": ["sesame"]}


def test_the_view_has_its_form(server):
    server.post("/v1/completions", {"prompt": "the view has its form", "cache_salt": "hush"})
    answer = server.get("/cache")
    assert answer.status_code == 200 and answer.headers["content-type"] == "application/json"
    assert answer.headers["cache-control"] == "no-store"
    body = answer.json()
    assert body["object"] == "cairn.cache" and body["server"]["model"] == "echo"
    view = msgspec.convert({name: body[name] for name in CacheView.__dataclass_fields__}, CacheView)
    assert view.paths and view.visits and view.history
    assert view.visits[0].hit + view.visits[0].received + sum(view.visits[0].lost.values()) == view.visits[0].prompt
    assert "hush" not in answer.text and "the view has" not in answer.text


def test_a_checkpoint_takes_whole_pages_where_the_setup_is_told_as_well(serve):
    def build(config):
        core = build_echo_core(config)
        sizes = {"checkpoint_bytes": 1, "pages_per_checkpoint": 3, "checkpoint_dtype": "int8"}
        cache = msgspec.structs.replace(core._info.cache, **sizes)
        core._info = msgspec.structs.replace(core._info, cache=cache)
        return core

    body = serve(build=build).get("/cache").json()
    assert body["server"]["checkpoint_bytes"] == 3 * body["pool"]["page_bytes"]
    assert body["server"]["checkpoint_dtype"] == "int8"


def test_what_drafts_have_brought(serve):
    def build(config):
        core = build_echo_core(config)
        core._info = msgspec.structs.replace(core._info, num_speculative_tokens=2)
        core._scheduler.state.counters.spec_decode.add(2, 1)
        return core

    counts = {"num_drafts": 1, "num_draft_tokens": 2, "num_accepted_tokens": 1, "accepted_per_pos": {"0": 1, "1": 0}}
    assert serve(build=build).get("/cache").json()["spec_decode"] == counts
    assert serve().get("/cache").json()["spec_decode"] is None


@pytest.mark.parametrize("number", ["0", "-1", "5001", "9" * 30, "many", "1.5", ""])
def test_a_number_of_nodes_out_of_range_is_refused(server, number):
    answer = server.get(f"/cache?max_nodes={number}")
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "max_nodes"


def test_no_more_nodes_than_asked_for(serve):
    server = serve()
    for prompt in "abc":
        server.post("/v1/completions", {"prompt": prompt * 5})
    for most, shown in ((1, 1), (2, 2), (5000, 3)):
        body = server.get(f"/cache?max_nodes={most}").json()
        assert len(body["paths"]) == shown and body["tree"]["below"]["paths"] == 3 - shown


def test_many_who_look_cost_one_look(serve):
    server = serve()
    looks, show = [], server.core.cache_view
    server.core.cache_view = lambda most: (looks.append(most), show(most))[1]
    answers = {server.get("/cache").text for _ in range(20)}
    assert 1 <= len(looks) == len(answers) < 20


def test_requests_go_on_while_somebody_looks(serve):
    server = serve(model="echo:pause_after=1")
    with server.client() as client:
        stream = client.completions.create(model="echo", prompt="abc", stream=True)
        assert server.get("/cache").json()["pool"]["open_leases"] == 1
        server.core.resume()
        assert "".join(chunk.choices[0].text for chunk in stream) == "abc"


def test_a_dead_engine_is_said_so(serve):
    server = serve(model="echo:fail_at_step=1")
    server.post("/v1/completions", {"prompt": "x"})
    server.join()
    assert server.code == 1


def test_the_view_is_behind_the_key_and_the_page_is_not(serve):
    server = serve(KEY)
    assert server.get("/cache").status_code == 401
    assert server.get("/cache", headers={"Authorization": "Bearer wrong"}).status_code == 401
    assert server.get("/cache", headers={"Authorization": "Bearer sesame"}).status_code == 200
    page = server.get("/cache/ui")
    # it holds nothing: it is the same file wherever it is served
    assert page.status_code == 200 and page.content == cache_page().body


def test_both_are_for_reading_only(server):
    for path in ("/cache", "/cache/ui"):
        assert server.post(path, {}).status_code == 405


def test_the_response_says_what_was_lost(server):
    prompts = ("what was lost" * 9, "what was lost" * 9, "what was lost" * 8)
    answers = [server.post("/v1/completions", {"prompt": prompt}).json() for prompt in prompts]
    reports = [answer["cairn"]["cache"] for answer in answers]
    assert [report["lost_tokens"] for report in reports] == [{"never_seen": 117}, {}, {"no_checkpoint": 40}]
    assert all(sum(r["lost_tokens"].values()) + r["cached_tokens"] == r["prompt_tokens"] for r in reports)


class Page(HTMLParser):
    """Notes the tags, the text inside of style and script, and the ids."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.texts, self.ids, self._open = [], {}, [], None
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.tags.append((tag, attributes))
        if "id" in attributes:
            self.ids.append(attributes["id"])
        self._open = tag if tag in ("style", "script") else self._open

    def handle_endtag(self, tag):
        self._open = None if tag == self._open else self._open

    def handle_data(self, data):
        if self._open:
            self.texts.setdefault(self._open, []).append(data)


@pytest.fixture(scope="module")
def page(server):
    return server.get("/cache/ui")


def test_the_page_is_one_file_and_asks_nobody_else(page):
    parsed = Page(page.text)
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    for tag, attributes in parsed.tags:
        assert tag not in ("base", "iframe", "object", "embed", "img"), tag
        assert "src" not in attributes and "srcset" not in attributes and "style" not in attributes, (tag, attributes)
        assert not any(name.startswith("on") for name in attributes), (tag, attributes)
        link = attributes.get("href", "")
        assert link == "" or link.startswith(("data:", "#", "../cache")), link
    style, script = "".join(parsed.texts["style"]), "".join(parsed.texts["script"])
    assert not re.search(r"url\(|@import|https?:", style)
    # the one address is the name of SVG, which nobody is asked for
    assert set(re.findall(r"https?:[^\"' ]*", script)) == {"http://www.w3.org/2000/svg"}


def test_the_policy_allows_this_style_and_this_script_only(page):
    policy = dict(part.strip().split(" ", 1) for part in page.headers["content-security-policy"].split(";"))
    parsed = Page(page.text)
    for kind in ("style", "script"):
        [text] = ["".join(parsed.texts[kind])]
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert policy[f"{kind}-src"] == f"'sha256-{digest}'"
    assert policy["default-src"] == policy["base-uri"] == policy["form-action"] == policy["frame-ancestors"] == "'none'"
    assert policy["connect-src"] == "'self'" and policy["img-src"] == "data:"
    assert page.headers["x-content-type-options"] == "nosniff" and page.headers["referrer-policy"] == "no-referrer"
    assert "unsafe" not in page.headers["content-security-policy"]


def test_the_script_puts_in_text_only(page):
    script = "".join(Page(page.text).texts["script"])
    for way in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function", "srcdoc"):
        assert way not in script, way
    assert "localStorage" not in script and "sessionStorage" not in script and "cookie" not in script
    assert "</script" not in script and "<!--" not in script


def test_what_the_script_asks_for_is_there(page):
    parsed = Page(page.text)
    script = "".join(parsed.texts["script"])
    assert len(parsed.ids) == len(set(parsed.ids))
    asked = set(re.findall(r'\$\("([a-z-]+)"\)', script))
    assert asked and asked <= set(parsed.ids)
    labels = [attributes.get("for") for tag, attributes in parsed.tags if tag == "label"]
    assert set(labels) <= set(parsed.ids)
    assert ("html", {"lang": "en"}) in parsed.tags and sum(tag == "h1" for tag, _ in parsed.tags) == 1


def test_every_reason_has_a_word_and_a_colour(page):
    from cairn.cache.reasons import Reason

    parsed = Page(page.text)
    script, style = "".join(parsed.texts["script"]), "".join(parsed.texts["style"])
    for reason in Reason:
        assert re.search(rf"\b{reason.value}: \"", script), reason
        if reason not in (Reason.NONE, Reason.NEVER_SEEN):
            assert style.count(f"--{reason.value}:") == 2, f"{reason}: a light and a dark colour"


def test_a_hostile_model_name_is_a_string_in_the_json(serve):
    name = "</script><img src=x onerror=alert(1)>"
    server = serve({"model": name})
    answer = server.get("/cache")
    assert json.loads(answer.text)["server"]["model"] == name and name not in server.get("/cache/ui").text
    assert answer.headers["content-type"] == "application/json"
