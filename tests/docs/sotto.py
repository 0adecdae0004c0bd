"""`sotto` for pages that are followed: peers of a cluster on one machine get ports that are free on this one."""

from __future__ import annotations

import sys

from peer.__main__ import main

if __name__ == "__main__":
    words = sys.argv[1:]
    if words[:2] == ["init", "cluster"] and "--peers" in words and "--host" not in words:
        # Here, so that no other command takes longer than it does for a reader.
        from peer.ops.local_cluster import free_ports

        at = words.index("--peers")
        hosts = [part for port in free_ports(int(words[at + 1])) for part in ("--host", f"127.0.0.1:{port}")]
        sys.argv[1:] = words[:at] + hosts + words[at + 2 :]
    sys.exit(main())
