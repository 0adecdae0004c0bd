"""Builds the native kernels; everything else is in pyproject.toml.

The kernels are optional: where no C compiler is found the build goes on without them, and `peer.native` falls back to
numpy with identical results.
"""

from setuptools import setup

setup(cffi_modules=["peer/native/build.py:ffibuilder"])
