"""What the daemon keeps of this device: its choices, its secret and its limits."""
