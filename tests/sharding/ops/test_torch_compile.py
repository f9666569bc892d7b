"""`torch.compile` of code on sharded tensors: correct, with graph breaks at the library's
own code.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import shardmesh as sm
from shardmesh import P
from shardmesh.parallel import colwise, fully_shard, parallelize
from shardmesh.sharding.ops.torch_compile import compiled_code_as_python
from tests.sharding.ranks import on_mesh

ORDERS = {
    "Dynamo after us": (
        "import shardmesh as sm; assert 'torch._dynamo' not in sys.modules; import torch._dynamo"
    ),
    "Dynamo before us": "import torch._dynamo, shardmesh as sm",
}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("order", ORDERS)
def test_rules_are_set_when_compiled_code_meets_a_sharded_tensor(order):
    checks = (
        "import torch\n"
        "from torch._dynamo import trace_rules\n"
        "from shardmesh.sharding.ops import strategy\n"
        "from shardmesh.mesh.comm import group\n"
        "before = list(trace_rules.SKIP_DIRS)\n"
        "def program():\n"
        "    x = sm.zeros(4, device_mesh=sm.init_device_mesh('cpu', (1,), axis_names=('a',)))\n"
        "    assert trace_rules.SKIP_DIRS == before and not "
        "trace_rules.check(group.Group.all_reduce)\n"
        "    torch.compile(lambda x: x + 1, backend='eager')(x)\n"
        "sm.simulate(1)(program)()\n"
        "assert trace_rules.check(strategy.choose_strategy) and "
        "trace_rules.check(group.Group.all_reduce)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", f"import sys\n{ORDERS[order]}\n{checks}"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


FIRST = {  # what compiled code may call before it has met a ShardedTensor
    "factory": "lambda x: sm.zeros(4, device_mesh=mesh).to_local() + x.sin()",
    "shard_map": "lambda x: mapped(x).to_local().cos()",
    "grad": "lambda x: gradient(x).cos() + 1",
    "scan": "lambda x: sm.scan(lambda c, y: (c + y, y * 2), x.sum(), x)[1]",
}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("first", FIRST)
def test_the_first_call_in_compiled_code(first):
    """No graph has a call of the library in it, and what the program computes is compiled, also
    what the library calls.
    """
    program = f"""
import sys, torch, shardmesh as sm
from shardmesh import P

def main():
    mesh = sm.init_device_mesh("cpu", (1,), axis_names=("a",))
    f = lambda x: sm.psum(x.sin(), "a")
    mapped = sm.shard_map(f, mesh=mesh, in_specs=P("a"), out_specs=P())
    gradient = sm.grad(lambda x: (x * x).sum())
    program = {FIRST[first]}
    assert "torch._dynamo" not in sys.modules
    operators = []
    def backend(graph, inputs):
        operators.extend(node.name for node in graph.graph.nodes if node.op.startswith("call"))
        return graph.forward
    x = torch.arange(4.0)
    expected = program(x)
    compiled = torch.compile(program, backend=backend)
    for _ in range(3):
        assert torch.equal(compiled(x), expected)
    print(*sorted(operators))

sm.simulate(1)(main)()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Dynamo does not know how to trace" not in done.stderr
    operators = {"factory": "add sin", "shard_map": "cos sin", "grad": "add cos mul sum_1"}
    assert done.stdout.strip() == operators.get(first, done.stdout.strip())
    assert done.stdout.strip()


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def arithmetic(x, w):
    return (x @ w).relu().sum()


def attributes(x, w):
    y = x @ w
    if y.shape[0] > 2 and len(y) == y.size(0):
        y = y * y.ndim
    return y.redistribute(P()).sum() * y.numel()


def in_place(x, w):
    plain = (torch.ones(4) * 3).cos()
    x = x.clone().add_(1.0)
    return torch.cat([x, x @ w]).sum() * plain.sum()


def parts(x, w):
    return (x @ w).to_local().sin().sum() + x.unbind(1)[0].sum().item()


def mapped(x, w):
    @sm.shard_map(in_specs=(P("a"), P()), out_specs=P(), mesh=x.mesh)
    def total(x, w):
        return sm.psum((x @ w).square().sum(), "a")

    return total(x, w)


@pytest.mark.one_in(4, each=["program"])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("program", [arithmetic, attributes, in_place, parts, mapped])
def test_compiled_function_is_correct(program, backend):
    def main(mesh):
        found = []
        compiled = torch.compile(program, backend=backend)
        for f in (program, compiled, compiled):
            torch.manual_seed(0)
            x = sm.device_put(torch.randn(5, 4), mesh, P("a"))
            w = sm.device_put(torch.randn(4, 4), mesh, P()).requires_grad_()
            y = f(x, w)
            y.backward()
            found.append((y.item(), w.grad.full_tensor()))
        for value, grad in found[1:]:
            assert value == found[0][0]
            assert torch.equal(grad, found[0][1])

    on_mesh((2,), main)


_OPERATORS = "Dynamo .*'?ShardedTensor"
_MARKED = r"sm\.jit\(step\)"
BREAKS = {
    "function": (
        lambda x: torch.relu(x),
        "(?s)operators on ShardedTensors run eagerly.*" + _MARKED,
    ),
    "operator": (lambda x: x @ x, _OPERATORS),
    "method": (lambda x: x.relu(), _OPERATORS),
    "in place": (lambda x: x.add_(1), _OPERATORS),
    "index": (lambda x: x[0], _OPERATORS),
    "dtype": (lambda x: torch.ones(2, dtype=x.dtype), "ShardedTensor.dtype"),
    "shape": (lambda x: torch.ones(x.shape[0]), "ShardedTensor.shape"),
    "redistribute": (lambda x: x.redistribute(P()), _MARKED),
    "to_local": (lambda x: x.to_local().sin(), "(?s)to_local.*" + _MARKED),
    "constraint": (lambda x: sm.with_sharding_constraint(x, P()), _MARKED),
    "factory": (lambda x: sm.zeros(4), "(?s)zeros.*" + _MARKED),
    "block": (lambda x: sm.accumulate_grads().__enter__(), "(?s)accumulate_grads.*" + _MARKED),
    "grad": (lambda x: sm.grad(lambda y: y.sum())(x), "(?s)grad.*" + _MARKED),
    "jit": (lambda x: sm.jit(lambda y: y.sum(), backend="eager")(x), "(?s)jit.*" + _MARKED),
}


@pytest.mark.one_in(7, each=["program"])
@pytest.mark.parametrize("program", BREAKS)
def test_fullgraph_error_explains_the_graph_break(program):
    f, says = BREAKS[program]

    def main(mesh):
        x = sm.device_put(torch.randn(4, 4), mesh, P("a"))
        with pytest.raises(torch._dynamo.exc.Unsupported, match=says):
            torch.compile(f, backend="eager", fullgraph=True)(x)

    on_mesh((2,), main)


def test_plain_code_around_is_compiled():
    def main(mesh):
        sizes = []

        def backend(graph, inputs):
            sizes.append(
                len(
                    [
                        node
                        for node in graph.graph.nodes
                        if node.op in ("call_function", "call_method")
                    ]
                )
            )
            return graph.forward

        def program(x, t):
            t = t.sin().cos().exp()
            return x.to_local().sum() * t.sum()

        x, t = sm.device_put(torch.randn(4, 4), mesh, P("a")), torch.randn(3)
        assert torch.equal(torch.compile(program, backend=backend)(x, t), program(x, t))
        return max(sizes, default=0)

    assert on_mesh((1,), main)[0] >= 3


# -- torch.jit.trace, torch.export -----------------------------------------------------------------


def _colwise(mesh):
    return parallelize(torch.nn.Linear(4, 4), mesh, {"": colwise()})


def _unit(mesh):
    return fully_shard(torch.nn.Linear(4, 4), mesh)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("make", [_colwise, _unit])
def test_trace_raises(make):
    """It would keep this rank's parameters as constants, and leave collectives out."""

    def main(mesh):
        made = make(mesh).requires_grad_(False)
        with pytest.raises(
            RuntimeError, match=r"torch.jit.trace records neither .* sm.checkpoint.full_state_dict"
        ):
            torch.jit.trace(made, torch.ones(2, 4), check_trace=False)
        assert made(torch.ones(2, 4)).shape == (2, 4), "afterwards the model works"

    on_mesh((2,), main)


@pytest.mark.parametrize("make", [_colwise, _unit])
def test_export_raises(make):
    def main(mesh):
        with pytest.raises(RuntimeError, match=r"a ShardedTensor is not one block of memory"):
            torch.export.export(make(mesh), (torch.ones(2, 4),))

    on_mesh((2,), main)


def test_blocks_of_threads_in_which_compiled_code_runs_as_python():
    """torch has one stance for all threads; here the first block ends inside of the second."""
    first_begun, second_begun, first_ended = (threading.Event() for _ in range(3))

    def first():
        with compiled_code_as_python():
            first_begun.set()
            assert second_begun.wait(60)
        first_ended.set()

    def second():
        assert first_begun.wait(60)
        with compiled_code_as_python():
            second_begun.set()
            assert first_ended.wait(60)
            return compiled(torch.ones(2))

    graphs = []

    def count(graph, _):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(lambda x: x + 1, backend=count)
    with ThreadPoolExecutor(2) as pool:
        done = [pool.submit(function) for function in (first, second)]
        for one in done:
            one.result()
    assert not graphs
    compiled(torch.ones(2))
    assert len(graphs) == 1
