"""Expert parallelism: tokens travel to the experts that they choose, and back."""
