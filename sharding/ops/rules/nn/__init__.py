"""Rules of `torch.nn.functional`."""
