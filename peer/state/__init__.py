"""The disk state of a peer: checkpoints, journal, metrics. Knows files, not their purpose."""
