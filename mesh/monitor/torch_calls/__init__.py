"""Record and compare the program's own calls of torch.distributed."""
