"""Diagnose from the records of all ranks why a collective cannot complete."""
