"""One peer without clock and sockets: rounds or pair exchanges put together, and their recovery after a crash."""
