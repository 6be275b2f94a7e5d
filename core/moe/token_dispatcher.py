"""Dispatch of tokens to their experts and back, by all-to-all or by all-gather.

Both dispatchers give each rank the tokens of its experts, sorted by expert. Afterwards they return, for each token, the
sum of its experts' outputs weighted by the router's probabilities. Ranks may have different numbers of tokens, or none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from core.groups.process_groups import ProcessGroups
from core.moe.exchange import all_to_all_rows, gather_rows, reduce_scatter_rows
from core.tensor_parallel.mappings import gather_first


@dataclass(frozen=True, slots=True)
class Dispatched:
    """Tokens at their experts, with the information needed to return them."""

    tokens: Tensor  # [rows, hidden], sorted by local expert
    tokens_per_expert: list[int]
    weights: Tensor  # weight of each sent row in its token's sum
    token_of_row: Tensor
    num_tokens: int  # tokens that the weighted rows are summed to
    rows_of_ranks: list[int]  # rows from each rank of the gathering group
    order: Tensor | None = None  # row received -> row sorted by expert
    sent: Sequence[int] = ()
    received: Sequence[int] = ()


class HostCounts:
    """Counts of rows per expert that the host needs."""

    def rows(self, choices: Tensor) -> tuple[Tensor, ...]:
        """Return the expert and the token of each choice in [tokens, experts], sorted by expert."""
        return choices.t().nonzero(as_tuple=True)

    def lists(self, counts: Tensor) -> tuple[list[int], list[int], list[int], list[int]]:
        """Convert counts [2 + expt_tp, ep, local experts] to lists of row numbers, with one device synchronization.

        The counts are rows that leave, rows that arrive, and rows on each rank of 'expt_tp'. Return the rows sent to
        and received from each rank of 'ep', the rows of each rank of 'expt_tp', and the rows of each local expert.
        """
        counts = counts.cpu()  # the one wait for the device; sizes are the host's
        sent, received, shared = counts[0].sum(dim=1), counts[1].sum(dim=1), counts[2:]
        return sent.tolist(), received.tolist(), shared.sum(dim=(1, 2)).tolist(), shared.sum(dim=(0, 1)).tolist()

    def of_ranks(self, rows: int, group: ProcessGroup, device: torch.device) -> list[int]:
        """Return every rank's number of rows. Collective over the group."""
        counts: list[int] = gather_first(torch.tensor([rows], device=device), group).tolist()
        return counts

    def of_experts(self, choices: Tensor) -> list[int]:
        """Return the number of rows of each expert in [tokens, experts]."""
        counts: list[int] = choices.sum(dim=0).tolist()
        return counts


HOST_COUNTS = HostCounts()  # the planner, whose tensors have no values, replaces it with even loads


class AllToAllTokenDispatcher:
    """Dispatcher that sends each token to its experts' ranks over 'ep'. The ranks of 'expt_tp' then share their rows.

    Args:
        num_experts (int): Number of experts over all ranks.
        groups (ProcessGroups): Process groups with 'ep' and 'expt_tp'.
    """

    def __init__(self, num_experts: int, groups: ProcessGroups) -> None:
        self.num_experts = num_experts
        self.ep = groups.ep if groups.size("ep") > 1 else None
        self.expt_tp = groups.expt_tp if groups.size("expt_tp") > 1 else None
        self.ep_size, self.ep_rank = groups.size("ep"), groups.rank("ep")

    def dispatch(self, hidden: Tensor, probs: Tensor, choices: Tensor) -> Dispatched:
        """Send tokens to the ranks of their experts. Collective over 'ep' and 'expt_tp'.

        Args:
            hidden (Tensor): [tokens, hidden].
            probs (Tensor): The router's probabilities, [tokens, experts].
            choices (Tensor): The router's choices, [tokens, experts].
        """
        local = self.num_experts // self.ep_size
        expert_of_row, token_of_row = HOST_COUNTS.rows(choices)  # sorted by expert, so by rank too
        # Rows to each expert; rows from each rank of 'ep' to each local expert; the latter for each rank of 'expt_tp'.
        leaving = choices.sum(dim=0).view(1, self.ep_size, local)
        arriving = leaving if self.ep is None else gather_first(leaving, self.ep)[:, self.ep_rank].unsqueeze(0)
        shared = arriving if self.expt_tp is None else gather_first(arriving, self.expt_tp)
        sent, received, rows_of_ranks, of_experts = HOST_COUNTS.lists(torch.cat([leaving, arriving, shared]))

        rows = all_to_all_rows(hidden.index_select(0, token_of_row), sent, received, self.ep)
        rows = gather_rows(rows, rows_of_ranks, self.expt_tp)
        expert = torch.arange(local, device=hidden.device).repeat(shared.numel() // local)
        expert_of_arrival = expert.repeat_interleave(shared.flatten(), output_size=rows.shape[0])
        order = expert_of_arrival.argsort(stable=True)
        return Dispatched(
            tokens=rows.index_select(0, order),
            tokens_per_expert=of_experts,
            weights=probs[token_of_row, expert_of_row],
            token_of_row=token_of_row,
            num_tokens=hidden.shape[0],
            rows_of_ranks=rows_of_ranks,
            order=order,
            sent=sent,
            received=received,
        )

    def combine(self, output: Tensor, routed: Dispatched) -> Tensor:
        """Return the experts' output, [rows, hidden] sorted by local expert, to the tokens, [tokens, hidden].

        ``routed`` is the result of ``dispatch``. Collective over 'expt_tp' and 'ep'.
        """
        assert routed.order is not None, "combine got the result of another dispatcher"
        rows = output.index_select(0, routed.order.argsort())
        rows = reduce_scatter_rows(rows, routed.rows_of_ranks, self.expt_tp)
        rows = all_to_all_rows(rows, routed.received, routed.sent, self.ep)
        return _weighted_sum(rows, routed).to(output.dtype)


class AllGatherTokenDispatcher:
    """Dispatcher that gathers all tokens over 'tp_ep'. Each rank runs its experts, and the outputs are summed.

    Args:
        num_experts (int): Number of experts over all ranks.
        groups (ProcessGroups): Process groups with 'ep', 'expt_tp' and 'tp_ep'.
    """

    def __init__(self, num_experts: int, groups: ProcessGroups) -> None:
        several = groups.size("ep") * groups.size("expt_tp") > 1
        self.group = groups.require("tp_ep") if several else None
        local = num_experts // groups.size("ep")
        self.first, self.last = groups.rank("ep") * local, (groups.rank("ep") + 1) * local

    def dispatch(self, hidden: Tensor, probs: Tensor, choices: Tensor) -> Dispatched:
        """Gather all tokens and select the rows of this rank's experts. Collective over 'tp_ep'.

        Args:
            hidden (Tensor): [tokens, hidden].
            probs (Tensor): The router's probabilities, [tokens, experts].
            choices (Tensor): The router's choices, [tokens, experts].
        """
        rows_of_ranks = [hidden.shape[0]]
        if self.group is not None:
            rows_of_ranks = HOST_COUNTS.of_ranks(hidden.shape[0], self.group, hidden.device)
            hidden = gather_rows(hidden, rows_of_ranks, self.group)
            probs = gather_rows(probs, rows_of_ranks, self.group)
            choices = gather_rows(choices.to(torch.uint8), rows_of_ranks, self.group).bool()
        mine = choices[:, self.first : self.last]
        expert_of_row, token_of_row = HOST_COUNTS.rows(mine)
        return Dispatched(
            tokens=hidden.index_select(0, token_of_row),
            tokens_per_expert=HOST_COUNTS.of_experts(mine),
            weights=probs[token_of_row, expert_of_row + self.first],
            token_of_row=token_of_row,
            num_tokens=hidden.shape[0],
            rows_of_ranks=rows_of_ranks,
        )

    def combine(self, output: Tensor, routed: Dispatched) -> Tensor:
        """Return the experts' output, [rows, hidden] sorted by local expert, to the tokens, [tokens, hidden].

        ``routed`` is the result of ``dispatch``. Collective over 'tp_ep'.
        """
        return reduce_scatter_rows(_weighted_sum(output, routed).to(output.dtype), routed.rows_of_ranks, self.group)


def _weighted_sum(rows: Tensor, routed: Dispatched) -> Tensor:
    weighted = rows * routed.weights.unsqueeze(1)
    return weighted.new_zeros(routed.num_tokens, rows.shape[1]).index_add(0, routed.token_of_row, weighted)


def build_dispatcher(
    kind: str, num_experts: int, groups: ProcessGroups
) -> AllToAllTokenDispatcher | AllGatherTokenDispatcher:
    """Create the dispatcher named by ``moe_token_dispatcher_type``."""
    if kind == "alltoall":
        return AllToAllTokenDispatcher(num_experts, groups)
    return AllGatherTokenDispatcher(num_experts, groups)
