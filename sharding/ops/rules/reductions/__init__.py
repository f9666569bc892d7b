"""Rules of reductions, scans and selections along dims."""
