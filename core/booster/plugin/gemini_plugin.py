"""GeminiPlugin: ZeRO-3 in chunks, which are gathered only while they are used."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup

from core.booster.plugin.chunk_search import search_chunk_size
from core.booster.plugin.hybrid_parallel_options import WITHOUT_EFFECT, warn_without_effect
from core.booster.plugin.mesh_attributes import PluginShardConfig
from core.booster.plugin.zero_plugin_base import MEGA, SCALER, ZeroPluginBase
from core.distributed import DistributedDataParallelConfig, MemStats, Placement
from core.groups.process_groups import ProcessGroups
from core.hugging_face.cut_model import Cutting
from core.optimizer.optimizer_config import OptimizerConfig

POLICIES = ("static", "auto")
CHUNK_CONFIG = {"chunk_size", "keep_gathered"}
INTERVAL = 1024  # elements between two candidate sizes if hidden_dim is None
OF_MODULES = ("enable_all_optimization", "enable_fused_normalization", "enable_jit_fused", "enable_sequence_overlap")
OF_SLICES = ("enable_flash_attention", "enable_sequence_parallelism")
NOT_SPLIT = (
    "GeminiPlugin leaves the modules of a model as they are where tp_size is 1; {}=True is an option of models that "
    "are split. Leave it False, and choose it in the model itself"
)


class GeminiPlugin(ZeroPluginBase):
    """Plugin for ZeRO stage 3 (arXiv:1910.02054) in chunks, as in Gemini (arXiv:2108.05818).

    Each rank stores a shard of all parameters, gradients and optimizer state, and all-gathers a chunk of parameters
    while it is used. Use it for models whose parameters do not fit on a single rank. A warning names options without
    effect.

        booster = Booster(plugin=GeminiPlugin(precision="bf16", placement_policy="static"))

    Args:
        chunk_config_dict: {data ranks: {'chunk_size': elements, 'keep_gathered': True for replicated chunks}}. By
            default the chunk size is searched.
        chunk_init_device: The process group's device, or None.
        placement_policy: 'static' places fixed fractions of the chunks' bytes. 'auto' offloads all parameters, masters
            and moments, and keeps as many chunks gathered on the device as ``memory_budget_bytes`` allows.
        enable_gradient_accumulation: Reduce every microbatch into the stored shard, also inside ``no_sync``. Otherwise
            ``no_sync`` keeps full gradients, which are reduced once.
        max_prefetch: 1 to gather the next chunk of the learned order while one is used, between hosts.
        shard_param_frac: Fraction of the parameter bytes that is sharded; the rest is replicated.
        offload_optim_frac: Fraction of masters and moments that is offloaded: to host memory with a GPU, to files in
            ``offload_directory`` on CPUs.
        offload_param_frac: Fraction of parameters that is offloaded, to the same place.
        warmup_non_model_data_ratio: Fraction of the budget that 'auto' leaves free in the first step.
        steady_cuda_cap_ratio: Fraction of the budget that 'auto' uses in later steps, minus the activations kept for
            backward.
        precision: 'fp16', 'bf16', or 'fp32', which does not change the parameters' dtype.
        master_weights: False to keep no fp32 copy of 16-bit parameters.
        pin_memory: Offload to pinned host memory, from which a GPU copies faster.
        force_outputs_fp32: Cast floating-point outputs of the forward to fp32.
        strict_ddp_mode: Replicate everything, as DDP does.
        search_range_m: Distance from the smallest to the largest size that is searched, in 1024 * 1024 elements.
        hidden_dim: Step of the search, in elements. Defaults to 1024.
        min_chunk_size_m: Smallest size that is searched, in 1024 * 1024 elements. A model of at most this size is one
            chunk.
        memstats: Statistics of an earlier run under 'auto', from the boosted model. 'auto' then needs no warm-up, and
            'static' places chunks in the order of their use instead of the order of registration.
        gpu_margin_mem_ratio: Must be 0: masters and moments stay offloaded under 'auto'.
        initial_scale, min_scale, growth_factor, backoff_factor, growth_interval, hysteresis, max_scale: Options of
            DynamicLossScaler, used with fp16 only.
        max_norm: Limit of the global gradient norm, applied inside ``step``. 0 disables clipping.
        norm_type: Order p of the norm.
        tp_size: Number of ranks over which a transformers model is split. Its slices are sharded over the others.
        extra_dp_size: Number of replicas of the shards, each on neighboring data ranks.
        enable_flash_attention: Use torch's scaled_dot_product_attention, with tp_size above 1.
        enable_sequence_parallelism: Split the sequence too, with tp_size above 1.
        enable_async_reduce: Reduce chunks during backward.
        use_fp8: Multiply in 8 bits in linear layers, with 'bf16', on machines that support it.
        verbose: Log how the model is wrapped.
        fp8_communication: Send gradients in 8 bits, with one scale per 256 elements.
        offload_directory: Directory for offloaded shards, required to offload on CPUs.
        memory_budget_bytes: Memory that a rank may use under 'auto'. Defaults to all memory of its GPU.
        example: Arguments of a small forward that verifies the split. By default created from the model's main input.
        broadcast_buffers: Broadcast rank 0's buffers, such as BatchNorm statistics, to all ranks before forwards, for
            models that save any.

    Raises:
        ValueError: If an option is out of range, or options cannot be combined.
        RuntimeError: If torch.distributed is not initialized, or this machine cannot run ``use_fp8``.
    """

    without_effect = WITHOUT_EFFECT

    def __init__(
        self,
        chunk_config_dict: dict[int, dict[str, Any]] | None = None,
        chunk_init_device: torch.device | None = None,
        placement_policy: str = "static",
        enable_gradient_accumulation: bool = False,
        max_prefetch: int = 0,
        shard_param_frac: float = 1.0,
        offload_optim_frac: float = 0.0,
        offload_param_frac: float = 0.0,
        warmup_non_model_data_ratio: float = 0.8,
        steady_cuda_cap_ratio: float = 0.9,
        precision: str = "fp16",
        master_weights: bool = True,
        pin_memory: bool = False,
        force_outputs_fp32: bool = False,
        strict_ddp_mode: bool = False,
        search_range_m: float = 32,
        hidden_dim: int | None = None,
        min_chunk_size_m: float = 32,
        memstats: MemStats | None = None,
        gpu_margin_mem_ratio: float = 0.0,
        initial_scale: float = 2**16,
        min_scale: float = 1,
        growth_factor: float = 2,
        backoff_factor: float = 0.5,
        growth_interval: int = 1000,
        hysteresis: int = 2,
        max_scale: float = 2**32,
        max_norm: float = 0.0,
        norm_type: float = 2.0,
        tp_size: int = 1,
        extra_dp_size: int = 1,
        enable_all_optimization: bool = False,
        enable_fused_normalization: bool = False,
        enable_flash_attention: bool = False,
        enable_sequence_parallelism: bool = False,
        enable_jit_fused: bool = False,
        enable_sequence_overlap: bool = False,
        enable_async_reduce: bool = True,
        use_fp8: bool = False,
        verbose: bool = False,
        fp8_communication: bool = False,
        *,
        offload_directory: str | os.PathLike[str] | None = None,
        memory_budget_bytes: int | None = None,
        example: Mapping[str, Any] | None = None,
        broadcast_buffers: bool = True,
    ) -> None:
        given = locals()
        super().__init__(
            precision,
            {name: given[name] for name in SCALER},
            max_norm=max_norm,
            norm_type=norm_type,
            master_weights=master_weights,
            verbose=verbose,
            fp8_communication=fp8_communication,
            use_fp8=use_fp8,
            extra_dp_size=extra_dp_size,
        )
        self.tp_size = tp_size
        self.broadcast_buffers = broadcast_buffers
        self._arguments = {name: given[name] for name in (*OF_MODULES, *OF_SLICES)}
        warn_without_effect("GeminiPlugin", self._arguments)
        of_slices = {name: given[name] for name in OF_SLICES}
        self._check_slices(of_slices)
        self._check_chunks(search_range_m, hidden_dim, min_chunk_size_m, chunk_init_device)
        self._check_placement(
            placement_policy,
            {
                "shard_param_frac": shard_param_frac,
                "offload_optim_frac": offload_optim_frac,
                "offload_param_frac": offload_param_frac,
            },
            {
                "warmup_non_model_data_ratio": (warmup_non_model_data_ratio, 0.8),
                "steady_cuda_cap_ratio": (steady_cuda_cap_ratio, 0.9),
                "gpu_margin_mem_ratio": (gpu_margin_mem_ratio, 0.0),
                "memory_budget_bytes": (memory_budget_bytes, None),
            },
        )
        if max_prefetch not in ((0,) if placement_policy == "auto" else (0, 1)):
            raise ValueError(
                f"max_prefetch is {max_prefetch!r}; one chunk is gathered ahead at most, and none with "
                "placement_policy='auto', whose budget has no room for a chunk that is not in use yet"
            )
        directory = None if offload_directory is None else os.fspath(offload_directory)
        is_auto = placement_policy == "auto"
        offloaded = (1.0, 1.0) if is_auto else (offload_param_frac, offload_optim_frac)
        of_budget: dict[str, Any] = {}
        if is_auto:
            of_budget = {
                "memory_budget_bytes": self._budget(gpu_margin_mem_ratio, directory, memory_budget_bytes),
                "warmup_non_model_data_ratio": warmup_non_model_data_ratio,
                "steady_cap_ratio": steady_cuda_cap_ratio,
            }
        self._check_offload(*offloaded, directory, pin_memory)
        self.placement = Placement(
            shard_param_frac,
            *offloaded,
            directory,
            prefetch=None if is_auto else max_prefetch,
            # Gradients use the place of offloaded parameters; on a host only if they are stepped there.
            offload_grad_frac=min(offloaded) if directory is None else offloaded[0],
            pin_memory=pin_memory,
            memstats=memstats,
            **of_budget,
        )
        self.chunk_config_dict = chunk_config_dict
        self.placement_policy = placement_policy
        self.force_outputs_fp32 = force_outputs_fp32
        self.search_range = int(search_range_m * MEGA)
        self.interval = INTERVAL if hidden_dim is None else hidden_dim
        self.min_chunk_size = int(min_chunk_size_m * MEGA)
        config = self._chunk_config()
        if config is not None:
            sizes = {
                "search_range_m": (search_range_m, 32),
                "hidden_dim": (hidden_dim, None),
                "min_chunk_size_m": (min_chunk_size_m, 32),
            }
            self._refuse_changed(sizes, "chunk_config_dict gives the size of chunks, so that none is searched")
        self.chunk_size: int | None = None if config is None else config["chunk_size"]
        replicates = bool(strict_ddp_mode or (config is not None and config.get("keep_gathered", False)))
        if replicates and (placement_policy == "auto" or self.placement.offloads):
            raise ValueError(
                "strict_ddp_mode and keep_gathered replicate chunks on the device; leave placement_policy 'static' and "
                "offload nothing"
            )
        if replicates:
            of_shards = {
                "shard_param_frac": (shard_param_frac, 1.0),
                "max_prefetch": (max_prefetch, 0),
                "enable_gradient_accumulation": (enable_gradient_accumulation, False),
            }
            self._refuse_changed(of_shards, "strict_ddp_mode or keep_gathered shards nothing")
        self._set_configs(
            overlap_grad_reduce=enable_async_reduce,
            bucket_size=self.chunk_size,
            data_parallel_sharding_strategy="no_shard" if replicates else "optim_grads_params",
            reduce_microbatches="every" if enable_gradient_accumulation else "last",
            placement=None if replicates else self.placement,
        )
        if tp_size > 1:
            self.cutting = Cutting(
                tp_size,
                sequence_parallel="split_gather" if enable_sequence_parallelism else None,
                example=example,
                flash_attention=enable_flash_attention,
            )

    # -- arguments ----------------------------------------------------------------------------------------------------

    def _check_slices(self, of_slices: dict[str, bool]) -> None:
        size, extra = self.tp_size, self.extra_dp_size
        if type(size) is not int or size < 1 or self.world_size % (size * extra):
            raise ValueError(
                f"the world of {self.world_size} ranks does not split into tp_size={size!r} times extra_dp_size={extra}"
            )
        for name in (name for name, value in of_slices.items() if value and size == 1):
            raise ValueError(NOT_SPLIT.format(name))
        if self.use_fp8 and size > 1:
            raise ValueError("use_fp8 supports unsplit linear layers only; set tp_size to 1")

    def _check_chunks(
        self, search_range_m: float, hidden_dim: int | None, min_chunk_size_m: float, device: Any
    ) -> None:
        self._check_numbers({"search_range_m": search_range_m, "min_chunk_size_m": min_chunk_size_m})
        if not 0 <= search_range_m < math.inf or not 0 <= min_chunk_size_m < math.inf:
            raise ValueError(
                f"search_range_m is {search_range_m} and min_chunk_size_m {min_chunk_size_m}; both are at least 0"
            )
        if hidden_dim is not None and (type(hidden_dim) is not int or hidden_dim < 1):
            raise ValueError(f"hidden_dim is {hidden_dim!r}; it is the width of the model's layers, or None")
        if device is not None and torch.device(device).type != self.device().type:
            raise ValueError(
                f"chunk_init_device is {str(device)!r}, but chunks are created on {self.device().type!r}, the process "
                "group's device; leave it None"
            )

    def _check_placement(self, policy: str, fractions: dict[str, Any], of_auto: dict[str, tuple[Any, Any]]) -> None:
        if policy not in POLICIES:
            raise ValueError(f"placement_policy {policy!r} is none of {', '.join(POLICIES)}")
        self._check_numbers(fractions)
        for name, value in fractions.items():
            if not 0 <= value <= 1:
                raise ValueError(f"{name} is {value}; it is a fraction of the bytes of chunks, between 0 and 1")
        defaults = {"shard_param_frac": 1.0, "offload_optim_frac": 0.0, "offload_param_frac": 0.0}
        if policy == "auto":
            static = {name: (value, defaults[name]) for name, value in fractions.items()}
            self._refuse_changed(static, "only placement_policy='static' reads it")
        else:
            self._refuse_changed(of_auto, "only placement_policy='auto' reads it")

    def _refuse_changed(self, given: dict[str, tuple[Any, Any]], why: str) -> None:
        """Raise ValueError for the first of these (value, default) that differ, because the value would have no
        effect.
        """
        for name, (value, default) in given.items():
            if value != default:
                raise ValueError(f"{name} is {value!r}, and {why}; leave it {default}")

    def _check_offload(self, param: float, optim: float, directory: str | None, pin_memory: bool) -> None:
        on_gpu = self.device().type != "cpu"
        if directory is None and (param or optim) and not on_gpu:
            raise ValueError(
                f"offload_optim_frac is {optim} and offload_param_frac {param}. On a CPU they go to files; "
                "name a directory with offload_directory, or set both to 0"
            )
        if directory is not None and on_gpu:
            raise ValueError(
                "offload_directory is supported on CPUs only; on a GPU, offloaded tensors are in host memory, so "
                "leave it out"
            )
        if pin_memory and not (on_gpu and (optim or param)):
            raise ValueError(
                "pin_memory pins the host memory of tensors offloaded from a GPU, but nothing is offloaded; leave it "
                "False"
            )

    def _budget(self, margin: float, directory: str | None, given: int | None) -> int:
        """Return the bytes that a rank may use: the configured number, or all memory of its GPU."""
        if margin:
            raise ValueError(
                f"gpu_margin_mem_ratio is {margin}, and masters and moments stay offloaded under "
                "placement_policy='auto'; leave it 0"
            )
        device = self.device()
        if device.type == "cpu" and (given is None or directory is None):
            raise ValueError(
                "placement_policy='auto' on a CPU needs memory_budget_bytes, the RAM that a rank may use, and "
                "offload_directory, where offloaded shards are stored"
            )
        return int(torch.get_device_module(device).mem_get_info(device)[1]) if given is None else given

    def _chunk_config(self) -> dict[str, Any] | None:
        if self.chunk_config_dict is None:
            return None
        ranks = self.data_size()
        config = self.chunk_config_dict.get(ranks)
        if config is None:
            raise ValueError(
                f"chunk_config_dict has chunks for {sorted(self.chunk_config_dict)} data ranks, and there are {ranks}"
            )
        unknown = sorted(set(config) - CHUNK_CONFIG)
        size = config.get("chunk_size")
        if unknown or type(size) is not int or size < 1:
            raise ValueError(
                f"chunk_config_dict[{ranks}] is {config}; expected {{'chunk_size': elements, 'keep_gathered': bool}}"
            )
        return config

    # -- what the base asks -------------------------------------------------------------------------------------------

    @property
    def _title(self) -> str:
        split = f", tp {self.tp_size}" if self.tp_size > 1 else ""
        return f"GeminiPlugin, {self.placement_policy} placement, chunks of {self.chunk_size} elements{split}"

    def data_size(self) -> int:
        """Return the number of data-parallel parts."""
        return self.world_size // self.tp_size

    @property
    def dp_size(self) -> int:
        """Number of ranks, or of replicas if a model is split over ranks."""
        return self.data_size()

    @property
    def dp_group(self) -> ProcessGroup:
        """Ranks that train on different data. The first read is collective, as for ``groups``."""
        return self.groups().require("dp")

    @property
    def tp_group(self) -> ProcessGroup | None:
        """Ranks over which a model is split, or ``None`` if tp_size is 1, as in ColossalAI."""
        return self.groups().require("tp") if self.tp_size > 1 else None

    @property
    def shard_config(self) -> PluginShardConfig:
        """Configuration of the model's split."""
        return PluginShardConfig.of(self._arguments, self.tp_group, self.tp_size)

    def groups(self) -> ProcessGroups:
        """Return the groups of ``parallel_state``, or create groups at the first call, which is then collective."""
        return self.expect_instances(super().groups())

    def engine_configs(
        self, model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> tuple[DistributedDataParallelConfig, OptimizerConfig]:
        """Return the base class's options, with the best chunk size for a model.

        Args:
            model (Module): This rank's part of the model.
            optimizer (torch.optim.Optimizer): The user's torch optimizer.
        """
        ddp_config, optimizer_config = super().engine_configs(model, optimizer)
        if self.chunk_config_dict is None:
            numels = [param.numel() for param in model.parameters() if param.is_floating_point()]
            self.chunk_size = search_chunk_size(
                numels, least=self.min_chunk_size, search_range=self.search_range, interval=self.interval
            )
            ddp_config = dataclasses.replace(ddp_config, bucket_size=self.chunk_size)
        return ddp_config, optimizer_config
