"""A record's call as text: operation, reduction, dtype, elements, layouts, between tabs."""

from __future__ import annotations


def fields_of(call: str) -> list[str]:
    """Return operation, reduction (or source), dtype, elements and layouts of a record's call."""
    return (call.split("\t") + [""] * 5)[:5]


def call_text(call: str) -> str:
    """Return `all_reduce(sum, float32, 4 elements) for f32[8] @ P('dp') -> P()`, for messages."""
    op, how, dtype, size, tag = fields_of(call)
    inside = ", ".join(word for word in (how, dtype, f"{size} elements" if size else "") if word)
    return f"{op}({inside})" + (f" for {tag}" if tag else "")
