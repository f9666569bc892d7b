"""Steps on shapes alone: no values, no ranks."""
