"""The cache page in a real browser."""

import time

import pytest

pytestmark = pytest.mark.ui

ROWS = "#tree-box .row"


def shown(visitor):
    visitor.page.wait_for_selector(ROWS)
    return visitor.page


def until(page, condition):
    """Wait for a JavaScript condition. Playwright's own way evaluates a string in the page: its policy forbids that."""
    deadline = time.monotonic() + 20
    while not page.evaluate(condition):
        assert time.monotonic() < deadline, f"not within 20 s: {condition}"
        page.wait_for_timeout(50)


def widest(page):
    return page.evaluate("document.documentElement.scrollWidth")


def test_it_shows_the_tree_the_requests_and_the_losses(watched, visit, picture):
    visitor = visit(watched)
    page = shown(visitor)
    until(page, "document.querySelector('#status').textContent === 'live'")
    assert page.inner_text("#model") == "nemotron-3-nano"
    view = page.evaluate("fetch('/cache').then((answer) => answer.json())")
    assert page.locator(ROWS).count() > 20
    assert page.locator("#tree-box .cairn").count() > 20 and page.locator("#tree-box .badge").count() > 3
    assert page.locator("#visits li").count() == 20
    assert page.locator("#lost li").count() == len(view["lost"]) > 3
    assert view["lost"][0]["cure"] in page.inner_text("#lost li:first-child")
    kinds = view["policy"]["kinds"]
    assert page.locator("#policy li").count() == len(kinds) > 2
    assert kinds[0]["kind"].replace("_", " ") in page.inner_text("#policy li:first-child")
    assert "MiB" in page.inner_text("#policy-note") or view["policy"]["price"] is None
    assert "GiB" in page.inner_text("#pool-key") or "MiB" in page.inner_text("#pool-key")
    assert page.locator("#time rect").count() > 0
    page.screenshot(path=picture("light"), full_page=True)
    assert visitor.errors == [] and visitor.strangers() == []


def test_bars_are_to_scale(watched, visit):
    page = shown(visit(watched))
    view = page.evaluate("fetch('/cache').then((answer) => answer.json())")
    longest = max(one["prompt"] for one in view["visits"][:20])
    for index, one in enumerate(view["visits"][:5]):
        scale = page.locator("#visits li .scale").nth(index)
        whole = scale.bounding_box()["width"]
        bar = sum(part.bounding_box()["width"] for part in scale.locator("i").all())
        assert bar / whole == pytest.approx(one["prompt"] / longest, abs=0.02)
        matched = scale.locator(".matched").bounding_box()["width"]
        assert matched / whole == pytest.approx(one["matched"] / longest, abs=0.02)


CONTRAST = """(selector) => {
    const light = (colour) => {
        const linear = (x) => (x <= 0.04 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4);
        const [r, g, b] = colour.match(/\\d+/g).map((x) => linear(x / 255));
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const one = document.querySelector(selector), clear = "rgba(0, 0, 0, 0)";
    let below = one;
    while (getComputedStyle(below).backgroundColor === clear) below = below.parentElement;
    return [light(getComputedStyle(one).color), light(getComputedStyle(below).backgroundColor)];
}"""


def test_dark_mode_is_dark_and_legible(watched, visit, picture):
    page = shown(visit(watched, scheme="dark"))
    page.screenshot(path=picture("dark"), full_page=True)
    for scheme in ("dark", "light"):
        page.emulate_media(color_scheme=scheme)
        for selector in ("#setup", "#model", "#lost li span", ".small", "button"):
            front, back = page.evaluate(CONTRAST, selector)
            assert (max(front, back) + 0.05) / (min(front, back) + 0.05) >= 4.5, (scheme, selector)
            assert (back < front) == (scheme == "dark"), (scheme, selector)


def test_it_fits_a_phone(watched, visit, picture):
    visitor = visit(
        watched, width=360, height=740, scheme="light", has_touch=True, is_mobile=True, device_scale_factor=2
    )
    page = shown(visitor)
    assert widest(page) <= 360
    page.screenshot(path=picture("phone"), full_page=True)
    page.click("#zoom-in")
    assert widest(page) <= 360
    assert page.evaluate("document.querySelector('#tree-box').scrollWidth > 360")
    for button in page.locator("button:visible").all():
        assert button.bounding_box()["height"] >= 26
    assert visitor.errors == []


def test_fifty_thousand_nodes(watch, visit, picture):
    server = watch(num_nodes=50_000)
    visitor = visit(server)
    page = shown(visitor)
    assert "5" in page.inner_text("#tree-note")
    view = page.evaluate("fetch('/cache').then((answer) => answer.json())")
    assert view["tree"]["nodes"] >= 50_000 and len(view["paths"]) == 500
    page.click("#expand")
    until(page, f"document.querySelectorAll('{ROWS}').length === 500")
    page.screenshot(path=picture("many"), full_page=False)
    page.click("#collapse")
    until(page, f"document.querySelectorAll('{ROWS}').length < 60")
    assert visitor.errors == [] and visitor.strangers() == []


def test_the_tree_opens_closes_and_zooms_by_keyboard(watched, visit):
    visitor = visit(watched)
    page = shown(visitor)
    page.click("#pause")
    page.click("#collapse")
    closed = page.locator(ROWS).count()
    page.focus(f"{ROWS}[tabindex='0']")
    name = "document.activeElement.dataset.name"
    first = page.evaluate(name)
    while page.evaluate("document.activeElement.getAttribute('aria-expanded')") != "false":
        page.keyboard.press("ArrowDown")
        assert page.evaluate(name) != first
        first = page.evaluate(name)
    page.keyboard.press("ArrowRight")
    assert page.locator(ROWS).count() > closed and page.evaluate(name) == first
    assert page.evaluate("document.activeElement.getAttribute('aria-expanded')") == "true"
    assert "Tokens" in page.inner_text("#detail")
    page.keyboard.press("ArrowRight")
    assert page.evaluate(name) != first
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowLeft") if page.evaluate(name) != first else None
    if page.evaluate("document.activeElement.getAttribute('aria-expanded')") == "true":
        page.keyboard.press("ArrowLeft")
    assert page.locator(ROWS).count() == closed
    page.keyboard.press("Enter")
    assert page.locator(f"{ROWS}[aria-level='1']").count() == 1 and page.evaluate(name) == first
    page.keyboard.press("Escape")
    assert page.locator(f"{ROWS}[aria-level='1']").count() > 1
    assert page.locator(f"{ROWS}[tabindex='0']").count() == 1
    assert visitor.errors == []


def test_clicks_choose_and_open(watched, visit):
    page = shown(visit(watched))
    page.click("#pause")
    page.click("#collapse")
    row = page.locator(f"{ROWS}[aria-expanded='false']").first
    before = page.locator(ROWS).count()
    name = row.get_attribute("data-name")
    row.locator("text.name").click()
    assert page.locator(ROWS).count() == before and "Tokens" in page.inner_text("#detail")
    page.locator(f"{ROWS}[data-name='{name}'] .toggle").click()
    assert page.locator(ROWS).count() > before
    page.locator("#lost button").first.click()
    assert page.evaluate("document.activeElement.classList.contains('row')")


def test_it_follows_what_happens_and_can_be_paused(watch, visit):
    server = watch(num_nodes=300)
    visitor = visit(server)
    page = shown(visitor)
    newest = "document.querySelector('#visits strong').textContent"
    before = page.evaluate(newest)
    server.core.visit(1)
    until(page, f"{newest} !== '{before}'")
    page.click("#pause")
    assert page.inner_text("#status") == "paused" and page.get_attribute("#pause", "aria-pressed") == "true"
    page.wait_for_load_state("networkidle")
    looks, now = server.core.looks, page.evaluate(newest)
    server.core.visit(2)
    page.evaluate("new Promise((done) => setTimeout(done, 4500))")
    assert server.core.looks == looks and page.evaluate(newest) == now
    page.click("#pause")
    until(page, f"{newest} !== '{now}'")
    assert visitor.errors == []


def test_a_server_that_is_gone_is_asked_less_and_less(watch, visit):
    server = watch(num_nodes=300)
    page = shown(visit(server))
    server.end()
    until(page, "document.querySelector('#status').textContent.includes('next try in 4 s')")
    until(page, "document.querySelector('#status').textContent.includes('next try in 8 s')")
    assert page.get_attribute("#status", "class") == "wrong" and page.locator(ROWS).count() > 0


def test_a_key_is_asked_for_and_kept_in_memory_only(watch, visit, picture):
    server = watch(num_nodes=300, api_key=["open-sesame"])
    visitor = visit(server)
    page = visitor.page
    page.wait_for_selector("#login:visible")
    assert page.locator("#main").is_hidden() and page.evaluate("document.activeElement.id") == "key"
    page.screenshot(path=picture("key"))
    page.keyboard.type("wrong")
    page.keyboard.press("Enter")
    until(page, "document.querySelector('#refused').textContent !== ''")
    page.fill("#key", "open-sesame")
    page.keyboard.press("Enter")
    shown(visitor)
    assert page.locator("#login").is_hidden() and page.input_value("#key") == ""
    assert page.evaluate("[localStorage.length, sessionStorage.length, document.cookie, location.search]") == [
        0,
        0,
        "",
        "",
    ]
    assert all("sesame" not in url for url in visitor.asked) and "sesame" not in page.content()
    # the two refusals are the only lines of the console
    assert len(visitor.errors) == 2 and all("401" in line for line in visitor.errors)
    page.reload()
    page.wait_for_selector("#login:visible")


def test_a_hostile_name_stays_text(watch, visit):
    name = '<img src=x onerror="window.hacked=1"></script><script>window.hacked=1</script>'
    visitor = visit(watch(num_nodes=300, model=name))
    page = shown(visitor)
    assert page.inner_text("#model") == name and page.evaluate("window.hacked") is None
    assert page.locator("img").count() == 0 and visitor.errors == []


def test_an_injected_script_does_not_run(watched, visit):
    visitor = visit(watched)
    page = shown(visitor)
    page.evaluate("""() => { const one = document.createElement("script"); one.textContent = "window.hacked = 1";
        document.body.append(one); }""")
    assert page.evaluate("window.hacked") is None and any("Content Security Policy" in line for line in visitor.errors)


def test_what_screen_readers_are_told(watched, visit):
    page = shown(visit(watched))
    assert page.locator("[role=tree]").count() == 1 and page.get_attribute("[role=tree]", "aria-label")
    for row in page.locator(ROWS).all()[:10]:
        assert "tokens" in row.get_attribute("aria-label") and int(row.get_attribute("aria-level")) >= 1
    assert "Prompt tokens" in page.get_attribute("#time svg", "aria-label")
    assert "free" in page.get_attribute("#pool", "aria-label")
    for bar in page.locator("#visits .scale").all()[:5]:
        assert bar.get_attribute("role") == "img" and "prompt" in bar.get_attribute("aria-label")
    assert page.evaluate("[...document.querySelectorAll('button')].every((one) => one.textContent.trim() !== '')")
