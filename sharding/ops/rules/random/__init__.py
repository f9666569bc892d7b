"""Rules of random operators."""
