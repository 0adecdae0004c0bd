"""The page of `sotto watch` on an operator's machine: `python -m tests.shaped.watching KITS`.

For each line of its input it asks its own server, as a page does that is opened now, and prints what came as JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from peer.watch.observer import open_observer
from tests.watch.serving import serving


def _shown(parts: dict[str, Any]) -> dict[str, Any]:
    edges = {f"{edge[0]}-{edge[1]}": edge[3] for edge in parts["edges"]}
    return {"peers": [peer[2] for peer in parts["peers"]], "edges": edges, "round": parts["run"]["round"]}


if __name__ == "__main__":
    with serving(open_observer(Path(sys.argv[1]))) as served:
        for _ in sys.stdin:
            print(json.dumps(_shown(served.parts({"run", "peers", "edges"}))), flush=True)
