"""Layouts of operators: rules for more functions, result layouts, and what may communicate."""

from shardmesh.sharding.ops.implicit_comm import implicit_comm
from shardmesh.sharding.ops.out_sharding import apply
from shardmesh.sharding.ops.plain_operands import implicit_replication
from shardmesh.sharding.ops.rules.check import check_rule
from shardmesh.sharding.ops.rules.nn.flex_attention import flex_attention
from shardmesh.sharding.ops.rules.register_rule import register_rule

__all__ = [
    "apply",
    "check_rule",
    "flex_attention",
    "implicit_comm",
    "implicit_replication",
    "register_rule",
]
