"""The steps of random programs: each is a line or two of Python, and its effect on the values of
all ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from tests.sharding.functional import oracle

if TYPE_CHECKING:
    from tests.sharding.functional.lockstep import Lockstep

Env = dict[str, Any]


class ProgramStep(Protocol):
    """A line or two of a program."""

    def lines(self) -> list[str]:
        """Return the step as lines of Python."""
        ...

    def run(self, world: Lockstep, envs: list[Env]) -> None:
        """Do it for every rank, whose variables are `envs[rank]`."""
        ...


def own(x: Tensor) -> Tensor:
    """Return a copy of the tensor."""
    return x.view_as(x)


@dataclass
class LocalStep:
    """Lines without communication."""

    text: str

    def lines(self) -> list[str]:
        return self.text.splitlines()

    @cached_property
    def code(self) -> Any:
        return compile(self.text, "<local lines of a program>", "exec")

    def run(self, world: Lockstep, envs: list[Env]) -> None:
        for names, env in zip(world.names, envs, strict=True):
            exec(self.code, names, env)


@dataclass
class Collective:
    """A collective on one variable, or on several as a tuple.

    Attributes:
        targets, args: names of variables.
        options: of the call.
        started: whether it is asynchronous.
    """

    name: str
    targets: tuple[str, ...]
    args: tuple[str, ...]
    axis: str | tuple[str, ...]
    options: dict[str, Any] = field(default_factory=dict)
    started: bool = False

    def lines(self) -> list[str]:
        arguments = self.args[0] if len(self.args) == 1 else f"({', '.join(self.args)})"
        inside = ", ".join(
            [arguments, repr(self.axis), *(f"{k}={v!r}" for k, v in self.options.items())]
        )
        call = (
            f"sm.async_start(sm.{self.name}, {inside}).wait()"
            if self.started
            else f"sm.{self.name}({inside})"
        )
        return [f"{', '.join(self.targets)} = {call}"]

    def run(self, world: Lockstep, envs: list[Env]) -> None:
        for target, arg in zip(self.targets, self.args, strict=True):
            xs, sizes = [env[arg] for env in envs], self.options.get("sizes")
            run = world.along if sizes is None else world.each
            if sizes and any(
                tuple(xs[r].shape[self.options["axis"]] for r in group) != sizes
                for group in world.groups(self.axis)
            ):
                raise ValueError("parts are of other sizes")
            for env, x in zip(envs, run(self.axis, self.meaning, xs), strict=True):
                env[target] = x

    def meaning(self, parts: list[Tensor]) -> list[Tensor]:
        options = {k: v for k, v in self.options.items() if k not in ("to", "sizes")}
        dim = options.get("split_axis")
        if (
            dim is not None
            and dim == options["concat_axis"]
            and options.get("tiled")
            and parts[0].shape[dim] % len(parts)
        ):
            raise ValueError("the library, too, refuses to put together what is cut unevenly")
        if self.name != "pcast":
            return getattr(oracle, self.name)(parts, **options)
        if self.options["to"] in ("sharded", "varying"):
            return parts
        shares = list(itertools.accumulate(parts[1:], lambda s, _: s / 2, initial=1.0))
        return [part * (share / sum(shares)) for part, share in zip(parts, shares, strict=True)]


@dataclass
class NestedFunction:
    """A nested function of the program, and the transformation applied to it.

    Attributes:
        kind: "remat", "torch_checkpoint", "vmap", "func_grad" (of torch), "grad", "value_and_grad",
            "vjp" or "jvp" (of the library).
        targets: what the result is called; of value_and_grad the value and the gradient.
        arg: what it is called with.
        body: the function's lines; its argument is `p`.
        result: what it returns.
        summed: of the library's gradients: the axes over which the argument is replicated.
        out_dim: of vmap.
    """

    kind: str
    targets: tuple[str, ...]
    arg: str
    body: list[Any]
    result: str
    summed: tuple[str, ...] = ()
    out_dim: int = 0

    @property
    def function(self) -> str:
        return f"f_{self.targets[0]}"

    def lines(self) -> list[str]:
        body = [f"    {line}" for step in self.body for line in step.lines()]
        call = {
            "vmap": f"torch.func.vmap({self.function}, out_dims={self.out_dim})({self.arg})",
            "func_grad": f"torch.func.grad({self.function})({self.arg})",
            "torch_checkpoint": f"checkpoint({self.function}, {self.arg}, use_reentrant=False)",
            "vjp": (
                f"sm.vjp({self.function}, {self.arg})[1](torch.tensor(0.7, dtype=torch.float64))[0]"
            ),
            "jvp": f"sm.jvp({self.function}, ({self.arg},), ({self.arg}.sin(),))",
        }.get(self.kind, f"sm.{self.kind}({self.function})({self.arg})")
        return [
            f"def {self.function}(p):",
            *body,
            f"    return {self.result}",
            f"{', '.join(self.targets)} = {call}",
        ]

    def run(self, world: Lockstep, envs: list[Env]) -> None:
        xs = [env[self.arg] for env in envs]
        how = {
            "vmap": self._vmap,
            "func_grad": self._func_grad,
            "grad": self._gradient,
            "value_and_grad": self._gradient,
        }
        how |= {"vjp": self._gradient, "jvp": self._jvp}
        results = how.get(self.kind, self._remat)(world, envs, xs)
        for env, values in zip(envs, results, strict=True):
            env.update(zip(self.targets, values, strict=True))

    def _call(self, world: Lockstep, envs: list[Env], xs: Sequence[Tensor]) -> list[Tensor]:
        inner = [{**env, "p": x} for env, x in zip(envs, xs, strict=True)]
        world.run(self.body, inner)
        return [env[self.result] for env in inner]

    def _remat(self, world: Lockstep, envs: list[Env], xs: list[Tensor]) -> list[tuple[Tensor]]:
        return [(y,) for y in self._call(world, envs, xs)]

    def _vmap(self, world: Lockstep, envs: list[Env], xs: list[Tensor]) -> list[tuple[Tensor]]:
        rows = [
            self._call(world, envs, each) for each in zip(*(x.unbind(0) for x in xs), strict=True)
        ]
        return [(torch.stack(column, self.out_dim),) for column in zip(*rows, strict=True)]

    def _func_grad(self, world: Lockstep, envs: list[Env], xs: list[Tensor]) -> list[tuple[Tensor]]:
        """Return the gradient of each rank's function."""
        own_xs = [own(x) if x.requires_grad else x.detach().requires_grad_() for x in xs]
        losses = self._call(world, envs, own_xs)
        return [
            torch.autograd.grad(y, x, create_graph=True, materialize_grads=True)
            for y, x in zip(losses, own_xs, strict=True)
        ]  # type: ignore[misc]

    def _gradient(
        self, world: Lockstep, envs: list[Env], xs: list[Tensor]
    ) -> list[tuple[Tensor, ...]]:
        """Return the gradient of a loss that is the same on all ranks, with respect to a replicated
        argument.
        """
        own_xs = [own(x) if x.requires_grad else x.detach().requires_grad_() for x in xs]
        losses = self._call(world, envs, own_xs)
        if not world.same(losses):
            world.unequal = True
        grads = torch.autograd.grad(
            losses[0], own_xs, create_graph=True, allow_unused=True, materialize_grads=True
        )
        summed = world.along(self.summed, oracle.psum, list(grads))
        values = [own(0.7 * g if self.kind == "vjp" else g) for g in summed]
        return (
            list(zip(losses, values, strict=True))
            if self.kind == "value_and_grad"
            else [(g,) for g in values]
        )

    def _jvp(self, world: Lockstep, envs: list[Env], xs: list[Tensor]) -> list[tuple[Tensor, ...]]:
        """Return the derivative in the direction x.sin(), as the gradient of the gradient with
        respect to the cotangent.
        """
        own_xs = [own(x) if x.requires_grad else x.detach().requires_grad_() for x in xs]
        results = self._call(world, envs, own_xs)
        cotangents = [torch.zeros_like(y).requires_grad_() for y in results]
        back = torch.autograd.grad(
            results,
            own_xs,
            cotangents,
            create_graph=True,
            allow_unused=True,
            materialize_grads=True,
        )
        pairs = [(g, x.sin()) for g, x in zip(back, xs, strict=True) if g.requires_grad]
        return list(zip(results, self._forward(pairs, cotangents), strict=True))

    def _forward(
        self, pairs: list[tuple[Tensor, Tensor]], cotangents: list[Tensor]
    ) -> Sequence[Tensor]:
        if not pairs:
            raise ValueError("not connected")
        back, directions = zip(*pairs, strict=True)
        return torch.autograd.grad(
            back,
            cotangents,
            directions,
            create_graph=True,
            allow_unused=True,
            materialize_grads=True,
        )


@dataclass
class Gradient:
    """`torch.autograd.grad` of losses that differ between ranks: the gradient of their sum."""

    target: str
    loss: str
    by: str

    def lines(self) -> list[str]:
        return [
            f"{self.target} = torch.autograd.grad({self.loss}, {self.by}, create_graph=True)[0]"
        ]

    def run(self, world: Lockstep, envs: list[Env]) -> None:
        total = sum(env[self.loss] for env in envs)
        results = torch.autograd.grad(
            total, [env[self.by] for env in envs], create_graph=True, allow_unused=True
        )  # type: ignore[arg-type]
        if all(g is None for g in results):
            raise ValueError("not connected")
        for env, g in zip(envs, results, strict=True):
            env[self.target] = torch.zeros_like(env[self.by]) if g is None else g
