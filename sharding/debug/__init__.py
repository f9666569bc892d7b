"""Look at layouts, plans, memory and values."""
