"""The timeline's page, in a real browser: Chromium without a screen, driven by selenium.

Debian's packages ``chromium`` and ``chromium-driver`` are enough; ``.ci/browser`` installs them.
"""

import json
import shutil

import pytest
import torch

import blockpipe as bp
from blockpipe.schedules.builders import make_schedule
from blockpipe.schedules.simulation import Costs

webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
from selenium.webdriver.common.action_chains import ActionChains  # noqa: E402
from selenium.webdriver.common.keys import Keys  # noqa: E402
from selenium.webdriver.support.ui import Select  # noqa: E402

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser")
DRIVER = shutil.which("chromedriver")
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--window-size=1100,800",
)

pytestmark = pytest.mark.skipif(
    not BROWSER or not DRIVER, reason="needs chromium and chromedriver (see .ci/browser)"
)


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('chromium')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options, webdriver.ChromeService(DRIVER))
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def timeline():
    """ZB-H1 over three lanes, with copies."""
    return bp.Timeline.of(make_schedule("zb-h1", [0, 1, 2], 4), Costs(transfer=0.25))


@pytest.fixture
def page(browser, timeline, tmp_path):
    """The page of a schedule, fresh; after the test nothing has failed and nothing was fetched."""
    yield from opened(browser, timeline, tmp_path)


@pytest.fixture
def profiled(browser, tmp_path):
    """The page of a real profile of two steps."""
    model = bp.begin_blocks(
        torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)), {"1": 1}
    )
    pipe = bp.Pipeline(model, devices=["cpu"] * 2, chunks=3)
    with pipe.profile() as t:
        for _ in range(2):
            pipe.forward_backward(torch.ones(6, 4), loss_fn=torch.sum)
    yield from opened(browser, t, tmp_path)


def opened(browser, timeline, tmp_path):
    path = tmp_path / "t.html"
    timeline.to_html(path)
    browser.get_log("performance")
    browser.get_log("browser")
    browser.get(path.as_uri())
    yield browser
    assert browser.get_log("browser") == []
    sent = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    urls = [
        message["params"]["request"]["url"]
        for message in sent
        if message["method"] == "Network.requestWillBeSent"
    ]
    own = ("data:", "chrome:")  # the browser's first tab is a page of its own
    assert [url for url in urls if not url.startswith(own)] == [path.as_uri()]


def of(browser, selector):
    return browser.find_elements("css selector", selector)


def one(browser, selector):
    (found,) = of(browser, selector)
    return found


def scale(browser):
    """How much time the chart shows."""
    chart = one(browser, "#chart")
    start, end = (float(chart.get_attribute(f"data-{name}")) for name in ("from", "to"))
    return start, end


def middle(browser, index):
    """Moves the mouse to an event."""
    event = one(browser, f"rect.event[data-i='{index}']")
    ActionChains(browser).move_to_element(event).perform()
    return event


def index_of(timeline, kind, hop, m):
    (found,) = (
        n for n, e in enumerate(timeline.events) if (e.kind, e.hop, e.microbatch) == (kind, hop, m)
    )
    return found


def test_every_event_is_drawn(page, timeline):
    """A rectangle for each; lanes by name; the facts above; a legend of what is there."""
    assert len(of(page, "rect.event")) == len(timeline.events)
    texts = [e.text for e in of(page, "#chart > text")]
    assert {"lane 0", "lane 1", "lane 2"} <= set(texts)
    facts = one(page, "#facts").text
    assert f"{100 * timeline.bubble():.1f} % bubble" in facts
    assert one(page, "#legend").text.split("\n") == [
        "forward", "backward", "weight gradients", "copy", "wait",
    ]  # fmt: skip


def test_the_table_has_the_figures(page, timeline):
    """A row for each lane: busy and bubble as the timeline says."""
    rows = [
        [c.text for c in r.find_elements("css selector", "td")] for r in of(page, "#lanes tbody tr")
    ]
    totals = timeline.totals()
    assert [row[:3] for row in rows] == [
        [f"lane {n}", f"{lane.busy:g}", f"{100 * lane.idle:.1f} %"] for n, lane in enumerate(totals)
    ]


def test_hovering_shows_what_it_is(page, timeline):
    """Kind, hop, stage, micro-batch and duration; away from it the tooltip goes."""
    assert not one(page, "#tip").is_displayed()
    middle(page, index_of(timeline, "B", 1, 2))
    tip = one(page, "#tip")
    assert tip.is_displayed()
    assert tip.text.startswith("backward of hop 1 (stage 1)\nmicro-batch 2\n1, from ")
    middle(page, first_copy(timeline))
    assert tip.text.startswith("copy from hop 0 to hop 1 (stage 1)\nmicro-batch 0\n0.25, from 1 on")
    ActionChains(page).move_to_element(one(page, "#title")).perform()
    assert not tip.is_displayed()


def first_copy(timeline):
    return next(n for n, e in enumerate(timeline.events) if e.kind == "copy")


def test_a_click_follows_a_micro_batch(page, timeline):
    """All else is dimmed, lines go from hop to hop; a second click, or Escape, ends it."""
    event = middle(page, index_of(timeline, "F", 0, 1))
    event.click()
    bright = {int(e.get_attribute("data-i")) for e in of(page, "rect.event:not(.dim)")}
    assert bright == {n for n, e in enumerate(timeline.events) if e.microbatch == 1}
    assert len(of(page, "path.path")) == 4  # three hops out, and back
    assert "micro-batch 1" in one(page, "#said").get_property("textContent")
    one(page, f"rect.event[data-i='{index_of(timeline, 'F', 0, 1)}']").click()
    assert not of(page, "rect.dim")
    assert not of(page, "path.path")
    middle(page, index_of(timeline, "F", 0, 2)).click()
    assert of(page, "rect.dim")
    one(page, "#chart").send_keys(Keys.ESCAPE)
    assert not of(page, "rect.dim")
    middle(page, index_of(timeline, "F", 0, 2)).click()
    one(page, "#clear").click()
    assert not of(page, "rect.dim")


def test_buttons_zoom_in_out_and_fit(page, timeline):
    """In makes the bars wider, out narrower, never beyond the whole; fit shows all."""
    start, end = scale(page)
    assert (start, end) == (0, timeline.step_time)
    wide = one(page, "rect.event[data-i='0']").size["width"]
    one(page, "#out").click()
    assert scale(page) == (start, end)
    one(page, "#in").click()
    a, b = scale(page)
    assert b - a == pytest.approx(0.6 * end)
    assert start < a < b < end
    one(page, "#in").click()
    one(page, "#fit").click()
    assert scale(page) == (start, end)
    assert one(page, "rect.event[data-i='0']").size["width"] == wide


def test_the_wheel_zooms_where_the_mouse_is(page):
    """What is under it stays there; the page does not scroll."""
    chart = one(page, "#chart")
    before = scale(page)
    event = one(page, "rect.event[data-i='9']")
    where = event.rect["x"] + event.rect["width"] / 2
    origin = webdriver.common.actions.wheel_input.ScrollOrigin.from_element(event)
    ActionChains(page).scroll_from_origin(origin, 0, -100).perform()
    after = scale(page)
    assert after[1] - after[0] < 0.8 * (before[1] - before[0])
    event = one(page, "rect.event[data-i='9']")
    assert event.rect["x"] + event.rect["width"] / 2 == pytest.approx(where, abs=2)
    assert page.execute_script("return scrollY") == 0
    assert chart.is_displayed()


def test_dragging_moves_to_later_times(page):
    """Zoomed in, to the left shows what is later; it is no click."""
    one(page, "#in").click()
    one(page, "#in").click()
    start, end = scale(page)
    chart = one(page, "#chart")
    ActionChains(page).move_to_element(chart).click_and_hold().move_by_offset(
        -120, 0
    ).release().perform()
    a, b = scale(page)
    assert a > start
    assert b - a == pytest.approx(end - start)
    assert not of(page, "rect.dim")


def test_keys_do_all_that_the_mouse_does(page, timeline):
    """Arrows choose an event, which is read out; Enter follows; plus, minus, 0 zoom."""
    chart = one(page, "#chart")
    assert chart.get_attribute("tabindex") == "0"
    chart.send_keys(Keys.ARROW_RIGHT)
    said = one(page, "#said")
    assert said.get_property("textContent").startswith("forward of hop 0 (stage 0)\nmicro-batch 0")
    chart.send_keys(Keys.ARROW_RIGHT)
    assert "micro-batch 1" in said.get_property("textContent")
    assert one(page, "#tip").is_displayed()
    chart.send_keys(Keys.ARROW_DOWN)
    assert said.get_property("textContent").startswith("copy from hop")
    chart.send_keys(Keys.ARROW_UP, Keys.ENTER)
    assert of(page, "rect.dim")
    chart.send_keys(Keys.ESCAPE)
    assert not of(page, "rect.dim")
    chart.send_keys("+")
    assert scale(page)[1] - scale(page)[0] < timeline.step_time
    chart.send_keys(Keys.SHIFT, Keys.ARROW_RIGHT)
    chart.send_keys(Keys.NULL, "0")
    assert scale(page) == (0, timeline.step_time)
    chart.send_keys("-")
    assert scale(page) == (0, timeline.step_time)


def test_colours_by_micro_batch(page, timeline):
    """Then actions of two micro-batches differ, and those of one are alike in hue."""
    Select(one(page, "#colour")).select_by_value("microbatch")
    fills = {
        m: one(page, f"rect[data-i='{index_of(timeline, 'F', 0, m)}']").get_attribute("fill")
        for m in range(4)
    }
    assert len(set(fills.values())) == 4
    other = one(page, f"rect[data-i='{index_of(timeline, 'F', 1, 2)}']").get_attribute("fill")
    assert other == fills[2]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours_follow_the_systems_scheme(page, scheme):
    """The colours follow the system's, and text stands out from its ground."""
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    def brightness(selector, name):
        value = one(page, selector).value_of_css_property(name)
        numbers = [float(n) / 255 for n in value.partition("(")[2].rstrip(")").split(",")[:3]]
        return sum(
            w * (n / 12.92 if n <= 0.03928 else ((n + 0.055) / 1.055) ** 2.4)
            for w, n in zip((0.2126, 0.7152, 0.0722), numbers, strict=True)
        )

    ground = brightness("body", "background-color")
    assert (ground > 0.5) == (scheme == "light")
    for selector in ("#title", "#facts", "#legend"):
        pair = sorted((ground, brightness(selector, "color")))
        assert (pair[1] + 0.05) / (pair[0] + 0.05) >= 4.5  # WCAG AA


def test_a_profile_shows_its_last_step_and_predictions(profiled):
    """The last of its steps is shown; other steps and the predictions can be chosen."""
    assert one(profiled, "#title").text == "1f1b"
    step, view = Select(one(profiled, "#step")), Select(one(profiled, "#view"))
    assert [option.text for option in step.options] == ["all", "1", "2"]
    second = scale(profiled)
    step.select_by_value("0")
    first = scale(profiled)
    assert first[0] == 0
    assert first[1] < second[1]
    step.select_by_value("")
    assert scale(profiled) == (first[0], second[1])
    assert [option.text for option in view.options] == [
        "measured",
        "1f1b, predicted from the recording",
        "1f1b, predicted from the measured hops",
    ]
    view.select_by_index(2)
    assert one(profiled, "#title").text == "1f1b, predicted from the measured hops"
    assert [r.find_element("css selector", "td").text for r in of(profiled, "#views tbody tr")] == [
        option.text for option in view.options
    ]


def test_the_page_works_in_a_notebooks_frame(browser, timeline, tmp_path):
    """The page is in a frame of its own, and works there."""
    path = tmp_path / "notebook.html"
    path.write_text(f"<!DOCTYPE html><meta charset=utf-8><body>{timeline._repr_html_()}")
    browser.get(path.as_uri())
    browser.switch_to.frame(one(browser, "iframe"))
    try:
        assert len(of(browser, "rect.event")) == len(timeline.events)
    finally:
        browser.switch_to.default_content()
    assert [e for e in browser.get_log("browser") if e["level"] == "SEVERE"] == []
