"""Layouts of a module's tensors: the table, the tree, and the `repr` of a distributed module."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref

from torch import nn

import shardmesh as sm
from shardmesh import P
from shardmesh.parallel import distribute_module, shard_parameter
from tests.device import DEVICE
from tests.sharding.ranks import collectives, every_rank, on_mesh


def rows_of_linear(name, module, mesh):
    if isinstance(module, nn.Linear):
        shard_parameter(module, "weight", mesh, P("a"), src_data_rank=None)


def distributed(mesh, module):
    return distribute_module(module, mesh, rows_of_linear, src_data_rank=None)


def model():
    return nn.Sequential(nn.Linear(3, 5, bias=False), nn.ReLU(), nn.BatchNorm1d(5, affine=False))


TREE = """
Sequential(
  (0): Linear(
    in_features=3, out_features=5, bias=False
    weight: f32[5, 3] @ P('a', None) on (a=2)
  )
  (1): ReLU()
  (2): BatchNorm1d(
    5, eps=1e-05, momentum=0.1, affine=False, bias=True, track_running_stats=True
    running_mean: f32[5] @ P(None) on (a=2)
    running_var: f32[5] @ P(None) on (a=2)
    num_batches_tracked: i64[] @ P() on (a=2)
  )
)""".strip().replace(
    "affine=False, bias=True",
    repr(nn.BatchNorm1d(5, affine=False)).partition("0.1, ")[2].partition(", track")[0],
)


def test_repr_of_a_distributed_module_is_the_same_on_every_rank():
    def program(mesh):
        module = distributed(mesh, model())
        with collectives() as records:
            shown = repr(module), sm.debug.visualize(module, style="tree")
        assert records == []
        return shown

    assert on_mesh((2,), program) == [(TREE, TREE)] * 2


def test_the_tree_of_a_plain_module():
    module = nn.ModuleList([nn.Linear(2, 2) for _ in range(3)] + [nn.ReLU()])
    assert sm.debug.visualize(module, style="tree").splitlines() == [
        "ModuleList(",
        "  (0-2): 3 x Linear(",
        "    in_features=2, out_features=2, bias=True",
        "    weight: f32[2, 2], plain",
        "    bias: f32[2], plain",
        "  )",
        "  (3): ReLU()",
        ")",
    ]
    assert sm.debug.visualize(nn.Dropout(0.5), style="tree") == repr(nn.Dropout(0.5))


@every_rank(2)
def test_layers_with_equal_layouts_are_folded(mesh):
    module = distributed(mesh, nn.ModuleList([nn.Linear(2, 2) for _ in range(4)]))
    assert "(0-3): 4 x Linear(" in repr(module)
    assert repr(module) == sm.debug.visualize(module, style="tree")
    shard_parameter(module[3], "bias", mesh, P("a"), src_data_rank=None)
    assert "(0-2): 3 x Linear(" in repr(module)  # the repr follows what is there now
    assert repr(module) == sm.debug.visualize(module, style="tree")


@every_rank(2)
def test_copies_and_pickles_show_their_own_tensors(mesh):
    module = distributed(mesh, nn.Linear(2, 4))
    copied, loaded = copy.deepcopy(module), pickle.loads(pickle.dumps(module))
    assert repr(copied) == repr(loaded) == repr(module)
    for other in (copied, loaded):
        shard_parameter(other, "bias", mesh, P("a"), src_data_rank=None)
        assert "bias: f32[4] @ P('a') on (a=2)" in repr(other)
    assert "bias: f32[4] @ P(None) on (a=2)" in repr(module)
    assert "P('a', None)" in repr(copy.deepcopy(nn.ModuleList([module])))


@every_rank(2)
def test_nothing_but_the_repr_changes(mesh):
    module = distributed(mesh, nn.Linear(2, 4))
    assert list(module.state_dict()) == ["weight", "bias"]
    assert type(module) is nn.Linear
    assert distribute_module(module, mesh) is module
    assert repr(module).count("weight:") == 1
    assert repr(nn.Linear(2, 4)) == "Linear(in_features=2, out_features=4, bias=True)"


@every_rank(2)
def test_custom_extra_repr_is_kept(mesh):
    module = nn.Linear(2, 4)
    module.extra_repr = lambda: "mine"
    distributed(mesh, module)
    assert repr(module) == "Linear(mine)"
    assert "mine\n  weight: f32[4, 2] @ P('a', None)" in sm.debug.visualize(module, style="tree")


@every_rank(2)
def test_memory_is_freed_with_the_last_reference(mesh):
    module = distributed(mesh, nn.Linear(2, 4))
    gone = weakref.ref(module)
    gc.disable()
    try:
        del module
        assert gone() is None
    finally:
        gc.enable()


@every_rank(2)
def test_tied_tensors_are_marked_and_counted_once(mesh):
    module = nn.ModuleDict({"embed": nn.Embedding(6, 2), "head": nn.Linear(2, 6, bias=False)})
    module["head"].weight = module["embed"].weight
    lines = sm.debug.visualize(distributed(mesh, module)).splitlines()
    assert [line.split() for line in lines[1:]] == [
        ["embed.weight", "f32[6,", "2]", "P('a',", "None)", "[3,", "2]", "24"],
        ["head.weight", "f32[6,", "2]", "P('a',", "None)", "[3,", "2]", "24", "is", "embed.weight"],
        "1 tensor on (a=2): 24 bytes on this rank, 48 in all".split(),
    ]


@every_rank(2)
def test_the_table_with_rich_has_the_same_cells(mesh):
    module = distributed(mesh, model())
    lines = sm.debug.visualize(module).splitlines()
    table = sm.debug.visualize(module, style="rich")
    rows = zip(*[[cell.plain for cell in column.cells] for column in table.columns], strict=True)
    assert [" ".join(row).split() for row in rows] == [line.split() for line in lines[1:-1]]
    assert str(table.caption) == lines[-1]


def test_modules_without_tensors_and_lazy_ones():
    assert sm.debug.visualize(nn.ReLU()).splitlines() == [
        "tensor  global  spec  local  bytes",
        "0 tensors: 0 bytes on this rank, 0 in all",
    ]
    assert "weight  f32[?]  plain  not known yet      0" in sm.debug.visualize(nn.LazyLinear(3))
    assert "weight: f32[?], plain" in sm.debug.visualize(nn.LazyLinear(3), style="tree")


def test_module_outside_the_mesh_is_empty():
    def program():
        mesh = sm.DeviceMesh(DEVICE, [0, 2], axis_names=("a",))
        module = distributed(mesh, nn.Linear(2, 4, bias=False))
        return sm.debug.visualize(module).splitlines()[-1]

    assert [line.split(":")[1].split()[0] for line in sm.simulate(3)(program)()] == [
        "16",
        "0",
        "16",
    ]
