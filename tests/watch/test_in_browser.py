"""The live page in a real browser: on a phone and a laptop, in light and dark, by keyboard, and against other pages."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from peer.config.options import load
from peer.config.writer import write_resolved
from peer.ops import control
from peer.ops.cluster_files import Host, write_cluster
from peer.ops.local_cluster import free_ports
from peer.state.metrics import MetricsStore, Summary
from peer.watch.observer import open_observer
from tests.browser import REBOUND, SIZES, Page
from tests.report.sample_run import as_simulation, evaluation, round_record, write_sample_run
from tests.watch.serving import TOKEN, Served, serving
from tests.watch.test_observer import Devices

NASTY = "<script>document.title='gone'</script>\x1b[31m"


@pytest.fixture(scope="module")
def simulation(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a simulation whose names try what markup and terminals can."""
    run = as_simulation(write_sample_run(tmp_path_factory.mktemp("runs") / "digits"))
    summary = Summary.load(run / "summary.json")
    summary.name, summary.ended = NASTY, f"stopped: {NASTY}"
    summary.peer_names = [NASTY, "<img src=x onerror=alert(1)>", "a_very_long_name_" * 6, "peer-3"]
    summary.save(run / "summary.json")
    return run


@pytest.fixture(scope="module")
def served(simulation: Path) -> Iterator[Served]:
    with serving(open_observer(simulation)) as opened:
        yield opened


@pytest.fixture(scope="module")
def silent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Kits of which no peer runs, with the operator's actions."""
    kits = tmp_path_factory.mktemp("kits") / "kits"
    config = load(environment={}, overrides=["run.rounds=9"])
    write_cluster(kits, config, [Host("127.0.0.1", port) for port in free_ports(3)])
    with serving(open_observer(kits), operate=True) as opened:
        yield opened


def opened(chromium: Any, served: Served, **how: Any) -> Page:
    """Return the page with its first figures."""
    shown = Page(chromium, served.address, **how)
    shown.page.wait_for_selector("#peers-rows tr")
    shown.page.wait_for_selector("#drawing svg .node, #drawing canvas")
    return shown


def test_the_page_fits_a_phone_and_a_laptop_and_passes_axe_in_light_and_dark(
    chromium: Any, served: Served, silent: Served
) -> None:
    for each in (served, silent):
        shown = opened(chromium, each, size=SIZES[0])
        for scheme in ("dark", "light"):
            shown.page.emulate_media(color_scheme=scheme)
            assert shown.too_wide() == []
            assert shown.violations(*(["color-contrast"] if scheme == "dark" else [])) == []
        shown.page.set_viewport_size({"width": SIZES[1][0], "height": SIZES[1][1]})
        shown.page.wait_for_selector("#drawing svg[width='420']")
        assert shown.too_wide() == []
        assert shown.complaints == []
        shown.close()


def test_what_a_run_says_stays_text(chromium: Any, served: Served) -> None:
    shown = opened(chromium, served)
    page = shown.page
    visible = "<script>document.title='gone'</script> [31m"
    assert page.title() == f"{visible} · Sottovoce"
    assert page.locator("#name").inner_text() == visible
    assert page.locator("#peers-rows tr").first.locator("td").first.inner_text() == visible
    assert visible in page.locator("#facts").inner_text()
    assert visible in page.locator("#figure .legend, #loss .legend").all_inner_texts()[0] + page.locator(
        "#drawing title"
    ).first.evaluate("e => e.textContent")
    assert page.locator("body img, body script").count() == 0
    assert shown.complaints == []
    shown.close()


def test_the_limits_of_a_device_stand_beside_its_state(
    chromium: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kits = tmp_path / "kits"
    config = load(environment={}, overrides=["run.rounds=40"])
    write_cluster(kits, config, [Host("127.0.0.1", port) for port in free_ports(3)])
    devices = Devices(kits)
    monkeypatch.setattr(control, "ask", devices.ask)
    for index in range(3):
        devices.start(index, 20)
    reached = [{"reason": f"1.2 MiB carried of limits.day_mbytes = 1 {NASTY}", "until": "2026-12-01 00:00+01:00"}]
    devices.says["peer-1"] = {"limits": {"then": "slow", "reached": reached, "warnings": []}}
    devices.says["peer-2"] = {"limits": {"then": "slow", "reached": [], "warnings": ["more than 90% is used"]}}
    with serving(open_observer(kits)) as watched:
        shown = opened(chromium, watched)
        why = shown.page.locator("#peers-rows tr .why")
        why.first.wait_for()
        texts = why.all_inner_texts()
        assert texts[0].startswith("slowed down until 2026-12-01 00:00+01:00: 1.2 MiB carried of limits.day_mbytes = 1")
        assert texts[1:] == ["more than 90% is used"]
        assert shown.page.locator("body img, body script").count() == 0
        assert shown.too_wide() == []
        assert shown.complaints == []
        shown.close()


def test_figures_move_without_a_reload_and_no_other_machine_is_asked(chromium: Any, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    config = load(environment={}, overrides=["run.rounds=30", 'graph.kind="directed-ring"'])
    write_resolved(config, run / "config.toml", run)
    store = MetricsStore(run / "metrics.sqlite")

    def write(first: int, last: int) -> None:
        for peer in range(4):
            store.put(*(round_record(peer, t, 30) for t in range(first, last)))
            store.put(evaluation(peer, last, "test", offset=peer))
        store.flush()

    write(0, 10)
    with serving(open_observer(run)) as watched:
        shown = Page(chromium, "about:blank")
        elsewhere: list[str] = []
        shown.page.route("**/*", lambda route: _only_loopback(route, elsewhere))
        shown.page.goto(watched.address)
        page = shown.page
        page.wait_for_selector("#round:text-is('10')")
        worst = page.locator("#worst").inner_text()
        plot = page.locator("#loss svg.plot")
        plot.focus()
        page.keyboard.press("End")
        assert page.locator("#loss .tip").inner_text().startswith("round 10")
        page.evaluate("document.body.dataset.kept = 'yes'")
        write(10, 20)
        page.wait_for_selector("#round:text-is('20')")
        page.wait_for_selector(f"#worst:not(:text-is('{worst}'))")
        assert page.evaluate("document.body.dataset.kept") == "yes"
        # The keyboard's place in the chart stays, and reads the new curve.
        assert plot.evaluate("e => e === document.activeElement")
        page.keyboard.press("End")
        page.wait_for_selector("#loss .tip:has-text('round 20')")
        assert page.locator("#drawing .edge").count() == 4
        # The token is out of the address, and the page may be loaded again.
        assert TOKEN not in page.url
        page.reload()
        page.wait_for_selector("#round:text-is('20')")
        assert elsewhere == []
        assert {request.split("/")[2] for request in shown.requests if request != "about:blank"} == {
            f"127.0.0.1:{watched.port}"
        }
        shown.close()
    store.close()


def _only_loopback(route: Any, elsewhere: list[str]) -> None:
    if route.request.url.startswith("http://127.0.0.1:"):
        route.continue_()
    else:
        elsewhere.append(route.request.url)
        route.abort()


def test_a_server_that_ends_is_said_and_found_again_by_nobody_else(chromium: Any, simulation: Path) -> None:
    with serving(open_observer(simulation)) as watched:
        shown = opened(chromium, watched)
        assert shown.page.locator("#connection").inner_text() == "live"
    shown.page.wait_for_selector("#connection.lost")
    shown.close()


def test_an_address_without_its_token_shows_nothing(chromium: Any, served: Served) -> None:
    for address in (served.origin, f"{served.origin}/#token=wrong"):
        shown = Page(chromium, address)
        shown.page.wait_for_selector("#connection.lost")
        assert "whole address" in shown.page.locator("#connection").inner_text()
        assert shown.page.locator("#peers-rows tr").count() == 0
        shown.close()


def test_by_keyboard_everything_is_reached_in_order_and_the_focus_is_seen(chromium: Any, silent: Served) -> None:
    shown = opened(chromium, silent)
    reached = []
    for _ in range(40):
        shown.page.keyboard.press("Tab")
        found = shown.page.evaluate(
            """() => { const e = document.activeElement; if (e === document.body) return null;
            const style = getComputedStyle(e);
            return [e.id || e.getAttribute('aria-label') || e.textContent,
              style.outlineStyle !== 'none' || style.textDecorationLine !== 'none',
              e.getBoundingClientRect().top + scrollY]; }"""
        )
        if found is None:
            break
        reached.append(found)
    names = [name for name, *_ in reached]
    assert names[:6] == ["Curves", "Graph", "Peers", "Links", "Events", "Log"]
    assert [name for name in names if name.startswith("Act on")] == [f"Act on peer-{n}…" for n in range(3)]
    assert all(seen for _, seen, _ in reached), "a focus that is not seen"
    heights = [top for *_, top in reached]
    assert heights == sorted(heights)
    shown.close()


def test_an_action_is_confirmed_by_name_and_its_answer_is_shown(chromium: Any, silent: Served) -> None:
    shown = opened(chromium, silent)
    page = shown.page
    page.get_by_role("button", name="Act on peer-1…").press("Enter")
    assert page.locator("#dialog").is_visible()
    # Nobody answers: what is left is to exclude it.
    assert page.locator("#choices input").count() == 1
    assert page.locator("#confirm").is_disabled()
    page.get_by_label("Remove as lost").check()
    assert page.locator("#confirm").is_disabled(), "this cannot be undone"
    page.locator("#confirm-name").fill("peer-1")
    assert shown.violations() == []
    page.locator("#confirm").click()
    page.wait_for_selector("#said:has-text('refused:')")
    assert "nobody listens" in page.locator("#said").inner_text()
    page.keyboard.press("Escape")
    assert page.locator("#dialog").is_hidden()
    shown.close()


def test_another_page_can_neither_read_nor_act(chromium: Any, silent: Served) -> None:
    evil = f"""<iframe src="{silent.origin}/"></iframe><script>
      const body = '{{"action": "stop all", "peer": null}}';
      const ask = (mode, type) => fetch("{silent.origin}/act",
        {{method: "POST", mode, body, headers: {{"Content-Type": type}}}}).then(a => "answered " + a.type, String);
      Promise.all([ask("no-cors", "text/plain"), ask("cors", "application/json"),
        fetch("{silent.origin}/events").then(a => a.text(), String)]).then(said => document.title = said.join("; "));
      </script>"""
    own = opened(chromium, silent)
    events = len(silent.feed.events)
    other = own.context.new_page()
    statuses: list[int] = []
    other.on("response", lambda answer: statuses.append(answer.status) if "/act" in answer.url else None)
    other.route("http://evil.example/", lambda route: route.fulfill(body=evil, content_type="text/html"))
    other.goto("http://evil.example/", wait_until="commit")
    other.wait_for_function("document.title !== ''")
    # What needs no leave is sent and refused; nothing can be read.
    first, *rest = other.title().split("; ")
    assert first in ("answered opaque", "TypeError: Failed to fetch")
    assert rest == ["TypeError: Failed to fetch"] * 2
    assert set(statuses) <= {401, 403}
    assert other.frames[1].locator("#name").count() == 0, "the page is in no frame"
    assert not [each for each in list(silent.feed.events)[events:] if "operator" in each.text]
    own.close()


def test_a_name_that_was_made_to_lead_here_is_refused(chromium: Any, served: Served) -> None:
    shown = Page(chromium, f"http://{REBOUND}:{served.port}/#token={TOKEN}")
    assert "served under 127.0.0.1" in shown.page.locator("body").inner_text()
    said = shown.page.evaluate(
        f"fetch('/events', {{headers: {{authorization: 'Bearer {TOKEN}'}}}}).then(a => a.status)"
    )
    assert said == 421
    shown.close()
