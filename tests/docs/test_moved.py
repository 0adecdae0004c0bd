"""Every page and heading that was published still leads somewhere: `published.txt` names them, one a line, and grows
with each release; `docs/moved.toml` says where those are that are gone.
"""

from __future__ import annotations

import tomllib
from pathlib import Path

from tests.docs.walk import ROOT
from tests.test_docs import anchors

PUBLISHED = (Path(__file__).parent / "published.txt").read_text(encoding="utf-8").split()
MOVED = tomllib.loads((ROOT / "docs" / "moved.toml").read_text(encoding="utf-8"))


def is_there(address: str) -> bool:
    page, _, heading = address.partition("#")
    return (ROOT / page).is_file() and (not heading or heading in anchors(ROOT / page))


def test_what_was_published_is_there_or_says_where_it_is() -> None:
    assert len(PUBLISHED) > 500
    assert [address for address in PUBLISHED if not is_there(address) and address not in MOVED] == []


def test_what_moved_is_gone_and_leads_to_what_is_there() -> None:
    assert [old for old, new in MOVED.items() if is_there(old) or not is_there(new)] == []
    # Of a page that is gone, its top leads on, too.
    assert [old for old in MOVED if not is_there(old.partition("#")[0]) and old.partition("#")[0] not in MOVED] == []
