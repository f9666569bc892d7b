"""Limits on the structure of the package: goals, and how far from them it may be today. Sizes have none: a file is as
long as its subject.

Where a goal is not reached, today's value is recorded below the line. It is a limit in both directions: a worse value fails,
and so does a better one, until `python tests/structure/measure.py --write` has lowered the limit. Run the same command when
files have moved to other folders, and look at the difference: it writes whatever it finds, a new exception too.
"""

PACKAGE = "shardmesh"

# Folders that belong to the package, lower layers first: no module imports one of a later layer. The root's own files are
# above all. A folder inside a layer may be a layer of its own, as "sharding/layout" before "sharding".
LAYERS = ("kernels", "mesh", "sharding", "namespaces")

# Circles, imports of higher layers and class names defined more than once: none. Names of the package itself: about 60.
# Imports inside functions: as few as possible, for optional dependencies such as Triton.

# -- today's exceptions, written by `python tests/structure/measure.py --write` ----------------------------------------
CIRCLES: list[tuple[str, ...]] = []

UPWARD: dict[str, int] = {}

CLASSES_TWICE: dict[str, int] = {}

FUNCTION_IMPORTS: dict[str, int] = {
    "kernels/copy.py": 1,
    "kernels/quantize.py": 2,
    "kernels/random/draw.py": 1,
    "kernels/reduce.py": 1,
    "kernels/symmetric/all_reduce.py": 1,
    "kernels/symmetric/pull.py": 2,
}

PUBLIC_NAMES: int = 78
