r"""`shard_map`: a plain PyTorch function over local tensors, mapped over the ranks of a mesh.

    x: P("dp")   w: P()             f(x, w) = psum((x @ w).sum(), "dp")           out: P()
    rank 0   [x0]  [w]    ->        x0 @ w ----sum---\                            [loss]
                                                       psum  -> the same on both
    rank 1   [x1]  [w]    ->        x1 @ w ----sum---/                            [loss]

At the boundary nothing happens to the tensors: the local tensor that goes in is the part that this rank holds, and autograd
runs on it as it is. The gradient of a value is laid out as the dual of its type (S <-> S, R <-> pending), which is what a
`ShardedTensor` of that layout expects: so gradients are right without a node at the boundary, and a parameter that is used many
times is reduced once.

A call is known by its signature: layouts, shapes and dtypes, static values. The first time, the types of all values are followed
(`following.py`) and ranks exchange the shapes of their results. After that a call looks its signature up and trusts it.
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
from ..layout.bounded_cache import keep
from ..layout.spec import P
from ..ops import dispatch
from ..ops.lineage import comm_context, mixed, seed_of
from ..tensor.autograd.engine_hooks import transforms_active
from ..tensor.sharded_tensor import ShardedTensor
from .captures import Captures, captured_in
from .inputs import Entrance, Watched, aliased, as_they_lie, check_transform, enter, entrance
from .named_axes import Mapping, current_mapping, swap
from .outputs import Exit, check_type, checked_spec, first_exits, made_with, tell_error, wrapped
from .replicas import check_replicas
from .signature import key_of, leaves_of, paths_of, position, rebuilt, specs_for
from .transforms.batch import current_batch
from .types.custom_functions import Application
from .types.type_checker import Following, Trusting, unfollowed
from .types.types import Origin, ShardingTypeError, Tag

CHECKS = (True, False, "always", "values")
_MOST_FOLLOWED = 4  # calls, until the backward of a custom function has run


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
    """shard_map(f, mesh=, in_specs=, out_specs=) -> f over `ShardedTensor`s: it runs on every rank's parts.

        @sm.shard_map(mesh=mesh, in_specs=(P("dp", None), P(None, "tp")), out_specs=P("dp", "tp"))
        def matmul(a, b):          # plain tensors: this rank's rows of a, its columns of b
            return a @ b

    Args:
        f: a function of local tensors. Left out, a decorator is returned.
        mesh: the mesh; by default that of the first sharded argument, or the one of `sm.set_mesh`.
        in_specs: how the arguments lie, as a tree of `P`s (or placements) that is a prefix of theirs; None for what is passed as
            it is (static). Left out: as they lie, plain tensors replicated. An argument that lies otherwise is redistributed,
            which is implicit communication (`sm.implicit`). A plain tensor is the same on every rank, whatever its spec.
        out_specs: how the results lie, likewise; None for what is no tensor.
        axis_names: the axes that are manual, over which `f` sees parts and may call collectives: all by default. Over the others
            tensors stay global: `f` sees `ShardedTensor`s on the mesh of these. Specs name manual axes only.
        check: True: the first time a signature is seen, types are followed, and a result that varies where its spec says that it
            is replicated is an error that names the line where it began to. "always": at every call. "values": also compare
            replicas bit for bit, at every call. False: trust f. The default is True.
        check_vma: JAX's name for `check`, of which it knows True and False.

    Returns:
        The mapped function. Keyword arguments go to `f` as they are.

    Raises:
        ValueError: specs that do not match arguments or results, or name an axis that is not manual.
        ShardingTypeError: on every rank, what the checker finds.
        TypeError: an argument or result of the wrong kind; a result whose shape is not that of the call before with this signature.
        RuntimeError: this rank is outside the mesh.

    Communication: that of redistributing arguments, in as few collectives as possible; for a signature never seen one small
        all_gather of the results' shapes. Else none.

    Example:
        >>> loss = sm.shard_map(lambda x, w: sm.psum((x @ w).square().sum(), "dp"), mesh=mesh, in_specs=(P("dp"), P()), out_specs=P())
        >>> loss(x, w).backward()
    """
    if check_vma is not None:
        if check not in (None, check_vma):
            raise ValueError(f"shard_map(check={check!r}, check_vma={check_vma!r}): the two are one argument; give check")
        check = check_vma
    check = True if check is None else check
    if check not in CHECKS:
        raise ValueError(f"shard_map(check={check!r}): write one of {', '.join(map(repr, CHECKS))}")
    if f is None:
        return functools.partial(shard_map, mesh=mesh, in_specs=in_specs, out_specs=out_specs, axis_names=axis_names, check=check)
    return functools.update_wrapper(Mapped(f, mesh, in_specs, out_specs, axis_names, check), f, updated=())


@dataclass
class Known:
    """What is known of calls with one signature.

    Attributes:
        mapping: the axes that are bound inside.
        own: the mesh of those that this function makes manual.
        inner: the mesh of the axes that stay global; None where there are none.
        mesh: the mesh that the function is mapped over.
        ways: how each argument goes in.
        plain: whether every argument's part goes in as it is.
        exits: how each result comes out; None before the first one did.
        seeds: what `grad` needs to know inside.
        uneven: whether parts of some argument differ in shape.
        customs: the applications of custom functions in the last call whose types were followed.
        followed: how many those calls were.
        captures: whether the function closes over tensors that are sharded or require grad, so that it is followed at every call.
        constants: plain tensors without gradient that it works on.
        trusted: whether calls are not followed any longer.
        quick: whether that is so, and arguments go in as they are.
    """

    mapping: Mapping
    own: DeviceMesh
    inner: DeviceMesh | None
    mesh: DeviceMesh
    ways: Sequence[Entrance]
    plain: bool = False
    exits: Sequence[Exit] | None = None
    seeds: list[Any] = field(default_factory=list)
    uneven: bool = False
    customs: Sequence[Application] = ()
    followed: int = 0
    captures: bool = False
    constants: Sequence[ref[Tensor]] = ()
    trusted: bool = False
    quick: bool = False

    def may_be_trusted(self) -> bool:
        """Whether its results are known, nothing is closed over, and the backward of all custom functions has been followed, or has not
        run in a few calls."""
        enough = self.uneven or self.followed > _MOST_FOLLOWED
        checked = all(custom.is_checked or (enough and not custom.must_be_checked) for custom in self.customs)
        return self.exits is not None and not self.captures and checked


class Mapped:
    """A mapped function; see `shard_map`."""

    def __init__(self, f: Any, mesh: DeviceMesh | None, in_specs: Any, out_specs: Any, axis_names: Any, check: bool | str) -> None:
        self.f, self.mesh, self.in_specs, self.out_specs, self.check = f, as_device_mesh(mesh), in_specs, out_specs, check
        self.axis_names = None if axis_names is None else frozenset(axis_names)
        self.name = getattr(f, "__name__", type(f).__name__)
        self._seed = seed_of(f"shard_map {self.name}")
        self._known: dict[Any, Known] = {}
        self._trusting = check in (True, False)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        sharded = [x for x in args if type(x) is ShardedTensor]
        if len(sharded) < len(args):
            sharded = [x for x in pytree.tree_leaves(args) if type(x) is ShardedTensor]
        if not sharded:
            return self._mapped(args, kwargs)
        lineage = mixed(self._seed, sharded)
        with comm_context(sharded[0].mesh.world, lineage):
            return made_with(lineage, self._mapped(args, kwargs))

    def _mapped(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        outer = current_mapping()
        key: list[Any] = [outer, is_grad_enabled()]
        parts: list[Any] = []
        for x in args:
            if type(x) is not ShardedTensor:
                return self._call(args, kwargs)
            key.append(x._layout)
            parts.append(x._local if x._local.requires_grad else dispatch.known_local(x))
        known = None if kwargs else self._known.get(tuple(key))
        if known is None or not known.quick or (outer is not None and outer.checker is not None):
            return self._call(args, kwargs)
        if known.constants and require_grad(known.constants):
            return self._call(args, kwargs)
        return wrapped(self.name, self._run(known, parts, None, kwargs), known.exits, parts)  # type: ignore[arg-type]

    def _run(self, known: Known, parts: Sequence[Any], tree: Any, kwargs: dict[str, Any], f: Any = None) -> Any:
        """The function itself, on parts."""
        f = self.f if f is None else f
        mapping = known.mapping
        mapping.seeds, mapping.cursor = known.seeds, 0
        before = swap(mapping)
        try:
            if tree is None and known.inner is None:
                return f(*parts, **kwargs)
            with known.inner or nullcontext():
                return f(*(parts if tree is None else rebuilt(tree, parts)), **kwargs)
        finally:
            swap(before)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else functools.partial(self, instance)

    # -- any call ------------------------------------------------------------------------------------------------------

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        outer = current_mapping()
        if outer is not None and outer.captures is not None:
            args = captured_in(args, outer.captures)
        leaves, tree = leaves_of(args)
        if transforms_active():
            check_transform(self.name, leaves)
            batch = current_batch()
            if batch is not None and batch.mesh is self.mesh:
                batch.check(self.name, self.in_specs, self.out_specs)
                if batch.inner is None:  # one example lies on no axis
                    return self.f(*args, **kwargs)
        known = self._known_for(args, leaves, tree, kwargs)
        with nullcontext() if outer is None or outer.checker is None else unfollowed():
            parts = as_they_lie(leaves, known.ways) if known.plain else enter(self.name, leaves, known.ways)
        around = None if outer is None else outer.checker
        if not known.trusted:
            known.trusted = self._trusting and known.may_be_trusted()
            known.quick = known.trusted and known.plain
        if not known.trusted or around is not None or require_grad(known.constants):
            return self._carefully(known, leaves, parts, tree, kwargs)
        return wrapped(self.name, self._run(known, parts, tree, kwargs), known.exits, parts)  # type: ignore[arg-type]

    def _known_for(self, args: tuple[Any, ...], leaves: Sequence[Any], tree: Any, kwargs: dict[str, Any]) -> Known:
        mesh, outer = self._mesh_for(leaves), current_mapping()
        # The world, since meshes of two ranks of a simulated world are equal, and the mode, since types are followed for gradients.
        here = mesh.world, outer, is_grad_enabled()
        key = (mesh, *here, tree, *map(key_of, leaves), *[(name, key_of(x)) for name, x in kwargs.items()])
        known = self._known.get(key)
        if known is None:
            known = keep(self._known, key, self._learn(mesh, outer, args, leaves, kwargs))
            if self._trusting and known.plain and tree is None and not kwargs:
                keep(self._known, (*here[1:], *map(key_of, leaves)), known)
        return known

    def _mesh_for(self, leaves: Sequence[Any]) -> DeviceMesh:
        if self.mesh is not None:
            if not isinstance(self.mesh, DeviceMesh):
                raise TypeError(f"shard_map({self.name}): {self.mesh!r} has no ranks that run; for shapes and bytes on it, use eval_shape")
            batch = current_batch() if transforms_active() else None
            return self.mesh if batch is None or batch.mesh is not self.mesh or batch.inner is None else batch.inner
        first = next((x for x in leaves if isinstance(x, ShardedTensor)), None)
        return context.given_or_current(None) if first is None else first.mesh

    def _learn(self, mesh: DeviceMesh, outer: Mapping | None, args: Any, leaves: Sequence[Any], kwargs: dict[str, Any]) -> Known:
        """What follows from a signature before the function has run."""
        if mesh.coordinate is None:
            where = f"rank {mesh.world.rank} is outside {mesh} and has no parts"
            raise RuntimeError(f"shard_map({self.name}): {where}; call it on the ranks of the mesh")
        for name, x in kwargs.items():
            if any(isinstance(t, ShardedTensor) for t in pytree.tree_leaves(x)):
                raise TypeError(f"shard_map({self.name}): {name}= holds a ShardedTensor; pass it by position, where it can have a spec")
        names = self._manual(mesh)
        inner = mesh[tuple(a for a in mesh.axis_names if a not in names)] if len(names) < mesh.ndim else None
        specs = [None] * len(leaves) if self.in_specs is None else specs_for("in_specs", self.in_specs, args)
        paths = [f"shard_map({self.name}): argument {position(path)}" for path in paths_of(args)]
        ways = [entrance(*each, mesh, names, inner) for each in zip(paths, leaves, specs, strict=True)]
        mapping = Mapping(mesh, names) if outer is None else outer.inside(mesh, names)
        uneven = any(way.uneven for way in ways)
        return Known(mapping, mesh[names], inner, mesh, ways, all(way.plain for way in ways), uneven=uneven)

    def _manual(self, mesh: DeviceMesh) -> tuple[str, ...]:
        unknown = sorted((self.axis_names or frozenset()) - set(mesh.axis_names))
        if unknown or (self.axis_names is not None and not self.axis_names):
            given = sorted(self.axis_names or ())
            raise ValueError(f"shard_map({self.name}): axis_names={given}, and the axes of the mesh are {list(mesh.axis_names)}")
        return tuple(a for a in mesh.axis_names if self.axis_names is None or a in self.axis_names)

    # -- with types ----------------------------------------------------------------------------------------------------

    def _carefully(self, known: Known, leaves: Sequence[Any], parts: Sequence[Any], tree: Any, kwargs: dict[str, Any]) -> Any:
        """A call whose types are followed, or whose results are not known yet."""
        outer = current_mapping()
        around = None if outer is None else outer.checker
        trusts = around is None and self.check is False
        checker = around or (Trusting if trusts else Following)(known.mapping.names)
        checker.uneven = checker.uneven or (known.uneven and (known.exits is None or not self._trusting))
        with unfollowed():
            parts = [aliased(part) for part in parts]
            watched = Watched(leaves, parts, known.ways)
        watched.tags = [self._noted(checker, *each) for each in zip(leaves, parts, known.ways, strict=True)]
        if self.check == "values":
            check_replicas([(way.path, part, way.dst) for part, way in zip(parts, known.ways, strict=True)], known.own)
        captures = Captures(self.name, known.mapping, known.mesh, known.own.axis_names, known.inner, checker)
        out = self._followed(known, parts, tree, kwargs, checker, around, captures)
        known.captures, known.constants = bool(captures.entered), captures.constants if is_grad_enabled() else ()
        with unfollowed():
            error = None if trusts else watched.written(checker)
            result = self._out(known, out, parts, None if trusts else checker, error, captures)
        if around is None:
            known.customs, known.followed = checker.end(), known.followed + 1
        else:
            for before, after in zip(pytree.tree_leaves(out), pytree.tree_leaves(result), strict=True):
                checker.note(after, checker.without(known.own.axis_names, before))
        return result

    def _noted(self, checker: Following, leaf: Any, part: Any, way: Entrance) -> Tag | None:
        """What is known of an argument as it goes in; None where it is no tensor, or passed as it is."""
        if not isinstance(part, Tensor) or way.src is None:
            return None
        tag = checker.join(checker.argument(leaf), checker.varying(Origin(way.path.partition(": ")[2]), way.type))
        checker.note(part, tag)
        return tag

    def _followed(
        self, known: Known, parts: Any, tree: Any, kwargs: dict[str, Any], checker: Following, around: Any, captures: Captures
    ) -> Any:
        mapping, before = known.mapping, known.seeds
        mapping.captures, known.seeds = captures, []
        mapping.checker, mapping.recording = (None, False) if checker.trusts else (checker, True)
        try:
            with checker.inside(mapping), checker if around is None else nullcontext():
                out = captured_in(self._run(known, parts, tree, kwargs, uncompiled(self.f)), captures)
                for leaf in [out] if type(out) is Tensor else pytree.tree_leaves(out):
                    if isinstance(leaf, Tensor):
                        checker.of(leaf)  # the axes are those in here
                return out
        except BaseException as error:
            known.seeds = before
            if checker.uneven and around is None and known.exits is None and isinstance(error, (ShardingTypeError, TypeError, ValueError)):
                tell_error(self.name, error, known.own)
            raise
        finally:
            mapping.checker, mapping.captures, mapping.recording = None, None, False

    def _out(
        self, known: Known, out: Any, parts: Sequence[Any], checker: Following | None, error: Exception | None, captures: Captures
    ) -> Any:
        """The results, checked; `error` is what is wrong already."""
        leaves, _ = pytree.tree_flatten(out)
        specs: list[P | None] = []
        try:
            specs = self._checked_specs(known, out, leaves, checker)
        except (ShardingTypeError, TypeError, ValueError) as found:
            error = error or found
        if known.exits is None or not self._trusting:
            paths = [f"shard_map({self.name}): result {path}".rstrip() for path in paths_of(out)]
            compare = checker is not None and self.check != "values"  # which compares by itself, and says more
            plain = captures.plain()  # first, so that an error names these and not what was made of them
            paths, specs = [*[path for path, _ in plain], *paths], [*[P(*[None] * x.ndim) for _, x in plain], *specs]
            every = [*[x for _, x in plain], *leaves]
            known.exits = first_exits(paths, specs, every, error, known.mesh, known.own, compare)[len(plain) :]
        elif error is not None:
            raise error
        result = wrapped(self.name, out, known.exits, parts)
        if self.check == "values":
            entered = [(way.path, part, way.dst) for way, part in captures.entrances()]
            check_replicas([*entered, *[(way.path, x, way.layout) for x, way in zip(leaves, known.exits, strict=True)]], known.own)
        return result

    def _checked_specs(self, known: Known, out: Any, leaves: Sequence[Any], checker: Following | None) -> list[P | None]:
        names, paths = known.own.axis_names, [f"shard_map({self.name}): result {path}".rstrip() for path in paths_of(out)]
        given = specs_for("out_specs", self.out_specs, out)
        specs = [checked_spec(*each, known.mesh, names, known.inner is not None) for each in zip(paths, leaves, given, strict=True)]
        for path, x, spec in zip(paths, leaves, specs, strict=True):
            if checker is not None and spec is not None:
                check_type(path, spec, checker.of(x), names)
        return specs


def require_grad(constants: Sequence[ref[Tensor]]) -> bool:
    """Whether some of the tensors require grad, which they did not when the function was followed."""
    for weak in constants:
        x = weak()
        if x is not None and x.requires_grad:
            return True
    return False


def uncompiled(f: Any) -> Any:
    """The function that `torch.compile` was given, since types are followed operator by operator."""
    return getattr(f, "_torchdynamo_orig_callable", getattr(f, "_orig_mod", f))
