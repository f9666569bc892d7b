import torch
from contextlib import nullcontext
class SplitBackward:
    def recording(self): return nullcontext()
    def backward_input(self, roots, grads): torch.autograd.backward(roots, grads)
    def backward_weight(self): pass
