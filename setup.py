"""Builds the native kernels; everything else is in pyproject.toml.

The kernels are optional: where no C compiler is found the build goes on without them, and `peer.native` falls back to
numpy with identical results. They use the limited API of Python, so that one wheel serves every version; builds of
Python without the global lock have no such API.
"""

import ctypes
import os
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.modified import newer_group

KERNELS = Path("peer/native")
LIMITED = {} if sysconfig.get_config_var("Py_GIL_DISABLED") else {"bdist_wheel": {"py_limited_api": "cp311"}}


class BuildKernels(build_ext):
    """Compiles the sources on all processors, and not at all for an editable installation that has them already: each
    set of extras that is added would compile them again."""

    def build_extensions(self) -> None:
        compile_all = self.compiler.compile

        def compile_at_once(sources: list[str], **options: Any) -> list[str]:
            with ThreadPoolExecutor(os.cpu_count()) as threads:
                objects = threads.map(partial(compile_all, **options), ([source] for source in sources))
                return [each for one in objects for each in one]

        self.compiler.compile = compile_at_once
        super().build_extensions()

    def build_extension(self, ext: Extension) -> None:
        kept = KERNELS / Path(self.get_ext_filename(ext.name)).name
        if self.editable_mode and not self.force and _is_fresh(kept):
            self.copy_file(str(kept), self.get_ext_fullpath(ext.name))
        else:
            super().build_extension(ext)


def _is_fresh(kernels: Path) -> bool:
    """Return whether compiled kernels are newer than all that they are made of, and are of this machine."""
    # The sources of the extension say less: one of them is generated anew in each build.
    if newer_group([__file__, KERNELS / "build.py", *KERNELS.glob("*.[ch]")], kernels):
        return False
    try:
        ctypes.CDLL(str(kernels.resolve()))
    except OSError:
        return False
    return True


setup(cffi_modules=["peer/native/build.py:ffibuilder"], cmdclass={"build_ext": BuildKernels}, options=LIMITED)
