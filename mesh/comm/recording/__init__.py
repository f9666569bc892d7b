"""Records of collectives in memory that the host shares: what every rank has called."""
