"""MegatronOptimizer: one step from reduced gradients to updated parameters.

    prepare_grads            norm, zeros and finiteness from one reduction over all ranks; updates the loss scale
    clip_grad_norm           one factor: data average x tokens / loss scale x clip coefficient
    step_with_ready_grads    bucket by bucket: inner optimizer over master weights -> parameters' memory -> gather

The code is the same if a rank owns a full bucket or only a shard of it; the bucket knows its owned range.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from core.distributed.buffer.bucket import BucketState
from core.distributed.buffer.grad_attribute import attributes_alone
from core.distributed.distributed_data_parallel import DistributedDataParallel
from core.distributed.finalize_model_grads import compare_before_update, models_of
from core.distributed.wire import huge_pages
from core.groups.agree import SyncError
from core.optimizer.algorithms.names import Scope, update_scope
from core.optimizer.groups.model_check import buckets_of, params_of
from core.optimizer.groups.offload import put_states_on_host
from core.optimizer.groups.param_groups import ParamGroups
from core.optimizer.loss_scaler import LossScaler, loss_scaler_of
from core.optimizer.masters.master_weights import BucketMasters, Segment
from core.optimizer.masters.scratch import Scratch, scratch_numel
from core.optimizer.norm.clip_grads import GradMeter, GradStats, clip_coefficient
from core.optimizer.norm.step_settings import Settings, settings_of
from core.optimizer.optimizer_config import OptimizerConfig
from core.optimizer.optimizer_state import (
    Entry,
    load_groups,
    load_parts,
    matching_groups,
    needed_parts,
    save_groups,
    segment_entries,
)
from core.optimizer.step.inner_optimizer import inner_optimizer
from core.optimizer.step.inner_step import Factors, InnerStep
from core.optimizer.step.scaled_backward import ScaleWatch, scale_loss
from core.optimizer.step.skip_log import SkipLog
from core.watch.waiting import calling


class MegatronOptimizer(torch.optim.Optimizer):
    """Optimizer of wrapped model chunks, created by ``get_megatron_optimizer``.

    Creating it and calling ``step`` are collective over all ranks of the job. Schedulers and trainers can use it like
    any torch optimizer: groups, state and defaults are the inner optimizer's objects.

    Args:
        config: Optimizer configuration.
        model_chunks: Wrapped model chunks of this rank.
        param_groups: Assignment of parameters to groups.
        world_groups: Groups that together reach every rank of the job once, for the norm and for agreements.
    """

    _step_supports_amp_scaling = True  # torch's GradScaler calls `step`, which rejects it by name

    def __init__(
        self,
        config: OptimizerConfig,
        model_chunks: Sequence[DistributedDataParallel],
        param_groups: ParamGroups,
        world_groups: Sequence[dist.ProcessGroup],
    ) -> None:
        self.config = config
        self.model_chunks = list(model_chunks)
        self.world_groups = list(world_groups)
        torch_groups = param_groups.torch_groups(config)
        scopes = [self._scope_of(group) for group in torch_groups]
        shaped = [scope != "element" for scope in scopes]
        self.is_coupled = "group" in scopes  # all parameters are stepped in one call
        put_states_on_host(config, model_chunks, lambda param: torch_groups[param_groups.of(param)])
        self.masters = [
            BucketMasters(
                bucket,
                param_groups.of,
                config,
                scratch_numel=scratch_numel,
                needs_shape=shaped.__getitem__,
                only_adam=all(group.get("optimizer") == "adam" for group in torch_groups),
            )
            for bucket in buckets_of(model_chunks)
        ]
        if any(masters.tier is not None for masters in self.masters):
            huge_pages.give_back()  # memory freed while offloaded masters were created
        self.scratch = Scratch(self.masters, config, at_once=self.is_coupled)
        segments = [segment for masters in self.masters for segment in masters.segments]
        for segment in self._listed(segments):
            torch_groups[segment.group]["params"].append(segment.master)
        self.optimizer = self._inner_optimizer(torch_groups, segments)
        self.built_groups = save_groups(self.optimizer.param_groups)  # later differences come from a scheduler
        self.names = self._qualified_names()
        self.grad_scaler: LossScaler | None = loss_scaler_of(config)
        self._before_first_step()

    def _before_first_step(self) -> None:
        """Create the gradient meter, and reset the state that changes from step to step."""
        self.meter = GradMeter(
            self.masters,
            self.world_groups,
            norm_type=self.config.grad_norm_type,
            watched=self.model_chunks,
            models=self.model_of_buckets(),
        )
        me = weakref.ref(self)
        for chunk in self.model_chunks:
            watch = ScaleWatch(lambda: getattr(me(), "grad_scaler", None), in_pipeline=chunk.groups.size("pp") > 1)
            chunk.reducer.scale_watch = None if self.grad_scaler is None else watch
        self.steps_skipped = 0
        self.skip_log = SkipLog()
        self.record_step(skipped=False)
        self._scale = 1.0  # loss scale at the time the gradients were measured
        self._stats: GradStats | None = None  # statistics of this step's gradients; None until measured
        self._spent: GradStats | None = None  # statistics of the last step's gradients
        self._spent_of: list[int] | None = None  # `_reductions` at the last step
        self._measured_of: list[int] | None = None  # `_reductions` when the gradients were measured
        self._limits: list[float] = []  # limits of this step's norm; the lowest one counts

    def _scope_of(self, torch_group: dict[str, Any]) -> Scope:
        """Return the scope of gradients that an element's update depends on in a group."""
        return update_scope(torch_group["optimizer"])

    def _listed(self, segments: list[Segment]) -> list[Segment]:
        """Return the segments in the order in which groups list their masters."""
        return segments

    def _inner_optimizer(self, torch_groups: list[dict[str, Any]], segments: list[Segment]) -> torch.optim.Optimizer:
        return inner_optimizer(self.config, torch_groups, segments=segments, groups=self.model_chunks[0].groups)

    # -- a step -----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: None = None) -> tuple[bool, float | None, int | None]:
        """Update the parameters from reduced gradients. Every rank of the job must call it.

        Returns:
            (True, global gradient norm before clipping, zeros if counted), or (False, None, None) if all ranks skipped
            the step, with a warning, because a gradient on any rank is NaN or Inf, or the norm is above the threshold.

        Raises:
            SyncError: If gradients are not reduced, or, on every rank, if ranks differ in learning rates or limits.
            TypeError: If ``closure`` is not ``None``, or if torch's own GradScaler called this method.
        """
        if closure is not None:
            raise TypeError("step() takes no closure: its backward would come after the gradients were reduced")
        if "found_inf" in vars(self):  # torch's GradScaler sets this attribute
            raise TypeError(
                "torch.amp.GradScaler looks at one rank's gradients, so that ranks would skip different steps; use "
                "core.optimizer.GradScaler, which has the same arguments and methods"
            )
        self.prepare_grads()
        stats = self._measured()
        if not stats.finite or stats.norm > self.config.grad_norm_skip_threshold:
            self._skip(stats)
            return False, None, None
        norm = self.clip_grad_norm(self.config.clip_grad)
        self.step_with_ready_grads()
        return True, norm, stats.num_zeros

    @torch.no_grad()
    def prepare_grads(self) -> bool:
        """Measure gradients and update the loss scale. Return ``True`` if any is not finite. Collective."""
        watches = filter(None, (chunk.reducer.scale_watch for chunk in self.model_chunks))
        problem = self._take_gradients() or next(filter(None, (watch.problem for watch in watches)), None)
        again = self._measured_of == self._reductions()
        if not again:
            self._measured_of = self._reductions()
            self._scale = 1.0 if self.grad_scaler is None else self.grad_scaler.value
            self._limits = []
        with self._named():
            self._stats = self.meter.measure(
                count_zeros=self.config.log_num_zeros_in_grad,
                loss_scale=self._scale,
                settings=self._settings(),
                problem=problem,
                edited=any(masters.bucket.attribute.edited for masters in self.masters),
            )
        if self.grad_scaler is not None and not again:
            self.grad_scaler.update(not self._stats.finite)
        return not self._stats.finite

    @torch.no_grad()
    def unscale_grads(self, scale: float) -> bool:
        """Divide reduced gradients by ``scale`` in memory, and call ``prepare_grads``. Used by ``GradScaler``."""
        self._take_gradients()  # raises if they are not reduced
        for chunk in self.model_chunks:
            chunk.scale_gradients(1.0 / scale)
        for masters in self.masters:
            masters.bucket.attach()  # the division above is not a user's edit
        return self.prepare_grads()

    def _named(self) -> calling:
        return calling("optimizer.step", self.model_chunks[0].reducer.steps)

    def _settings(self) -> Settings:
        others = {name: getattr(self.config, name) for name in ("clip_grad", "grad_norm_skip_threshold")}
        return settings_of(self.param_groups, {**others, "loss_scale": self._scale})

    def clip_grad_norm(self, clip_grad: float) -> float:
        """Limit this step's gradient norm to ``clip_grad`` (0 for no limit), and return the norm before clipping.

        Gradients of a norm group are scaled by that group's norm. Memory is not changed: the step applies the factor
        when it reads the gradients. The lowest of several limits, including ``OptimizerConfig.clip_grad``, is used.
        """
        self._limits.append(clip_grad)
        return self._measured().norm

    @torch.no_grad()
    def step_with_ready_grads(self) -> bool:
        """Update masters and parameters from measured gradients, after ``prepare_grads``. Always returns ``True``."""
        self._spent, self._spent_of, self._stats = self._measured(), self._reductions(), None
        problem = self._take_gradients()
        if problem is not None:
            raise SyncError(f"rank {dist.get_rank()}: {problem}")
        factors = self._factors(self._spent)
        with attributes_alone():
            loss_scale = 1.0 if self.grad_scaler is None else self.grad_scaler.value  # the next step's
            for masters, factor in zip(self.masters, factors, strict=True):
                masters.follow_freezing(self.optimizer)
                masters.copy_user_edits()
                masters.record_spent(factor, loss_scale)
        with self._named():
            self._update(InnerStep(self.optimizer, at_once=self.is_coupled), factors)
        self.record_step(skipped=False)
        self.skip_log.made(self._scale)
        return True

    def _update(self, step: InnerStep, factors: Sequence[Factors]) -> None:
        """Step every bucket, and gather the parameters that other ranks have updated."""
        compare_before_update(self.model_chunks)
        for chunk in self.model_chunks:
            chunk.begin_param_update()
        at_once = self.config.overlap_param_gather_with_optimizer_step
        streamed = [chunk for chunk in self.model_chunks if at_once or chunk.ddp_config.overlap_param_gather]
        streamed = [] if self.is_coupled else streamed
        left = {id(masters.bucket): index for index, masters in enumerate(self.masters)}
        for chunk in streamed:
            for bucket in chunk.param_sync.buckets:
                index = left.pop(id(bucket))
                step.step_buckets([self.masters[index]], [factors[index]], self.scratch)
                chunk.param_sync.start_bucket(bucket)
        step.step_buckets([self.masters[i] for i in left.values()], [factors[i] for i in left.values()], self.scratch)
        for chunk in self.model_chunks:
            if chunk in streamed:
                chunk.finish_param_sync()
            else:
                chunk.start_param_sync()

    def _factors(self, stats: GradStats) -> list[Factors]:
        """Return for each bucket, by norm group, the factor that its gradients in memory are multiplied by."""
        clip = {
            name: min((clip_coefficient(limit, norm) for limit in self._limits), default=1.0)
            for name, norm in stats.norms.items()
        }
        return [{name: factor * coefficient for name, coefficient in clip.items()} for factor in stats.factors]

    def _measured(self) -> GradStats:
        if self._stats is None:
            raise SyncError(
                f"rank {dist.get_rank()}: this step's gradients have not been measured; call prepare_grads() after "
                "finalize_model_grads, on every rank, or step() for all of it"
            )
        return self._stats

    def _skip(self, stats: GradStats) -> None:
        self.steps_skipped += 1
        self.record_step(skipped=True)
        self._stats = None
        if dist.get_rank() == 0:
            threshold = self.config.grad_norm_skip_threshold
            reason = stats.culprit or f"gradient norm {stats.norm:.4g}, grad_norm_skip_threshold {threshold:.4g}"
            self.skip_log.skipped(reason, self.grad_scaler, self._scale)

    def record_step(self, *, skipped: bool) -> None:
        """Record the outcome of the last step for schedulers, here and on the inner torch optimizer."""
        inner: Any = self.optimizer
        self.step_was_skipped = inner.step_was_skipped = skipped

    def model_of_buckets(self) -> list[Hashable]:
        """Return the model index of each bucket. The chunks of a virtual pipeline count as one model."""
        models = zip(models_of(self.model_chunks), self.model_chunks, strict=True)
        return [model for model, chunk in models for _ in buckets_of([chunk])]

    def _qualified_names(self) -> dict[int, str]:
        """Return parameter names by id(parameter), prefixed with the chunk's index if there are several chunks."""
        several = len(self.model_chunks) > 1
        return {
            id(param): f"model{number}.{contract.name}" if several else contract.name
            for number, param, contract in params_of(self.model_chunks)
        }

    def _reductions(self) -> list[int]:
        """Return counts that change with every reduction. A stage without parameters counts finalized steps."""
        steps = [chunk.reducer.steps for chunk in self.model_chunks]
        return steps + [masters.bucket.reductions for masters in self.masters]

    def _take_gradients(self) -> str | None:
        """Apply user edits of ``.grad``. Return an error text for an invalid one, and raise SyncError if unreduced."""
        for masters in self.masters:
            bucket, step = masters.bucket, masters.bucket.step
            if step.owed is not None:
                raise SyncError(
                    f"rank {dist.get_rank()}: an optimizer has made a step of the gradients of "
                    f"{bucket.layout.describe()} already, which may have multiplied them by its factor; a second step "
                    "would do so again. Run zero_grad, backward and finalize_model_grads before the next one"
                )
            rules_due = any(contract.rules for contract in bucket.contracts) or step.accumulated_shard is not None
            whole = step.state is BucketState.REDUCED and not rules_due
            if step.state is not BucketState.FINAL and not whole:
                raise SyncError(
                    f"rank {dist.get_rank()}: optimizer.step() came while {bucket.layout.describe()} was "
                    f"{step.state.value}; its gradients are not reduced. Call finalize_model_grads([model]) "
                    "after the last backward and before step()"
                )
        problems = [chunk.engine.tier.failure for chunk in self.model_chunks if chunk.engine.tier is not None]
        with attributes_alone():
            problems += [masters.bucket.follow_edits() for masters in self.masters]
        return next((problem for problem in problems if problem is not None), None)

    # -- what users of Megatron call --------------------------------------------------------------------------------

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Param groups of the inner optimizer. A scheduler may set 'lr' and 'weight_decay'."""
        groups: list[dict[str, Any]] = self.optimizer.param_groups
        return groups

    @property
    def defaults(self) -> dict[str, Any]:
        """Default options of the inner optimizer."""
        defaults: dict[str, Any] = self.optimizer.defaults
        return defaults

    def add_param_group(self, param_group: Any) -> None:
        """Raise RuntimeError, because the buffers are already laid out and parameters cannot be added."""
        raise RuntimeError(
            "parameters cannot be added to an optimizer whose buffers are laid out; make the model with all of its "
            "parameters, wrap it, and call get_megatron_optimizer again"
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_optimizer_"):  # torch stores hooks under these names
            raise AttributeError(
                f"{type(self).__name__} calls no hooks of torch.optim.Optimizer; do it before or after step() and "
                "state_dict() in the loop, or register it on `.optimizer`, whose step() runs for each bucket"
            )
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("an optimizer is bound to its model's buffers and cannot be copied; save its state_dict()")

    @property
    def state(self) -> Any:
        """State of the inner optimizer by master weight, without state that is stored in another dtype.

        Raises TypeError if torch.distributed.checkpoint reads it, before learning rates and gradients are changed.
        """
        if sys._getframe(1).f_globals.get("__name__") == "torch.distributed.checkpoint.state_dict":
            raise TypeError(
                "torch.distributed.checkpoint's optimizer helpers need an optimizer over full parameters, but this "
                "one has master weights of a rank's shards; save with core.checkpoint.save_checkpoint, which loads at "
                "any layout, or save each rank's state_dict()"
            )
        return self.optimizer.state

    @property
    def loss_scaler(self) -> LossScaler | None:
        """Loss scaler of the job under Megatron's name, or ``None`` without loss scaling."""
        return self.grad_scaler

    @property
    def is_stub_optimizer(self) -> bool:
        """True if this rank has nothing to update. It must still join every step, because all ranks decide together."""
        return not any(masters.shards for masters in self.masters)

    def get_parameters(self) -> list[torch.nn.Parameter]:
        """Return the master weights that this rank updates. To change weights, write to the model's parameters."""
        return [master for group in self.param_groups for master in group["params"]]

    def get_main_grads_for_grad_norm(self) -> list[torch.Tensor]:
        """Return the gradients in memory that this rank counts in the norm, without pending factors."""
        return list(self.meter.counted_memory)

    @torch.no_grad()
    def get_grad_norm(self) -> float:
        """Return the global norm of reduced gradients, or of the last step's after a step. Collective over the job."""
        return self._stats_or_measure().norm

    @torch.no_grad()
    def get_grad_norms(self) -> dict[str | None, float]:
        """Return the norm per norm group, under ``None`` for ungrouped gradients. Collective over the job."""
        return dict(self._stats_or_measure().norms)

    @torch.no_grad()
    def count_zeros(self) -> int:
        """Count the zeros in the full model's gradients. Collective over the job."""
        return self._stats_or_measure(count_zeros=True).num_zeros or 0

    def _stats_or_measure(self, *, count_zeros: bool = False) -> GradStats:
        # Asks the reducer, as a stage without trained parameters has no buckets: all ranks must measure, or none.
        is_open = any(chunk.reducer.open for chunk in self.model_chunks)
        stats = self._spent if self._spent_of == self._reductions() and not is_open else self._stats
        if stats is not None and not (count_zeros and stats.num_zeros is None):
            return stats
        problem = self._take_gradients()
        scale = 1.0 if self.grad_scaler is None or stats is not None else self.grad_scaler.value
        return self.meter.measure(count_zeros=count_zeros, loss_scale=scale, problem=problem)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Zero all gradients and begin a new step. ``set_to_none`` is ignored: gradients are views of the buffer."""
        self._stats = None
        for chunk in self.model_chunks:
            chunk.zero_grad_buffer()

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the scaled loss, to call backward on. Schedules use it as ``config.grad_scale_func``."""
        return loss if self.grad_scaler is None else scale_loss(loss, self.grad_scaler)

    def get_loss_scale(self) -> torch.Tensor:
        """Return the loss scale as an fp32 tensor of shape [1]. It is 1 without loss scaling."""
        scale = torch.ones(1, device="cpu") if self.grad_scaler is None else self.grad_scaler.scale
        return scale.to(self.meter.device)

    @torch.no_grad()
    def reload_model_params(self) -> None:
        """Copy the model's parameters to the master weights. ``step`` does so for parameters that were changed."""
        for masters in self.masters:
            masters.load_parameters()

    # -- state ------------------------------------------------------------------------------------------------------

    def state_by_parameter(self) -> dict[str, list[Entry]]:
        """Return this rank's state by parameter name, as entries over disjoint elements (see optimizer_state.py)."""
        entries: dict[str, list[Entry]] = {}
        for masters in self.masters:
            masters.copy_user_edits()
            for segment in masters.segments:
                for shard, entry in segment_entries(segment, self.optimizer.state.get(segment.master, {})):
                    entries.setdefault(self.names[id(shard.param)], []).append(entry)
        return entries

    @torch.no_grad()
    def load_state_by_parameter(self, entries: Mapping[str, Any]) -> None:
        """Load masters, moments and counts from entries that cover at least the elements that this rank updates.

        Load the model's weights too, before or after: they replace masters that an entry lacks, or that do not round to
        the weight. Collective if parameters are sharded. Missing parameters or elements raise ValueError before
        anything is changed, and RuntimeError on the other ranks if parameters are sharded.
        """
        parts, failure = {}, None
        try:
            parts = needed_parts(entries, self.masters, self.names)
        except ValueError as error:
            failure = error
        for chunk in self.model_chunks:  # other ranks may still compute with the weights overwritten here
            chunk.engine.params.refuse(failure, "a load")
            chunk.begin_param_update()
        load_parts(parts, self.masters, self.optimizer, self.scratch)
        for chunk in self.model_chunks:
            chunk.record_param_write()

    def state_dict(self) -> dict[str, Any]:
        """Return the param groups, this rank's state by parameter name, and the loss scaler's state."""
        state: dict[str, Any] = {"param_groups": save_groups(self.param_groups), "state": self.state_by_parameter()}
        if self.grad_scaler is not None:
            state["grad_scaler"] = self.grad_scaler.state_dict()
        return state

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore a saved state; see ``load_state_by_parameter``."""
        matching_groups(self.param_groups, state_dict["param_groups"])  # raises before anything is changed
        self.load_state_by_parameter(state_dict["state"])
        load_groups(self.param_groups, state_dict["param_groups"])
        if self.grad_scaler is not None and "grad_scaler" in state_dict:
            self.grad_scaler.load_state_dict(state_dict["grad_scaler"])


class ReplicatedOptimizer(MegatronOptimizer):
    """Optimizer in which every data-parallel rank updates every parameter, from equal gradients."""


class DistributedOptimizer(MegatronOptimizer):
    """Sharded optimizer (ZeRO-1), in which each data-parallel rank keeps and updates 1 / dp of the optimizer state.

    Updated shards are gathered before ``step`` returns, or during it with the wrapper's ``overlap_param_gather``.
    """
