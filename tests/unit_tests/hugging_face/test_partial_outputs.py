"""Whatever can be asked of a forward is whole, or it is refused by name."""

import pytest
import torch

pytest.importorskip("transformers")

from core import parallel_state
from core.hugging_face import split_model, split_stages
from core.pipeline_parallel import plan_pipeline
from tests.families.tiny import families_with_policy, tiny_config, tiny_model
from tests.unit_tests.hugging_face.models import small, tokens, whole_copy
from tests.unit_tests.ranks import ranks


@ranks(2)
@pytest.mark.parametrize("by_argument", [True, False])
def test_attentions_of_a_ranks_own_heads_are_refused_by_name(rank: int, world: int, by_argument: bool) -> None:
    model, encoder_decoder = (
        small("llama", attn_implementation="eager"),
        tiny_model(tiny_config(families_with_policy()["t5/T5Config"])),
    )
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=world)
    for each in (model, encoder_decoder):
        each.set_attn_implementation("eager")
        reference = whole_copy(each)
        split_model(each)
        inputs = {"input_ids": tokens()} | ({"decoder_input_ids": tokens()} if each is encoder_decoder else {})
        asked = {"output_attentions": True} if by_argument else {}
        each.config.output_attentions = not by_argument
        with pytest.raises(ValueError, match=r"output_attentions over tp 2: they would be of this rank's heads"):
            each(**inputs, **asked)
        each.config.output_attentions = False
        found, wanted = (m(**inputs, output_hidden_states=True) for m in (each.eval(), reference.eval()))
        states = "decoder_hidden_states" if each is encoder_decoder else "hidden_states"
        for mine, whole_one in zip(found[states], wanted[states], strict=True):
            torch.testing.assert_close(mine, whole_one)


@ranks(2)
@pytest.mark.parametrize("asked", ["output_attentions", "output_hidden_states", "use_cache"])
def test_outputs_of_a_stages_own_layers_are_refused_by_name(rank: int, world: int, asked: str) -> None:
    layout = plan_pipeline(2, 2)
    parallel_state.initialize_model_parallel(1, 2, get_embedding_ranks=layout.embedding_ranks)
    (stage,) = split_stages(small("llama"), layout)
    received = {"received": torch.zeros(2, 12, 32, dtype=torch.float64)} if rank else {}
    stage(input_ids=tokens(), **received)
    with pytest.raises(ValueError, match=f"{asked} in stages: a stage"):
        stage(input_ids=tokens(), **received, **{asked: True})
