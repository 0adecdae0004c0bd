"""Builds the native kernels; everything else is in pyproject.toml.

The kernels are optional: where no C compiler is found the build goes on without them, and `peer.native` falls back to
numpy with identical results. They use the limited API of Python, so that one wheel serves every version; builds of
Python without the global lock have no such API.
"""

import sysconfig

from setuptools import setup

LIMITED = {} if sysconfig.get_config_var("Py_GIL_DISABLED") else {"bdist_wheel": {"py_limited_api": "cp311"}}

setup(cffi_modules=["peer/native/build.py:ffibuilder"], options=LIMITED)
