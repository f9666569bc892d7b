"""What `shardmesh.compat` does with each public name of torch's FSDP2, each of its methods and
parameters.

`STATUS` has `name`, `name(parameter)`, `Class.method`, `Class.method(parameter)` or
`Class.attribute` -> what it does, and a note.
`test_surface_fsdp.py` compares it with torch and with `shardmesh.compat`; docs/from_dtensor.md has
it as a table.
"""

from __future__ import annotations

WORKS, NO_EFFECT, REFUSED = "works", "accepted without effect", "refused"

STATUS: dict[str, tuple[str, str]] = {
    # -- fully_shard -------------------------------------------------------------------------------
    "fully_shard": (
        WORKS,
        "parameters come from rank 0, as with `distribute_tensor`; containers without `forward` "
        "are accepted",
    ),
    "fully_shard(module)": (WORKS, "a module, or a list of modules as one unit"),
    "fully_shard(mesh)": (WORKS, "by default the current mesh, else all ranks"),
    "fully_shard(reshard_after_forward)": (
        WORKS,
        "a number that is the size of no axis of the mesh means True",
    ),
    "fully_shard(shard_placement_fn)": (
        WORKS,
        "any dim of any size; `ShardPlacementResult` with a mesh for the parameters of whole "
        "modules, which become a unit of their own",
    ),
    "fully_shard(mp_policy)": (WORKS, ""),
    "fully_shard(offload_policy)": (WORKS, ""),
    "fully_shard(ignored_params)": (WORKS, ""),
    "fully_shard(dp_mesh_dims)": (WORKS, "parameters on the mesh may be plain, too"),
    # -- FSDPModule --------------------------------------------------------------------------------
    "FSDPModule": (
        WORKS,
        "`isinstance` holds for modules of `compat.fully_shard`; copies and pickles keep the class",
    ),
    "FSDPModule.unshard": (
        WORKS,
        "the plain parameters are in the module until `reshard` or the end of its forward",
    ),
    "FSDPModule.unshard(async_op)": (WORKS, ""),
    "FSDPModule.reshard": (WORKS, "inside of the module's own forward an error"),
    "FSDPModule.reset_iter_state": (
        WORKS,
        "not needed: the next forward recovers; it also drops held gradients",
    ),
    "FSDPModule.set_requires_gradient_sync": (WORKS, ""),
    "FSDPModule.set_requires_gradient_sync(requires_gradient_sync)": (WORKS, ""),
    "FSDPModule.set_requires_gradient_sync(recurse)": (WORKS, ""),
    "FSDPModule.set_requires_all_reduce": (WORKS, ""),
    "FSDPModule.set_requires_all_reduce(requires_all_reduce)": (WORKS, ""),
    "FSDPModule.set_requires_all_reduce(recurse)": (WORKS, ""),
    "FSDPModule.set_is_last_backward": (NO_EFFECT, "each backward ends with its reductions"),
    "FSDPModule.set_is_last_backward(is_last_backward)": (NO_EFFECT, ""),
    "FSDPModule.set_reshard_after_forward": (WORKS, ""),
    "FSDPModule.set_reshard_after_forward(reshard_after_forward)": (WORKS, ""),
    "FSDPModule.set_reshard_after_forward(recurse)": (WORKS, ""),
    "FSDPModule.set_reshard_after_backward": (
        WORKS,
        "a forward after a step of the optimizer gathers anew",
    ),
    "FSDPModule.set_reshard_after_backward(reshard_after_backward)": (WORKS, ""),
    "FSDPModule.set_reshard_after_backward(recurse)": (WORKS, ""),
    "FSDPModule.set_unshard_in_backward": (
        WORKS,
        "False stops prefetching only: a backward that needs the parameters gathers them",
    ),
    "FSDPModule.set_unshard_in_backward(unshard_in_backward)": (WORKS, ""),
    "FSDPModule.set_modules_to_forward_prefetch": (WORKS, ""),
    "FSDPModule.set_modules_to_forward_prefetch(modules)": (WORKS, ""),
    "FSDPModule.set_modules_to_backward_prefetch": (
        WORKS,
        "modules whose backward needs no parameters are not gathered",
    ),
    "FSDPModule.set_modules_to_backward_prefetch(modules)": (WORKS, ""),
    "FSDPModule.set_gradient_divide_factor": (
        WORKS,
        "of plain inputs; gradients of sharded ones are those of the global batch",
    ),
    "FSDPModule.set_gradient_divide_factor(factor)": (WORKS, ""),
    "FSDPModule.set_reduce_scatter_divide_factor": (WORKS, "as `set_gradient_divide_factor`"),
    "FSDPModule.set_reduce_scatter_divide_factor(factor)": (WORKS, ""),
    "FSDPModule.set_reduce_scatter_unused_params": (WORKS, "`find_unused_parameters`"),
    "FSDPModule.set_reduce_scatter_unused_params(reduce_scatter_unused_params)": (WORKS, ""),
    "FSDPModule.set_reduce_scatter_unused_params(recurse)": (WORKS, ""),
    "FSDPModule.set_all_reduce_hook": (
        WORKS,
        "not with HSDP, whose replicas are reduced together with those of other units",
    ),
    "FSDPModule.set_all_reduce_hook(hook)": (WORKS, "gets averaged gradients, once per dtype"),
    "FSDPModule.set_all_reduce_hook(stream)": (WORKS, ""),
    "FSDPModule.set_post_optim_event": (
        WORKS,
        "the current stream waits for it when the next forward begins",
    ),
    "FSDPModule.set_post_optim_event(event)": (WORKS, ""),
    "FSDPModule.set_force_sum_reduction_for_comms": (
        NO_EFFECT,
        "gradients are always summed and then scaled",
    ),
    "FSDPModule.set_force_sum_reduction_for_comms(enable)": (NO_EFFECT, ""),
    "FSDPModule.set_reduce_scatter_max_input_buffers": (
        NO_EFFECT,
        "a buffer lives until its reduction is complete",
    ),
    "FSDPModule.set_reduce_scatter_max_input_buffers(max_input_buffers)": (NO_EFFECT, ""),
    "FSDPModule.set_reduce_scatter_max_input_buffers(recurse)": (NO_EFFECT, ""),
    "FSDPModule.set_separate_reduce_scatter_group": (
        NO_EFFECT,
        "one process group per set of ranks",
    ),
    "FSDPModule.set_separate_reduce_scatter_group(enable)": (NO_EFFECT, ""),
    "FSDPModule.set_separate_reduce_scatter_group(recurse)": (NO_EFFECT, ""),
    "FSDPModule.set_allocate_memory_from_process_group_for_comm": (
        NO_EFFECT,
        "buffers are torch's",
    ),
    "FSDPModule.set_allocate_memory_from_process_group_for_comm(enable)": (NO_EFFECT, ""),
    "FSDPModule.set_symm_mem_for_comm": (NO_EFFECT, "buffers are torch's"),
    "FSDPModule.set_symm_mem_for_comm(backend)": (NO_EFFECT, ""),
    "FSDPModule.set_custom_all_gather": (
        REFUSED,
        "collectives are planned, and compared between ranks, before they run",
    ),
    "FSDPModule.set_custom_all_gather(comm)": (REFUSED, ""),
    "FSDPModule.set_custom_reduce_scatter": (REFUSED, "as `set_custom_all_gather`"),
    "FSDPModule.set_custom_reduce_scatter(comm)": (REFUSED, ""),
    # -- other names -------------------------------------------------------------------------------
    "UnshardHandle": (WORKS, ""),
    "UnshardHandle.wait": (WORKS, ""),
    "register_fsdp_forward_method": (WORKS, ""),
    "register_fsdp_forward_method(module)": (WORKS, ""),
    "register_fsdp_forward_method(method_name)": (WORKS, ""),
    "share_comm_ctx": (NO_EFFECT, "all units of a process use the same streams"),
    "share_comm_ctx(modules)": (NO_EFFECT, ""),
    "MixedPrecisionPolicy": (WORKS, ""),
    "MixedPrecisionPolicy(param_dtype)": (WORKS, ""),
    "MixedPrecisionPolicy(reduce_dtype)": (WORKS, ""),
    "MixedPrecisionPolicy(output_dtype)": (WORKS, ""),
    "MixedPrecisionPolicy(cast_forward_inputs)": (WORKS, ""),
    "OffloadPolicy": (WORKS, ""),
    "CPUOffloadPolicy": (
        WORKS,
        "not with HSDP: gradients of replicas would be reduced on the host",
    ),
    "CPUOffloadPolicy(pin_memory)": (WORKS, ""),
    "DataParallelMeshDims": (WORKS, ""),
    "DataParallelMeshDims(shard)": (WORKS, ""),
    "DataParallelMeshDims(replicate)": (WORKS, ""),
    "DataParallelMeshDims.shard_names": (WORKS, ""),
    "DataParallelMeshDims.replicate_names": (WORKS, ""),
    # -- torch.distributed._composable -------------------------------------------------------------
    "replicate": (WORKS, "both of torch's: over DDP, and over FSDP2"),
    "replicate(module)": (WORKS, "a module, or a list of modules as one unit"),
    "replicate(ignored_modules)": (WORKS, ""),
    "replicate(kwargs)": (
        WORKS,
        "`device_mesh`, `find_unused_parameters` and `init_sync`; options about devices, buckets "
        "and memory have no effect; refused: `process_group`, `mixed_precision`, "
        "`broadcast_buffers=True`, hooks",
    ),
    "replicate(mesh)": (WORKS, ""),
    "replicate(mp_policy)": (WORKS, ""),
    "replicate(offload_policy)": (WORKS, "`OffloadPolicy()` only"),
    "replicate(ignored_params)": (WORKS, ""),
    "replicate(dp_mesh_dims)": (WORKS, ""),
}
