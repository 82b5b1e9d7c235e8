"""docs/transformers.md: each row of its table of transformers models has its tests."""

import re
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from tests.compat import (
    test_transformers,
    test_transformers_dense_masks,
    test_transformers_masks,
    test_transformers_paged,
    test_transformers_refusals,
)

ROWS = {
    "padding": [
        test_transformers.test_logits_are_those_of_eager,
        test_transformers_masks.test_the_mask_is_the_one_transformers_writes_out,
    ],
    "masks in memory": [
        test_transformers_masks.test_the_mask_is_the_one_transformers_writes_out,
        test_transformers_masks.test_a_mask_of_ones_needs_no_look_at_the_band,
    ],
    "windows, chunks": [
        test_transformers_masks.test_what_a_layer_says_counts_where_there_is_no_mask_and_only_there,
        test_transformers_masks.test_chunks_as_wide_as_the_window_are_still_chunks,
    ],
    "softcap, sinks": [
        test_transformers.test_logits_are_those_of_eager,
        test_transformers.test_a_step_of_training_through_the_flattening_collator,
    ],
    "bidirectional models": [test_transformers.test_logits_are_those_of_eager],
    "encoder and decoder": [test_transformers.test_an_encoder_and_its_decoder],
    "packed by position_ids": [
        test_transformers.test_packed_sequences_are_apart,
        test_transformers.test_positions_are_read_once_a_forward_and_again_when_they_change,
    ],
    "packed by cu_seq_lens": [
        test_transformers.test_packed_sequences_are_apart,
        test_transformers_refusals.test_offsets_that_contradict_the_rest_are_refused,
    ],
    "caches": [
        test_transformers.test_generates_what_eager_does,
        test_transformers_masks.test_the_mask_over_a_cache,
        test_transformers.test_a_prompt_in_pieces_is_the_prompt,
    ],
    "continuous batching": [
        test_transformers.test_continuous_batching,
        test_transformers_paged.test_tokens_are_those_of_transformers_own_attention,
    ],
    "torch.compile": [
        test_transformers.test_compiles_without_graph_breaks,
        test_transformers.test_a_decoding_step_compiles_once,
    ],
    "training": [test_transformers.test_a_step_of_training_through_the_flattening_collator],
    "dropout": [
        test_transformers_dense_masks.test_dropout_is_strobes,
        test_transformers_dense_masks.test_a_model_drops_weights_while_it_trains_and_only_then,
    ],
    "output_attentions": [test_transformers_refusals.test_weights_are_refused],
    "masks of your own": [
        test_transformers_dense_masks.test_patterns_that_strobe_has_become_built_in_masks,
        test_transformers_dense_masks.test_logits_are_those_of_eager_with_a_mask_of_ones_own,
        test_transformers_dense_masks.test_patterns_of_a_mask_function_are_written_as_a_tensor,
        test_transformers_refusals.test_a_mask_of_integers_is_refused,
    ],
    "position bias": [
        test_transformers_dense_masks.test_logits_and_gradients_of_t5_are_those_of_eager,
        test_transformers_dense_masks.test_t5_generates_what_eager_does,
    ],
    "chosen keys": [test_transformers_refusals.test_arguments_that_are_not_served_are_refused],
    "layers strided in the last dimension": [
        test_transformers_refusals.test_rows_strided_in_the_last_dimension_are_copied
    ],
}


def test_each_row_of_the_page_has_its_tests():
    page = (Path(__file__).parents[2] / "docs" / "transformers.md").read_text()
    section = page.partition("## What is the same and what is not\n")[2].partition("\n## ")[0]
    assert re.findall(r"^\| ([a-z][^|]*) \|", section, re.MULTILINE) == [*ROWS]
