"""Monitor a job for hangs and for ranks that diverge. How to use it: `docs/debugging.md`."""
