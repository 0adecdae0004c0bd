"""Notes that all members pass on: evaluations, divergence, classes, releases and digests."""
