"""Each row of README's table on what is checked is held by tests, which exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
GUARD, VERIFY, OPTIMIZER = "distributed/guard", "verify", "optimizer"
# First words of a row -> tests of what it says, by file.
HELD_BY = {
    "the model is wrapped": {
        f"{GUARD}/test_ddp_agreement.py": ["the_first_difference_is_named", "configs_that_reduce_differently"],
        f"{GUARD}/test_weight_copies.py": ["a_copy_that_another_seed", "a_copy_of_an_expert_is_compared"],
        f"{GUARD}/test_ddp_other_wrappers.py": ["torchs_wrapper_around_ours", "what_cannot_be_wrapped"],
        "distributed/wire/test_ddp_shared_memory.py": ["two_parameters_of_one_memory"],
        "distributed/reduce/test_finalize_model_grads.py": ["a_partial_gradient_that_no_rule_reduces"],
    },
    "the optimizer is created": {
        f"{OPTIMIZER}/algorithms/test_optimizer_algorithms.py": ["an_algorithm_that_needs_whole_parameters"],
        f"{OPTIMIZER}/algorithms/test_muon.py": ["matrices_go_to_muon", "shards_that_may_cut_matrices"],
        f"{OPTIMIZER}/norm/test_clip_grads.py": ["a_collection_that_spans_the_model"],
        f"{OPTIMIZER}/groups/test_param_groups.py": ["every_rank_lists_the_same_groups"],
    },
    "backward": {
        "distributed/buffer/test_grad_placeholder.py": ["no_read_reaches_memory_that_is_not_there"],
        "distributed/reduce/test_ddp_repeated_gradients.py": ["late_gradients", "two_backwards_in_one_microbatch"],
        "distributed/buffer/test_ddp_streamed.py": ["unequal_numbers_of_backwards"],
        "distributed/test_ddp_by_hand.py": ["a_bucket_in_flight_cannot_be_scaled"],
    },
    "`finalize_model_grads`": {
        f"{GUARD}/test_step_guard.py": ["ranks_that_are_at_different_steps"],
        f"{GUARD}/test_ddp_misuse.py": ["a_change_of_dtype_after_the_wrap", "a_parameter_that_came_after_the_wrap"],
        f"{GUARD}/test_weight_copies.py": ["copies_on_other_stages_are_compared_before_the_first_step"],
        "distributed/test_ddp_grad_rules.py": ["a_copy_frozen_on_one_tensor_parallel_rank"],
    },
    "[the first two steps]": {
        f"{GUARD}/test_first_steps.py": ["a_mistake_over_tensor_parallelism", "a_mistake_over_data_parallelism"],
        f"{GUARD}/test_stage_parameters.py": ["a_parameter_of_two_stages_that_nothing_ties"],
        f"{GUARD}/test_right_programs.py": ["a_right_program_runs_in_silence", "a_right_pipeline_runs_in_silence"],
    },
    "every 1,000 steps": {
        f"{GUARD}/test_weight_copies.py": [
            "a_flipped_bit_is_found_at_the_interval",
            "weights_that_one_rank_alone_writes",
        ],
    },
    "`finalize_model_grads`, when asked for": {
        f"{GUARD}/test_ddp_guards.py": ["a_non_finite_gradient_names_rank", "a_drift_between_replicas"],
    },
    "`optimizer.step()`": {
        f"{OPTIMIZER}/norm/test_step_settings.py": ["no_rank_steps_where_one_would_step_differently"],
        f"{OPTIMIZER}/test_optimizer_fp16.py": ["an_overflow_anywhere_skips_the_step_of_all"],
        "distributed/test_ddp_unshared_edits.py": ["an_edit_that_ranks_do_not_share"],
        f"{GUARD}/test_limit_agreement.py": ["ranks_that_would_clip_differently"],
    },
    "a checkpoint is loaded": {"checkpoint/test_checkpoint_damage.py": ["every_kind_of_damage_is_named"]},
    "all the time": {
        "test_rank_watch.py": ["a_rank_that_was_stopped"],
        f"{GUARD}/test_lost_ranks.py": ["the_others_say_which_rank_was_killed"],
    },
    "whenever you ask": {
        f"{VERIFY}/test_right_twins.py": ["a_right_program_is_not_blamed"],
        f"{VERIFY}/test_updates.py": ["a_wrong_step_is_named", "a_step_of_torch_that_one_rank_leaves_out"],
        f"{VERIFY}/test_also_seen.py": ["the_command_names_a_mistake_that_all_ranks_share"],
    },
}


def test_each_check_that_the_readme_lists_has_a_test() -> None:
    table = (ROOT / "README.md").read_text().partition("| when | what is checked")[2].partition("\n\n")[0]
    rows = [line[2:].partition(" |")[0] for line in table.splitlines()[2:]]
    heads = [max((head for head in HELD_BY if row.startswith(head)), key=len, default=row) for row in rows]
    assert heads == list(HELD_BY)
    for file, words in ((file, words) for tests in HELD_BY.values() for file, words in tests.items()):
        names = re.findall(r"^def test_(\w+)", (Path(__file__).parent / file).read_text(), re.MULTILINE)
        for start in words:
            assert any(name.startswith(start) for name in names), f"{file} has no test_{start}"
