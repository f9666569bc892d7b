"""Rules of operators that read and write by index."""
