"""Check that replicas are bitwise equal."""
