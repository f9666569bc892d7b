"""Rules of operators over lists of tensors."""
