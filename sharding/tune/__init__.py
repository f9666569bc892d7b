"""Choose the form of parallelism of a model on a cluster, without devices."""
