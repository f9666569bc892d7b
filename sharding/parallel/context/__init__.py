"""Context parallelism: attention over sequences that are split over an axis."""
