"""The text of programs and settings that run a form: this library's, accelerate's, torchtitan's."""

from __future__ import annotations

import math
from itertools import accumulate

from .description import Description, stage_layers, takes_use_cache
from .form import AXES, Form
from .plans import plan_text, style_text

PLACEHOLDER = "PATH/TO/MODEL"  # in programs for a model of which no one said where it is

# Names of schedules in torchtitan, which are those of torch.distributed.pipelining.
_TITAN_SCHEDULES = {
    ("gpipe", 1): "GPipe",
    ("1f1b", 1): "1F1B",
    ("interleaved", 2): "Interleaved1F1B",
    ("interleaved", 4): "Interleaved1F1B",
    ("zb_h1", 1): "InterleavedZeroBubble",
}


def mesh_axes(form: Form) -> dict[str, int]:
    """Return the axes of the program's mesh, at least one of them for data."""
    sizes = form.sizes
    if sizes.keys() <= {"pp", "tp"} or form.ep > 1:
        sizes.setdefault("fsdp", 1)
    return {axis: sizes[axis] for axis in AXES if axis in sizes}


def program_text(form: Form, model: Description, build: str, node: int) -> str:
    """Return a program that trains the model in this form.

    Args:
        build: the lines of a function `build()` that returns the model on "meta".
        node: devices of a node, for the command that starts it.
    """
    axes = mesh_axes(form)
    inner = {axis: size for axis, size in axes.items() if axis != "pp"}
    data = [axis for axis in ("dp", "fsdp", "ep") if axis in axes]
    shards = [axis for axis in ("fsdp", "cp", "ep") if axis in axes]
    has_pipeline = "pp" in axes
    has_experts = form.ep > 1
    experts_over = form.expert_axes or None
    plan = model.plan_of(form.sequence_parallel, experts_over, has_tp=form.tp > 1)
    # experts that are not split compute each rank's own rows, those of the interface
    calls_moe = bool(model.experts) and model.odd_experts is None and form.devices > 1
    units = f'"{model.units}"' if isinstance(model.units, str) else _tuple(list(model.units))
    names = ["MixedPrecisionPolicy"]
    names += ["context_parallel"] if form.cp > 1 else []
    names += ["balance_sequence"] if form.balanced else []
    is_fsdp = bool(shards) and form.zero == 3
    names += ["register_moe"] if calls_moe else []
    in_sequence = has_experts and form.sequence_parallel and bool(model.norms_of_mixtures)
    splits_tokens = calls_moe and (form.cp > 1 or in_sequence)
    names += ["token_wise"] if splits_tokens else []
    names += ["fully_shard"] if has_experts and form.zero == 3 else []
    names += [] if has_pipeline else ["fully_shard" if is_fsdp else "data_parallel", "materialize"]
    names += ["pipeline"] if has_pipeline else []
    names += ["parallelize"] if plan and not has_pipeline else []
    styles = {"colwise", "rowwise", "prepare_outputs", "sequence_parallel"}
    texts = [style_text(style) for style in plan.values()]
    names += [name for name in styles if any(f"{name}(" in text for text in texts)]
    positions = '"cp"' if form.cp > 1 else "None"
    spec = f"P({_tuple(data)}, {positions})"
    sizes = ", ".join(f'"{axis}": {size}' for axis, size in axes.items())
    nodes = math.ceil(form.devices / node)
    hosts = f"--nnodes {nodes} --node-rank N --master-addr HOST0 " if nodes > 1 else ""
    lines = [
        f'"""Train on {form.devices:,} devices: {form}.',
        "",
        *(_REGATHER if form.regather else []),
        f"torchrun {hosts}--nproc-per-node {min(node, form.devices)} train.py",
        '"""',
        "",
        "import torch",
        *(["import torch.nn.functional as F"] if model.output_kind == "logits of tokens" else []),
        *_imports(form),
        "",
        "import shardmesh as sm",
        "from shardmesh import P",
        f"from shardmesh.parallel import {', '.join(sorted({*names}, key=str.lower))}",
        "",
        f"MESH = {{{sizes}}}",
        f"ROWS, POSITIONS = {model.rows}, {model.sequence}  # of a step, all devices together",
        f"MICROBATCHES = {form.microbatches}",
    ]
    if plan:
        lines += ["PLAN = {", *plan_text(plan, "    ").split("\n"), "}"]
    if has_pipeline:
        firsts = list(accumulate(stage_layers(model.layers, form.pp * form.stages)))[:-1]
        lines += ["STAGES = [  # where they begin"]
        lines += [f'    "{model.blocks}.{first}",' for first in firsts]
        lines += ["]"]
    lines += ["", "", *build.strip("\n").split("\n")]
    lines += [
        "",
        "",
        *_loss_and_data(model, spec, form),
        "",
        "",
        *(_split_experts(form) if has_experts else []),
        *(_CONTEXTS if form.recompute == "selective" else []),
        'def main(device="cuda", steps=3):',
        "    mesh = sm.init_device_mesh(device, tuple(MESH.values()), axis_names=tuple(MESH))",
        f"    policy = MixedPrecisionPolicy(param_dtype=torch.{form.param_dtype}, "
        f"reduce_dtype=torch.{form.reduce_dtype})",
        "    model = build()",
        *(_KEPT_IN_BFLOAT16 if form.dtype == "bfloat16" else []),
        "    model.train()",
    ]
    lines += _recompute_and_compile(form, model)
    lines += _token_wise(model) if splits_tokens else []
    at = "mesh"
    if has_pipeline:
        at = "inner"
        lines += [
            f"    inner = mesh[{_tuple(list(inner))}]",
            "    pipe = pipeline(",
            "        model,",
            "        mesh,",
            "        split=STAGES,",
            f'        schedule="{form.schedule}",',
            "        microbatches=MICROBATCHES,",
            f'        gather="{form.gather}",',
            "    )",
        ]
        lines += _use_moe(form) if calls_moe else []
        if plan:
            lines += ["    pipe.parallelize(PLAN, inner)"]
        if has_experts:
            lines += [
                "    for stage in pipe.stages.values():",
                "        split_experts(stage, inner, policy)",
            ]
        layer = f"fully_shard(inner, axes={_tuple(shards)}" if shards else "data_parallel(inner"
        lines += [f"    pipe.{layer}, units={units}, mp_policy=policy)", "    pipe.materialize()"]
        trained = "pipe"
    else:
        lines += _use_moe(form) if calls_moe else []
        if plan:
            lines += ["    parallelize(model, mesh, PLAN)"]
        if has_experts:
            lines += ["    split_experts(model, mesh, policy)"]
        axes_text = _tuple(shards)
        layer = "data_parallel(model, mesh"
        if is_fsdp:
            layer = f"fully_shard(model, mesh, axes={axes_text}"
        elif shards:
            layer += f", gradient={axes_text}" * (form.zero == 2) + f", optimizer={axes_text}"
        lines += [f"    {layer}, units={units}, mp_policy=policy)", "    materialize(model)"]
        trained = "model"
    parameters = "pipe" if has_pipeline else "model.parameters()"
    lines += [
        f"    optimizer = torch.optim.AdamW({trained}.parameters(), lr=3e-4)",
        "    losses = []",
        "    for step in range(steps):",
        f"        ids, labels = rows_of(step, {at})",
    ]
    options = ", use_cache=False" if takes_use_cache(model.model) else ""
    indent = " " * 8
    if form.balanced:
        lines += [f"{indent}ids, labels, order = balanced(ids, labels, {at})"]
        options += ", **order"
    if form.cp > 1:
        is_balanced = ", balanced=True" if form.balanced else ""
        lines += [f'{indent}with context_parallel("cp", method="ring"{is_balanced}):']
        indent += " " * 4
    if has_pipeline:
        lines += [f"{indent}loss = pipe.step(ids, labels, loss_fn=loss_fn{options})"]
    elif form.microbatches == 1:
        lines += [
            f"{indent}loss = loss_fn(model(ids{options}), labels)",
            f"{indent}loss.backward()",
        ]
    else:
        lines += [
            f"{indent}loss = 0.0",
            f"{indent}with sm.accumulate_grads():",
            f"{indent}    for part in range(MICROBATCHES):",
            f"{indent}        rows = slice(part, None, MICROBATCHES)",
            f"{indent}        part_loss = loss_fn(model(ids[rows]{options}), labels[rows])",
            f"{indent}        part_loss = part_loss / MICROBATCHES",
            f"{indent}        part_loss.backward()",
            f"{indent}        loss = loss + part_loss.detach()",
        ]
    lines += [
        f"        sm.training.clip_grad_norm_({parameters}, 1.0)",
        "        optimizer.step()",
        "        optimizer.zero_grad()",
        "        losses.append(loss.detach())",
        "    return losses",
        "",
        "",
        'if __name__ == "__main__":',
        "    print(main())",
    ]
    return "\n".join(lines) + "\n"


_KEPT_IN_BFLOAT16 = [
    "    for parameter in model.parameters():  # buffers, such as frequencies, stay as they are",
    "        parameter.data = parameter.data.to(torch.bfloat16)",
]
_REGATHER = ["It saves what it gathers along the sequence; sm.jit can gather it again.", ""]

# Lines of a function that reorders sequences, and returns what a model of Hugging Face needs then:
# with a mask it does not take the jumps between positions for the ends of packed sequences.
_BALANCED = [
    "",
    "",
    "def balanced(ids, labels, mesh):",
    '    """Reorder sequences so that causal attention takes each rank the same time."""',
    "    positions = sm.arange(ids.shape[1], device_mesh=mesh)[None]",
    '    ids, labels, positions = (balance_sequence(x, 1, "cp") for x in (ids, labels, positions))',
    "    mask = torch.ones_like(positions)",
    '    return ids, labels, {"position_ids": positions, "attention_mask": mask}',
]


def _use_moe(form: Form) -> list[str]:
    axes = _tuple(list(form.expert_axes))
    return [f"    model.set_experts_implementation(register_moe({axes}))"]


def _token_wise(model: Description) -> list[str]:
    """Return the lines for the modules that call experts, and flatten sequences for them."""
    names = sorted({path.split(".")[-2] for path in model.expert_weights})
    has_experts = " or ".join(f'hasattr(module, "{name}")' for name in names)
    return [
        "    for module in model.modules():",
        f"        if {has_experts}:",
        "            token_wise(module)",
    ]


def _split_experts(form: Form) -> list[str]:
    """Return the lines of a function that shares experts among the ranks of fsdp and cp."""
    axes = [axis for axis in ("fsdp", "cp") if axis in mesh_axes(form)]
    shards = _tuple(axes)
    share = f"fully_shard(module, mesh, axes={shards}"
    if form.zero < 3:
        gradient = f", gradient={shards}" if form.zero == 2 else ""
        share = f"data_parallel(module, mesh{gradient}, optimizer={shards}"
    return [
        "def split_experts(model, mesh, policy):",
        f'    """Make a unit of the experts of each block, shared over {" and ".join(axes)}."""',
        "    for module in list(model.modules()):",
        '        if hasattr(module, "down_proj") and hasattr(module, "num_experts"):',
        f"            {share}, mp_policy=policy)",
        "",
        "",
    ]


# Lines of a function of the contexts of selective recomputation.
_CONTEXTS = [
    "def contexts():",
    '    """Save the results of attention and of every second product; compute the rest again."""',
    "    counts = {False: 0, True: 0}",
    "",
    "    def policy(context, op, *args, **kwargs):",
    '        is_saved = "scaled_dot_product" in op.name()',
    "        if not is_saved and op.overloadpacket in flop_registry:",
    "            counts[context.is_recompute] += 1",
    "            is_saved = counts[context.is_recompute] % 2 == 1",
    "        return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE",
    "",
    "    return create_selective_checkpoint_contexts(policy)",
    "",
    "",
]


def _imports(form: Form) -> list[str]:
    """Return the imports of recomputation."""
    lines = []
    if form.compiled and form.recompute != "none":
        lines += [
            "from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (",
            "    checkpoint_wrapper,",
            ")",
        ]
    if form.recompute == "selective":
        lines += [
            "from torch.utils.checkpoint import CheckpointPolicy, "
            "create_selective_checkpoint_contexts",
            "from torch.utils.flop_counter import flop_registry",
        ]
    return lines


def _recompute_and_compile(form: Form, model: Description) -> list[str]:
    """Return the lines that have blocks recomputed and compiled."""
    is_selective = form.recompute == "selective"
    if not form.compiled:
        options = ""
        if is_selective:
            options = '{"use_reentrant": False, "context_fn": contexts}'
        enable = f"model.gradient_checkpointing_enable({options})"
        return [f"    {enable}  # of each block"] if form.recompute != "none" else []
    lines = [f'    blocks = model.get_submodule("{model.blocks}")']
    if form.recompute != "none":
        options = ", context_fn=contexts" if is_selective else ""
        lines += [
            "    for i, block in enumerate(blocks):",
            f"        blocks[i] = checkpoint_wrapper(block{options})",
        ]
    return [*lines, "    for block in blocks:", "        block.compile()"]


_REPLACE = ".float().mean()  # replace this by your loss"
_LOSSES = {
    "logits of tokens": "F.cross_entropy(output.logits.float().transpose(1, 2), labels)",
    "logits": f"output.logits{_REPLACE}",
    "tensor": f"output{_REPLACE}",
    "tuple": f"output[0]{_REPLACE}",
    "dict": f"next(iter(output.values())){_REPLACE}",
}


def _loss_and_data(model: Description, spec: str, form: Form) -> list[str]:
    """Return the lines of the loss and of a step's rows, which the user replaces."""
    loss = [f"    return {_LOSSES[model.output_kind]}"]
    if model.vocabulary is None:
        shape = (model.rows, *model.one_row_shape[1:])
        rows = [f"    ids = labels = torch.rand({shape}, generator=generator)"]
    elif len(model.one_row_shape) == 2:
        rows = [
            "    shape = (ROWS, POSITIONS + 1)",
            f"    tokens = torch.randint({model.vocabulary}, shape, generator=generator)",
            "    ids, labels = tokens[:, :-1], tokens[:, 1:]",
        ]
    else:
        shape = (model.rows, *model.one_row_shape[1:])
        integers = f"torch.randint({model.vocabulary}, {shape}, generator=generator)"
        rows = [f"    ids = labels = {integers}"]
    return [
        *(["@torch.compile"] if form.compiled else []),
        "def loss_fn(output, labels):",
        *loss,
        "",
        "",
        "def rows_of(step, mesh):",
        '    """Return the data of a step; replace this by yours, the same on every rank."""',
        "    generator = torch.Generator().manual_seed(step)",
        *rows,
        f"    spec = {spec}",
        "    return sm.device_put(ids, mesh, spec, src_data_rank=None), sm.device_put(",
        "        labels, mesh, spec, src_data_rank=None",
        "    )",
        *(_BALANCED if form.balanced else []),
    ]


def hugging_face_build(config: str) -> str:
    """Return the lines of `build()` for a configuration of Hugging Face."""
    return (
        "def build():\n"
        "    from transformers import AutoConfig, AutoModelForCausalLM\n"
        "\n"
        f'    config = AutoConfig.from_pretrained("{config}")\n'
        '    with torch.device("meta"):\n'
        "        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)"
    )


def function_build(target: str) -> str:
    """Return the lines of `build()` for "module:function", which returns a model and more."""
    module, _, function = target.partition(":")
    return (
        "def build():\n"
        f"    from {module} import {function}\n"
        "\n"
        f"    model, *_ = {function}()\n"
        "    return model.to(torch.float32)"
    )


def accelerate_text(form: Form) -> str:
    """Return the form as accelerate's ParallelismConfig, or why it has none."""
    if form.pp > 1:
        return f"# accelerate's ParallelismConfig has no pipeline (pp={form.pp})"
    if form.zero < 3:
        return f"# accelerate's ParallelismConfig has FSDP alone (zero={form.zero})"
    if form.ep > 1:
        return f"# accelerate's ParallelismConfig has no expert parallelism (ep={form.ep})"
    if form.dp > 1 and form.fsdp == 1 and form.cp * form.tp > 1:
        return f"# accelerate's ParallelismConfig takes dp={form.dp} with cp or tp only if fsdp > 1"
    text = (
        f"ParallelismConfig(dp_replicate_size={form.dp}, dp_shard_size={form.fsdp}, "
        f"cp_size={form.cp}, tp_size={form.tp})"
    )
    if not form.precision:
        return text
    if form.param_dtype == form.reduce_dtype == form.dtype:
        return f'{text}  # Accelerator(mixed_precision="no"), the model in {form.dtype}'
    return f"{text}  # and a MixedPrecisionPolicy of its plugin: {form.precision}"


def titan_text(form: Form, model: Description) -> str:
    """Return the form as flags of torchtitan 0.2, or why it has none."""
    # torchtitan counts the embedding and the head as a layer each
    layers_per_stage = math.ceil((model.layers + 2) / (form.pp * form.stages))
    stages = math.ceil((model.layers + 2) / layers_per_stage)
    if form.pp > 1 and form.schedule == "zb_h1" and form.stages == 1:
        return "# torchtitan's zero-bubble schedules have two stages on a rank or more"
    if form.zero < 3:
        return f"# torchtitan shards parameters, too (zero={form.zero})"
    if form.reduce_dtype != "float32":
        return "# torchtitan sums gradients in float32 alone (reduce_dtype)"
    if form.ep > 1 and form.cp > 1:
        return f"# torchtitan splits experts over all of cp (cp={form.cp})"
    if form.regather:
        return "# torchtitan saves what it gathers along the sequence (regather)"
    if form.pp > 1 and stages != form.pp * form.stages:
        return f"# torchtitan cannot cut {model.layers} layers into {form.pp * form.stages} stages"
    flags = {
        "training.seq_len": model.sequence,
        "training.local_batch_size": form.rows * (form.microbatches if form.pp > 1 else 1),
        "training.global_batch_size": model.rows,
        "parallelism.data_parallel_replicate_degree": form.dp,
        "parallelism.data_parallel_shard_degree": form.fsdp * form.ep,  # of which ep takes a part
        "parallelism.context_parallel_degree": form.cp,
        "parallelism.tensor_parallel_degree": form.tp,
        "parallelism.pipeline_parallel_degree": form.pp,
    }
    if form.ep > 1:
        flags["parallelism.expert_parallel_degree"] = form.expert_ranks
        if form.tp > 1:
            flags["parallelism.expert_tensor_parallel_degree"] = 1
    if form.pp > 1:
        flags["parallelism.pipeline_parallel_schedule"] = _TITAN_SCHEDULES[
            form.schedule, form.stages
        ]
        flags["parallelism.pipeline_parallel_microbatch_size"] = form.rows
        flags["parallelism.pipeline_parallel_layers_per_stage"] = layers_per_stage
    if form.param_dtype != "bfloat16":
        flags["training.mixed_precision_param"] = form.param_dtype
    if form.dtype != "float32":
        flags["training.dtype"] = form.dtype
    flags["activation_checkpoint.mode"] = form.recompute
    if form.recompute == "selective":
        # every second product; the default is every second layer
        flags["activation_checkpoint.selective_ac_option"] = "op"
    text = " ".join(f"--{name} {value}" for name, value in flags.items())
    return f"{text} --compile.enable" if form.compiled else text  # of layers and loss


def _tuple(names: list[str]) -> str:
    quoted = [f'"{name}"' for name in names]
    if len(quoted) == 1:
        return quoted[0]
    return f"({', '.join(quoted)})" if quoted else "None"
