"""The search page in a real Chromium: what people do with it, what they see when something is wrong, and who can use it.

After each test: nothing was asked of any other origin, nothing was thrown, and the content security policy held.
"""

from __future__ import annotations

import re
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from PIL import Image

pytest.importorskip("playwright", reason="needs the browser tier")
pytest.importorskip("fastapi", reason="needs the gateway extra")

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, expect, sync_playwright

from clip_deploy.cli import main
from clip_deploy.errors import ServerBusy
from clip_deploy.gateway import GatewaySettings
from clip_deploy.gateway.app import create_app
from tests.gallery import CAPTIONS, PHOTOGRAPHS, Gallery, gallery_gateway, listening
from tests.gateway_parts import FakeClient

pytestmark = pytest.mark.browser
expect.set_options(timeout=15_000)

FLAGS = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update"),
)
PHONE = {
    "viewport": {"width": 320, "height": 640},
    "device_scale_factor": 2,
    "is_mobile": True,
    "has_touch": True,
}
SCHEMES = ("light", "dark")
TOKEN = "a-token-of-the-shop-0123"
HOSTILE = (
    '<img src=x onerror="document.title=`owned`"> harm',
    "<script>document.title='owned'</script> harm",
    "javascript:document.title='owned' harm",
    '"><svg onload=alert(1)> ../../harm?x=1#y %2e%2e/ harm',
    "harm \u202ereversed",
    "harm " + "Donaudampfschifffahrtsgesellschaft" * 12,
)


@pytest.fixture(scope="module")
def chromium():
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def shop():
    """A gateway with the photographs and hostile captions: its address, client and index."""
    client, index = FakeClient(), Gallery(HOSTILE)
    with gallery_gateway(client, index) as url:
        yield url, client, index


@pytest.fixture
def client(shop):
    yield shop[1]
    shop[1].failure = None


@pytest.fixture
def started():
    """Starts another gateway, as a function; it ends after the browser's tabs, which may still load pictures."""
    with ExitStack() as stack:
        yield lambda *args, **settings: stack.enter_context(gallery_gateway(*args, **settings))


@pytest.fixture
def visit(chromium, shop, started):
    """Opens a page, by default the shop's, as a function of its path and of what kind of browser it is."""
    contexts, wrong = [], []

    def opened(path: str = "", *, url: str = shop[0], **kind) -> Page:
        context = chromium.new_context(**kind)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(20_000)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("console", lambda said: _listen(said, wrong))
        page.on("request", lambda request: _watch(request.url, url, wrong))
        page.goto(url + path)
        return page

    yield opened
    for context in contexts:
        for page in context.pages:
            assert page.evaluate("[localStorage.length, document.cookie]") == [0, ""]
        context.close()
    assert wrong == []


def _listen(said, wrong: list[str]) -> None:
    # Chromium itself notes failed requests; those that a test provokes have these statuses.
    meant = re.search(r"status of (401|413|422|502|503)|ERR_FAILED", said.text)
    if said.type in ("error", "warning") and not meant:
        wrong.append(said.text)


def _watch(address: str, url: str, wrong: list[str]) -> None:
    if not address.startswith((url, "blob:", "data:")):
        wrong.append(f"asked {address}")


def _cards(page: Page):
    return page.locator(".card")


def _search(page: Page, words: str) -> None:
    page.get_by_label("Describe a picture").fill(words)
    page.keyboard.press("Enter")
    expect(page.locator("#summary")).to_have_text(f"“{words}”")


def _choose(page: Page, file) -> None:
    page.locator("#file").set_input_files(file)


def _drop(page: Page, file: Path) -> None:
    """What Chromium does when a file is dragged from the desktop onto the page."""
    devtools = page.context.new_cdp_session(page)
    data = {"items": [], "files": [str(file)], "dragOperationsMask": 1}

    def send(kind: str) -> None:
        devtools.send("Input.dispatchDragEvent", {"type": kind, "x": 300, "y": 300, "data": data})

    send("dragEnter")
    # A hand that holds a file says so again and again; Chromium drops what comes before its first frame.
    deadline = time.monotonic() + 10
    while page.locator("#drop").is_hidden() and time.monotonic() < deadline:
        send("dragOver")
        page.wait_for_timeout(50)
    expect(page.locator("#drop")).to_be_visible()
    send("drop")


def _milliseconds(text: str) -> float:
    value, unit = re.search(r"([\d.]+) (ms|s)$", text).groups()
    return float(value) * {"ms": 1, "s": 1000}[unit]


def _fits(page: Page) -> bool:
    return page.evaluate("document.documentElement.scrollWidth <= innerWidth")


# --- Searching ----------------------------------------------------------------------------------------------------


def test_words_find_pictures_and_the_address_says_what_was_asked(visit, shop):
    page = visit()
    expect(page.locator("#facts")).to_have_text(f"{len(shop[2].captions)} pictures · tiny")
    expect(page.locator("#start")).to_be_visible()
    _search(page, "espresso spoon")
    coffee = _cards(page).filter(has_text="espresso")
    expect(coffee.locator(".caption")).to_have_text(CAPTIONS["coffee.jpg"])
    expect(coffee.locator(".scores")).to_contain_text("caption #1")
    expect(coffee.locator(".scores")).to_contain_text(re.compile(r"picture #\d+"))
    expect(page.locator("#count")).to_contain_text(re.compile(r"^\d+ results in [\d.]+ m?s$"))
    assert page.url == shop[0] + "?q=espresso+spoon"
    page.get_by_label("captions").check(force=True)
    expect(_cards(page)).to_have_count(1)
    assert page.url.endswith("&mode=text")

    page.go_back()
    expect(page.locator("#start")).to_be_hidden()
    expect(page.get_by_label("both")).to_be_checked()
    page.go_back()
    expect(page.locator("#start")).to_be_visible()
    expect(page.get_by_label("Describe a picture")).to_have_value("")
    page.go_forward()
    expect(page.get_by_label("Describe a picture")).to_have_value("espresso spoon")

    shared = visit("?q=rocket&mode=text")
    expect(_cards(shared).locator(".caption")).to_have_text([CAPTIONS["rocket.jpg"]])
    assert shared.title() == "“rocket” – Image search"


def test_the_time_of_each_stage_is_shown_and_adds_up(visit):
    page = visit("?q=cat")
    stages = page.locator("#stages div")
    expect(stages.first).to_be_visible()
    shown = dict(text.split(maxsplit=1) for text in stages.all_inner_texts())
    assert set(shown) <= {"prepare", "embed", "search", "gateway", "network"}
    assert "network" in shown
    total = _milliseconds(page.locator("#count").inner_text())
    assert sum(map(_milliseconds, shown.values())) == pytest.approx(total, abs=2, rel=0.1)
    assert page.locator("#bar span").count() == len(shown)


def test_a_chosen_picture_finds_itself(visit):
    page = visit()
    _choose(page, PHOTOGRAPHS / "cat.jpg")
    expect(page.locator("#summary")).to_have_text("Pictures like cat.jpg")
    expect(_cards(page).first.locator(".caption")).to_have_text(CAPTIONS["cat.jpg"])
    expect(_cards(page).first).to_contain_text("cosine 1.000")
    assert (
        page.locator("#asked").evaluate("image => image.decode().then(() => image.src)")[:5]
        == "blob:"
    )
    _choose(page, PHOTOGRAPHS / "cat.jpg")  # the same once more
    _choose(page, PHOTOGRAPHS / "rocket.jpg")
    expect(page.locator("#summary")).to_have_text("Pictures like rocket.jpg")
    page.go_back()
    page.go_back()
    expect(page.locator("#summary")).to_have_text("Pictures like cat.jpg")


def test_a_dropped_picture_finds_itself(visit):
    page = visit()
    _drop(page, PHOTOGRAPHS / "galaxies.jpg")
    expect(page.locator("#summary")).to_have_text("Pictures like galaxies.jpg")
    expect(_cards(page).first.locator(".caption")).to_have_text(CAPTIONS["galaxies.jpg"])
    expect(page.locator("#drop")).to_be_hidden()


def test_a_dropped_text_is_refused_in_words_and_not_sent(visit, tmp_path):
    page = visit()
    (tmp_path / "notes.txt").write_text("no picture")
    expect(page.locator("#facts")).not_to_be_empty()
    sent = []
    page.on("request", lambda request: sent.append(request.url))
    _drop(page, tmp_path / "notes.txt")
    expect(page.get_by_role("alert")).to_contain_text("notes.txt is not a picture. Choose a JPEG")
    assert sent == []


def test_a_pasted_picture_finds_itself(visit):
    page = visit()
    page.evaluate(
        """async (address) => {
          const blob = await (await fetch(address)).blob();
          const data = new DataTransfer();
          data.items.add(new File([blob], "pasted.jpg", { type: "image/jpeg" }));
          document.body.dispatchEvent(new ClipboardEvent("paste", { clipboardData: data, bubbles: true }));
        }""",
        "api/v1/images/retina.jpg",
    )
    expect(page.locator("#summary")).to_have_text("Pictures like pasted.jpg")
    expect(_cards(page).first.locator(".caption")).to_have_text(CAPTIONS["retina.jpg"])


def test_a_result_leads_to_more_like_it_and_the_address_can_be_shared(visit):
    page = visit("?q=space")
    _cards(page).filter(has_text=CAPTIONS["galaxies.jpg"]).click()
    expect(page.locator("#summary")).to_have_text(f"Pictures like {CAPTIONS['galaxies.jpg']}")
    expect(_cards(page).first).to_contain_text("galaxies.jpg")
    expect(_cards(page).first).to_be_focused()
    assert page.url.endswith("?like=galaxies.jpg")
    page.reload()
    expect(_cards(page).first).to_contain_text("galaxies.jpg")


def test_more_results_come_on_request_and_keep_ones_place(visit):
    page = visit("?q=harm+a")
    expect(_cards(page)).to_have_count(12)
    page.get_by_role("button", name="Show more").click()
    expect(_cards(page)).to_have_count(len(CAPTIONS) + len(HOSTILE))
    expect(_cards(page).nth(12)).to_be_focused()
    expect(page.get_by_role("button", name="Show more")).to_be_hidden()


def test_an_old_answer_never_replaces_a_newer_one(visit, shop):
    shop[2].slow_s = {"slow rocket": 2.5}
    page = visit()
    page.get_by_label("Describe a picture").fill("slow rocket")
    page.keyboard.press("Enter")
    expect(page.locator("#form")).to_have_attribute("aria-busy", "true")
    _search(page, "espresso")
    page.wait_for_timeout(3000)
    expect(page.locator("#summary")).to_have_text("“espresso”")
    expect(page.locator("#form")).to_have_attribute("aria-busy", "false")


def test_the_keyboard_alone_does_everything(visit):
    page = visit()
    page.locator("body").click(position={"x": 5, "y": 5})
    page.keyboard.press("/")
    expect(page.get_by_label("Describe a picture")).to_be_focused()
    page.keyboard.type("rocket")
    page.keyboard.press("Enter")
    expect(_cards(page)).not_to_have_count(0)
    page.keyboard.press("ArrowDown")
    expect(_cards(page).nth(0)).to_be_focused()
    page.keyboard.press("ArrowRight")
    expect(_cards(page).nth(1)).to_be_focused()
    page.keyboard.press("ArrowDown")
    columns = len(
        page.locator("#grid").evaluate("grid => getComputedStyle(grid).gridTemplateColumns").split()
    )
    expect(_cards(page).nth(1 + columns)).to_be_focused()
    assert (
        _cards(page).nth(1 + columns).evaluate("card => getComputedStyle(card).outlineStyle")
        == "solid"
    )
    page.keyboard.press("End")
    expect(_cards(page).last).to_be_focused()
    page.keyboard.press("Home")
    page.keyboard.press("Enter")
    expect(page.locator("#summary")).to_contain_text("Pictures like")
    expect(_cards(page).first).to_be_focused()
    page.keyboard.press("ArrowUp")
    expect(page.get_by_label("Describe a picture")).to_be_focused()
    page.keyboard.press("Escape")
    expect(page.locator("#start")).to_be_visible()
    expect(page.get_by_label("Describe a picture")).to_have_value("")


def test_tab_reaches_every_control_in_the_order_of_reading(visit):
    page = visit("?q=rocket&mode=text")
    expect(_cards(page)).to_have_count(1)
    reached = []
    for _ in range(9):
        page.keyboard.press("Tab")
        reached.append(
            page.evaluate(
                "document.activeElement.id || document.activeElement.className || document.activeElement.name"
            )
        )
    assert reached == ["skip", "home", "words", "clear", "go", "file", "mode", "card", *reached[8:]]
    page.locator("#skip").focus()
    page.keyboard.press("Enter")
    expect(page.locator("#results")).to_be_focused()
    expect(_cards(page)).to_have_count(1)


def test_captions_sources_and_ids_are_text_whatever_they_hold(visit, shop):
    page = visit("?q=harm&mode=text")
    expect(_cards(page).locator(".caption")).to_have_text(list(HOSTILE))
    assert page.title() == "“harm” – Image search"
    for image in page.locator(".card img").all():  # ids of any letters are addresses of pictures
        assert image.evaluate("image => image.decode().then(() => image.naturalWidth)") == 451
    page = visit("?q=" + "%3Cimg+src%3Dx+onerror%3Dalert(1)%3E")
    expect(page.locator("#summary")).to_have_text("“<img src=x onerror=alert(1)>”")
    assert page.locator("#results img[src='x'], #results svg, #results script").count() == 0


# --- What goes wrong ----------------------------------------------------------------------------------------------


def test_a_busy_server_is_waited_for_and_then_asked_again(visit, client):
    page = visit()
    page.clock.install()
    page.clock.pause_at(datetime.now() + timedelta(minutes=1))  # however slow this machine is
    client.failure = ServerBusy("Triton's queue is full", remedy="ask again in a moment")
    page.get_by_label("Describe a picture").fill("rocket")
    page.keyboard.press("Enter")
    expect(page.get_by_role("alert")).to_contain_text("Ask again in a moment.")
    expect(page.locator("#again")).to_have_text(re.compile(r"^Try again in [12] s$"))
    client.failure = None
    with page.expect_request("**/search/text") as again:
        page.locator("#again").press("Enter")  # too early: nothing happens
        page.clock.run_for(2000)
        expect(page.get_by_role("status")).to_have_text("You can try again now.")
        expect(page.locator("#again")).to_have_text("Try again")
        expect(page.locator("#summary")).to_be_hidden()
        page.locator("#again").press("Enter")
    assert again.value.post_data_json["text"] == "rocket"
    expect(page.locator("#summary")).to_have_text("“rocket”")
    expect(page.locator("#problem")).to_be_hidden()


def test_a_picture_that_is_too_large_can_be_sent_smaller(visit, started, tmp_path):
    # Large as files, and small as pictures of 1024 pixels: plain, and with bytes behind the end.
    Image.new("RGB", (2400, 1600), "teal").save(tmp_path / "large.jpg")
    head = (tmp_path / "large.jpg").read_bytes()
    (tmp_path / "large.jpg").write_bytes(head + bytes(400_000))
    (tmp_path / "huge.jpg").write_bytes(head + bytes(30_000_000))
    url = started(index=Gallery(), max_upload_bytes=200_000)
    page = visit(url=url)
    for name in ("huge.jpg", "large.jpg"):
        _choose(page, tmp_path / name)
        alert = page.get_by_role("alert")
        expect(alert).to_contain_text("The body is too large.")
        expect(alert).to_contain_text("Send a smaller picture")
        page.get_by_role("button", name="Send a smaller copy").click()
        expect(page.locator("#summary")).to_have_text(f"Pictures like {name}")


def test_what_is_not_a_picture_is_explained(visit):
    page = visit()
    _choose(page, {"name": "cat.jpg", "mimeType": "image/jpeg", "buffer": b"%PDF-1.7 no picture"})
    alert = page.get_by_role("alert")
    expect(alert).to_contain_text("not a picture that can be read")
    expect(alert).to_contain_text("Send a JPEG, PNG, WebP, GIF, BMP, TIFF or AVIF file.")
    expect(page.locator("#problem-request")).to_have_text(re.compile(r"^Request \w+"))
    expect(page.locator("#again")).to_be_hidden()
    _search(page, "rocket")
    expect(alert).to_be_hidden()


def test_a_token_is_asked_for_kept_for_the_tab_and_forgotten(visit, started):
    url = started(index=Gallery(), tokens=(TOKEN,))
    page = visit("?q=rocket", url=url)
    expect(page.get_by_label("Access token", exact=True)).to_be_focused()
    page.keyboard.type("a-token-of-nobody-0123")
    page.keyboard.press("Enter")
    expect(page.get_by_role("alert")).to_contain_text("The token was not accepted.")
    page.get_by_label("Access token", exact=True).fill(TOKEN)
    page.keyboard.press("Enter")
    expect(page.locator("#summary")).to_have_text("“rocket”")
    image = _cards(page).filter(has_text="rocket.jpg").locator("img")
    expect(image).to_have_attribute("src", re.compile("^blob:"))
    assert image.evaluate("image => image.decode().then(() => image.naturalWidth)") == 640
    page.reload()
    expect(page.locator("#summary")).to_have_text("“rocket”")
    page.get_by_role("button", name="Forget").click()
    expect(page.get_by_label("Access token", exact=True)).to_be_visible()


def test_without_an_index_the_page_says_how_to_make_one(visit, started):
    url = started()
    page = visit("?q=rocket", url=url)
    expect(page.locator("#notices")).to_contain_text("There is no index")
    expect(page.locator("#notices")).to_contain_text("clip-deploy index add PICTURES")
    expect(page.locator("#form")).to_have_attribute("inert", "")


def test_random_weights_are_said_to_mean_nothing_and_trained_ones_are_not(visit, started, client):
    expect(visit("?q=cat").locator("#notices")).to_contain_text("its weights are random")
    trained = FakeClient()
    trained.serves.trained = True
    url = started(trained, Gallery())
    page = visit("?q=cat", url=url)
    expect(_cards(page)).not_to_have_count(0)
    expect(page.locator("#notices")).to_be_hidden()


def test_a_gateway_that_is_gone_and_a_proxys_own_page_are_explained(visit):
    page = visit()
    page.route("**/api/v1/search/text", lambda route: route.abort())
    page.get_by_label("Describe a picture").fill("rocket")
    page.keyboard.press("Enter")
    expect(page.get_by_role("alert")).to_contain_text("The gateway does not answer.")
    page.unroute_all()
    page.route("**/search/text", lambda route: route.fulfill(status=502, body="<h1>Bad</h1>"))
    page.locator("#again").click()
    expect(page.get_by_role("alert")).to_have_text(
        "The server answered 502, without an explanation."
    )
    page.unroute_all()
    page.locator("#again").click()
    expect(page.locator("#summary")).to_have_text("“rocket”")


# --- Who can use it -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", SCHEMES)
def test_axe_finds_nothing_in_any_state(visit, started, client, scheme):
    axe = Axe()

    def judged(page: Page) -> list[str]:
        found = axe.run(page).response["violations"]
        return [f"{row['id']}: {node['target']}" for row in found for node in row["nodes"]]

    page = visit(color_scheme=scheme)
    expect(page.locator("#start")).to_be_visible()
    assert judged(page) == []
    _search(page, "rocket")
    _cards(page).first.hover()
    assert judged(page) == []
    _choose(page, {"name": "cat.jpg", "mimeType": "image/jpeg", "buffer": b"none"})
    expect(page.locator("#problem")).to_be_visible()
    assert judged(page) == []
    client.failure = ServerBusy("Triton's queue is full", remedy="ask again in a moment")
    _choose(page, PHOTOGRAPHS / "cat.jpg")
    expect(page.locator("#again")).to_be_visible()
    assert judged(page) == []
    client.failure = None
    url = started(tokens=(TOKEN,))
    page = visit(url=url, color_scheme=scheme, **PHONE)
    expect(page.get_by_label("Access token", exact=True)).to_be_visible()
    assert judged(page) == []
    page.get_by_label("Access token", exact=True).fill(TOKEN)
    page.keyboard.press("Enter")
    expect(page.locator("#notices")).to_contain_text("There is no index")
    assert judged(page) == []


def test_the_dark_scheme_is_dark_and_the_light_one_light(visit):
    grounds = {}
    for scheme in SCHEMES:
        page = visit("?q=rocket", color_scheme=scheme)
        colour = page.evaluate("getComputedStyle(document.body).backgroundColor")
        grounds[scheme] = max(map(int, re.findall(r"\d+", colour)))
    assert grounds["dark"] < 40
    assert grounds["light"] > 240


def test_a_small_phone_shows_everything_without_scrolling_sideways(visit, client):
    page = visit(**PHONE)
    expect(page.locator("#start")).to_be_visible()
    assert _fits(page)
    for name in ("#go", ".way:has(#file)", ".way:has(#camera)", "fieldset label >> nth=0"):
        box = page.locator(name).bounding_box()
        assert box["height"] >= 44, name
    assert page.locator("#camera").get_attribute("capture") == "environment"
    page.get_by_label("Describe a picture").fill("harm " + "w" * 300)
    page.keyboard.press("Enter")
    expect(_cards(page)).not_to_have_count(0)
    assert _fits(page)
    assert _cards(page).first.bounding_box()["width"] < 160  # two in a row
    client.failure = ServerBusy("x" * 400, remedy="ask again in a moment")
    page.locator("#camera").set_input_files(PHOTOGRAPHS / "cat.jpg")
    expect(page.locator("#again")).to_be_visible()
    assert _fits(page)
    client.failure = None


@pytest.mark.parametrize("width", [768, 1280, 2560])
def test_wider_screens_show_more_in_a_row(visit, width):
    page = visit("?q=a", viewport={"width": width, "height": 900})
    expect(_cards(page)).not_to_have_count(0)
    assert _fits(page)
    columns = page.locator("#grid").evaluate("grid => getComputedStyle(grid).gridTemplateColumns")
    assert len(columns.split()) == {768: 3, 1280: 5, 2560: 6}[width]


def test_nothing_moves_for_those_who_asked_for_less_motion(visit, shop):
    shop[2].slow_s = {"slow cat": 3.0}
    page = visit(reduced_motion="reduce")
    page.get_by_label("Describe a picture").fill("slow cat")
    page.keyboard.press("Enter")
    expect(page.locator("#form")).to_have_attribute("aria-busy", "true")
    page.wait_for_timeout(350)
    assert (
        page.evaluate(
            "document.getAnimations().filter(a => a.effect.getComputedTiming().duration > 0).length"
        )
        == 0
    )
    expect(page.locator("#summary")).to_have_text("“slow cat”")


def test_pages_speak_of_what_happened_to_those_who_do_not_see(visit):
    page = visit()
    _search(page, "rocket")
    expect(page.get_by_role("status")).to_have_text(re.compile(r"^“rocket”: \d+ results in"))
    expect(page.get_by_role("search")).to_be_visible()
    for landmark in ("banner", "main", "contentinfo"):
        expect(page.get_by_role(landmark)).to_have_count(1)


# --- All of it ----------------------------------------------------------------------------------------------------


@pytest.mark.server
@pytest.mark.export
def test_a_real_model_a_real_index_and_a_real_browser(visit, tiny_server, tmp_path):
    place = tmp_path / "photos.index"
    command = [
        "index",
        "add",
        str(PHOTOGRAPHS),
        "--triton",
        tiny_server.grpc,
        "--index",
        str(place),
    ]
    with ThreadPoolExecutor() as threads:  # this one runs Playwright's event loop
        assert threads.submit(main, command).result(120) == 0
    app = create_app(GatewaySettings(tiny_server.grpc, index=str(place)))
    with listening(app) as url:
        page = visit("?q=espresso&mode=text", url=url)
        expect(_cards(page).locator(".caption")).to_have_text([CAPTIONS["coffee.jpg"]])
        _choose(page, PHOTOGRAPHS / "cat.jpg")
        expect(_cards(page)).to_have_count(len(CAPTIONS))
        expect(_cards(page).first).to_contain_text("score 1.00 picture #1")
        expect(_cards(page).first.locator(".caption")).to_have_text(CAPTIONS["cat.jpg"])
        image = _cards(page).first.locator("img")
        assert (
            max(image.evaluate("i => i.decode().then(() => [i.naturalWidth, i.naturalHeight])"))
            == 320
        )
        _cards(page).nth(1).click()
        expect(page.locator("#summary")).to_contain_text("Pictures like")
        expect(page.locator("#notices")).to_contain_text("its weights are random")
        page.context.close()  # before the gateway
