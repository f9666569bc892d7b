"""The public names of a package: what `__all__` of its `__init__.py` lists, read without importing it."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from pathlib import Path


def public_names(init: Path) -> list[str]:
    """Return the names in `__all__`, in its order, each once.

    `__all__` may be built from literals of strings, `+`, `*names`, `sorted(...)`, `list(...)`, `tuple(...)` and variables of the
    file that are; of a dict (a table of lazily loaded names) the keys count.

    Raises:
        ValueError: there is no `__all__`, or it is computed in another way.
    """
    values: dict[str, ast.expr] = {}
    for node in ast.parse(init.read_text(encoding="utf-8"), str(init)).body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            values |= {t.id: node.value for t in targets if isinstance(t, ast.Name)}
        elif isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name) and node.target.id in values:
            values[node.target.id] = ast.BinOp(values[node.target.id], node.op, node.value)
    if "__all__" not in values:
        raise ValueError(f"{init} has no __all__")
    try:
        return list(dict.fromkeys(_strings(values["__all__"], values)))
    except NotImplementedError as e:
        raise ValueError(f"{init}: cannot read __all__ without running the file: {e}") from None


def _strings(node: ast.expr | None, values: Mapping[str, ast.expr]) -> list[str]:
    match node:
        case ast.Constant(value=str(text)):
            return [text]
        case ast.List(elts=parts) | ast.Tuple(elts=parts) | ast.Set(elts=parts):
            return [text for part in parts for text in _strings(part, values)]
        case ast.Dict(keys=parts, values=merged):  # `**other` has no key
            return [t for key, value in zip(parts, merged, strict=True) for t in _strings(key or value, values)]
        case ast.Starred(value=inner):
            return _strings(inner, values)
        case ast.BinOp(left=left, op=ast.Add() | ast.BitOr(), right=right):
            return _strings(left, values) + _strings(right, values)
        case ast.Call(func=ast.Name(id="sorted" | "list" | "tuple" | "set"), args=[inner]):
            return _strings(inner, values)
        case ast.Name(id=name) if name in values:
            return _strings(values[name], values)
    raise NotImplementedError(ast.unparse(node) if node else "an empty value")
