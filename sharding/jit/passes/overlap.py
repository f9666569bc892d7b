"""Start collectives early and wait for them late, so that they run next to other operators.

    before    a = start(x); u = wait(a); f(u); b = start(y); v = wait(b); g(v)
    after     a = start(x); b = start(y); u = wait(a); f(u); v = wait(b); g(v)

The order of starts stays, over all groups, so what ranks send is the same. Gathers of the
parameters of the next unit (FSDP) move before the computation of this one.
"""

from __future__ import annotations

from torch import fx

from ..collectives import OPERATORS, WAIT
from .alias import MemoryUse, is_view, live_bytes, nbytes
from .order import Places, set_order


def overlap(graph: fx.Graph, max_live_bytes: int | None = None) -> int:
    """Move each start as early, and each wait as late, as the graph allows.

    A start goes as early as its operand and the order of starts allow, and a wait as late as the
    first use of its result.

    Args:
        max_live_bytes: how many bytes of results may be in flight, started earlier than in the
            program. By default as many as do not raise the most memory that the graph takes.

    Returns: how many collectives start earlier or are waited for later than before.
    """
    before = list(graph.nodes)
    peak = max(live_bytes(graph, MemoryUse(graph)), default=0)
    moved = _start_early(graph, max_live_bytes, peak)
    if max_live_bytes is None and max(live_bytes(graph, MemoryUse(graph)), default=0) > peak:
        set_order(graph, before)
        moved = set()
    early = list(graph.nodes)
    late = wait_late(graph)
    if max_live_bytes is None and max(live_bytes(graph, MemoryUse(graph)), default=0) > peak:
        set_order(graph, early)
        late = set()
    return len(moved | late)


def _start_early(graph: fx.Graph, limit: int | None, peak: int) -> set[fx.Node]:
    places = Places(graph)
    live = live_bytes(graph, places.use)
    flying = [0] * len(live)
    behind: dict[int, list[fx.Node]] = {}
    inside: set[fx.Node] = set()
    place = -1
    moved = set()
    for i, node in enumerate(places.nodes):
        if node in places.use.fences:
            place = i
        if node.target not in OPERATORS:
            continue
        target, size = i - 1, nbytes(node)
        earliest = max(places.early(node), place)
        while target > earliest and (
            live[target] + size <= peak if limit is None else flying[target] + size <= limit
        ):
            target -= 1
        if target < i - 1:  # it runs right behind `target`, after the starts that are there already
            need = [x for x in places.nodes_for(node, target) if x not in inside]
            for q in range(target + 1, i):
                live[q] += size
                flying[q] += size
            behind.setdefault(target, []).extend(need)
            inside.update(need)
            moved.add(node)
            place = target
        else:
            place = max(place, i)
    order = []
    for i, node in enumerate(places.nodes):
        order += [] if node in inside else [node]
        order += behind.get(i, [])
    set_order(graph, order)
    return moved


def wait_late(graph: fx.Graph) -> set[fx.Node]:
    """Move each wait to right before the first node that must run after it.

    The views of its result move with it.
    """
    use = MemoryUse(graph)
    nodes = list(graph.nodes)
    at = {node: i for i, node in enumerate(nodes)}
    late: dict[fx.Node, int] = {}
    touched: dict[int, int] = {}
    written: dict[int, int] = {}
    fence = len(nodes)
    waits = {node for node in nodes if node.target is WAIT}
    for node in nodes:
        if is_view(node) and node.all_input_nodes and waits.issuperset(node.all_input_nodes):
            waits.add(node)
    for i in range(len(nodes) - 1, -1, -1):
        node = nodes[i]
        if node in waits:
            users = (late.get(user, at[user]) for user in node.users)
            others = [written.get(c, fence) for c in use.reads[node]] + [
                touched.get(c, fence) for c in use.writes[node]
            ]
            late[node] = min([fence, *users, *others])
        else:
            written |= dict.fromkeys(use.writes[node], i)
            touched |= dict.fromkeys(use.reads[node] | use.writes[node], i)
            fence = i if node in use.fences or node.op == "output" else fence
    before: dict[int, list[fx.Node]] = {}
    moved = {
        node for node, i in late.items() if any(x not in late for x in nodes[at[node] + 1 : i])
    }
    for node in nodes:
        if node in late:
            before.setdefault(late[node], []).append(node)
    order = []
    for i, node in enumerate(nodes):
        order += before.get(i, [])
        order += [] if node in late else [node]
    set_order(graph, order)
    return {node for node in moved if node.target is WAIT}
