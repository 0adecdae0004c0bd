"""Writes the golden frames that do not exist yet."""

from peer.wire import encode
from tests.wire.golden import FOLDER, cases, layout_of

for name, (message, previous) in cases().items():
    path = FOLDER / f"{name}.bin"
    if not path.exists():
        path.write_bytes(encode(message, layout_of(name), previous=previous))
        print(f"wrote {path.name}")
