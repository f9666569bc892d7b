"""Storage of parameters: flat shards and gathered buffers."""
