"""State of a job that has lost ranks (docs/elastic.md)."""
