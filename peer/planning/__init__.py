"""`sotto lab plan`: which algorithm, graph and compressor suit some links, and when another system is better.

Sizes are those of frames that the product's own algorithms encode for layers of the given sizes; times are those of the
link model of `peer.lab.study.predict`; how many rounds an option needs comes from measurements alone (`evidence.toml`).
"""
