"""Names of torch's DTensor API."""
