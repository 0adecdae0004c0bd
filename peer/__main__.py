"""`python -m peer` is `sotto`."""

from peer.cli import main

main()
