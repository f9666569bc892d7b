"""Files of a checkpoint: written atomically, read by slices."""
