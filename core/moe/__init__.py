"""Mixture of experts: the router, the experts of a rank, and the dispatch of tokens to them."""

from core.moe.auxiliary_loss import MoEAuxLossAutoScaler, auxiliary_loss_scale
from core.moe.experts import Experts
from core.moe.moe_layer import MoELayer
from core.moe.router import TopKRouter
from core.moe.shared_experts import SharedExpert
from core.moe.token_dispatcher import AllGatherTokenDispatcher, AllToAllTokenDispatcher

__all__ = [
    "AllGatherTokenDispatcher",
    "AllToAllTokenDispatcher",
    "Experts",
    "MoEAuxLossAutoScaler",
    "MoELayer",
    "SharedExpert",
    "TopKRouter",
    "auxiliary_loss_scale",
]
