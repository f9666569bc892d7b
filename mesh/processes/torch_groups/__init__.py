"""torch's process groups and works, as ProcessGroup uses them."""
