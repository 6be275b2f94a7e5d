"""Pipeline stages of transformers models against one process that holds the whole model; and what is refused."""

import copy
import importlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from core import parallel_state
from core.distributed import DistributedDataParallelConfig
from core.groups import agree
from core.hugging_face import PlanError, split_stages, stage_activations, stage_forward_step, stages_config
from core.hugging_face.cut.order import watch_order
from core.hugging_face.cut.parts import keep_stage
from core.hugging_face.cut.places import find_cut
from core.hugging_face.prove.compare import Shown, refuse_other_output
from core.hugging_face.run.stage_forward import StageForward
from core.pipeline_parallel import PipelineRunner, StageSpec, plan_pipeline, wrap_stages
from core.verify.in_double import InDouble
from tests.families.check import check_on_rank
from tests.families.tiny import families
from tests.unit_tests.hugging_face.models import small, tokens, whole
from tests.unit_tests.ranks import ranks

LAYERS = 4
attach_module = importlib.import_module("core.hugging_face.cut.attach")
# gemma scales embeddings by a buffer and ties them; granite multiplies embeddings, residuals and logits by numbers.
GRANITE = {"embedding_multiplier": 2.5, "residual_multiplier": 0.7, "logits_scaling": 3.0}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "gemma": {"tie_word_embeddings": True},
    "granite": GRANITE,
    "gemma2": {},
    "gemma3_text": {"tie_word_embeddings": True},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "gpt2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "opt": {"ffn_dim": 64, "dropout": 0.0},
}


def batches(count: int, data_rank: int) -> list[dict[str, torch.Tensor]]:
    """Microbatches; padded rows in the second, so that masks are made on every stage."""
    made = []
    for number in range(count):
        ids = tokens(seed=100 * data_rank + number)
        labels = ids.masked_fill(ids % 5 == 0, -100)
        mask = torch.ones_like(ids)
        if number == 1:
            mask[0, :3] = 0
        made.append({"input_ids": ids, "labels": labels, "attention_mask": mask})
    return made


def _compare(
    model: Any, tp: int, pp: int, schedule: str, *, chunks: int | None = None, parallel_output: bool = False
) -> None:
    """Loss and every gradient of a step, in the layout and in one process."""
    tolerance = 1e-10
    layout = plan_pipeline(LAYERS, pp, schedule=schedule, chunks=chunks)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        get_embedding_ranks=layout.embedding_ranks,
    )
    groups = parallel_state.get_process_groups()
    reference = copy.deepcopy(model)
    data_ranks, count = groups.size("dp_cp"), 4
    losses = [reference(**batch, use_cache=False).loss for rank in range(data_ranks) for batch in batches(count, rank)]
    torch.stack(losses).mean().backward()
    stages = split_stages(model, layout, parallel_output=parallel_output)
    held = sum(parameter.numel() for stage in stages for parameter in stage.parameters())
    assert held < sum(parameter.numel() for parameter in reference.parameters())
    wrapped = wrap_stages(stages_config(layout, tp), DistributedDataParallelConfig(overlap_grad_reduce=True), stages)
    runner = PipelineRunner(wrapped, layout, stage_forward_step, stage_activations(stages[0], 2, 12), schedule=schedule)
    evaluated = runner.evaluate(batches(count, groups.rank("dp_cp"))).loss
    loss = runner.step(batches(count, groups.rank("dp_cp"))).loss
    own = torch.stack(losses).view(data_ranks, count)[groups.rank("dp_cp")].mean()
    assert abs(float(loss - own.detach())) < tolerance
    assert abs(float(evaluated - own.detach())) < tolerance
    largest = max(float(p.grad.abs().max()) for p in reference.parameters() if p.grad is not None)
    seen = set()
    for stage in stages:
        for name, parameter in stage.named_parameters():
            wanted = reference.get_parameter(name).grad
            found = whole(stage, name, parameter.grad)
            assert float((found - wanted).abs().max()) < tolerance * largest, name
            seen.add(name)
    said = set().union(*agree.gather(seen, groups.pp, "the parameters of stages").values())
    assert {name for name, _ in reference.named_parameters()} <= said


def compare_with_one_process(
    model: Any, tp: int, pp: int, schedule: str, *, chunks: int | None = None, parallel_output: bool = False
) -> None:
    """In fp64 throughout: what families compute in fp32 is computed in fp64 too."""
    torch.set_default_dtype(torch.float64)
    try:
        with InDouble():
            _compare(model, tp, pp, schedule, chunks=chunks, parallel_output=parallel_output)
    finally:
        torch.set_default_dtype(torch.float32)


@ranks(2)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.in_suite(5)
def test_a_pipeline_of_a_family_is_one_process(rank: int, world: int, family: str) -> None:
    compare_with_one_process(small(family, num_hidden_layers=LAYERS, **FAMILIES[family]), 1, 2, "1F1B")


@ranks(4)
@pytest.mark.parametrize(
    "family",
    ["llama", "qwen3_moe", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("gemma", "granite", "gpt2"))],
)
def test_a_pipeline_over_tp_is_one_process(rank: int, world: int, family: str) -> None:
    model = small(family, num_hidden_layers=LAYERS, **FAMILIES[family])
    compare_with_one_process(model, 2, 2, "1F1B", parallel_output=family == "llama")


@ranks(2)
@pytest.mark.parametrize("schedule", ["Interleaved1F1B", "ZBVZeroBubble", "DualPipeV"])
def test_several_stages_a_rank_are_one_process(rank: int, world: int, schedule: str) -> None:
    """With tied embeddings: in a V both ends lie on one rank, and the parameter is one."""
    chunks = 2 if schedule == "Interleaved1F1B" else None
    compare_with_one_process(small("gemma", num_hidden_layers=LAYERS), 1, 2, schedule, chunks=chunks)


# -- what must not pass silently ------------------------------------------------------------------------------------


def start(pp: int, tp: int = 1) -> Any:
    layout = plan_pipeline(LAYERS, pp)
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp)
    return layout


@ranks(2)
def test_hidden_states_in_place_of_embeddings_are_refused(rank: int, world: int) -> None:
    """The way of feeding what was received as embeddings: granite multiplies it again in its own forward."""

    def as_embeddings(self: StageForward, *args: Any, **kwargs: Any) -> Any:
        return self.received[0]

    def through(self: StageForward, number: int, *args: Any, **kwargs: Any) -> Any:
        return leave(self, number, *args, **kwargs) if self.entered else args[0]

    leave = StageForward.absent_layer
    model = small("granite", num_hidden_layers=LAYERS, **GRANITE)
    layout = start(2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StageForward, "absent_entry", as_embeddings)
        patch.setattr(StageForward, "absent_layer", through)
        patch.setattr(StageForward, "enter", lambda self, number, module, args, kwargs: setattr(self, "entered", 1))
        with pytest.raises(PlanError, match="differs from the unsplit model's by"):
            split_stages(model, layout)


@ranks(2)
def test_a_layer_that_no_stage_runs_is_refused(rank: int, world: int) -> None:
    layout = start(2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            type(layout),
            "stage",
            lambda self, index: StageSpec(index, [range(2), range(3, 4)][index], index == 0, index == 1),
        )
        with pytest.raises(PlanError, match="differs from the unsplit model's by"):
            split_stages(small("llama", num_hidden_layers=LAYERS), layout)


@ranks(2)
def test_a_tie_whose_gradients_are_not_added_is_seen(rank: int, world: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attach_module, "tie_ends", lambda chunks, layout: None)
        with pytest.raises(AssertionError, match="embed_tokens|lm_head"):
            compare_with_one_process(small("gemma", num_hidden_layers=LAYERS), 1, 2, "1F1B")


@ranks(2)
def test_layers_that_see_the_embeddings_are_refused(rank: int, world: int) -> None:
    model = small("llama", num_hidden_layers=LAYERS)
    rotary = type(model.model.rotary_emb)
    plain = rotary.forward

    def of_embeddings(self: Any, hidden: torch.Tensor, position_ids: torch.Tensor) -> Any:
        return tuple(table + hidden.mean() for table in plain(self, hidden, position_ids))

    layout = start(2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rotary, "forward", of_embeddings)
        with pytest.raises(PlanError, match="read a value of the embeddings or of earlier layers|rank 1 failed"):
            split_stages(model, layout)


def test_where_a_model_is_cut() -> None:
    model = small("opt", num_hidden_layers=2, ffn_dim=64, word_embed_proj_dim=16)
    order, _ = watch_order(model, {"input_ids": tokens()})
    cut = find_cut(model, order.sides)
    assert cut.lists == ("model.decoder.layers",)
    assert cut.count == 2
    inside = "model.decoder."
    assert cut.entry == {inside + "embed_tokens", inside + "embed_positions", inside + "project_in"}
    assert cut.exit == {inside + "final_layer_norm", inside + "project_out", "lm_head"}
    assert cut.tied == {inside + "embed_tokens.weight", "lm_head.weight"}


def test_models_that_no_pipeline_can_cut_are_refused() -> None:
    with pytest.raises(PlanError, match=r"its one list of layers \(nn.ModuleList\); it has 2 of them"):
        find_cut(image_and_text())
    with pytest.raises(PlanError, match="takes a transformers model and was given a Sequential"):
        find_cut(torch.nn.Sequential(torch.nn.Linear(4, 4)))
    with pytest.raises(PlanError, match="output_router_logits adds a loss of all layers' routers"):
        find_cut(small("mixtral", num_local_experts=4, output_router_logits=True))
    with pytest.raises(PlanError, match=r"layerdrop=0.5 leaves layers out at random"):
        find_cut(small("opt", ffn_dim=64, layerdrop=0.5))


def test_an_output_of_another_shape_is_refused_as_one_of_other_values() -> None:
    """Layers that run in a loop, which a stage without the others does otherwise, can leave out the head."""
    plan: Any = SimpleNamespace(family="dory")
    with pytest.raises(
        PlanError, match=r"dory: as a pipeline, its output .* has shape \[2, 64\], expected \[2, 96\] .*, so its layers"
    ):
        whole_one, of_parts = Shown(torch.ones(2, 96)), Shown(torch.ones(2, 64))
        refuse_other_output(plan, whole_one, of_parts, 0.1, "as a pipeline", "its layers run again")


@pytest.mark.parametrize("by_argument", [False, True])
def test_a_loss_of_routers_that_is_asked_for_after_the_cut_is_refused(by_argument: bool) -> None:
    """The last stage would add the loss of its own layers' routers alone."""
    model = small("mixtral", num_hidden_layers=2, num_local_experts=4)
    stage = keep_stage(model, find_cut(model), plan_pipeline(2, 2), 1)
    received = torch.zeros(2, 12, 32, dtype=torch.float64)
    asked = {"output_router_logits": True} if by_argument else {}
    model.config.output_router_logits = not by_argument
    with pytest.raises(PlanError, match="output_router_logits adds a loss of all layers' routers"):
        stage(input_ids=tokens(), labels=tokens(), received=received, **asked)


def image_and_text() -> Any:
    import transformers

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
    return transformers.CLIPModel(transformers.CLIPConfig(text_config=sizes, vision_config=sizes))


@ranks(2)
def test_sizes_that_do_not_fit_are_refused_on_all_ranks(rank: int, world: int) -> None:
    layout = start(2)
    with pytest.raises(ValueError, match="places 4 layers, and the model has 2"):
        split_stages(small("llama"), layout)
    with pytest.raises(
        ValueError, match=r"group 'pp' \[0, 1\] has 2; give initialize_model_parallel pipeline_model_parallel_"
    ):
        split_stages(small("llama", num_hidden_layers=4), plan_pipeline(4, 4))
    stages = split_stages(small("llama", num_hidden_layers=4), layout)
    ids = tokens()
    wrong = {} if rank else {"received": torch.zeros(2, 12, 32, dtype=torch.float64)}
    with pytest.raises(ValueError, match="a stage takes what the stage before it sent as received="):
        stages[0](input_ids=ids, **wrong)


@ranks(2)
@pytest.mark.parametrize("name", ["qwen2/Qwen2Config", "granitemoe/GraniteMoeConfig", "cohere/CohereConfig"])
def test_check_compares_a_pipeline(rank: int, world: int, name: str) -> None:
    verdict = check_on_rank(name, families()[name], 1, pp=2)
    assert verdict.answer == "equal", verdict


@ranks(2)
def test_check_sees_a_tie_that_is_not_added(rank: int, world: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attach_module, "tie_ends", lambda chunks, layout: None)
        verdict = check_on_rank("cohere/CohereConfig", families()["cohere/CohereConfig"], 1, pp=2)
    assert verdict.answer == "wrong", verdict
    assert "embed_tokens.weight" in verdict.why or "lm_head.weight" in verdict.why


@pytest.mark.nightly
@ranks(2, timeout_s=160.0)
@pytest.mark.parametrize("part", range(10))
def test_a_pipeline_of_every_family_is_equal_or_refused(rank: int, world: int, part: int) -> None:
    for name in list(families())[part::10]:
        verdict = check_on_rank(name, families()[name], 1, pp=2)
        assert verdict.answer != "wrong", verdict
        torch.distributed.barrier()
