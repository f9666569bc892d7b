"""Rules of operators that rearrange elements."""
