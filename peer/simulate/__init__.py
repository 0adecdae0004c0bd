"""The simulator: thousands of peers in one process on a virtual clock, with the objects of the real ones."""
