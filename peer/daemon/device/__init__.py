"""Settings and limits that the daemon keeps for this device, and its secret."""
