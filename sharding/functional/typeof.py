"""`typeof`: the layout of a sharded tensor.

Inside a mapped function, the axes over which a value varies.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..autograd import engine_hooks
from ..autograd.named_axes import current_captures
from ..layout.layout import Layout, dtype_name
from ..layout.spec import P
from ..tensor.sharded_tensor import DonatedTensor, ShardedTensor
from ..tensor.sharded_tensor import typeof as layout_of
from .mapped_env import MappedEnv, current_mapped_env
from .types.types import Type


@dataclass(frozen=True)
class LocalType:
    """The type of a value inside a mapped function.

    Attributes:
        shape: of this rank's part; of a tensor that stays global over some axes, its global shape
            there.
        dtype: the element type.
        layout: the layout over the axes that stay global; None if there are none.
    """

    shape: torch.Size
    dtype: torch.dtype
    layout: Layout | None = None
    _type: Type | None = None

    @property
    def varying(self) -> frozenset[str]:
        """The manual axes along which ranks have different data, JAX's `vma`.

        Raises: RuntimeError if types are not tracked.
        """
        return self._known_type().varying

    vma = varying

    @property
    def pending(self) -> frozenset[str]:
        """The manual axes over which the value is a share of a sum. Raises: as `varying`."""
        return self._known_type().pending

    @property
    def spec(self) -> P | None:
        """The spec of the layout."""
        return None if self.layout is None else self.layout.spec

    def _known_type(self) -> Type:
        if self._type is None:
            raise RuntimeError(
                "typeof inside a mapped function: the axes over which the value varies are not "
                "known. check=False does not track types; otherwise this call was not made in the "
                "first call with this signature: use shard_map(check='always')"
            )
        return self._type

    def __str__(self) -> str:
        type_ = self._type or Type.of(frozenset())
        marks = [
            f"{letter}:{', '.join(sorted(axes))}"
            for letter, axes in (("V", type_.varying), ("U", type_.pending))
            if axes
        ]
        text = f"{dtype_name(self.dtype)}{list(self.shape)}" + (
            f"{{{'; '.join(marks)}}}" if marks else ""
        )
        return (
            text
            if self.layout is None
            else text + f"{self.layout}".removeprefix(f"{dtype_name(self.dtype)}{list(self.shape)}")
        )

    __repr__ = __str__


def typeof(x: Any) -> Any:
    """typeof(x) -> the `Layout` of a sharded tensor: mesh, spec, global shape and dtype.

    Inside a mapped function, the `LocalType` of any tensor: shape and dtype of this rank's part and
    the manual axes over which it varies, `typeof(x).varying`, printed as JAX does.

    Raises:
        TypeError: a plain tensor outside of mapped functions, or no tensor.

    Communication: none.

    Example:
        >>> typeof(distribute_tensor(torch.ones(8, 3), mesh, [Shard(0)]))
        f32[8, 3] @ P('x', None) on (x=4), local [2, 3]
        >>> shard_map(
        ...     lambda x: (print(typeof(x)), x)[1], mesh=mesh, in_specs=P("x"), out_specs=P("x")
        ... )(x)
        f32[2, 3]{V:x}
    """
    env = current_mapped_env()
    if env is None or not isinstance(x, Tensor) or isinstance(x, DonatedTensor):
        return layout_of(x)  # type: ignore[arg-type]
    captures = current_captures()
    x = x if captures is None else captures.local(x)
    return LocalType(
        x.shape, x.dtype, x._layout if isinstance(x, ShardedTensor) else None, _type_of(env, x)
    )


def _type_of(env: MappedEnv, x: Tensor) -> Type | None:
    """Return the type of a value, from the checker or from the log; None if it is not known."""
    if engine_hooks.current_backward() >= 0:  # a piece that runs again
        return None
    if env.checker is not None:
        type_ = env.checker.tag_of(x).type
        if env.recording:
            env.type_log.append(type_)
        return type_
    logged = env.type_log[env.cursor] if env.cursor < len(env.type_log) else None
    env.cursor += 1
    return logged if isinstance(logged, Type) else None
