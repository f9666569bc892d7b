"""The public surface of torch's DTensor, its styles, its experimental functions and DeviceMesh, and
what of it works in `shardmesh.compat`.

`test_surface_dtensor.py` compares the keys with torch itself; the table in docs/from_dtensor.md is
made from them.
"""

from __future__ import annotations

WORKS, ACCEPTED, REFUSED = "works", "accepted without effect", "refused"

_PRIVATE = "torch's own constructor argument"


def _works(names: str, notes: dict[str, str] | None = None) -> dict[str, tuple[str, str]]:
    """Return the status of names that work, with the notes of some of them."""
    return {name: (WORKS, (notes or {}).get(name, "")) for name in names.split()}


def _parameters(
    name: str, parameters: str, notes: dict[str, str] | None = None
) -> dict[str, tuple[str, str]]:
    """Return the status of a callable and of its parameters, which all work."""
    known = notes or {}
    return {name: (WORKS, known.get("", ""))} | {
        f"{name}({p})": (WORKS, known.get(p, "")) for p in parameters.split()
    }


_FACTORY = "size dtype layout requires_grad device_mesh placements"
_FACTORY_NOTES = {
    "layout": "torch.strided, as in torch; others raise a ValueError",
    "placements": "pending ones raise a ValueError",
    "device_mesh": "the mesh of `with mesh:` by default",
}
_RANDOM_NOTES = {
    **_FACTORY_NOTES,
    "": "the same global tensor on every mesh; seeded by sm.random.manual_seed",
}
_STYLE_NOTES = {
    "": (
        "subclasses may override _apply, _partition_linear_fn, _partition_embedding_fn, "
        "_prepare_input_fn, _prepare_output_fn"
    )
}
_MESH_DIM = {"mesh_dim": "also by position"}

STATUS: dict[str, tuple[str, str]] = {
    # torch.distributed.tensor
    "DTensor": (WORKS, "an alias of ShardedTensor"),
    "DTensor(args)": (REFUSED, "it has no constructor: DTensor.from_local, distribute_tensor"),
    "DTensor(kwargs)": (REFUSED, "it has no constructor: DTensor.from_local, distribute_tensor"),
    **_works("DTensor.device_mesh DTensor.placements"),
    **_parameters(
        "DTensor.from_local",
        "local_tensor device_mesh placements run_check shape grad_placements",
        {
            "": (
                "without shape=, ranks exchange the shapes of split parts when a call is first "
                "reached"
            ),
            "run_check": "does not write into the local tensor",
        },
    ),
    "DTensor.from_local(stride)": (
        ACCEPTED,
        "the number of entries is checked; parts are contiguous",
    ),
    **_parameters(
        "DTensor.to_local",
        "grad_placements",
        {"": "ranks that use a replicated value differently get an error in the first backward"},
    ),
    **_parameters("DTensor.full_tensor", "grad_placements"),
    **_parameters(
        "DTensor.redistribute",
        "device_mesh placements async_op forward_dtype backward_dtype",
        {
            "": "without placements nothing changes",
            "device_mesh": "another mesh as well",
            "async_op": "a handle that waits when it is used as a tensor, or by wait()",
        },
    ),
    **_parameters("distribute_tensor", "tensor device_mesh placements src_data_rank"),
    **_parameters(
        "distribute_module",
        "module device_mesh partition_fn input_fn output_fn",
        {
            "input_fn": "(module, inputs, mesh), or without the module with a warning",
            "output_fn": "as input_fn",
        },
    ),
    **_parameters("Shard", "dim", {"": "also Shard(dim, order=, sizes=)"}),
    **_works("Shard.is_shard Shard.is_replicate Shard.is_partial Shard.dim"),
    "Shard.local_shard_size_and_offset": (
        REFUSED,
        "x.sharding and typeof(x).box give this rank's part, of uneven splits too",
    ),
    "Replicate": (WORKS, ""),
    **_works("Replicate.is_shard Replicate.is_replicate Replicate.is_partial"),
    **_parameters(
        "Partial", "reduce_op", {"": "an operator reduces a pending value where it needs it"}
    ),
    **_works("Partial.is_shard Partial.is_replicate Partial.is_partial Partial.reduce_op"),
    "Partial.ALL_REDUCE_OPS": (REFUSED, "a list of torch's; Partial(op) raises for an unknown op"),
    "Partial.LINEAR_REDUCE_OPS": (
        REFUSED,
        "a list of torch's; Partial(op) raises for an unknown op",
    ),
    "Placement": (WORKS, "the base class"),
    **_works("Placement.is_shard Placement.is_replicate Placement.is_partial"),
    **_parameters("zeros", _FACTORY, _FACTORY_NOTES),
    **_parameters("ones", _FACTORY, _FACTORY_NOTES),
    **_parameters("empty", _FACTORY, _FACTORY_NOTES),
    **_parameters("full", f"{_FACTORY} fill_value", _FACTORY_NOTES),
    **_parameters("rand", _FACTORY, _RANDOM_NOTES),
    **_parameters("randn", _FACTORY, _RANDOM_NOTES),
    # torch.distributed.tensor.parallel
    **_parameters(
        "parallelize_module",
        "module device_mesh parallelize_plan src_data_rank",
        {
            "parallelize_plan": (
                "styles of torch, of shardmesh, and the program's own; a pattern that matches "
                "nothing is an error"
            )
        },
    ),
    "ParallelStyle": (
        WORKS,
        "the base class of a program's own styles; _apply(module, device_mesh) is called as in "
        "torch",
    ),
    **_parameters("ColwiseParallel", "input_layouts output_layouts use_local_output", _STYLE_NOTES),
    **_parameters("RowwiseParallel", "input_layouts output_layouts use_local_output", _STYLE_NOTES),
    **_parameters("SequenceParallel", "sequence_dim use_local_output"),
    **_parameters(
        "PrepareModuleInput",
        "input_layouts desired_input_layouts input_kwarg_layouts desired_input_kwarg_layouts "
        "use_local_output",
    ),
    **_parameters("PrepareModuleOutput", "output_layouts desired_output_layouts use_local_output"),
    **_parameters(
        "PrepareModuleInputOutput",
        "input_layouts desired_input_layouts input_kwarg_layouts desired_input_kwarg_layouts "
        "use_local_input output_layouts desired_output_layouts use_local_output",
    ),
    "loss_parallel": (
        WORKS,
        "for plain targets; any mesh, reduction, weights and label smoothing; backward may come "
        "after the block",
    ),
    # torch.distributed.tensor.experimental
    **_parameters(
        "context_parallel",
        "mesh buffers buffer_seq_dims no_restore_buffers",
        {
            "": (
                "for plain tensors, in torch's form; sm.parallel.context_parallel is the form for "
                "sharded ones"
            ),
            "buffers": "of any length; longer ones than the first give their first positions",
        },
    ),
    **_parameters(
        "context_parallel_unshard",
        "mesh buffers seq_dims load_balancer",
        {"load_balancer": "None, or an object with _generate_indices(restore=True)"},
    ),
    **_parameters(
        "set_rotate_method",
        "rotate_method",
        {"rotate_method": '"allgather" and "alltoall"; results are the same'},
    ),
    "implicit_replication": (WORKS, ""),
    **_parameters(
        "local_map",
        "func out_placements in_placements in_grad_placements device_mesh redistribute_inputs",
        {
            "out_placements": "required",
            "in_grad_placements": "by default the gradients of replicated arguments are summed",
        },
    ),
    **_parameters("register_sharding", "op", {"": "applies to the functions that a program calls"}),
    # torch.distributed.device_mesh
    **_parameters(
        "init_device_mesh",
        "device_type mesh_shape mesh_dim_names backend_override",
        {
            "": "over all ranks of the world",
            "backend_override": (
                "collectives over an axis of several ranks with the backend 'fake' raise"
            ),
        },
    ),
    **_parameters(
        "DeviceMesh",
        "device_type mesh mesh_dim_names backend_override",
        {"": "equal meshes are one object; process groups are made by their first collective"},
    ),
    **{
        f"DeviceMesh({name})": (REFUSED, _PRIVATE)
        for name in ("_init_backend", "_rank", "_layout", "_rank_map", "_root_mesh")
    },
    **_works("DeviceMesh.device_type DeviceMesh.mesh DeviceMesh.ndim"),
    "DeviceMesh.mesh_dim_names": (WORKS, '("axis_0", ...) without names'),
    "DeviceMesh.shape": (WORKS, "a tuple that is also a mapping from names"),
    **_parameters("DeviceMesh.size", "mesh_dim", _MESH_DIM),
    **_parameters(
        "DeviceMesh.get_group",
        "mesh_dim",
        {**_MESH_DIM, "": "the first call waits for the ranks of the group"},
    ),
    **_works("DeviceMesh.get_all_groups DeviceMesh.get_rank"),
    "DeviceMesh.get_coordinate": (WORKS, "a list"),
    **_parameters("DeviceMesh.get_local_rank", "mesh_dim", _MESH_DIM),
    **_parameters("DeviceMesh.from_group", "group device_type mesh mesh_dim_names"),
    # Private in torch, and what trainers build their meshes with.
    **_parameters(
        "DeviceMesh._flatten", "mesh_dim_name backend_override", {"": "mesh.flatten(axes, name)"}
    ),
    **_parameters(
        "DeviceMesh._unflatten",
        "dim mesh_sizes mesh_dim_names backend_override",
        {"": "mesh.unflatten(axis, sizes, names)"},
    ),
    "DeviceMesh._concatenate": (WORKS, "DeviceMesh.concatenate(meshes); groups are used again"),
    "DeviceMesh._concatenate(device_mesh_list)": (WORKS, "by position"),
    "DeviceMesh._get_root_mesh": (WORKS, "mesh.root"),
}
