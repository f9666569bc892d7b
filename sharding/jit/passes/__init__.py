"""Passes: functions that change a graph in place and keep what it computes; each returns how many nodes it has changed."""
