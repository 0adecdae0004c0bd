"""One peer without clock and sockets: rounds or pair exchanges put together, and how they survive a crash."""
