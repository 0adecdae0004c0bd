"""Compressors: the only place where information is lost on purpose.

Each compressor turns one layer of a flat vector into a `LayerPayload` and knows neither algorithms, bytes nor the
network. `build(kind, **settings)` finds one by name; `decompress` and its companions turn payloads back into numbers.
"""
