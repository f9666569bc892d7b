"""The watch: no hang without a name, no silent divergence. `docs/debugging.md` is how to use it."""
