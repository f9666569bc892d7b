"""The import graph of a package: cycles, and imports of a higher layer by a lower one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from tests.structure.source_tree import Import, Module


def edges(modules: Mapping[str, Module]) -> list[Import]:
    """Return the imports that are executed as modules are imported, without those of a module by itself."""
    return [i for m in modules.values() for i in m.imports if i.when == "import" and i.target != i.source]


def circles(imports: Iterable[Import]) -> list[tuple[str, ...]]:
    """Return the strongly connected components of more than one module, each sorted, in order of their first module.

    Tarjan's algorithm, with a stack of its own: no limit on the length of a chain of imports.
    """
    following: dict[str, list[str]] = {}
    for i in imports:
        following.setdefault(i.source, []).append(i.target)
        following.setdefault(i.target, [])
    number: dict[str, int] = {}  # in order of the first visit
    lowest: dict[str, int] = {}  # the smallest number that is reached from here
    waiting: dict[str, None] = {}  # visited, and not yet in a component, in this order
    found = []
    for start in following:
        path = [(start, iter(following[start]))] if start not in number else []
        while path:
            node, rest = path[-1]
            if node not in number:
                number[node] = lowest[node] = len(number)
                waiting[node] = None
            for nxt in rest:
                if nxt not in number:
                    path.append((nxt, iter(following[nxt])))
                    break
                if nxt in waiting:
                    lowest[node] = min(lowest[node], number[nxt])
            else:
                path.pop()
                if path:
                    above = path[-1][0]
                    lowest[above] = min(lowest[above], lowest[node])
                if lowest[node] == number[node]:
                    component = []
                    while node in waiting:
                        component.append(waiting.popitem()[0])
                    if len(component) > 1:
                        found.append(tuple(sorted(component)))
    return sorted(found)


def inside(circle: Sequence[str], imports: Iterable[Import]) -> list[Import]:
    """Return the imports between modules of a circle."""
    return [i for i in imports if i.source in circle and i.target in circle]


def shortest_circle(first: Import, imports: Iterable[Import]) -> list[Import]:
    """Return the imports of a shortest way that begins with one import and comes back to its source; none if there is none."""
    following: dict[str, list[Import]] = {}
    for i in imports:
        following.setdefault(i.source, []).append(i)
    came: dict[str, Import] = {first.target: first}
    queue = [first.target]
    for node in queue:
        if node == first.source:
            break
        for i in following.get(node, ()):
            if i.target not in came:
                came[i.target] = i
                queue.append(i.target)
    else:
        return []
    way, node = [], first.source
    while node != first.target:
        way.append(came[node])
        node = came[node].source
    return [first, *reversed(way)]


def layer(path: str, layers: Sequence[str]) -> int:
    """Return the position of the layer that has the module: of the longest folder that contains it, else the top."""
    holding = [n for n, folder in enumerate(layers) if path.startswith(folder + "/")]
    return max(holding, key=lambda n: len(layers[n]), default=len(layers))


def upward(modules: Mapping[str, Module], layers: Sequence[str]) -> list[Import]:
    """Return the imports of a higher layer by a lower one, those inside functions and for type checkers too.

    Args:
        modules: of the package, by path.
        layers: folders from the lowest to the highest; what is in none of them is above all.
    """
    imports = [i for m in modules.values() for i in m.imports]
    return [i for i in imports if layer(i.source, layers) < layer(i.target, layers)]
