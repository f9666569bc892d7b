"""Operators whose weight gradients are computed later than the rest of backward.

Read `weights` and `operators`, in this order.
"""
