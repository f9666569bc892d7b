from torch import nn
class Stage(nn.Module):
    def __init__(self, index, parts, last):
        super().__init__(); self.index=index; self.last=last
        for n,m in parts: self.add_module(n,m)
    def forward(self, carried, args, kwargs):
        x = carried[0] if carried else args[0]
        for m in self.children(): x = m(x)
        return x if self.last else (x,)
