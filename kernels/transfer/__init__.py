"""Copies between the host and devices that the host does not wait for."""
