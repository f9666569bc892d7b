"""Storage of parameters: flat buffers at rest, gathered while used."""
