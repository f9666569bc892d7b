r"""`shard_map`: map a plain PyTorch function of local tensors over the ranks of a mesh.

    x: P("dp")   w: P()             f(x, w) = psum((x @ w).sum(), "dp")           out: P()
    rank 0   [x0]  [w]    ->        x0 @ w ----sum---\                            [loss]
                                                       psum  -> the same on both
    rank 1   [x1]  [w]    ->        x1 @ w ----sum---/                            [loss]

The function receives the local tensors themselves, and autograd records operators on them. The
gradient of a value has the dual type (S <-> S, R <-> pending), which is the layout that a
`ShardedTensor` expects for its gradient. So the boundary needs no autograd node, and a parameter
that is used many times is reduced once.

Calls are cached by signature: layouts, shapes, dtypes and static values. The first call with a
signature tracks the types of all values (`types/type_checker.py`), and ranks exchange the shapes of
their results. Later calls look the signature up.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any
from weakref import ref

from torch import Tensor, is_grad_enabled
from torch.utils import _pytree as pytree

from ...mesh import context
from ...mesh.device_mesh import DeviceMesh, as_device_mesh
from ..autograd.engine_hooks import transforms_active
from ..autograd.named_axes import swap
from ..layout.bounded_cache import HEAVY_LIMIT, keep
from ..layout.layout import MeshLayouts
from ..layout.spec import P
from ..lineage import comm_context, mixed, seed_of
from ..ops.torch_compile import ORIGINAL, keep_compiler_out, not_compiled
from ..tensor.autograd.local_part import known_local
from ..tensor.sharded_tensor import ShardedTensor
from ..trees import paths_of, unflatten
from .captures import Captures, replace_captures
from .inputs import (
    InputMutationCheck,
    InputSpec,
    alias,
    check_transform,
    local_parts,
    make_input_spec,
    prepare_inputs,
)
from .mapped_env import MappedEnv, current_mapped_env
from .outputs import (
    OutputSpec,
    check_type,
    infer_outputs,
    resolve_output_spec,
    share_error,
    with_lineage,
    wrap_outputs,
)
from .replicas import check_replicas
from .signature import key_of, leaves_of, position, specs_for, specs_of_arguments
from .transforms.batch import current_batch
from .types.custom_functions import CustomFunctionCall
from .types.type_checker import CaptureTracker, TypeChecker, untracked
from .types.types import ShardingTypeError, Tag, TypeOrigin

CHECKS = (True, False, "always", "values")
_MAX_TRACKED_CALLS = 4  # until the backward of a custom function has run


def shard_map(
    f: Callable[..., Any] | None = None,
    *,
    mesh: DeviceMesh | None = None,
    in_specs: Any = None,
    out_specs: Any,
    axis_names: Collection[str] | None = None,
    check: bool | str | None = None,
    check_vma: bool | None = None,
) -> Callable[..., Any]:
    """shard_map(f, mesh=, in_specs=, out_specs=) -> f on the local tensors of each rank.

    A function of `ShardedTensor`s.

        @sm.shard_map(mesh=mesh, in_specs=(P("dp", None), P(None, "tp")), out_specs=P("dp", "tp"))
        def matmul(a, b):          # plain tensors: this rank's rows of a, its columns of b
            return a @ b

    Args:
        f: a function of local tensors. If omitted, a decorator is returned.
        mesh: the mesh. Default: that of the first sharded argument, or the one of `sm.set_mesh`.
        in_specs: the layouts of the arguments: a tree of `P`s (or placements) that is a prefix of
            theirs; None for static arguments, which are passed unchanged. Default: each argument
            keeps its layout, and plain tensors are replicated. An argument with another layout is
            redistributed, which is implicit communication (`sm.ops.implicit_comm`). A plain tensor
            must be the same on every rank, whatever its spec.
        out_specs: the layouts of the results, likewise; None for results that are not tensors.
        axis_names: the manual axes, over which `f` receives local parts and may call collectives.
            Default: all axes. Over the other axes tensors stay global: `f` receives
            `ShardedTensor`s on the mesh of those. Specs name manual axes only.
        check: True (the default): the first call with a signature tracks types, and raises if a
            result varies where its spec declares it replicated; the error names the line that made
            it vary. "always": at every call. "values": also compare replicas bit for bit, at every
            call. False: trust f.
        check_vma: JAX's name for `check`; True or False.

    Returns:
        The mapped function. Keyword arguments are passed to `f` unchanged.

    Raises:
        ValueError: specs that do not match arguments or results, or name an axis that is not
            manual.
        ShardingTypeError: on every rank, an error that the checker finds.
        TypeError: an argument or result of the wrong kind, or something that is not a spec; a
            result whose shape differs from the previous call with this signature.
        RuntimeError: this rank is not in the mesh.

    Communication: that of redistributing arguments, in as few collectives as possible; for a new
        signature one small all_gather of the results' shapes. Otherwise none.

    Example:
        >>> loss = sm.shard_map(
        ...     lambda x, w: sm.psum((x @ w).square().sum(), "dp"),
        ...     mesh=mesh,
        ...     in_specs=(P("dp"), P()),
        ...     out_specs=P(),
        ... )
        >>> loss(x, w).backward()
    """
    if check_vma is not None:
        if check not in (None, check_vma):
            raise ValueError(
                f"shard_map(check={check!r}, check_vma={check_vma!r}): check_vma is another name "
                "for check; pass one of them"
            )
        check = check_vma
    check = True if check is None else check
    if check not in CHECKS:
        raise ValueError(
            f"shard_map(check={check!r}): check must be one of {', '.join(map(repr, CHECKS))}"
        )
    if f is None:
        options = {"in_specs": in_specs, "out_specs": out_specs, "axis_names": axis_names}
        return functools.partial(shard_map, mesh=mesh, check=check, **options)
    mapped = Mapped(f, mesh, in_specs, out_specs, axis_names, check)
    return functools.update_wrapper(mapped, f, updated=())


@dataclass
class CachedCall:
    """What calls with one signature have in common.

    Attributes:
        env: the axis names that collectives may use.
        manual_mesh: the mesh of the axes that this function makes manual.
        auto_mesh: the mesh of the axes that stay global; None if there are none.
        mesh: the mesh that the function is mapped over.
        inputs: the layout of each argument.
        passes_through: whether every argument's local tensor is passed unchanged.
        outputs: the layout of each result; None before the first call has returned.
        type_log: the types that `grad`, `typeof` and `custom_vjp` inside need in later calls.
        uneven: whether the parts of some argument differ in shape.
        custom_calls: the calls of custom autograd functions in the last tracked call.
        tracked_calls: number of calls whose types were tracked.
        captures: whether the function closes over tensors that are sharded or require grad; then
            every call is tracked.
        constants: plain tensors without gradient that it uses.
        trusted: whether calls are no longer tracked.
        fast: whether calls are trusted and arguments are passed unchanged.
    """

    env: MappedEnv
    manual_mesh: DeviceMesh
    auto_mesh: DeviceMesh | None
    mesh: DeviceMesh
    inputs: Sequence[InputSpec]
    passes_through: bool = False
    outputs: Sequence[OutputSpec] | None = None
    type_log: list[Any] = field(default_factory=list)
    uneven: bool = False
    custom_calls: Sequence[CustomFunctionCall] = ()
    tracked_calls: int = 0
    captures: bool = False
    constants: Sequence[ref[Tensor]] = ()
    trusted: bool = False
    fast: bool = False

    def may_be_trusted(self) -> bool:
        """Return whether types need no more tracking.

        Outputs are known, nothing is captured, and the backward of every custom function was
        checked or did not run in the first calls.
        """
        enough = self.uneven or self.tracked_calls > _MAX_TRACKED_CALLS
        checked = all(
            call.is_checked or (enough and not call.must_be_checked) for call in self.custom_calls
        )
        return self.outputs is not None and not self.captures and checked


class Mapped:
    """A mapped function; see `shard_map`."""

    def __init__(
        self,
        f: Any,
        mesh: DeviceMesh | None,
        in_specs: Any,
        out_specs: Any,
        axis_names: Any,
        check: bool | str,
    ) -> None:
        self.f, self.mesh, self.check = f, as_device_mesh(mesh), check
        self.in_specs, self.out_specs = in_specs, out_specs
        self.axis_names = None if axis_names is None else frozenset(axis_names)
        self.name = getattr(f, "__name__", type(f).__name__)
        self._seed = seed_of(f"shard_map {self.name}")
        # On the mesh of this function; others are kept on their mesh, see `_calls_on`.
        self._calls: dict[Any, CachedCall] = {}
        # The first call with a signature, not every call.
        self._checks_once = check in (True, False)

    @not_compiled("it calls a function of the program outside of any graph", calls_program=True)
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        keep_compiler_out()
        sharded = [x for x in args if type(x) is ShardedTensor]
        if len(sharded) < len(args):
            sharded = [x for x in pytree.tree_leaves(args) if type(x) is ShardedTensor]
        if not sharded:
            return self._call_cached(args, kwargs)
        lineage = mixed(self._seed, sharded)
        with comm_context(sharded[0].mesh.world, lineage):
            return with_lineage(lineage, self._call_cached(args, kwargs))

    def _call_cached(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a known signature of `ShardedTensor`s on the shortest path.

        Leave everything else to `_call`.
        """
        outer = current_mapped_env()
        key: list[Any] = [outer, is_grad_enabled()]
        parts: list[Any] = []
        for x in args:
            if type(x) is not ShardedTensor:
                return self._call(args, kwargs)
            key.append(x._layout)
            parts.append(x._local if x._local.requires_grad else known_local(x))
        if kwargs or not parts:
            return self._call(args, kwargs)
        cached = self._calls_on(args[0]._layout.mesh).get(tuple(key))
        if cached is None or not cached.fast or (outer is not None and outer.checker is not None):
            return self._call(args, kwargs)
        if cached.constants and any_requires_grad(cached.constants):
            return self._call(args, kwargs)
        out = self._run(self.f, cached, parts, None, kwargs)
        return wrap_outputs(self.name, out, cached.outputs, parts)  # type: ignore[arg-type]

    def _run(
        self, f: Any, cached: CachedCall, parts: Sequence[Any], tree: Any, kwargs: dict[str, Any]
    ) -> Any:
        """Call the function itself on local parts."""
        env = cached.env
        env.type_log, env.cursor = cached.type_log, 0
        before = swap(env)
        try:
            if tree is None and cached.auto_mesh is None:
                return f(*parts, **kwargs)
            with cached.auto_mesh or nullcontext():
                return f(*(parts if tree is None else unflatten(tree, parts)), **kwargs)
        finally:
            swap(before)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else functools.partial(self, instance)

    # -- any call ----------------------------------------------------------------------------------

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        outer = current_mapped_env()
        if outer is not None and outer.captures is not None:
            args = replace_captures(args, outer.captures)
        leaves, tree = leaves_of(args)
        if transforms_active():
            check_transform(self.name, leaves)
            batch = current_batch()
            if batch is not None and batch.mesh is self.mesh:
                batch.check(self.name, self.in_specs, self.out_specs)
                if batch.inner is None:  # one example is a plain tensor
                    return self.f(*args, **kwargs)
        cached = self._cached_for(args, leaves, tree, kwargs)
        with nullcontext() if outer is None or outer.checker is None else untracked():
            if cached.passes_through:
                parts = local_parts(leaves, cached.inputs)
            else:
                parts = prepare_inputs(self.name, leaves, cached.inputs)
        if not cached.trusted:
            cached.trusted = self._checks_once and cached.may_be_trusted()
            cached.fast = cached.trusted and cached.passes_through
        is_tracked = not cached.trusted or (outer is not None and outer.checker is not None)
        if is_tracked or any_requires_grad(cached.constants):
            return self._tracked_call(cached, leaves, parts, tree, kwargs)
        out = self._run(self.f, cached, parts, tree, kwargs)
        return wrap_outputs(self.name, out, cached.outputs, parts)  # type: ignore[arg-type]

    def _cached_for(
        self, args: tuple[Any, ...], leaves: Sequence[Any], tree: Any, kwargs: dict[str, Any]
    ) -> CachedCall:
        mesh, outer = self._mesh_for(leaves), current_mapped_env()
        # The world, since meshes of two ranks of a simulated world are equal, and the grad mode,
        # since gradients need types.
        situation = mesh.world, outer, is_grad_enabled()
        leaf_keys = [key_of(x) for x in leaves]
        key = (mesh, *situation, tree, *leaf_keys, *[(k, key_of(x)) for k, x in kwargs.items()])
        calls = self._calls_on(mesh)
        cached = calls.get(key)
        if cached is None:
            new = self._new_call(mesh, outer, args, leaves, kwargs)
            cached = keep(calls, key, new, HEAVY_LIMIT)
            if self._checks_once and cached.passes_through and tree is None and not kwargs:
                # The key of `_call_cached`.
                keep(calls, (*situation[1:], *leaf_keys), cached, HEAVY_LIMIT)
        return cached

    def _calls_on(self, mesh: Any) -> dict[Any, CachedCall]:
        """Return the cached calls on a mesh.

        This function must not keep alive a mesh that only arguments had.
        """
        if self.mesh is not None:
            return self._calls
        functions = MeshLayouts.of(mesh).functions
        calls = functions.get(self)
        return functions.setdefault(self, {}) if calls is None else calls

    def _mesh_for(self, leaves: Sequence[Any]) -> DeviceMesh:
        if self.mesh is not None:
            if not isinstance(self.mesh, DeviceMesh):
                raise TypeError(
                    f"shard_map({self.name}): {self.mesh!r} has no ranks to run on; for shapes and "
                    "bytes use eval_shape"
                )
            batch = current_batch() if transforms_active() else None
            is_inner = batch is not None and batch.mesh is self.mesh and batch.inner is not None
            return batch.inner if is_inner else self.mesh  # type: ignore[union-attr,return-value]
        first = next((x for x in leaves if isinstance(x, ShardedTensor)), None)
        return context.given_or_current(None) if first is None else first.mesh

    def _new_call(
        self,
        mesh: DeviceMesh,
        outer: MappedEnv | None,
        args: Any,
        leaves: Sequence[Any],
        kwargs: dict[str, Any],
    ) -> CachedCall:
        """Return what a new signature implies before the function has run."""
        if mesh.coordinate is None:
            where = f"rank {mesh.world.rank} is not in {mesh} and holds no parts"
            raise RuntimeError(
                f"shard_map({self.name}): {where}; call it on the ranks of the mesh only"
            )
        for name, x in kwargs.items():
            if any(isinstance(t, ShardedTensor) for t in pytree.tree_leaves(x)):
                raise TypeError(
                    f"shard_map({self.name}): {name}= contains a ShardedTensor; pass it by "
                    "position, where it can have a spec"
                )
        unknown = sorted((self.axis_names or frozenset()) - set(mesh.axis_names))
        if unknown or (self.axis_names is not None and not self.axis_names):
            axis_names = sorted(self.axis_names or ())
            raise ValueError(
                f"shard_map({self.name}): axis_names={axis_names} must name one or more axes of "
                f"the mesh, {list(mesh.axis_names)}"
            )
        names = tuple(a for a in mesh.axis_names if self.axis_names is None or a in self.axis_names)
        auto = tuple(a for a in mesh.axis_names if a not in names)
        auto_mesh = mesh[auto] if auto else None
        specs: Sequence[Any] = [None] * len(leaves)
        if self.in_specs is not None:
            specs = specs_of_arguments(f"shard_map({self.name}): in_specs", self.in_specs, args)
        paths = [f"shard_map({self.name}): argument {position(path)}" for path in paths_of(args)]
        triples = zip(paths, leaves, specs, strict=True)
        inputs = [make_input_spec(*each, mesh, names, auto_mesh) for each in triples]
        env = MappedEnv(mesh, names) if outer is None else outer.inside(mesh, names)
        passes_through = all(spec.passes_through for spec in inputs)
        uneven = any(spec.uneven for spec in inputs)
        return CachedCall(env, mesh[names], auto_mesh, mesh, inputs, passes_through, uneven=uneven)

    # -- with types --------------------------------------------------------------------------------

    def _tracked_call(
        self,
        cached: CachedCall,
        leaves: Sequence[Any],
        parts: Sequence[Any],
        tree: Any,
        kwargs: dict[str, Any],
    ) -> Any:
        """Run a call whose types are tracked, or whose results are not known yet."""
        outer = current_mapped_env()
        outer_checker = None if outer is None else outer.checker
        captures_only = outer_checker is None and self.check is False
        make = CaptureTracker if captures_only else TypeChecker
        checker = outer_checker or make(cached.env.names)
        is_first = cached.outputs is None or not self._checks_once
        checker.uneven = checker.uneven or (cached.uneven and is_first)
        with untracked():
            parts = [alias(part) for part in parts]
            mutations = InputMutationCheck(leaves, parts, cached.inputs)
        triples = zip(leaves, parts, cached.inputs, strict=True)
        mutations.tags = [self._tag_input(checker, *each) for each in triples]
        manual = cached.manual_mesh
        if self.check == "values":
            pairs = zip(parts, cached.inputs, strict=True)
            check_replicas([(spec.path, part, spec.dst) for part, spec in pairs], manual)
        captures = Captures(
            self.name, cached.env, cached.mesh, manual.axis_names, cached.auto_mesh, checker
        )
        out = self._run_tracked(cached, parts, tree, kwargs, checker, outer_checker, captures)
        cached.captures = bool(captures.inputs)
        cached.constants = captures.constants if is_grad_enabled() else ()
        with untracked():
            error = None if captures_only else mutations.error(checker)
            types = None if captures_only else checker
            result = self._checked_outputs(cached, out, parts, types, error, captures)
        if outer_checker is None:
            cached.custom_calls, cached.tracked_calls = checker.finish(), cached.tracked_calls + 1
            return result
        for before, after in zip(pytree.tree_leaves(out), pytree.tree_leaves(result), strict=True):
            checker.set_tag(after, checker.tag_outside(manual.axis_names, before))
        return result

    def _tag_input(self, checker: TypeChecker, leaf: Any, part: Any, spec: InputSpec) -> Tag | None:
        """Set and return the tag of an argument's part; None if it is static or no tensor."""
        if not isinstance(part, Tensor) or spec.src is None:
            return None
        own = checker.make_tag(TypeOrigin(spec.path.partition(": ")[2]), spec.type)
        tag = checker.join(checker.argument_tag(leaf), own)
        checker.set_tag(part, tag)
        return tag

    def _run_tracked(
        self,
        cached: CachedCall,
        parts: Any,
        tree: Any,
        kwargs: dict[str, Any],
        checker: TypeChecker,
        outer: Any,
        captures: Captures,
    ) -> Any:
        env, before = cached.env, cached.type_log
        env.captures, cached.type_log = captures, []
        env.checker, env.recording = (None, False) if checker.captures_only else (checker, True)
        try:
            with checker.bind(env), checker if outer is None else nullcontext():
                # Of a compiled function the one that was passed to `torch.compile`: types are
                # tracked operator by operator.
                f = getattr(self.f, ORIGINAL, self.f)
                f = getattr(self.f, "_torchdynamo_orig_callable", f)
                out = self._run(f, cached, parts, tree, kwargs)
                out = replace_captures(out, captures)
                for leaf in [out] if type(out) is Tensor else pytree.tree_leaves(out):
                    if isinstance(leaf, Tensor):
                        checker.tag_of(leaf)  # here, while the manual axes are bound
                return out
        except BaseException as error:
            cached.type_log = before
            # Parts differ in shape, so errors may too.
            may_be_alone = checker.uneven and outer is None and cached.outputs is None
            if may_be_alone and isinstance(error, (ShardingTypeError, TypeError, ValueError)):
                share_error(self.name, error, cached.manual_mesh)
            raise
        finally:
            env.checker, env.captures, env.recording = None, None, False

    def _checked_outputs(
        self,
        cached: CachedCall,
        out: Any,
        parts: Sequence[Any],
        checker: TypeChecker | None,
        error: Exception | None,
        captures: Captures,
    ) -> Any:
        """Return the results as `ShardedTensor`s, after all checks.

        `error` is that of an earlier check.
        """
        leaves, _ = pytree.tree_flatten(out)
        paths = [f"shard_map({self.name}): result {path}".rstrip() for path in paths_of(out)]
        specs: list[P | None] = []
        try:
            specs = self._output_specs(cached, out, leaves, paths, checker)
        except (ShardingTypeError, TypeError, ValueError) as spec_error:
            error = error or spec_error
        if cached.outputs is None or not self._checks_once:
            # "values" compares below, and reports more.
            compare = checker is not None and self.check != "values"
            # First, so that an error names these and not values computed from them.
            plain = captures.plain_tensors()
            outputs = infer_outputs(
                [*[path for path, _ in plain], *paths],
                [*[P(*[None] * x.ndim) for _, x in plain], *specs],
                [*[x for _, x in plain], *leaves],
                error,
                cached.mesh,
                cached.manual_mesh,
                compare,
            )
            cached.outputs = outputs[len(plain) :]
        elif error is not None:
            raise error
        result = wrap_outputs(self.name, out, cached.outputs, parts)
        if self.check == "values":
            captured = [(spec.path, part, spec.dst) for _, spec, part in captures.inputs.values()]
            pairs = zip(leaves, cached.outputs, strict=True)
            results = [(spec.path, x, spec.layout) for x, spec in pairs]
            check_replicas([*captured, *results], cached.manual_mesh)
        return result

    def _output_specs(
        self,
        cached: CachedCall,
        out: Any,
        leaves: Sequence[Any],
        paths: Sequence[str],
        checker: TypeChecker | None,
    ) -> list[P | None]:
        """Return the spec of every result, checked against its kind and type."""
        names, partly = cached.manual_mesh.axis_names, cached.auto_mesh is not None
        out_specs = specs_for(f"shard_map({self.name}): out_specs", self.out_specs, out)
        triples = zip(paths, leaves, out_specs, strict=True)
        specs = [resolve_output_spec(*each, cached.mesh, names, partly) for each in triples]
        for path, x, spec in zip(paths, leaves, specs, strict=True):
            if checker is not None and spec is not None:
                check_type(path, spec, checker.tag_of(x), names)
        return specs


def any_requires_grad(constants: Sequence[ref[Tensor]]) -> bool:
    """Return whether one of the tensors requires grad, which none did when the call was tracked."""
    for weak in constants:
        x = weak()
        if x is not None and x.requires_grad:
            return True
    return False
