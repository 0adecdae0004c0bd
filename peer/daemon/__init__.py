"""The process of one peer: performs what the layers below decided."""
