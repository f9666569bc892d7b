"""Operators whose result type does not follow from their operands alone.

For most operators, the result varies if an operand varies. Those here write to an operand, draw
random numbers, use only the shape of an operand, or turn values into numbers. `Rule` is what the
rows of the tables at the end of this file say; other operators have a handler, which runs them and
sets the tags.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...ops.rules.registry import writes_first_operand
from ...ops.strategy import name_of
from ...trees import tensors_in
from .types import ShardingTypeError, TypeOrigin, user_location

if TYPE_CHECKING:
    from .type_checker import TypeChecker

Args = Sequence[Any]
Kwargs = dict[str, Any]
Special = Callable[["TypeChecker", Any, Args, Kwargs], Any]


@dataclass(frozen=True)
class Rule:
    """The results have the joined tag of some operands, and operands are written.

    Attributes:
        sources: returns the operands whose values count; None if all do, and if the operator must
            be linear in those that are pending.
        replaced: returns the operands that have the tag of the results afterwards.
        writes: whether they were written in place, so that all views of them have it.
        has_length: whether the results' shape depends on values.
    """

    sources: Callable[[Args, Kwargs], Iterable[Any]] | None = None
    replaced: Callable[[Any, Args, Kwargs], Iterable[Any]] = lambda func, args, kwargs: ()
    writes: bool = False
    has_length: bool = False

    def __call__(self, checker: TypeChecker, func: Any, args: Args, kwargs: Kwargs) -> Any:
        if self.sources is None:
            tag = checker.result_tag(func, args, kwargs)
        else:
            tag = checker.join_all(tensors_in(self.sources(args, kwargs)), checker.control_tag)
        result = func(*args, **kwargs)
        checker.set_tag(result, tag)
        for x in tensors_in(self.replaced(func, args, kwargs)):
            checker.set_tag(x, tag)
            if self.writes:
                checker.record_write(x)
        if self.has_length:
            checker.number_tag = checker.join(checker.number_tag, tag)
        return result


def _statistics(func: Any, args: Args, kwargs: Kwargs) -> list[Tensor]:
    """Return the operands of a normalization into which it may write running statistics."""
    operands = (*args[1:], kwargs.get("running_mean"), kwargs.get("running_var"))
    return [x for x in operands if isinstance(x, Tensor) and not x.requires_grad]


ORDINARY = Rule()
# An in-place operator writes to its first argument, a fused optimizer to several lists.
WRITE = Rule(
    replaced=lambda func, args, kwargs: args if name_of(func).startswith("_fused") else args[:1],
    writes=True,
)
SIZED_BY_VALUES = Rule(has_length=True)
# Only the shape of the first.
CONSTANT = Rule(sources=lambda args, kwargs: (*args[1:], *kwargs.values()))
LIKE = Rule(sources=lambda args, kwargs: args[:1])  # only the shape or dtype of the second
SET = Rule(sources=lambda args, kwargs: args[1:], replaced=lambda func, args, kwargs: args[:1])
NORM_WITH_STATISTICS = Rule(replaced=_statistics, writes=True)


# -- handlers --------------------------------------------------------------------------------------


def _run(checker: TypeChecker, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Run an operator that changes no values."""
    return func(*args, **kwargs)


def _read(checker: TypeChecker, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Run an operator that returns a number."""
    checker.record_read(func, checker.result_tag(torch.Tensor.clone, args[:1], None))
    return func(*args, **kwargs)


def _index(checker: TypeChecker, func: Any, args: Args, kwargs: Kwargs) -> Any:
    masked = any(x.dtype in (torch.bool, torch.uint8) for x in tensors_in(args[1:]))
    return (SIZED_BY_VALUES if masked else ORDINARY)(checker, func, args, kwargs)


def _detach(checker: TypeChecker, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Run a detaching operator, which captured tensors allow too."""
    result = func(*args, **kwargs)
    with torch.no_grad():
        checker.set_tag(result, checker.join_all(tensors_in(args), checker.control_tag))
    return result


def _draw(checker: TypeChecker, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Run an operator that may draw random numbers: it did if the generator's state has changed."""
    before = _generator_states()
    tag = checker.result_tag(func, args, kwargs)
    result = func(*args, **kwargs)
    has_generator = kwargs.get("generator") is not None
    if has_generator or not all(map(torch.equal, before, _generator_states())):
        origin = TypeOrigin(f"{name_of(func)} outside of sm.random.seeded(key)", user_location())
        tag = checker.join(tag, checker.make_tag(origin, checker.random_type))
    checker.set_tag(result, tag)
    if writes_first_operand(func) or kwargs.get("inplace") is True:
        checker.record_write(result)
    return result


def _generator_states() -> list[Tensor]:
    states = [torch.default_generator.get_state()]
    return [*states, *torch.cuda.get_rng_state_all()] if torch.cuda.is_initialized() else states


def _check_seed(checker: TypeChecker, func: Any, args: Args, kwargs: Kwargs) -> None:
    """Check the default seed of backward, which is 1 on every rank.

    It is right for the sum of the ranks' losses.

    Raises: ShardingTypeError for a replicated loss, whose gradients would be n times too large.
    """
    position = 2 if func is torch.autograd.grad else 1
    names = ("grad_outputs", "grad_tensors", "gradient")
    has_seed = args[position : position + 1] not in ((), (None,))
    if checker.captures_only or has_seed or any(kwargs.get(name) is not None for name in names):
        return
    for out in [args[0]] if isinstance(args[0], Tensor) else args[0]:
        same = sorted(checker.names - checker.tag_of(out).type.varying)
        if same:
            raise ShardingTypeError(
                f"{user_location()}: {name_of(func)} of a loss that is replicated over "
                f"{', '.join(map(repr, same))} starts from 1 on every rank, and gradients would be "
                "too large by the number of ranks; use sm.grad or sm.value_and_grad, which scale "
                "the seed"
            )


def _grad(checker: TypeChecker, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Run `torch.autograd.grad` on parts: each gradient has the type dual to its input's."""
    inputs = args[1] if len(args) > 1 else kwargs["inputs"]
    _check_seed(checker, func, args, kwargs)
    types = [checker.tag_of(x).type for x in ([inputs] if isinstance(inputs, Tensor) else inputs)]
    gradients = func(*args, **kwargs)
    for type_, g in zip(types, gradients, strict=True):
        if g is not None:
            checker.set_tag(g, checker.grad_tag(type_))
    return gradients


def _backward(checker: TypeChecker, func: Any, args: Args, kwargs: Kwargs) -> Any:
    _check_seed(checker, func, args, kwargs)
    return func(*args, **kwargs)


def _read_grad(checker: TypeChecker, func: Any, args: Args, kwargs: Kwargs) -> Any:
    gradient = func(*args, **kwargs)
    if gradient is not None:
        checker.set_tag(gradient, checker.grad_tag(checker.tag_of(args[0]).type))
    return gradient


# -- tables ----------------------------------------------------------------------------------------

_BY_NAME: dict[str, Special] = {
    name: special
    for special, names in {
        CONSTANT: "zeros_like ones_like empty_like full_like new_zeros new_ones new_empty new_full "
        "new_empty_strided",
        LIKE: "view_as expand_as reshape_as type_as",
        SIZED_BY_VALUES: "nonzero masked_select unique unique_consecutive argwhere bincount",
        _read: "item tolist numpy __array__ __bool__ __int__ __float__ __complex__ __index__ "
        "__contains__ is_nonzero equal allclose __dlpack__ untyped_storage storage data_ptr",
        _draw: "rand randn randint randperm rand_like randn_like randint_like normal bernoulli "
        "multinomial poisson binomial rrelu rrelu_ dropout dropout_ dropout1d dropout2d dropout3d "
        "alpha_dropout alpha_dropout_ feature_dropout feature_dropout_ feature_alpha_dropout "
        "feature_alpha_dropout_ native_dropout gumbel_softmax scaled_dot_product_attention "
        "multi_head_attention_forward fractional_max_pool2d fractional_max_pool3d uniform_ normal_ "
        "exponential_ geometric_ cauchy_ log_normal_ random_ bernoulli_ lstm gru rnn_tanh rnn_relu",
    }.items()
    for name in names.split()
}
_FACTS = ("shape", "dtype", "device", "layout", "ndim", "requires_grad", "is_leaf", "grad_fn")
_BY_FUNCTION: dict[Special, tuple[Any, ...]] = {
    NORM_WITH_STATISTICS: (F.batch_norm, torch.batch_norm, F.instance_norm, torch.instance_norm),
    SET: (Tensor.set_, Tensor.data.__set__),  # type: ignore[attr-defined]
    _index: (Tensor.__getitem__,),
    _detach: (Tensor.detach, torch.detach, Tensor.data.__get__),  # type: ignore[attr-defined]
    _grad: (torch.autograd.grad,),
    _backward: (Tensor.backward, torch.autograd.backward),
    _read_grad: (Tensor.grad.__get__,),  # type: ignore[attr-defined]
    _run: (
        *(getattr(Tensor, name).__get__ for name in _FACTS),
        Tensor.requires_grad_,
        Tensor.retain_grad,
        Tensor.requires_grad.__set__,  # type: ignore[attr-defined]
        Tensor.register_hook,
        Tensor.detach_,
    ),
}
# The rule or handler of a function; None for an ordinary operator.
SPECIAL: dict[Any, Special | None] = {
    function: special for special, functions in _BY_FUNCTION.items() for function in functions
}


def special_of(func: Any) -> Special | None:
    """Return the rule or handler of a function that is not in `SPECIAL`."""
    name = getattr(func, "__name__", "")
    if name.startswith("_foreach_") and name.endswith("_"):
        return WRITE
    return _BY_NAME.get(name) or (WRITE if writes_first_operand(func) else None)
