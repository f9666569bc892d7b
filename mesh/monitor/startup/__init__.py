"""Check that ranks agree while they rendezvous, before any process group exists."""
