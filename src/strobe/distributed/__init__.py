"""Context parallelism: one sequence over several processes, with every mask of the library.

cp = strobe.distributed.context_parallel()              # all processes
plan = cp.plan(strobe.causal(), seqlen=S, heads_q=32, heads_kv=8)
out = strobe.attention(q_local, k_local, v_local, context_parallel=plan)
"""

from .context import ContextParallel, context_parallel
from .plan import Plan
from .warmup import problems, warmup

__all__ = ["ContextParallel", "Plan", "context_parallel", "problems", "warmup"]
