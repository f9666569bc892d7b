"""Checks while ranks rendezvous, before any process group exists."""
