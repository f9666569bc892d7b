"""Operators whose weight gradients are computed later than the rest of backward.

Read `weights`, `operators` and `operands`, in this order.
"""
