"""`ShardedTensor`: conversion, construction, gradients."""
