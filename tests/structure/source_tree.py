"""Read a package's source files into `Module`s: imports, functions and classes, without importing anything.

A module is named by its path relative to the package's root, such as `mesh/group.py`; a package by its `__init__.py`.
"""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

When = Literal["import", "call", "typing"]  # when Python executes it: as the module is imported, in a function, never

_BLOCKS = ("body", "handlers", "cases", "orelse", "finalbody")  # the fields of a statement that hold statements


@dataclass(frozen=True)
class Import:
    """`source` imports `target`, both paths, on a line."""

    source: str
    target: str
    line: int
    when: When

    def __str__(self) -> str:
        return f"{self.source}:{self.line} -> {self.target}"


@dataclass(frozen=True)
class Function:
    """A function or method; `lines` are those of its body, from the first statement after the docstring to the last."""

    name: str
    line: int
    lines: int


@dataclass
class Module:
    """One source file.

    Attributes:
        path: relative to the package's root, with slashes.
        lines: of the file, comments and blank lines included.
        functions: all of them, nested ones too; declarations (a body of `...` or of a docstring alone) left out.
        classes: name and line of each class, nested ones too.
        imports: of modules of the same package.
    """

    path: str
    lines: int
    functions: list[Function] = field(default_factory=list)
    classes: list[tuple[str, int]] = field(default_factory=list)
    imports: list[Import] = field(default_factory=list)

    @property
    def folder(self) -> str:
        """The folder's path, "." for the root."""
        return self.path.rpartition("/")[0] or "."


def read(root: Path, folders: Iterable[str], name: str) -> dict[str, Module]:
    """Return the package's modules by path. Each file is parsed once.

    Args:
        root: folder of the package's own `__init__.py`.
        folders: top-level folders that belong to the package; others next to them (tests, examples) are left out.
        name: of the package, to recognise its absolute imports of itself.

    Raises:
        ImportError: an import names a module that the package does not have.
    """
    files = [*root.glob("*.py"), *(file for folder in folders for file in (root / folder).rglob("*.py"))]
    modules, statements = {}, {}
    for path, file in sorted((file.relative_to(root).as_posix(), file) for file in files):
        text = file.read_text(encoding="utf-8")
        modules[path] = Module(path, len(text.splitlines()))
        statements[path] = list(_statements(ast.parse(text, path).body, "import"))
    resolver = _Resolver(name, modules.keys(), {path: _bound(found) for path, found in statements.items()}, package_dirs(root))
    for path, module in modules.items():
        for node, when in statements[path]:
            if isinstance(node, ast.ClassDef):
                module.classes.append((node.name, node.lineno))
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                module.functions += _function(node)
            elif isinstance(node, ast.Import | ast.ImportFrom):
                targets = dict.fromkeys(resolver.targets(node, path))  # each once, in order
                module.imports += [Import(path, target, node.lineno, when) for target in targets]
    return modules


def package_dirs(root: Path) -> dict[str, str]:
    """Return where pyproject.toml says that packages lie: folder by package, both relative to the root package."""
    file = root / "pyproject.toml"
    tables = tomllib.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    found = tables.get("tool", {}).get("setuptools", {}).get("package-dir", {})
    return {package.partition(".")[2]: folder for package, folder in found.items() if "." in package}


def _statements(block: Iterable[ast.AST], when: When) -> Iterator[tuple[ast.AST, When]]:
    """Yield every statement of a block and of the blocks in it, and when it is executed."""
    for node in block:
        yield node, when
        function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        inner: When = "call" if function and when == "import" else when
        checking = _type_checking(node.test) if isinstance(node, ast.If) else None
        for name in _BLOCKS:
            skipped = checking is not None and checking == (name == "body")
            yield from _statements(getattr(node, name, ()), "typing" if skipped else inner)


def _type_checking(test: ast.expr) -> bool | None:
    """Return True for `TYPE_CHECKING`, False for `not TYPE_CHECKING`, None for another condition."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        inner = _type_checking(test.operand)
        return None if inner is None else not inner
    name = test.id if isinstance(test, ast.Name) else test.attr if isinstance(test, ast.Attribute) else ""
    return True if name == "TYPE_CHECKING" else None


def _function(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[Function]:
    """Return the function, or nothing for a declaration."""
    body = node.body[ast.get_docstring(node, clean=False) is not None :]
    if all(isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant) for s in body):
        return []
    first = min([body[0].lineno, *(d.lineno for d in getattr(body[0], "decorator_list", ()))])
    return [Function(node.name, node.lineno, (body[-1].end_lineno or body[-1].lineno) - first + 1)]


def _bound(statements: Iterable[tuple[ast.AST, When]]) -> set[str]:
    """Return the names that a package's `__init__.py` binds to something other than its submodule of that name."""
    names: set[str] = set()
    for node, when in statements:
        if when != "import":
            continue
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {t.id for t in targets if isinstance(t, ast.Name)}
        elif isinstance(node, ast.ImportFrom) and (node.module or node.level != 1):
            names |= {a.asname or a.name for a in node.names}
    return names


@dataclass(frozen=True)
class _Resolver:
    """From an import statement to the modules that it names.

    Attributes:
        name: of the package.
        paths: of its modules.
        bound: by path, the names that a module binds at import time.
        dirs: folders of packages that do not lie where their names say.
    """

    name: str
    paths: Iterable[str]
    bound: Mapping[str, set[str]]
    dirs: Mapping[str, str]

    def targets(self, node: ast.Import | ast.ImportFrom, path: str) -> Iterator[str]:
        """Yield the modules of this package that an import statement names; one may come several times."""
        if isinstance(node, ast.Import):
            named = [alias.name.split(".") for alias in node.names]
            yield from (self._module(parts[1:], path, node.lineno) for parts in named if parts[0] == self.name)
            return
        parts = node.module.split(".") if node.module else []
        if node.level:
            parts = path.split("/")[: -node.level] + parts
        elif parts[0] == self.name:
            parts = parts[1:]
        else:
            return
        base = self._module(parts, path, node.lineno)
        for alias in node.names:
            submodule = self._find([*parts, alias.name]) if alias.name not in self.bound[base] else None
            yield submodule or base

    def _module(self, parts: Sequence[str], path: str, line: int) -> str:
        found = self._find(parts)
        if found is None:
            raise ImportError(f"{path}:{line} imports {'.'.join(parts)}, and the package has no such module")
        return found

    def _find(self, parts: Sequence[str]) -> str | None:
        folder = self.dirs.get(".".join(parts), "/".join(parts))
        candidates = (f"{folder}/__init__.py".lstrip("/"), f"{folder}.py")
        return next((path for path in candidates if path in self.paths), None)
