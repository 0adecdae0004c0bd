"""Takes one check out of the running program: what the program would be without it.

A check is an `if` that raises, found by a piece of its condition or of its sentence. The function around it is compiled
again with a condition that is never true, and takes the place of the old one until the end.
"""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType, FunctionType, ModuleType


@contextmanager
def disabled(module_name: str, piece: str) -> Iterator[None]:
    """Disable the one check of a module that has this piece in its condition or its sentence. Raises ValueError where
    there is none, or more than one."""
    module = importlib.import_module(module_name)
    tree = ast.parse(inspect.getsource(module))
    check, names = _only(tree, piece, module_name)
    check.test = ast.copy_location(ast.Constant(False), check.test)
    compiled = compile(tree, str(module.__file__), "exec")
    function = _function(module, names)
    before = function.__code__
    function.__code__ = _code(compiled, ".".join(names))
    try:
        yield
    finally:
        function.__code__ = before


def _only(tree: ast.Module, piece: str, module_name: str) -> tuple[ast.If, list[str]]:
    """Return the check, and the names of class and function around it."""
    found = [(check, names) for check, names in _checks(tree, []) if piece in _texts(check)]
    if len(found) != 1:
        raise ValueError(f"{module_name} has {len(found)} checks with {piece!r}")
    return found[0]


def _checks(node: ast.AST, names: list[str]) -> Iterator[tuple[ast.If, list[str]]]:
    for child in ast.iter_child_nodes(node):
        is_named = isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        inner = (
            [*names, child.name] if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) else names
        )
        if isinstance(child, ast.If) and names:
            yield child, names
        yield from _checks(child, inner if is_named else names)


def _texts(check: ast.If) -> str:
    """Return the condition, and the sentences that stand directly in the body."""
    statements = [
        statement for statement in check.body if not isinstance(statement, ast.If | ast.For | ast.While | ast.With)
    ]
    strings = [
        node.value
        for statement in statements
        for node in ast.walk(statement)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    return "\n".join([ast.unparse(check.test), *strings])


def _function(module: ModuleType, names: list[str]) -> FunctionType:
    value: object = module
    for name in names:
        value = inspect.getattr_static(value, name)
    value = inspect.unwrap(getattr(value, "__func__", value))  # type: ignore[arg-type]
    if not isinstance(value, FunctionType):
        raise ValueError(f"{module.__name__}.{'.'.join(names)} is no function")
    return value


def _code(compiled: CodeType, name: str) -> CodeType:
    for constant in compiled.co_consts:
        if isinstance(constant, CodeType):
            if constant.co_qualname == name:
                return constant
            if name.startswith(f"{constant.co_qualname}."):
                return _code(constant, name)
    raise ValueError(f"nothing is called {name}")
