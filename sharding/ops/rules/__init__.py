"""The operator table: notation, engine and registry, and the rules by family."""
