"""MegatronOptimizer: one step from reduced gradients to updated parameters.

    prepare_grads            norm, zeros and finiteness from one reduction over all ranks; the loss scale follows
    clip_grad_norm           one factor: data average x tokens / loss scale x clip coefficient
    step_with_ready_grads    bucket by bucket: inner optimizer over master weights -> parameters' memory -> gather

Where a rank owns all of a bucket or only a shard of it, everything here is the same; the bucket says which.
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
    """Updates the parameters of wrapped model chunks; made by `get_megatron_optimizer`.

    Every rank of the job makes it, and calls `step`, together. To torch's schedulers and to trainers it is a torch
    optimizer: groups, state and defaults are the inner optimizer's own objects, and there are no others.
    """

    _step_supports_amp_scaling = True  # torch's GradScaler calls `step`, which refuses it by name

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
            huge_pages.give_back()  # what was freed while offloaded masters were made
        self.scratch = Scratch(self.masters, config, at_once=self.is_coupled)
        segments = [segment for masters in self.masters for segment in masters.segments]
        for segment in self._listed(segments):
            torch_groups[segment.group]["params"].append(segment.master)
        self.optimizer = self._inner_optimizer(torch_groups, segments)
        self.built_groups = save_groups(self.optimizer.param_groups)  # what differs later, a schedule has written
        self.names = self._qualified_names()
        self.grad_scaler: LossScaler | None = loss_scaler_of(config)
        self._before_first_step()

    def _before_first_step(self) -> None:
        """The meter, and what changes from step to step."""
        self.meter = GradMeter(
            self.masters,
            self.world_groups,
            norm_type=self.config.grad_norm_type,
            watched=self.model_chunks,
            models=self.model_of_buckets(),
        )
        me = weakref.ref(self)
        for chunk in self.model_chunks:
            in_pipeline = chunk.groups.size("pp") > 1
            chunk.reducer.scale_watch = ScaleWatch(lambda: getattr(me(), "grad_scaler", None), in_pipeline=in_pipeline)
        self.steps_skipped = 0
        self.skip_log = SkipLog()
        self.note_step(skipped=False)
        self._scale = 1.0  # of the loss, when the gradients were measured
        self._stats: GradStats | None = None  # of this step's gradients, once they are measured
        self._spent: GradStats | None = None  # of those that the last step was made of
        self._spent_of: list[int] | None = None  # `_reductions` of these
        self._measured_of: list[int] | None = None  # `_reductions` of the measured gradients
        self._limits: list[float] = []  # that this step's norm was asked to be clipped to

    def _scope_of(self, torch_group: dict[str, Any]) -> Scope:
        """Return which gradients one element's update depends on in a group."""
        return update_scope(torch_group["optimizer"])

    def _listed(self, segments: list[Segment]) -> list[Segment]:
        """The segments, in the order in which groups list their masters."""
        return segments

    def _inner_optimizer(self, torch_groups: list[dict[str, Any]], segments: list[Segment]) -> torch.optim.Optimizer:
        """The torch optimizer of these groups, which hold the masters of `segments`."""
        return inner_optimizer(self.config, torch_groups, segments=segments, groups=self.model_chunks[0].groups)

    # -- a step -----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: None = None) -> tuple[bool, float | None, int | None]:
        """Update the parameters from reduced gradients. Collective: every rank of the job.

        Returns (True, global gradient norm before clipping, zeros among the gradients if counted).
        A NaN or Inf anywhere skips the step on all ranks, with a warning that names it: (False, None, None).
        Raises SyncError when `finalize_model_grads` has not made the gradients ready, and on every rank where ranks
        would step with different learning rates, decay or limits. TypeError for a closure.
        """
        if closure is not None:
            raise TypeError("step() takes no closure: its backward would come after the gradients were reduced")
        if "found_inf" in vars(self):  # where torch's GradScaler says what it has found
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
        """Measure the gradients, and let the loss scale follow. True if a gradient of any rank is not finite.

        Collective: every rank of the job, once a step.
        """
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
        """Divide reduced gradients by a scale of the loss, in memory, and measure them; for `GradScaler`.

        True if a gradient of any rank is not finite. Collective: every rank of the job, once a step.
        """
        self._take_gradients()  # raises where they are not reduced
        for chunk in self.model_chunks:
            chunk.scale_gradients(1.0 / scale)
        for masters in self.masters:
            masters.bucket.attach()  # what was written here is no edit of the user's
        return self.prepare_grads()

    def _named(self) -> calling:
        return calling("optimizer.step", self.model_chunks[0].reducer.steps)

    def _settings(self) -> Settings:
        others = {name: getattr(self.config, name) for name in ("clip_grad", "grad_norm_skip_threshold")}
        return settings_of(self.param_groups, {**others, "loss_scale": self._scale})

    def clip_grad_norm(self, clip_grad: float) -> float:
        """Have the step scale gradients to a norm of `clip_grad` at most; 0 for no limit. Returns the norm before it.

        Gradients of a norm group are scaled by that group's norm. Memory is not touched: the step reads it once. Of
        several limits, OptimizerConfig.clip_grad among them, the lowest counts.
        """
        self._limits.append(clip_grad)
        return self._measured().norm

    @torch.no_grad()
    def step_with_ready_grads(self) -> bool:
        """Update masters and parameters from measured gradients; True. Call it after prepare_grads."""
        self._spent, self._spent_of, self._stats = self._measured(), self._reductions(), None
        problem = self._take_gradients()
        if problem is not None:
            raise SyncError(f"rank {dist.get_rank()}: {problem}")
        factors = self._factors(self._spent)
        with attributes_alone():
            loss_scale = 1.0 if self.grad_scaler is None else self.grad_scaler.value  # of the next step
            for masters, factor in zip(self.masters, factors, strict=True):
                masters.follow_freezing(self.optimizer)
                masters.take_over_edits()
                masters.note_spent(factor, loss_scale)
        with self._named():
            self._update(InnerStep(self.optimizer, at_once=self.is_coupled), factors)
        self.note_step(skipped=False)
        self.skip_log.made(self._scale)
        return True

    def _update(self, step: InnerStep, factors: Sequence[Factors]) -> None:
        """Step every bucket, and gather what other ranks have updated."""
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
        """For each bucket and norm group the one number that its memory is multiplied by."""
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
        self.note_step(skipped=True)
        self._stats = None
        if dist.get_rank() == 0:
            threshold = self.config.grad_norm_skip_threshold
            reason = stats.culprit or f"gradient norm {stats.norm:.4g}, grad_norm_skip_threshold {threshold:.4g}"
            self.skip_log.skipped(reason, self.grad_scaler, self._scale)

    def note_step(self, *, skipped: bool) -> None:
        """Leave word of the last step for schedulers, which hold this optimizer or the torch optimizer in it."""
        inner: Any = self.optimizer
        self.step_was_skipped = inner.step_was_skipped = skipped

    def model_of_buckets(self) -> list[Hashable]:
        """For each bucket the number of its model: the chunks of a virtual pipeline are one, others are not."""
        models = zip(models_of(self.model_chunks), self.model_chunks, strict=True)
        return [model for model, chunk in models for _ in buckets_of([chunk])]

    def _qualified_names(self) -> dict[int, str]:
        """id(parameter) -> its name, with the chunk's number before it where there are several chunks."""
        several = len(self.model_chunks) > 1
        return {
            id(param): f"model{number}.{contract.name}" if several else contract.name
            for number, param, contract in params_of(self.model_chunks)
        }

    def _reductions(self) -> list[int]:
        """Counts that distinguish these gradients from earlier ones; finalized steps for a stage without parameters."""
        steps = [chunk.reducer.steps for chunk in self.model_chunks]
        return steps + [masters.bucket.reductions for masters in self.masters]

    def _take_gradients(self) -> str | None:
        """Take over edits of `.grad`; one that cannot be followed, in words. Raises SyncError if a reduction is due."""
        for masters in self.masters:
            bucket = masters.bucket
            if bucket.owed is not None:
                raise SyncError(
                    f"rank {dist.get_rank()}: an optimizer has made a step of the gradients of "
                    f"{bucket.layout.describe()} already, which may have multiplied them by its factor; a second step "
                    "would do so again. Run zero_grad, backward and finalize_model_grads before the next one"
                )
            rules_due = any(contract.rules for contract in bucket.contracts) or bucket.accumulated_shard is not None
            whole = bucket.state is BucketState.REDUCED and not rules_due
            if bucket.state is not BucketState.FINAL and not whole:
                raise SyncError(
                    f"rank {dist.get_rank()}: optimizer.step() came while {bucket.layout.describe()} was "
                    f"{bucket.state.value}; its gradients are not reduced. Call finalize_model_grads([model]) "
                    "after the last backward and before step()"
                )
        problems = [chunk.engine.tier.failure for chunk in self.model_chunks if chunk.engine.tier is not None]
        with attributes_alone():
            problems += [masters.bucket.follow_edits() for masters in self.masters]
        return next((problem for problem in problems if problem is not None), None)

    # -- what users of Megatron call --------------------------------------------------------------------------------

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The inner optimizer's groups; a scheduler may set 'lr' and 'weight_decay'."""
        groups: list[dict[str, Any]] = self.optimizer.param_groups
        return groups

    @property
    def defaults(self) -> dict[str, Any]:
        """The inner optimizer's."""
        defaults: dict[str, Any] = self.optimizer.defaults
        return defaults

    def add_param_group(self, param_group: Any) -> None:
        """Refused: parameters have their place in buffers by now."""
        raise RuntimeError(
            "parameters cannot be added to an optimizer whose buffers are laid out; make the model with all of its "
            "parameters, wrap it, and call get_megatron_optimizer again"
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_optimizer_"):  # where torch keeps the functions that its register_..._hook are given
            raise AttributeError(
                f"{type(self).__name__} calls no hooks of torch.optim.Optimizer; do it before or after step() and "
                "state_dict() in the loop, or register it on `.optimizer`, whose step() runs for each bucket"
            )
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("an optimizer is bound to its model's buffers and cannot be copied; save its state_dict()")

    @property
    def state(self) -> Any:
        """The inner optimizer's state by master weight. What is kept in another dtype is in it only during a step.

        Raises TypeError where torch.distributed.checkpoint asks, before it changes learning rates and gradients.
        """
        if sys._getframe(1).f_globals.get("__name__") == "torch.distributed.checkpoint.state_dict":
            raise TypeError(
                "torch.distributed.checkpoint's helpers for optimizers take one that lists whole parameters, and this "
                "one lists the master weights of a rank's shards; save with core.checkpoint.save_checkpoint, which any "
                "layout can load, or each rank's state_dict()"
            )
        return self.optimizer.state

    @property
    def loss_scaler(self) -> LossScaler | None:
        """The same object as `grad_scaler`, Megatron's name; one for the whole job, None without loss scaling."""
        return self.grad_scaler

    @property
    def is_stub_optimizer(self) -> bool:
        """True if this rank has nothing to update. It takes part in every step all the same: all ranks decide."""
        return not any(masters.shards for masters in self.masters)

    def get_parameters(self) -> list[torch.nn.Parameter]:
        """The master weights that this rank updates. To change weights write to the model's parameters."""
        return [master for group in self.param_groups for master in group["params"]]

    def get_main_grads_for_grad_norm(self) -> list[torch.Tensor]:
        """The gradients that this rank counts in the norm, as they lie in memory: without what is still due."""
        return list(self.meter.counted_memory)

    @torch.no_grad()
    def get_grad_norm(self) -> float:
        """The global norm of reduced gradients; after a step, of those it was made of. Collective: every rank."""
        return self._stats_or_measure().norm

    @torch.no_grad()
    def get_grad_norms(self) -> dict[str | None, float]:
        """The norm of each norm group, None for the gradients that are in none. Collective: every rank of the job."""
        return dict(self._stats_or_measure().norms)

    @torch.no_grad()
    def count_zeros(self) -> int:
        """Zeros among the gradients of the whole model. Collective: every rank of the job."""
        return self._stats_or_measure(count_zeros=True).num_zeros or 0

    def _stats_or_measure(self, *, count_zeros: bool = False) -> GradStats:
        # Not by buckets, of which a stage that trains nothing has none: all ranks must measure, or none.
        is_open = any(chunk.reducer.open for chunk in self.model_chunks)
        stats = self._spent if self._spent_of == self._reductions() and not is_open else self._stats
        if stats is not None and not (count_zeros and stats.num_zeros is None):
            return stats
        problem = self._take_gradients()
        scale = 1.0 if self.grad_scaler is None or stats is not None else self.grad_scaler.value
        return self.meter.measure(count_zeros=count_zeros, loss_scale=scale, problem=problem)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Zero all gradients and begin a new step. They stay views of the buffer for any `set_to_none`."""
        self._stats = None
        for chunk in self.model_chunks:
            chunk.zero_grad_buffer()

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss to call backward on. Schedules take it as `config.grad_scale_func = optimizer.scale_loss`."""
        return loss if self.grad_scaler is None else scale_loss(loss, self.grad_scaler)

    def get_loss_scale(self) -> torch.Tensor:
        """The factor in `scale_loss`, [1] in fp32; 1 without loss scaling."""
        scale = torch.ones(1, device="cpu") if self.grad_scaler is None else self.grad_scaler.scale
        return scale.to(self.meter.device)

    @torch.no_grad()
    def reload_model_params(self) -> None:
        """Take master weights from the model's parameters, all digits. A step takes over those that were changed."""
        for masters in self.masters:
            masters.load_parameters()

    # -- state ------------------------------------------------------------------------------------------------------

    def state_by_parameter(self) -> dict[str, list[Entry]]:
        """This rank's part of the state by parameter name: entries over disjoint elements (see optimizer_state.py)."""
        entries: dict[str, list[Entry]] = {}
        for masters in self.masters:
            masters.take_over_edits()
            for segment in masters.segments:
                for shard, entry in segment_entries(segment, self.optimizer.state.get(segment.master, {})):
                    entries.setdefault(self.names[id(shard.param)], []).append(entry)
        return entries

    @torch.no_grad()
    def load_state_by_parameter(self, entries: Mapping[str, Any]) -> None:
        """Take over masters, moments and counts that cover at least what this rank updates.

        Load the model's weights too, before or after: they are the masters in full precision, and where an entry has
        none or one that does not round to the weight. Collective where parameters are sharded.
        Raises ValueError, before anything is changed, when a parameter or elements that this rank needs are missing;
        where parameters are sharded the other ranks then raise RuntimeError.
        """
        parts, failure = {}, None
        try:
            parts = needed_parts(entries, self.masters, self.names)
        except ValueError as error:
            failure = error
        for chunk in self.model_chunks:  # other ranks may still compute with the weights that are written here
            chunk.engine.params.refuse(failure, "a load")
            chunk.begin_param_update()
        load_parts(parts, self.masters, self.optimizer, self.scratch)
        for chunk in self.model_chunks:
            chunk.note_param_write()

    def state_dict(self) -> dict[str, Any]:
        """The param groups, this rank's part of the state by parameter name, and the loss scaler's numbers."""
        state: dict[str, Any] = {"param_groups": save_groups(self.param_groups), "state": self.state_by_parameter()}
        if self.grad_scaler is not None:
            state["grad_scaler"] = self.grad_scaler.state_dict()
        return state

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a saved state; see load_state_by_parameter."""
        matching_groups(self.param_groups, state_dict["param_groups"])  # raises before anything is changed
        self.load_state_by_parameter(state_dict["state"])
        load_groups(self.param_groups, state_dict["param_groups"])
        if self.grad_scaler is not None and "grad_scaler" in state_dict:
            self.grad_scaler.load_state_dict(state_dict["grad_scaler"])


class ReplicatedOptimizer(MegatronOptimizer):
    """Every rank of a data group updates every parameter, from equal gradients to equal parameters."""


class DistributedOptimizer(MegatronOptimizer):
    """The sharded optimizer (ZeRO-1): state for 1 / data ranks of the parameters; updated shards are gathered.

    Every bucket is gathered once a step, and all are complete when `step` returns. With the wrapper's
    `overlap_param_gather` or the optimizer's `overlap_param_gather_with_optimizer_step` a bucket's gather starts
    once it is updated, while the next one is being stepped.
    """
