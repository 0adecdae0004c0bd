"""The parts of models in float32, as ordinary modules of torch. `peer.train.eight_bit` has their twins in 8 bits."""
