from strobe import reference
from strobe.kernels.kernel import attention_cost
class F:
    name = "cpu.forward"
    def why_not(self, problem, target): return None if target.kind == "cpu" else "runs on CPUs"
    def config(self, problem, target): return None
    def cost(self, problem): return attention_cost(problem)
    def workspace(self, problem, config): return ()
    def run(self, plan, call, tensors, workspace):
        r = reference.forward(call); tensors.out.copy_(r.out); tensors.lse.copy_(r.lse)
class B(F):
    name = "cpu.backward"
    def run(self, plan, call, t, workspace):
        g = reference.backward(call, t.dout, t.dlse)
        t.dq.copy_(g.dq); t.dk.copy_(g.dk); t.dv.copy_(g.dv)
        delta = (t.dout.double() * t.out.double()).sum(-1).transpose(-1, -2)
        t.delta.copy_(delta if t.dlse is None else delta - t.dlse)
FORWARD, BACKWARD = F(), B()
