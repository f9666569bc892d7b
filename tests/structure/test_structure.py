"""The package is within the limits of `limits.py`, and the figures recorded there and in CONTRIBUTING.md are current."""

from __future__ import annotations

import re
import tomllib

import pytest

from tests.structure import limits
from tests.structure.measure import PAGE, ROOT, Figures, measure, read_table, table
from tests.structure.ratchet import RENEW, check_counts, check_groups
from tests.structure.source_tree import package_dirs


@pytest.fixture(scope="module")
def figures() -> Figures:
    return measure(ROOT, limits.LAYERS, limits.PACKAGE)


def test_modules_import_each_other_in_no_circle(figures):
    def where(path: str) -> str:
        return f"{path} is in a circle of imports: " + ", ".join(map(str, figures.circle_through(path)))

    check_groups(figures.circles, limits.CIRCLES, where)


def test_no_layer_imports_a_higher_one(figures):
    imports = {f"{i.source} -> {i.target}": [] for i in figures.upward}
    for i in figures.upward:
        imports[f"{i.source} -> {i.target}"].append(i.line)

    def where(name: str) -> str:
        lines = ", ".join(map(str, imports[name]))
        return f"{name} (line {lines}): imports go one way, {' <- '.join(limits.LAYERS)} <- the root"

    check_counts({name: len(lines) for name, lines in imports.items()}, limits.UPWARD, where)


def test_class_names_are_defined_once(figures):
    def where(name: str) -> str:
        return f"class {name} is defined more than once: {', '.join(figures.classes_twice[name])}: find another name"

    check_counts({name: len(places) for name, places in figures.classes_twice.items()}, limits.CLASSES_TWICE, where)


def test_imports_inside_functions(figures):
    imports: dict[str, list[str]] = {}
    for i in figures.function_imports:
        imports.setdefault(i.source, []).append(str(i))

    def where(path: str) -> str:
        allowed = limits.FUNCTION_IMPORTS.get(path, 0)
        return f"imports inside functions of {path}, at most {allowed}; put them at the top: {', '.join(imports[path])}"

    check_counts({path: len(lines) for path, lines in imports.items()}, limits.FUNCTION_IMPORTS, where)


def test_public_names(figures):
    def where(_: str) -> str:
        return f"{len(figures.public)} names in {limits.PACKAGE} itself, at most {limits.PUBLIC_NAMES}: put new ones into a namespace"

    check_counts({"public names": len(figures.public)}, {"public names": limits.PUBLIC_NAMES}, where)


def test_layers_are_the_folders_of_the_wheel():
    with open(ROOT / "pyproject.toml", "rb") as file:
        packages = [package.partition(".")[2] for package in tomllib.load(file)["tool"]["setuptools"]["packages"]]
    folders = package_dirs(ROOT)
    shipped = {re.split("[./]", folders.get(package, package))[0] for package in packages if package}
    assert {layer.split("/")[0] for layer in limits.LAYERS} == shipped, (
        "LAYERS in limits.py, or packages in pyproject.toml"
    )


def test_contributing_shows_the_figures(figures):
    shown = read_table(PAGE)
    now = {name: n for name, n, _ in table(figures)}
    assert list(shown) == list(now), f"the table of {PAGE.name} has other rows: {RENEW}"
    stale = {name: f"shown {shown[name]}, now {n}" for name, n in now.items() if abs(n - shown[name]) > max(1, n / 10)}
    assert not stale, f"{PAGE.name}: {stale}; renew it with `{RENEW}`"
