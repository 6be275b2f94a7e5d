"""Expert parallelism for transformers models: each rank holds some experts, and tokens travel to them and back.

The family's own experts run on the tokens that arrive at this rank; the router runs on every rank, on its own tokens.
Over tensor parallelism the experts are split too, or each rank holds unsplit experts and sends its part of the tokens.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from core.groups.process_groups import ProcessGroups
from core.hugging_face.read.plan import Plan, PlanError, Seam, Split, family_of
from core.hugging_face.read.transformers_plans import read_experts
from core.hugging_face.run.seams import SeamForward
from core.moe.token_dispatcher import AllToAllTokenDispatcher
from core.number_ranges import divisors

EXPERTS_SEAM = "experts over ep"  # style of seams at fused experts


def over_experts(model: Any, plan: Plan, groups: ProcessGroups) -> Plan:
    """Return a plan in which experts are cut over expert parallelism, unchanged if its size is 1.

    Raises PlanError if the model has no experts that can be cut, or their number or the sizes do not fit.
    """
    ep, tp, expt_tp = groups.size("ep"), groups.size("tp"), groups.size("expt_tp")
    if ep == 1:
        return plan
    experts = check_experts(model, ep)
    if expt_tp not in (1, tp):
        raise PlanError(
            f"{plan.family}: expert_tensor_parallel_size is {expt_tp}, expected 1 (unsplit experts) or {tp} (the "
            "tensor-parallel size)"
        )
    splits, seams, whole = dict(plan.splits), dict(plan.seams), dict(plan.whole)
    for name, parameters in experts.items():
        for parameter, shape in parameters.items():
            split = Split(parameter, shape, 0, axes=("ep",))
            if expt_tp > 1:
                split = replace(plan.splits.get(parameter, split), axes=("ep", "tp"))
                if split.dim == 0:
                    raise PlanError(
                        f"{plan.family}: no rule splits {parameter!r} over tensor parallelism; call "
                        "initialize_model_parallel with expert_tensor_parallel_size=1 to keep experts unsplit"
                    )
            splits[parameter] = split
            whole.pop(parameter, None)
        seams = {key: seam for key, seam in seams.items() if not key.startswith(name + ".")}
        seams[name] = Seam(name, EXPERTS_SEAM, "copy", "reduce")
    return replace(plan, splits=splits, seams=seams, whole=whole, partial=plan.partial - splits.keys(), ep=ep)


def check_experts(model: Any, ep: int) -> dict[str, dict[str, tuple[int, ...]]]:
    """Find the fused experts of a model, as ``read_experts`` does, and check that ``ep`` ranks can share them.

    The model may be on the meta device. Raises PlanError if there are none, or their number is not divisible by ``ep``.
    """
    family = family_of(model)
    experts = read_experts(model)
    if not experts:
        raise PlanError(
            f"{family} has no experts that its plan would cut (`base_model_ep_plan` of its config is empty), and "
            f"there are {ep} expert-parallel ranks; use expert_model_parallel_size=1"
        )
    for name, parameters in experts.items():
        count = next(iter(parameters.values()))[0]
        if count % ep:
            raise PlanError(
                f"{family}: {count} experts ({name!r}) are not divisible by {ep} expert-parallel ranks. Sizes that "
                f"fit: {', '.join(map(str, divisors(count)))}"
            )
    return experts


class ExpertsForward(SeamForward):
    """Forward of fused experts: sends this rank's tokens to their experts and returns the weighted results.

    It is called with hidden states [..., hidden], chosen experts [tokens, top k], and their weights [tokens, top k].
    The output is a partial sum over tp: of split experts, or of unsplit experts on this rank's part of the tokens.

    Collective over the expert-parallel group, in forward and backward, even for a rank without tokens.
    """

    def __init__(
        self, module: nn.Module, seam: Seam, groups: ProcessGroups, length: int = 0, multiple: int = 1
    ) -> None:
        super().__init__(module, seam, groups, length, multiple)
        experts: Any = module
        self.num_experts: int = experts.num_experts
        experts.num_experts //= groups.size("ep")
        self.dispatcher = AllToAllTokenDispatcher(self.num_experts, type(groups)(ep=groups.ep))
        full_experts = groups.size("expt_tp") == 1
        self.share = (groups.rank("tp"), groups.size("tp")) if full_experts else (0, 1)

    def run(self, *args: Any, **kwargs: Any) -> Tensor:
        with contextlib.nullcontext() if self.watch is None else self.watch.paused():
            output = self._run(*args, **kwargs)
        if self.watch is not None:
            self.watch.cut(args[0], output)
        return output

    def _run(self, *args: Any, **kwargs: Any) -> Tensor:
        if len(args) != 3 or kwargs or args[1].shape != args[2].shape or args[1].dim() != 2:
            raise PlanError(
                f"module {self.seam.module!r}: experts over expert parallelism are called with hidden states, chosen "
                "experts and one weight for each of these, and it was called otherwise"
            )
        hidden, chosen, weights = args
        tokens = hidden.reshape(-1, hidden.shape[-1])
        rank, ranks = self.share
        first, last = (len(tokens) * place // ranks for place in (rank, rank + 1))
        chosen, weights = chosen[first:last], weights[first:last]
        table = weights.new_zeros(len(chosen), self.num_experts)
        routed = self.dispatcher.dispatch(
            tokens[first:last],
            table.scatter_add(1, chosen, weights),
            torch.zeros_like(table, dtype=torch.bool).scatter(1, chosen, True),
        )
        output = self.dispatcher.combine(self._local(routed.tokens, routed.tokens_per_expert), routed)
        return F.pad(output, (0, 0, first, len(tokens) - last)).view_as(hidden)

    def _local(self, rows: Tensor, rows_per_expert: list[int]) -> Tensor:
        """Run this rank's experts on rows [rows, hidden] that are sorted by expert."""
        if not len(rows):
            # Without tokens, backward still has to run the exchange and produce zero gradients rather than None.
            return rows + sum(parameter.flatten()[0] for parameter in self.module.parameters()) * 0.0
        counts = torch.tensor(rows_per_expert, device=rows.device)
        expert = torch.arange(len(rows_per_expert), device=rows.device).repeat_interleave(counts, output_size=len(rows))
        expert = expert.unsqueeze(1)
        output: Tensor = super().run(rows, expert, rows.new_ones(expert.shape))
        return output
