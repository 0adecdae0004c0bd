"""`sotto watch`: a live page about a run."""

from __future__ import annotations

import contextlib
import importlib.util
import secrets
from pathlib import Path

import click

from peer.cli.app import SottoCommand, tell
from peer.cli.options import json_option, newest_run
from peer.errors import ConfigError


@click.command(cls=SottoCommand)
@click.argument("place", metavar="[RUN|KITS|PEER]", required=False, type=click.Path(path_type=Path))
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=0,
    show_default="a free one",
    metavar="PORT",
    help="Port on loopback.",
)
@click.option(
    "--operate", is_flag=True, help="Add actions: stop, leave, remove, reload. It needs the operator's certificate."
)
@json_option
def watch(place: Path | None, port: int, operate: bool, as_json: bool) -> None:
    """Show a run on a live page in the browser.

    The argument is a run folder (`sotto up`, `sotto simulate`), a cluster folder (`sotto init cluster`), or the folder
    or configuration file of one device; by default ./peer.toml or, without one, the newest run in ./runs. The page
    shows the curves of all peers, the worst peer, the graph with its links, who waits for whom, traffic, events and
    logs. Figures from before the page was opened come from the metrics.

    The command prints the address of the page and serves it until Ctrl-C, on loopback only. The address contains a
    token; without it, nobody on this machine can read the figures. From another machine, forward the port with
    `ssh -L`. The page only shows the run unless --operate is given. Every action has to be confirmed.

    Peers are asked as by `sotto status`, and open no port for it. It needs `pip install 'sottovoce[watch]'`.

    \b
    Examples:
      sotto watch
      sotto watch runs/digits
      sotto watch kits --port 8080
      sotto watch kits --operate
      sotto watch peer.toml
    """
    lacking = [name for name in ("starlette", "uvicorn") if importlib.util.find_spec(name) is None]
    if lacking:
        raise ConfigError(f"needs {' and '.join(lacking)}: pip install 'sottovoce[watch]'", key="sotto watch")
    import asyncio

    from peer.watch.actions import check_operator
    from peer.watch.feed import Feed
    from peer.watch.observer import open_observer
    from peer.watch.server import listen, server

    if place is None:
        place = newest_run(or_device=True)
    observer = open_observer(place)
    if operate:
        check_operator(observer)
    token = secrets.token_urlsafe(24)
    with listen(port) as opened:
        # Not opened from here: the command line of a browser shows the token to every user of the machine.
        address = f"http://127.0.0.1:{opened.getsockname()[1]}/#token={token}"
        lines = [f"watch at {address}", "Ctrl-C ends this; the run goes on"]
        tell(as_json, {"address": address, "operate": operate}, lines, indent=None)

        async def serve() -> None:
            await server(Feed(observer), token=token, operate=operate).serve(sockets=[opened])

        with contextlib.suppress(KeyboardInterrupt):
            asyncio.run(serve())
