"""Which passes run, and how Inductor compiles: `sm.jit(..., compiler_options=...)`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True)
class PassOptions:
    """The values of `compiler_options`.

    Attributes:
        dead_collectives, common_collectives, fuse_casts, reduce_scatter, regather, overlap: whether
            the pass runs.
        bucket_bytes: the largest buffer that small collectives are packed into; 0 for none.
        max_live_bytes: how many bytes of results `overlap` and `common_collectives` may keep; None
            for as many as do not raise the peak. `regather` goes on until the graph takes at most
            so many; None for as few as it can reach.
        inductor: names in `torch._inductor.config` and their values.
    """

    dead_collectives: bool = True
    common_collectives: bool = True
    fuse_casts: bool = True
    reduce_scatter: bool = True
    regather: bool = False
    bucket_bytes: int = 1 << 20
    overlap: bool = False
    max_live_bytes: int | None = None
    inductor: tuple[tuple[str, Any], ...] = ()

    @property
    def any(self) -> bool:
        """Whether any pass runs."""
        return any(getattr(self, name) for name in _PASSES)

    @staticmethod
    def of(options: Mapping[str, Any] | bool | None) -> PassOptions:
        """Return the options of a mapping; False switches all passes off.

        Raises: TypeError or ValueError, naming the option.
        """
        if options is None or options is True:
            return PassOptions()
        if options is False:
            return PassOptions(**dict.fromkeys(_PASSES, 0))  # type: ignore[arg-type]
        if not isinstance(options, Mapping):
            raise TypeError(
                f"sm.jit: compiler_options must be a dict of options or False, got {options!r}"
            )
        ours = {
            name: value for name, value in options.items() if name in (*_PASSES, "max_live_bytes")
        }
        for name, value in ours.items():
            is_size = name == "bucket_bytes" or (name == "max_live_bytes" and value is not None)
            if is_size and (type(value) is not int or value < 0):
                raise ValueError(
                    f"sm.jit: compiler_options[{name!r}] must be a number of bytes, an integer >= "
                    f"0, got {value!r}"
                )
            if not is_size and name != "max_live_bytes" and type(value) is not bool:
                raise TypeError(
                    f"sm.jit: compiler_options[{name!r}] must be True or False, got {value!r}"
                )
        return PassOptions(
            **ours,
            inductor=tuple(
                (name, _check_option(name, x)) for name, x in options.items() if name not in ours
            ),
        )


_PASSES = tuple(
    option.name
    for option in fields(PassOptions)
    if option.name not in ("max_live_bytes", "inductor")
)


def _check_option(name: str, value: Any) -> Any:
    """Return the value of an option of Inductor.

    Raises: ValueError if it has no such option, TypeError for a value of another type.
    """
    from torch._inductor import config  # takes a second to import

    options = config.get_config_copy()
    if name not in options:
        raise ValueError(
            f"sm.jit: compiler_options has no {name!r}; it has "
            f"{', '.join((*_PASSES, 'max_live_bytes'))}, and the names in torch._inductor.config"
        )
    kind = type(options[name])
    if options[name] is not None and not callable(value) and type(value) is not kind:
        raise TypeError(
            f"sm.jit: compiler_options[{name!r}] must be {kind.__name__}, as in "
            f"torch._inductor.config, got {value!r}"
        )
    return value
