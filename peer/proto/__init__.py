"""Code generated from `proto/` by `tools/generate_proto.py`; not to be edited."""
