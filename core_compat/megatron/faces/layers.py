"""The split linear layers and their product, with Megatron's arguments."""

from __future__ import annotations

from typing import Any

from core import tensor_parallel as ours
from core_compat.megatron.faces.refusals import StandsFor, arguments

_REFUSED = "!keep_master_weight_for_test=False !is_expert=False"


def _layer(kind: type, row: str) -> Any:
    """Create a class with Megatron's arguments. Layers in models of this package are instances of it too."""
    space = {"stands_for": kind, "__init__": arguments(row)(vars(kind)["__init__"]), "__module__": __name__}
    return StandsFor(kind.__name__, (kind,), space)


ColumnParallelLinear = _layer(
    ours.ColumnParallelLinear,
    f"self input_size output_size * config init_method bias=True gather_output=False stride=1 {_REFUSED} "
    "skip_bias_add=False skip_weight_param_allocation=False !embedding_activation_buffer=None !grad_output_buffer=None "
    "-tp_comm_buffer_name=None !disable_grad_reduce=False !output_dtype=None allow_padding=False tp_group=None "
    "pg_collection=None name=None",
)
RowParallelLinear = _layer(
    ours.RowParallelLinear,
    f"self input_size output_size * config init_method bias=True input_is_parallel=True skip_bias_add=False stride=1 "
    f"{_REFUSED} -tp_comm_buffer_name=None tp_group=None pg_collection=None name=None",
)
linear_with_grad_accumulation_and_async_allreduce = arguments(
    "input weight bias gradient_accumulation_fusion allreduce_dgrad sequence_parallel !grad_output_buffer=None "
    "!wgrad_deferral_limit=0|None !async_grad_allreduce=None tp_group=None !gtp_remat_size=1|None !output_dtype=None"
)(ours.linear_with_grad_accumulation_and_async_allreduce)
