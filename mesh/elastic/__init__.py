"""Jobs that lose ranks and go on: what survivors agree on (docs/elastic.md)."""
