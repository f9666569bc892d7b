from .stage import Stage
Split = object
class StagedModel:
    def __init__(self, model, split, num_stages, own_stages, *, example=None):
        names=[n for n,_ in model.named_children()]
        cuts=[0]+[names.index(p) for p in split]+[len(names)]
        self.model=model; model.train(); self.num_stages=num_stages; self.tied={}
        self.stages={s:Stage(s,[(n,getattr(model,n)) for n in names[cuts[s]:cuts[s+1]]],s==num_stages-1) for s in own_stages}
    def signature(self,args,kwargs): return tuple(a.shape for a in args)
