"""Faults seeded in the portable kernels, which Triton's interpreter runs."""

from __future__ import annotations

import torch

from strobe.testing import CASES
from tests import test_contract
from tests.reliability import test_reliability
from tests.reliability.seeding import (
    GOLDEN,
    HERE,
    Check,
    Mutant,
    _far_rows,
    judged,
    runs,
)

ATTEND, GRADIENTS, LAUNCH = (f"kernels.portable.{name}" for name in ("forward", "backward", "launch"))
MASKING, SOFTMAX, POINTERS = (f"kernels.device.{name}" for name in ("mask", "softmax", "seqlen"))


def light(name: str, **changes) -> Check:
    return judged(name, head_dim=16, **changes)


PORTABLE = (
    Mutant(
        "hidden one key late (portable)",
        f"{MASKING}:apply_mask",
        "stop > column",
        "stop >= column",
        light("length_3"),
        (18, 53),
    ),
    Mutant(
        "aligned at the top left (portable)",
        f"{MASKING}:row_interval",
        "row + (seqlen_k - seqlen_q)",
        "row",
        GOLDEN["causal 2 x 5"],
        (53,),
    ),
    Mutant(
        "window one key short (portable)",
        f"{MASKING}:row_interval",
        "diagonal - left)",
        "diagonal - left + 1)",
        GOLDEN["window (0, 0) 3 x 3"],
        (53,),
    ),
    Mutant(
        "last row that sees a key (portable)",
        f"{MASKING}:stop_row",
        "(seqlen_k - seqlen_q) + 1",
        "(seqlen_k - seqlen_q)",
        light("window_diagonal"),
        (55,),
    ),
    Mutant(
        "tile of another sequence (portable)",
        f"{POINTERS}:find_sequence",
        "middle <= tile",
        "middle < tile",
        light("packed_empty_first"),
        (6, 13),
    ),
    Mutant(
        "key length not clamped (portable)",
        f"{POINTERS}:key_limit",
        "tl.minimum(tl.maximum(length, 0), seqlen_k)",
        "tl.minimum(length, seqlen_k + 1)",
        runs(test_contract.test_key_lengths_out_of_range, **HERE),
        (),
    ),
    Mutant(
        "offsets in 32 bits (portable)",
        f"{POINTERS}:load_rows",
        "rows.to(tl.int64)",
        "rows",
        runs(_far_rows),
        (24, 25, 26, 30, 32),
    ),
    Mutant(
        "maximum not safe (portable)",
        f"{SOFTMAX}:online_step",
        'tl.where(new_max == float("-inf"), 0.0, new_max)',
        "new_max",
        light("window_both", seqlen_q=70),
        (1, 2, 10),
    ),
    Mutant(
        "finite stand-in for -inf (portable)",
        f"{SOFTMAX}:online_step",
        "tl.max(s, 1)",
        "tl.maximum(tl.max(s, 1), -5e4)",
        runs(test_contract.test_scores_of_minus_100000, torch.float32, **HERE),
        (3, 4),
    ),
    Mutant(
        "sink in log2 (portable)",
        f"{SOFTMAX}:in_log2",
        "sink * LOG2_E",
        "sink",
        light("no_keys_sinks", seqlen_k=9),
        (21,),
    ),
    Mutant(
        "empty row divided by 0 (portable)",
        f"{ATTEND}:forward_rows",
        "tl.where(is_empty[:, None], 0.0, o * normalizer[:, None])",
        "o / state.row_sum[:, None]",
        light("few_keys", mask=CASES["causal"].mask),
        (1, 7, 9),
    ),
    Mutant(
        "tail of a tile not zeroed (portable)",
        f"{ATTEND}:attend",
        "tl.minimum(seqlen.num_keys, rows.k_stop)",
        "seqlen.seqlen_k",
        runs(test_contract.test_hidden_bytes_do_not_matter, "key_lengths", torch.nan, torch.float32, **HERE),
        (56, 62, 63),
    ),
    Mutant(
        "lse of another sequence (portable)",
        f"{ATTEND}:forward_kernel",
        "* shape.seqlen_q + seqlen.offset_q",
        "* shape.seqlen_q",
        light("packed_no_keys_middle"),
        (6,),
    ),
    Mutant(
        "key head h % H_kv (portable)",
        f"{ATTEND}:forward_kernel",
        "work.head // traits.group",
        "work.head % (shape.heads // traits.group)",
        light("one_row_causal", heads=(4, 2)),
    ),
    Mutant(
        "documents compared with another row's (portable)",
        f"{ATTEND}:load_keys",
        "== document",
        ">= document",
        light("documents_shuffled", seqlen_q=24, batch=1, heads=(1, 1)),
        (29, 55),
    ),
    Mutant(
        "rows of padding with lse -inf (portable)",
        f"{GRADIENTS}:load_per_row",
        'tl.where(row_lse == float("-inf"), float("inf"), row_lse)',
        "row_lse",
        light("length_3"),
        (17, 19),
    ),
    Mutant(
        "dk of one head of the group (portable)",
        f"{GRADIENTS}:dk_dv_of_keys",
        "head_of_group(base, kv_head * traits.group + member,",
        "head_of_group(base, kv_head * traits.group,",
        light("decode_63"),
        (),
    ),
    Mutant(
        "hidden weights in dq (portable)",
        f"{GRADIENTS}:dq_of_blocks",
        "(blocks.stop - n_start)[:, None]",
        "(blocks.stop - n_start)[:, None] + 1",
        light("one_row_causal", seqlen_q=5, seqlen_k=9),
        (17,),
    ),
    Mutant(
        "strides of dO taken for O's (portable)",
        f"{LAUNCH}:backward_launches",
        "_strides(t.out, problem)",
        "_strides(t.dout, problem)",
        runs(test_reliability.test_gradient_of_out_in_any_layout, "heads first", **HERE),
        (44,),
    ),
    Mutant(
        "strides of q taken for k's (portable)",
        f"{LAUNCH}:forward_strides",
        "(call.q, call.k, call.v, tensors.out)",
        "(call.q, call.q, call.v, tensors.out)",
        light("stored_mixed", seqlen_q=20, seqlen_k=33, batch=1),
        (45,),
    ),
    Mutant(
        "strides ignored (portable)",
        "kernels.protocol:strides_of",
        "tensor.stride()[:3]",
        'torch.empty(tensor.shape, device="meta").stride()[:3]',
        light("stored_expanded_heads", seqlen_q=20),
        (39, 40, 42, 46),
    ),
    Mutant(
        "two kernels' tiles disagree (portable)",
        f"{LAUNCH}:backward_launches",
        "-(-num_rows // DELTA_ROWS)",
        "max(1, num_rows // DELTA_ROWS)",
        light("one_key"),
        (52,),
    ),
    Mutant(
        "one tile of a pack too few (portable)",
        f"{LAUNCH}:_shape",
        "layout.batch + 2",
        "layout.batch",
        light("packed_lengths_1_2_3"),
        (36, 37),
    ),
    Mutant(
        "sign of the scale forgotten (portable)",
        "kernels.portable.kernel:_traits",
        "(problem.scale > 0) - (problem.scale < 0)",
        "1",
        light("scale_negative", seqlen_q=20),
    ),
    Mutant(
        "grid's second dimension (portable)",
        f"{LAUNCH}:Launch.start",
        "[(self.programs,)]",
        "[(1, self.programs)]",
        light("length_1"),
        (35,),
    ),
    Mutant(
        "refusal to launch printed (portable)",
        f"{LAUNCH}:Launch.start",
        "raise KernelFault",
        "print",
        runs(test_reliability.test_a_launch_that_fails_raises_in_the_call_that_failed),
        (36, 38),
    ),
)
