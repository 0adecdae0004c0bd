"""What a peer keeps on disk: checkpoints, journal, metrics. Knows files, and not what they are for."""
