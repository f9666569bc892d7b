"""Tensors created from per-rank data, and addressable shards."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch

import shardmesh as sm
from shardmesh import P, Partial, Replicate, Shard
from shardmesh.mesh.context import set_mesh
from shardmesh.sharding.tensor.process_data import make_array_from_callback as from_callback
from shardmesh.sharding.tensor.process_data import (
    make_array_from_process_local_data as from_local_data,
)
from shardmesh.sharding.tensor.process_data import (
    make_array_from_single_device_arrays as from_arrays,
)
from tests.device import DEVICE
from tests.sharding.ranks import every_rank, on_mesh

SPECS = [P(), P("a"), P("b", "a"), P(None, ("b", "a")), P(("a", "b")), P("a", sizes={"a": (5, 0)})]
SHAPES = [(5, 7), (1, 3), (0, 4), (8, 8)]


def numbers(*shape, dtype=torch.float32):
    return torch.arange(1, 1 + int(np.prod(shape)), dtype=dtype).reshape(shape)


def fits(spec, shape):
    return all(sum(sizes) == shape[0] for _, sizes in spec.sizes)


def everywhere():
    return [(spec, shape) for spec, shape in product(SPECS, SHAPES) if fits(spec, shape)]


# -- from a function -------------------------------------------------------------------------------


@every_rank(2, 2)
def test_callback_is_called_once_with_this_ranks_box(mesh):
    for spec, shape in everywhere():
        whole, asked = numbers(*shape), []

        def part(index, whole=whole, asked=asked):
            asked.append(index)
            return whole[index]

        with sm.debug.comm_budget(launches=0):
            x = from_callback(shape, mesh, spec, part)
        assert asked == [tuple(slice(*interval) for interval in sm.typeof(x).box)]
        assert x.spec == sm.Layout.of(mesh, spec, shape).spec
        assert torch.equal(x.full_tensor(), whole)
        assert not x.requires_grad
        assert x.is_leaf


@every_rank(2)
def test_a_callback_may_return_arrays_or_numbers(mesh):
    data = np.arange(12, dtype=np.int64).reshape(6, 2)
    floats = data.astype(np.float64)
    for given, dtype in [
        (data, torch.int64),
        (data[:, ::-1], torch.int64),
        (data > 3, torch.bool),
        (floats, torch.float64),
    ]:
        x = from_callback(given.shape, mesh, P("a"), lambda index, given=given: given[index])
        assert x.dtype is dtype
        assert np.array_equal(x.numpy(), given)
    x = from_callback(
        (4,),
        mesh,
        P("a"),
        lambda index: list(range(index[0].start, index[0].stop)),
        dtype=torch.bfloat16,
    )
    assert x.dtype is torch.bfloat16
    assert x.tolist() == [0, 1, 2, 3]
    assert from_callback((), mesh, P(), lambda index: 3.5 if index == () else 0).item() == 3.5


@every_rank(2)
def test_result_of_a_callback_is_copied(mesh):
    whole = numbers(4)
    x = from_callback((4,), mesh, P("a"), lambda index: whole[index])
    assert not x.requires_grad
    x.zero_()
    assert torch.equal(whole, numbers(4))
    memory = np.ones(4, dtype=np.float32)
    memory.flags.writeable = False
    from_callback((4,), mesh, P("a"), lambda index: memory[index]).zero_()
    assert memory.sum() == 4
    columns = from_callback((4, 4), mesh, P("a"), lambda index: numbers(4, 4).T[index])
    assert columns._local.is_contiguous()


@every_rank(2)
def test_current_mesh_is_the_default(mesh):
    set_mesh(mesh)
    whole = numbers(5)
    for where in (P("a"), [Shard(0)]):
        made = [
            from_callback((5,), where, lambda index: whole[index]),
            from_callback((5,), where, data_callback=lambda index: whole[index]),
            from_callback((5,), None, where, lambda index: whole[index]),
        ]
        part = made[0].to_local()
        made += [
            from_local_data(where, part),
            from_local_data(where, part, (5,)),
            from_local_data(where, part, global_shape=(5,)),
            from_local_data(where, local_data=part, global_shape=(5,)),
            from_local_data(mesh, where, part, (5,)),
            from_arrays((5,), where, [part]),
            from_arrays((5,), where, arrays=[part]),
        ]
        for x in made:
            assert x.mesh is mesh
            assert x.spec == P("a")
            assert torch.equal(x.full_tensor(), whole)


@every_rank(2)
def test_invalid_callbacks_raise(mesh):
    for call, error, text in [
        (
            lambda: from_callback((4,), mesh, P("a"), lambda i: torch.ones(3)),
            ValueError,
            r"shape \[3\] for index .*, which is \[2\]",
        ),
        (
            lambda: from_callback((4,), mesh, P("a"), numbers(4)),
            TypeError,
            "expected a function of the index",
        ),
        (lambda: from_callback((4,), mesh, P("a")), TypeError, "expected a function of the index"),
        (lambda: from_callback((4,), mesh, P("z"), lambda i: 0), ValueError, "names axis 'z'"),
        (
            lambda: from_callback((4,), mesh, P(unreduced={"a"}), lambda i: 0),
            ValueError,
            "leaves values pending",
        ),
        (
            lambda: from_callback((4,), mesh, P("a"), lambda i: sm.ones(2, device_mesh=mesh)),
            TypeError,
            "got a ShardedTensor",
        ),
        (lambda: from_callback((4,), P("a"), lambda i: 0), TypeError, "give the mesh"),
        (lambda: from_callback((4,), "a", P("a"), lambda i: 0), TypeError, "give a DeviceMesh"),
    ]:
        with pytest.raises(error, match=text):
            call()


# -- from each rank's own data ---------------------------------------------------------------------


@every_rank(2, 2)
def test_parts_of_any_lengths(mesh):
    for spec, shape in everywhere():
        whole = numbers(*shape)
        part = whole[tuple(slice(*i) for i in sm.Layout.of(mesh, spec, shape).box)]
        x = from_local_data(mesh, spec, part.numpy())
        assert x.spec == sm.Layout.of(mesh, spec, shape).spec
        assert torch.equal(x.full_tensor(), whole)
        with sm.debug.comm_budget(launches=0):
            assert sm.typeof(from_local_data(mesh, spec, part, shape)) is sm.typeof(x)


@every_rank(2, 3)
def test_uneven_parts_get_sizes(mesh):
    row, column = mesh.coordinate
    lengths, widths = (1, 4), (0, 2, 3)
    x = from_local_data(
        mesh, P("a", "b"), torch.full((lengths[row], widths[column]), 10.0 * row + column)
    )
    assert x.shape == (5, 5)
    assert x.spec == P("a", "b", sizes={"a": lengths, "b": widths})
    assert x.full_tensor()[0].tolist() == [1, 1, 2, 2, 2]
    assert x.full_tensor()[4].tolist() == [11, 11, 12, 12, 12]
    counts = [(2, 0, 1), (3, 3, 0)]
    joint = from_local_data(
        mesh, P(("a", "b")), torch.full((counts[row][column],), 10 * row + column)
    )
    assert joint.tolist() == [0, 0, 2, 10, 10, 10, 11, 11, 11]
    turned = from_local_data(
        mesh, P(("b", "a")), torch.full((counts[row][column],), 10 * row + column)
    )
    assert turned.tolist() == [0, 0, 10, 10, 10, 11, 11, 11, 2]
    one = from_local_data(mesh, P(None, "a"), torch.ones(3, 2, dtype=torch.bfloat16))
    assert (one.shape, one.spec, one.dtype) == ((3, 4), P(None, "a"), torch.bfloat16)


@every_rank(2)
def test_data_of_global_length_is_sliced(mesh):
    whole = numbers(5, 3)
    for given in (whole, whole[:, slice(*sm.Layout.of(mesh, P(None, "a"), (5, 3)).box[1])]):
        x = from_local_data(mesh, P(None, "a"), given, (5, 3))
        assert torch.equal(x.full_tensor(), whole)
    x.zero_()
    assert torch.equal(whole, numbers(5, 3))


@every_rank(2, 2)
def test_invalid_local_data_raises(mesh):
    rank = mesh.get_rank()
    for call, error, text in [
        (
            lambda: from_local_data(mesh, P("a"), torch.ones(3), (4,)),
            ValueError,
            r"shape \[3\]; under .* this rank holds \[2\]",
        ),
        (
            lambda: from_local_data(mesh, P("a"), torch.ones(2, 2), (4,)),
            ValueError,
            r"shape \[2, 2\]; under",
        ),
        (
            lambda: from_local_data(mesh, P("a", "b"), torch.ones(1 + rank, 1)),
            ValueError,
            r"rank 0: f32\[1, 1\], .* are not parts",
        ),
        (
            lambda: from_local_data(mesh, P(unreduced={"a"}), torch.ones(2)),
            ValueError,
            "leaves values pending",
        ),
        (lambda: from_local_data(mesh, P("z"), torch.ones(2)), ValueError, "names axis 'z'"),
        (
            lambda: from_local_data(mesh, P(), sm.ones(2, device_mesh=mesh)),
            TypeError,
            "got a ShardedTensor",
        ),
    ]:
        with pytest.raises(error, match=text):
            call()


def test_incompatible_parts_raise_the_same_error_on_every_rank():
    def program(mesh):
        texts = []
        for part in (
            torch.ones([2] * (1 + mesh.get_rank())),
            torch.ones(2, dtype=[torch.float32, torch.int32][mesh.get_rank()]),
        ):
            with pytest.raises(
                ValueError, match=r"differ in dtype or number of dims \(rank 0: f32\[2\], rank 1"
            ) as error:
                from_local_data(mesh, P("a"), part)
            texts.append(str(error.value))
        return texts

    first, second = on_mesh((2,), program)
    assert first == second


# -- from this rank's tensor -----------------------------------------------------------------------


@every_rank(2, 2)
def test_single_device_array_is_not_copied(mesh):
    for spec, shape in everywhere():
        whole = numbers(*shape)
        part = (
            whole[tuple(slice(*i) for i in sm.Layout.of(mesh, spec, shape).box)]
            .clone()
            .requires_grad_()
        )
        with sm.debug.comm_budget(launches=0):
            x = from_arrays(shape, mesh, spec, [part])
        assert torch.equal(x.full_tensor(), whole)
        assert x._local.data_ptr() == part.data_ptr()
        assert not x.requires_grad
    pending = from_arrays((3,), mesh, [Partial(), Replicate()], [torch.ones(3)])
    assert pending.tolist() == [2, 2, 2]


@every_rank(2)
def test_invalid_single_device_arrays_raise(mesh):
    for call, error, text in [
        (
            lambda: from_arrays((4,), mesh, P("a"), [torch.ones(3)]),
            ValueError,
            r"has shape \[3\].* holds \[2\]",
        ),
        (
            lambda: from_arrays((4,), mesh, P("a"), torch.ones(2)),
            TypeError,
            "expected a list with .* got Tensor",
        ),
        (
            lambda: from_arrays((4,), mesh, P("a"), [torch.ones(2)] * 2),
            ValueError,
            "2 tensors were given",
        ),
        (lambda: from_arrays((4,), mesh, P("a"), []), ValueError, "0 tensors were given"),
        (lambda: from_arrays((4,), mesh, P("a"), [[1.0]]), TypeError, "expected a list"),
    ]:
        with pytest.raises(error, match=text):
            call()


# -- ranks outside the mesh ------------------------------------------------------------------------


@every_rank(4)
def test_ranks_outside_the_mesh(everyone):
    mesh = sm.DeviceMesh(DEVICE, [3, 1], axis_names=("x",))
    inside, whole = mesh.coordinate is not None, numbers(5)
    part = whole[slice(*sm.Layout.of(mesh, P("x"), (5,)).box[0])]

    def refuse(index):
        raise AssertionError

    made = [
        from_callback(
            (5,),
            mesh,
            P("x"),
            (lambda index: whole[index]) if inside else refuse,
            dtype=torch.float32,
        ),
        from_local_data(mesh, P("x"), part, (5,)),
        from_arrays((5,), mesh, P("x"), [part] if inside else [], dtype=torch.float32),
    ]
    for x in made:
        assert sm.typeof(x) is sm.Layout.of(mesh, P("x"), (5,))
        assert len(x.addressable_shards) == inside
        moved = x.redistribute(everyone, [Replicate()])
        assert torch.equal(moved.to_local(), whole)
    if not inside:
        with pytest.raises(ValueError, match="has no data with a dtype; pass dtype="):
            from_callback((5,), mesh, P("x"), refuse)
        with pytest.raises(ValueError, match="has no data with a dtype; pass dtype="):
            from_arrays((5,), mesh, P("x"), [])
        with pytest.raises(ValueError, match="pass global_shape="):
            from_local_data(mesh, P("x"), part)


# -- the parts -------------------------------------------------------------------------------------


def test_addressable_shards_make_up_the_tensor():
    def program(mesh):
        found = []
        for spec, shape in everywhere():
            x = sm.distribute_tensor(
                numbers(*shape), mesh, spec, src_data_rank=None
            ).requires_grad_()
            with sm.debug.comm_budget(launches=0):
                (shard,) = x.addressable_shards
            assert shard.data.data_ptr() == x._local.data_ptr()
            assert not shard.data.requires_grad
            assert shard.device == torch.device("cpu")
            found.append(shard)
        return found

    ranks = on_mesh((2, 2), program)
    for i, (spec, shape) in enumerate(everywhere()):
        whole, shards = numbers(*shape), [rank[i] for rank in ranks]
        assert [s.rank for s in shards] == [0, 1, 2, 3]
        assert all(torch.equal(s.data, whole[s.index]) for s in shards)
        assert sum(s.data.numel() for s in shards if s.replica_id == 0) == whole.numel()
        for shard in shards if not spec.sizes else ():
            holders = [s for s in shards if s.index == shard.index]
            if shard.data.numel():
                assert [s.replica_id for s in holders] == list(range(len(holders)))


@every_rank(2, 2)
def test_contributions_are_not_replicas(mesh):
    x = sm.device_put(numbers(4), mesh, P(unreduced={"a"}))
    (shard,) = x.addressable_shards
    assert shard.replica_id == mesh.coordinate[1]
    assert torch.equal(shard.data, x._local)
    (scalar,) = sm.full((), 2.0, mesh).addressable_shards
    assert scalar.index == ()
    assert scalar.replica_id == mesh.get_rank()
    assert repr(sm.ones((4, 2), mesh, P("b")).addressable_shards[0]).endswith(
        f"f32[2, 2] on cpu, replica_id={mesh.coordinate[0]}, rank={mesh.get_rank()})"
    )


# -- a bare P, where a mesh is set -----------------------------------------------------------------


@every_rank(2, 2)
def test_a_bare_spec_is_enough(mesh):
    whole = numbers(4, 8)
    with mesh:
        for where in (P("a"), [Shard(0), Replicate()], (Shard(0), Replicate())):
            made = [
                sm.zeros((4, 8), where),
                sm.zeros(4, 8, where),
                sm.ones((4, 8), placements=where),
                sm.empty((4, 8), where),
                sm.full((4, 8), 2.0, where),
                sm.rand(4, 8, where),
                sm.randn((4, 8), where),
                sm.randint(5, (4, 8), where),
                sm.randint(0, 5, (4, 8), where),
                sm.zeros((4, 8), where, device_mesh=mesh),
                sm.zeros((4, 8), mesh, where),
                sm.zeros((4, 8), mesh, placements=where),
                sm.device_put(whole, where),
                sm.distribute_tensor(whole, where),
                sm.distribute_tensor(whole, placements=where),
                sm.from_local(whole[:2], where),
                sm.ShardedTensor.from_local(whole[:2], placements=where),
                sm.ones((4, 8)).redistribute(where),
            ]
            for x in made:
                assert (x.spec, x.shape, x.mesh) == (P("a", None), (4, 8), mesh)
            assert sm.randperm(8, where).spec == P("a")
            assert sm.arange(8, placements=where).spec == P("a")
            assert torch.equal(sm.device_put(whole, where).full_tensor(), whole)
        assert sm.device_put(sm.ones((4, 8), P("a")), P(None, "b")).spec == P(None, "b")
    assert sm.typeof(sm.device_put(sm.ones((4, 8), mesh, P("a")), P("b"))) is sm.Layout.of(
        mesh, P("b"), (4, 8)
    )
    with mesh["a"]:
        assert sm.zeros((4, 8), P("a")).mesh is mesh["a"]
        with pytest.raises(ValueError, match="names axis 'b', but the mesh has axes"):
            sm.zeros((4, 8), P("b"))


@every_rank(2)
def test_bare_spec_without_a_mesh_raises(mesh):
    plain = torch.ones(4)
    for call in (
        lambda: sm.zeros((4,), P("a")),
        lambda: sm.device_put(plain, P("a")),
        lambda: sm.from_local(plain, P("a")),
    ):
        with pytest.raises(TypeError, match="give the mesh of the tensor"):
            call()
    for call in (
        lambda: sm.device_put(torch.ones(4), P("a"), P()),
        lambda: sm.zeros(4, P("a"), P()),
        lambda: sm.zeros(4, P("a"), placements=P()),
    ):
        with mesh, pytest.raises(TypeError, match="two placements"):
            call()
    with pytest.raises(TypeError, match="takes a mesh and a P or list of placements, each once"):
        sm.zeros(4, mesh, P(), P())
    with pytest.raises(TypeError, match="takes a mesh and a P or list of placements, each once"):
        sm.zeros(4, mesh, P(), placements=P())
    for wrong in ("cpu", 3):
        with pytest.raises(
            TypeError, match=r"give a DeviceMesh or, with a mesh set, P\(\.\.\.\) in its place"
        ):
            sm.device_put(torch.ones(4), wrong)  # type: ignore[arg-type]


# -- processes -------------------------------------------------------------------------------------


def _loader():
    mesh = sm.init_device_mesh(DEVICE, (2, 2), axis_names=("dp", "tp"))
    rows = (3, 4)[mesh.coordinate[0]]
    with set_mesh(mesh):
        batch = from_local_data(P("dp"), np.full((rows, 2), float(mesh.coordinate[0])))
        squares = from_callback((7,), P("tp"), lambda index: torch.arange(7)[index] ** 2)
    return (
        batch.spec,
        batch.sum(1).tolist(),
        squares.tolist(),
        squares.addressable_shards[0].replica_id,
    )


def test_in_processes(world4):
    sums, squares = [0.0] * 3 + [2.0] * 4, [i * i for i in range(7)]
    for rank, found in enumerate(world4(_loader)):
        assert found == (P("dp", None, sizes={"dp": (3, 4)}), sums, squares, rank // 2)


@every_rank(2)
def test_data_that_are_differentiated_are_refused(mesh):
    data = torch.ones(4, 3, requires_grad=True)
    for make in (
        lambda t: sm.make_array_from_callback((4, 3), mesh, P("a"), lambda index: t[index]),
        lambda t: sm.make_array_from_process_local_data(mesh, P("a"), t[:2], (4, 3)),
    ):
        with pytest.raises(RuntimeError, match=r"its gradient would be lost.*from_local"):
            make(data * 2)
        with pytest.raises(RuntimeError, match="its gradient would be lost"):
            make(data)
        with pytest.raises(RuntimeError, match="its gradient would be lost"):
            sm.grad(lambda t, make=make: make(t).sum())(data)
        with torch.no_grad():
            assert not make(data).requires_grad
        assert torch.equal(make(data.detach()).full_tensor(), torch.ones(4, 3))
