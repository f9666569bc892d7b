"""Lines of random programs: operators, writes, reads of values, and reads of the rank.

x and y are variables, z and w new ones, d a dim, n the length of x's last dim, a and b the two
axes. Operators with a kink get inputs away from it, where rounding may differ between ranks and one
process.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# What a pending sum goes through.
LINEAR = """
{x} * 0.7 | -{x} | {x}.sum({d}) | {x}.sum() | {x}.mean({d}, keepdim=True) | {x}.transpose(0, -1) |
{x}.reshape(-1) | {x}[None].flip({d}) | {x}[..., :1] | {x}[0] | {x}[..., -1] |
torch.cat([{x}, {x}], {d}) | torch.stack([{x}, {x} * 0.5], {d}) | {x}.unsqueeze({d}) | {x} + {x} |
{x} * K[:{n}] | {x} @ K[:{n}] | {x}.narrow({d}, 0, 1) | {x}.expand(2, *{x}.shape) | {x} / 3 |
{x}.unbind({d})[0] | {x}.clone() | {x}.cumsum({d}) | {x}.chunk(2, {d})[-1] |
torch.einsum('...i->...', {x}) | {x}.roll(1, {d}) | {x}.contiguous() | {x}.double() | {x}.detach() |
{x}.view_as({x}) | {x}.mT | {x}[None].movedim(0, -1) | {x}.diagonal() | {x}.flatten() |
{x}.detach().clone() | torch._foreach_mul([{x}], 0.9)[0] | {x}.data * 1.0 | {x}.split(1, {d})[0] |
{x}.squeeze({d})
"""
UNARY = """
{x}.sin() | {x}.tanh() | torch.relu({x} + 0.3137) | {x}.softmax({d}) |
F.layer_norm({x}, {x}.shape[-1:]) | {x} ** 2 | torch.exp({x} * 0.3) | {x}.logsumexp({d}) |
{x}.var({d}, correction=0) | ({x} - 0.177).abs() | torch.sqrt({x} * {x} + 1) | {x}.amax({d}) |
F.gelu({x}) | {x}.clamp(-0.91, 0.83) | {x} + 1 | {x} + K[:{n}] | {x}.detach() * {x} |
{x} / ({x}.square().sum() + 1) | F.softplus({x}) | torch.where({x} > 0.2137, {x}, 0.5 * {x}) |
{x}.cumprod({d}) | {x}.sort({d}).values | F.normalize({x} + 2.0, dim={d}) | {x}.prod() |
{x} * {x}.shape[0] | torch.zeros_like({x}) | torch.ones({n}, dtype=torch.float64) * 0.5 |
{x}.to(torch.float64).sigmoid() | F.linear(K[:{n}], {x}) | {x}.new_ones({n}) |
torch.linalg.vector_norm({x} + 3.0, dim={d}) | {x} * sm.axis_size('a') | {x}.square().mean() |
1 / ({x} * {x} + 1) | Square.apply({x}) | Same.apply({x}) | F.relu({x} + 0.2113, inplace=True) |
Halved.apply({x} * {x}) | sm.stop_gradient({x}) | {x}.detach() * {x}
"""
BINARY = """
{x} + {y} | {x} * {y} | {x} - 0.5 * {y} | {x} @ {y} | torch.where({x} > 0.2137, {y}, {x}) |
torch.cat([{x}, {y}], {d}) | F.linear({x}, {y}) | torch.stack([{x}, {y}], {d}) |
torch.einsum('...i,...i->...', {x}, {y}) | {x} * {y}.sum() | {x} + {y}.mean() | {x} * {y}.sin() |
torch.maximum({x}, {y} + 0.1171) | {x}.expand_as({y}) | torch.lerp({x}, {y}, 0.3) |
torch.addcmul({x}, {y}, {y}) | {x} @ {y}.transpose(0, -1) | F.layer_norm({x}, {x}.shape[-1:], {y}) |
{y}.detach() * {x} | torch.outer({x}.reshape(-1), {y}.reshape(-1)) |
{x}.masked_fill({y} > 0.2137, 0.5) | torch._foreach_mul([{x}], [{y}])[0] | {y} * {x}.shape[0] |
{y} / {x}.numel() | {x}.new_full({y}.shape, 0.5) * {y} | {y}.view_as({x})
"""
WRITES = [
    "{z} = {x}.clone()\n{z}.add_({y})",
    "{z} = {x}.clone()\n{w} = {z}.transpose(0, -1)\n{z}.mul_({y}.sum())",
    "{z} = {x}.clone()\n{w} = {z}[..., :1]\n{w}.mul_({y}.mean())",
    "{z} = {x} * 1.0\n{w} = {z}.detach()\n{z}[0].mul_(2.0 + {y}.sum())",
    "{z} = {x}.clone()\n{w} = {z}.reshape(-1)\n{z}.transpose(0, -1).copy_({y}.transpose(0, -1))",
    "{z} = {x} + 0\n{z}[0] = {y}.sum()",
    "{z} = torch.zeros({n}, dtype=torch.float64)\n{z} += {x}.reshape(-1)[0]\n{w} = {z} * {y}.sum()",
    "{z} = torch.zeros(2, dtype=torch.float64)\n{w} = {z}.view(2, 1)\n{w}[0].copy_({x}.sum())\n{w} "
    "= {w} * {y}.sum()",
    "{z} = {x}.clone()\n{z}.select(0, -1).zero_()\n{w} = {z} + {y}",
    "{z} = torch.zeros({n}, dtype=torch.float64)\n{w} = {z}[:1]\n{z}.data = "
    "{y}.detach().reshape(-1) * {x}.sum().detach()",
    "{z} = torch.zeros({n}, dtype=torch.float64)\n{w} = {z}[:1]\ntorch._foreach_add_([{z}], "
    "[{y}.sum() * {x}.sum()])",
    "{z} = torch.zeros((), dtype=torch.float64)\nwith torch.no_grad():\n    torch.mul({x}.sum(), "
    "{y}.sum(), out={z})",
    "{z} = torch.zeros({n}, dtype=torch.float64)\n{w} = "
    "{z}.detach()\n{z}.fill_({y}.mean()).mul_({x}.sum())",
    "{z} = torch.zeros(3, dtype=torch.float64)\n{z}.index_put_((torch.tensor([1]),), {y}.sum() + "
    "{x}.sum())",
    "{z} = torch.ones(3, dtype=torch.float64)\n{w} = "
    "{z}[1:]\nF.relu({w}.mul_({y}.sum()).add_({x}.sum() + 0.1193), inplace=True)",
    "{z} = torch.ones(2, dtype=torch.float64)\n{w} = {z}.clone()\ntorch._foreach_copy_([{z}], "
    "[{y}.detach().sum() + {x}.detach().sum()])",
    "with torch.no_grad():\n    {z} = {x} * {y}.sum()\n    {w} = {z}.t()",
    "{z} = {x} * {y}.sum()\nif {z}.requires_grad:\n    {z}.register_hook(lambda g: 2.0 * g)",
    "{z} = torch.zeros({n}, dtype=torch.float64)\nF.batch_norm({x}.detach().reshape(-1, {n}), {z}, "
    "K[:{n}] + 2.0, training=True)",
    "{z} = {x}.detach().clone()\n{z}.set_({y}.detach() * {x}.detach().sum())",
]
LOOKS = [
    "{z} = {x} * (1.5 if {y}.sum().item() > 0.1931 else -0.5)",
    "if {y}.mean() > 0.1177:\n    {z} = {x} * 2.0 + {y}.sum()\nelse:\n    {z} = {x} - {y}.sum()",
    "{z} = {x} * float({y}.sum())",
    "{z} = {x} * (int(sm.axis_index('{a}')) + 1)",
    "if int(sm.axis_index('{a}')) == 0:\n    {z} = {x} * 0.5\nelse:\n    {z} = {x} * 1.5",
    "{z} = torch.tensor({x}.detach().tolist(), dtype=torch.float64) * {y}.sum()",
    "{z} = torch.from_numpy({x}.detach().numpy().copy()) + {y}.sum()",
    "{z} = {x} * len({y}[{y} > 0.2137])",
    "{z} = {x} + 0.1 * ({y} > 0.2137).nonzero().shape[0]",
    "{z} = {x} * {y}.masked_select({y} < 0.1937).numel()",
]
INDEX = [
    "{z} = {x} * (sm.axis_index('{a}') + 1)",
    "{z} = {x} + 0.3 * sm.axis_index(('{a}', '{b}'))",
    "{z} = torch.where(sm.axis_index('{a}') == 0, {x}, -{x})",
    "{z} = K[:3].clone()\n{z}[sm.axis_index('{a}')] = {x}.sum()",
    "{z} = K[sm.axis_index('{a}')] * {x}",
    "{z} = {x} * K.index_select(0, sm.axis_index('{a}').reshape(1))",
]


def texts(table: str) -> list[str]:
    """Return the expressions of a table."""
    return [text.strip() for text in table.replace("\n", " ").split("|")]


class Square(torch.autograd.Function):
    """A user-defined operator with its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return 2 * ctx.saved_tensors[0] * grads[0]


class Same(torch.autograd.Function):
    """An operator that returns its input, and scales the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return 0.5 * grads[0]


class Halved(torch.autograd.Function):
    """An operator that modifies its input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(0.5)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return 0.5 * grads[0]
