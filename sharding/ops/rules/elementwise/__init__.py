"""Rules of operators on single elements."""
