"""`python -m peer` is `sotto`."""

from peer.entry import main

main()
