"""Random small programs for `shard_map`: operators and collectives over the axes a and b, in the
order in which they were drawn.

A program grows step by step. Each step runs at once for all ranks (`lockstep.py`), and is dropped
if torch raises or numbers become large. Most steps make sense, by an approximate record of the axes
over which a value varies and is pending (a `Kind`); some are random, so that the library must
reject some programs.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardmesh import P
from tests.sharding.functional.lines import BINARY, INDEX, LINEAR, LOOKS, UNARY, WRITES, texts
from tests.sharding.functional.lockstep import Lockstep, LockstepProgram, Meaning, finish, meaning
from tests.sharding.functional.steps import Collective, Env, Gradient, LocalStep, NestedFunction

MESHES = [(2, 2)] * 14 + [(2, 3), (3, 2), (1, 2), (2, 1), (3, 1)]
SHAPES = [(2, 3), (3, 2), (2, 2), (3,), (2,), (), (2, 2, 2), (4, 2)]
SENSE = 0.9  # how often a step is one that a sensible program would have
BOLD = 0.15  # how often a result is said to be the same on every rank, whatever it is
LARGE, MOST = 1e3, 150  # the largest number, and the most elements

ROUGH = [  # how often which
    (26, "linear"),
    (20, "unary"),
    (22, "binary"),
    (38, "collective"),
    (7, "write"),
    (1.5, "look"),
    (3, "index"),
    (3, "gradient"),
    (4, "sm_gradient"),
    (3, "remat"),
    (3, "vmap"),
    (2, "func_gradient"),
    (1, "jvp"),
]
REDUCE = ["psum", "psum", "pmean", "pmax", "pmin"]
MOVE = [
    "psum_scatter",
    "all_gather",
    "all_gather",
    "all_to_all",
    "ppermute",
    "pshuffle",
    "pbroadcast",
    "pcast",
]
NOT_IN_VMAP = (".apply", ".data", ".flip(", "_foreach")  # what torch itself does not do there
REFUSALS = (RuntimeError, ValueError, IndexError, TypeError)  # of a step that torch cannot do


TEXTS = {"linear": texts(LINEAR), "unary": texts(UNARY), "binary": texts(BINARY)}


class Kind(NamedTuple):
    """The axes over which a value varies, and is pending."""

    varying: frozenset[str] = frozenset()
    pending: frozenset[str] = frozenset()

    def join(self, other: Kind) -> Kind:
        pending = self.pending | other.pending
        return Kind((self.varying | other.varying) - pending, pending)


REPLICATED = Kind()


class ProgramGenerator:
    """Draws one program.

    Attributes:
        program: the program so far.
        kinds: kinds of its variables.
        read_kinds: values that the program has read.
    """

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        mesh = rng.choice(MESHES)
        self.program = LockstepProgram(seed, mesh, [], [], [], [])
        self.kinds: dict[str, Kind] = {}
        self.read_kinds, self.count, self.in_vmap = REPLICATED, 0, False
        for _ in range(rng.choice([1, 2, 2, 3])):
            self._argument()
        self.world = Lockstep(mesh)
        self.leaves = self.program.inputs(0)
        self.envs = self.program.begin(self.world, self.leaves)

    def chance(self, p: float) -> bool:
        return self.rng.random() < p

    # -- arguments ---------------------------------------------------------------------------------

    def _argument(self) -> None:
        rng, mesh = self.rng, self.program.mesh
        shape, spec = list(rng.choice(SHAPES)), self._spec(-1)
        spec = P(*spec.dims[: len(shape)], unreduced=dict(spec.unreduced))
        for dim, axes in enumerate(spec.dims):
            for axis in axes:
                shape[dim] *= mesh["ab".index(axis)]
            shape[dim] -= len(axes) > 0 and self.chance(0.08)
        argument = spec if self.chance(0.85) else self._spec(0)
        pending = frozenset(axis for axis, _ in spec.unreduced)
        self.kinds[f"x{len(self.program.shapes)}"] = Kind(frozenset(spec.axes) - pending, pending)
        self.program.shapes.append(tuple(shape))
        self.program.in_specs.append(spec)
        self.program.frozen.append(self.chance(0.15))
        self.program.given.append(P(*argument.dims[: len(shape)]))

    def _spec(self, pending: int) -> P:
        """Return a random spec: each axis on a dim, unused, or (unless `pending` is 0) pending."""
        dims: list[list[str]] = [[], [], []]
        unreduced = []
        for axis in self.rng.sample("ab", 2):
            where = self.rng.choice([0, 0, 1, 2, "nowhere", "nowhere", "pending"])
            if isinstance(where, int):
                dims[where].append(axis)
            elif where == "pending" and pending and self.chance(0.6):
                unreduced.append(axis)
        return P(*map(tuple, dims), unreduced=unreduced)

    # -- steps -------------------------------------------------------------------------------------

    def new(self) -> str:
        self.count += 1
        return f"v{self.count - 1}"

    def pick(self, kinds: dict[str, Kind], wanted: Any = None) -> str:
        """Return a random variable, preferring recent ones, and one of the wanted kind if
        possible.
        """
        names = list(kinds)
        if wanted is not None and self.chance(SENSE):
            names = [name for name in names if wanted(kinds[name])] or names
        return names[-1] if self.chance(0.4) else self.rng.choice(names)

    def attempt(self, step: Any, kind: Kind, names: Sequence[str]) -> bool:
        """Do a step, and keep it if that goes well."""
        envs: list[Env] = [dict(env) for env in self.envs]
        before = self.world.unequal
        try:
            step.run(self.world, envs)
            good = all(fits(env[name]) for env in envs for name in names)
        except REFUSALS:
            good = False
        if not good:
            self.world.unequal = before
            return False
        self.envs = envs
        self.program.steps.append(step)
        self.kinds |= dict.fromkeys(names, kind.join(self.read_kinds))
        return True

    def grow(self) -> bool:
        """Try to append a random step."""
        weights, kinds = zip(*ROUGH, strict=True)
        step, kind, names = getattr(self, f"_{self.rng.choices(kinds, weights)[0]}")(self.kinds)
        return self.attempt(step, kind, names)

    def _operator(
        self, kinds: dict[str, Kind], name: str, wanted: Any = None, other: Any = None
    ) -> tuple[LocalStep, Kind, list[str]]:
        x, z = self.pick(kinds, wanted), self.new()
        y = self.pick(kinds, other) if other is not None else x
        usable = [
            text
            for text in TEXTS[name]
            if not self.in_vmap or not any(word in text for word in NOT_IN_VMAP)
        ]
        return (
            self._filled(f"{{z}} = {self.rng.choice(usable)}", x, y, z),
            kinds[x].join(kinds[y]),
            [z],
        )

    def _filled(self, text: str, x: str, y: str, z: str, w: str = "") -> LocalStep:
        shape = self.envs[0][x].shape if x in self.envs[0] else (2,)
        a, b = self.rng.sample("ab", 2)
        dim = self.rng.randrange(-1, max(len(shape), 1))
        return LocalStep(
            text.format(x=x, y=y, z=z, w=w, a=a, b=b, d=dim, n=shape[-1] if shape else 1)
        )

    def _linear(self, kinds: dict[str, Kind]) -> Any:
        return self._operator(kinds, "linear")

    def _unary(self, kinds: dict[str, Kind]) -> Any:
        return self._operator(kinds, "unary", not_pending)

    def _binary(self, kinds: dict[str, Kind]) -> Any:
        return self._operator(kinds, "binary", not_pending, not_pending)

    def _with_two(
        self, kinds: dict[str, Kind], texts: list[str]
    ) -> tuple[LocalStep, Kind, list[str]]:
        x = self.pick(kinds, not_pending)
        y = self.pick(kinds, not_pending)
        z = self.new()
        w = self.new()
        step = self._filled(self.rng.choice(texts), x, y, z, w)
        return step, kinds[x].join(kinds[y]), [z, w] if f"{w} =" in step.text else [z]

    def _write(self, kinds: dict[str, Kind]) -> Any:
        return self._with_two(kinds, WRITES)

    def _look(self, kinds: dict[str, Kind]) -> Any:
        step, kind, names = self._with_two(kinds, LOOKS)
        kind = (
            kind
            if "axis_index" not in step.text
            else kind.join(Kind(frozenset(a for a in "ab" if f"'{a}'" in step.text)))
        )
        self.read_kinds = self.read_kinds.join(Kind(kind.varying))
        return step, kind, names

    def _index(self, kinds: dict[str, Kind]) -> Any:
        step, kind, names = self._with_two(kinds, INDEX)
        return step, kind.join(Kind(frozenset(a for a in "ab" if f"'{a}'" in step.text))), names

    # -- collectives -------------------------------------------------------------------------------

    def _collective(self, kinds: dict[str, Kind]) -> Any:
        axis = self.rng.choice(["a", "b", "a", "b", ("a", "b"), ("b", "a")])
        name = self.rng.choice(REDUCE if self.chance(0.45) else MOVE)
        x = self.pick(kinds, lambda kind: sensible(name, kind, frozenset(axis)))
        return self.call(kinds, name, axis, x)

    def call(
        self, kinds: dict[str, Kind], name: str, axis: Any, x: str
    ) -> tuple[Collective, Kind, list[str]]:
        """Return a collective on a variable, sometimes on two."""
        shape = tuple(self.envs[0][x].shape) if x in self.envs[0] else (2,)
        options = self._options(name, axis, shape, x)
        args = (x, self.pick(kinds, lambda kind: kind == kinds[x])) if self.chance(0.1) else (x,)
        step = Collective(
            name, tuple(self.new() for _ in args), args, axis, options, self.chance(0.1)
        )
        joined = REPLICATED
        for arg in args:
            joined = joined.join(kinds[arg])
        step.started = step.started and not self.in_vmap
        return step, law(name, options.get("to"), joined, frozenset(axis)), list(step.targets)

    def _options(self, name: str, axis: Any, shape: tuple[int, ...], x: str) -> dict[str, Any]:
        """Return random arguments of a collective."""
        rng = self.rng
        n = self.world.oracle.axis_size(axis)
        dim = self.rng.randrange(max(len(shape), 1))
        tiled = {} if self.chance(0.3) else {"tiled": True}
        if name == "psum_scatter":
            return {"scatter_dimension": dim, **tiled}
        if name == "all_gather":
            to = {"to": "sharded"} if self.chance(0.3) else {}
            return {"axis": dim, **tiled, **to, **self._sizes(x, axis, dim)}
        if name == "all_to_all":
            return {"split_axis": dim, "concat_axis": rng.randrange(max(len(shape), 1)), **tiled}
        if name == "ppermute":
            pairs = list(zip(rng.sample(range(n), n), rng.sample(range(n), n), strict=True))
            return {"perm": pairs[: rng.randrange(1, n + 1)]}
        if name == "pshuffle":
            return {"perm": rng.sample(range(n), n)}
        if name == "pbroadcast":
            return {"source": rng.randrange(n)}
        return {"to": rng.choice(["sharded", "unreduced", "pending"])} if name == "pcast" else {}

    def _sizes(self, x: str, axis: Any, dim: int) -> dict[str, Any]:
        """Return the sizes of a gathered variable with parts of different lengths."""
        xs = [env[x] for env in self.envs] if x in self.envs[0] else []
        lengths = (
            [xs[rank].shape[dim] for rank in self.world.groups(axis)[0]]
            if xs and all(dim < x.ndim for x in xs)
            else []
        )
        return {"tiled": True, "sizes": tuple(lengths)} if len(set(lengths)) > 1 else {}

    # -- functions within --------------------------------------------------------------------------

    def _body(self, arg: Kind, makers: Sequence[Any], length: int) -> tuple[list[Any], str, Kind]:
        """Return steps on `p` and captured variables."""
        own = {"p": arg}
        steps = []
        for _ in range(length):
            kinds = own if self.chance(0.8) else {**self.kinds, **own}
            step, kind, names = self.rng.choice(makers)(kinds)
            steps.append(step)
            own |= dict.fromkeys(names, kind)
        return steps, list(own)[-1], own[list(own)[-1]]

    def _block(self, name: str, makers: Sequence[Any]) -> Any:
        deep = {name: kind for name, kind in self.kinds.items() if self.envs[0][name].ndim > 1}
        arg = self.pick(deep if self.in_vmap and deep else self.kinds, not_pending)
        body, result, kind = self._body(self.kinds[arg], makers, self.rng.choice([1, 2, 3]))
        target, tied = self.new(), self.new()
        if name == "vmap":  # torch puts a result that has no batch dim wherever it likes
            body.append(LocalStep(f"{tied} = {result} * p.sum()"))
            result = tied
        return (
            NestedFunction(name, (target,), arg, body, result, out_dim=self.rng.choice([0, 0, 1])),
            kind,
            [target],
        )

    def _remat(self, _: Any) -> Any:
        name = "remat" if self.chance(0.7) else "torch_checkpoint"
        return self._block(name, [self._linear, self._unary, self._collective, self._binary])

    def _vmap(self, _: Any) -> Any:
        self.in_vmap = True
        try:
            return self._block("vmap", [self._linear, self._unary, self._collective])
        finally:
            self.in_vmap = False

    def _func_gradient(self, kinds: dict[str, Kind]) -> Any:
        """Return a gradient by torch.func of what each rank computes locally."""
        self.in_vmap = True
        arg = self.pick(kinds, not_pending)
        body, result, kind = self._body(
            kinds[arg], [self._linear, self._unary, self._binary], self.rng.choice([1, 2, 3])
        )
        self.in_vmap = False
        total, target = self.new(), self.new()
        body.append(LocalStep(f"{total} = {result}.square().sum()"))
        return (
            NestedFunction("func_grad", (target,), arg, body, total),
            kind.join(kinds[arg]),
            [target],
        )

    def _gradient(self, kinds: dict[str, Kind]) -> Any:
        """Return a gradient of a loss that differs between ranks."""
        fitting = {name: kind for name, kind in kinds.items() if kind.varying == {"a", "b"}}
        loss = self.pick(fitting if fitting else kinds)
        by, total, target = self.pick(kinds), self.new(), self.new()
        if (not fitting and self.chance(SENSE)) or not self.attempt(
            LocalStep(f"{total} = ({loss} * {loss}).sum()"), kinds[loss], [total]
        ):
            return LocalStep("pass"), REPLICATED, []
        kind = Kind(kinds[by].varying, frozenset("ab") - kinds[by].varying - kinds[by].pending)
        return Gradient(target, total, by), kind, [target]

    def _sm_gradient(self, kinds: dict[str, Kind]) -> Any:
        """Return a gradient by an argument of known kind, of a loss that is the same on all
        ranks.
        """
        arg = self.rng.choice(self.program.arguments)
        makers = [self._linear, self._unary, self._binary, self._collective]
        body, result, kind = self._body(kinds[arg], makers, self.rng.choice([1, 2, 3]))
        total = self.new()
        over = "".join(sorted(kind.varying | kind.pending | self.read_kinds.varying))
        body.append(LocalStep(f"{total} = {result}.sum()"))
        if over or self.chance(0.1):
            how = "psum" if kind.pending or self.chance(0.5) else "pmean"
            body.append(Collective(how, (total,), (total,), tuple(over) or "a"))
        own, name = kinds[arg], self.rng.choice(["grad", "grad", "value_and_grad", "vjp"])
        targets = (self.new(), self.new()) if name == "value_and_grad" else (self.new(),)
        summed = tuple(a for a in "ab" if a not in own.varying | own.pending)
        return (
            NestedFunction(name, targets, arg, body, total, summed),
            Kind(own.varying),
            list(targets),
        )

    def _jvp(self, kinds: dict[str, Kind]) -> Any:
        arg = self.pick(kinds, not_pending)
        makers = [self._linear, self._unary, self._binary, self._collective]
        body, result, kind = self._body(kinds[arg], makers, self.rng.choice([1, 2, 3]))
        targets = (self.new(), self.new())
        return (
            NestedFunction("jvp", targets, arg, body, result),
            kind.join(kinds[arg]),
            list(targets),
        )

    # -- the end -----------------------------------------------------------------------------------

    def end(self) -> None:
        """Append the results and their specs."""
        for name in self._last():
            bold = self.chance(BOLD)
            name = self._settled(name) if self.chance(0.4 if bold else SENSE) else name
            self.program.results.append(name)
            self.program.out_specs.append(P() if bold else self._out_spec(name))
        inner = self.program.uses(r"sm\.(value_and_grad|grad|vjp|jvp)\(")
        by_grad = not all(self.program.frozen) and self.chance(0.4 if inner else 0.1)
        self.program.outside = "grad" if by_grad else "backward"

    def _last(self) -> list[str]:
        names = [name for name in self.kinds if name.startswith("v")] or list(self.kinds)
        return [names[-1]] if self.chance(0.6) else [names[-1], self.rng.choice(names)]

    def _settled(self, name: str) -> str:
        """Reduce over the axes over which the value varies, or over some of them."""
        kind = self.kinds[name]
        for axis in sorted(kind.varying | kind.pending):
            if self.chance(0.6):
                how = self.rng.choice(
                    ["psum", "psum", "pmean"]
                    if axis in kind.pending
                    else ["psum", "pmean", "pmax", "all_gather"]
                )
                step, after, names = self.call({name: self.kinds[name]}, how, axis, name)
                step.options.pop("to", None)
                if self.attempt(
                    step,
                    law(how, None, self.kinds[name], frozenset(axis)) if after else after,
                    names,
                ):
                    name = names[0]
        return name

    def _out_spec(self, name: str) -> P:
        """Return a spec that fits the kind of the result, if there is one that makes sense."""
        xs, kind = [env[name] for env in self.envs], self.kinds[name]
        tries = [self._spec(-1) for _ in range(12)]
        tries = [P(*spec.dims[: xs[0].ndim], unreduced=dict(spec.unreduced)) for spec in tries]
        fitting = (
            [spec for spec in tries if fits_kind(spec, kind)] if self.chance(SENSE) else tries[:2]
        )
        for spec in [*fitting, P(unreduced=kind.varying | kind.pending)]:
            try:
                Lockstep(self.program.mesh).leave([x.detach() for x in xs], spec)
            except REFUSALS:
                continue
            return spec
        return P(unreduced=kind.varying | kind.pending)


def fits(x: Any) -> bool:
    """Return whether the program can continue with a value."""
    good = isinstance(x, Tensor) and x.dtype == torch.float64 and 0 < x.numel() <= MOST
    return good and bool(x.detach().abs().max() < LARGE)


def not_pending(kind: Kind) -> bool:
    return not kind.pending


def fits_kind(spec: P, kind: Kind) -> bool:
    """Return whether a result of this kind can be returned with this spec."""
    split = {axis for axes in spec.dims for axis in axes}
    pending = {axis for axis, _ in spec.unreduced}
    return (
        kind.pending <= pending
        and kind.varying <= split | pending
        and pending <= kind.varying | kind.pending
    )


def sensible(name: str, kind: Kind, axes: frozenset[str]) -> bool:
    """Return whether this collective makes sense on such a value."""
    if kind.pending:
        return (name in ("psum", "pmean", "psum_scatter") and kind.pending <= axes) or (
            name not in REDUCE and not kind.pending & axes
        )
    return not (name == "pcast" and kind.varying & axes)


def law(name: str, to: str | None, kind: Kind, axes: frozenset[str]) -> Kind:
    """Return the kind of a collective's result."""
    if to in ("unreduced", "pending"):
        return Kind(kind.varying - axes, kind.pending | axes)
    varies = name not in (*REDUCE, "pbroadcast") and (name != "all_gather" or to == "sharded")
    return Kind(kind.varying | axes if varies else kind.varying - axes, kind.pending - axes)


def make(seed: int) -> tuple[LockstepProgram, list[Meaning]]:
    """Return a program by its number, and its results in two calls with different arguments."""
    while True:
        generator = ProgramGenerator(seed)
        for _ in range(generator.rng.choice([1, 2, 3, 4, 6, 8])):
            any(generator.grow() for _ in range(8))
        generator.end()
        program = generator.program
        try:
            first = finish(program, generator.world, generator.leaves, generator.envs)
            return program, [first, meaning(program, 1)]
        except REFUSALS:  # torch has no gradient for it, or parts do not make a whole
            seed += 1 << 32
