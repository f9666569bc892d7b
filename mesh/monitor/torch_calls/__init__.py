"""Record the program's own calls of torch.distributed."""
