"""Reference: loss and gradients of the global batch on one process that splits nothing."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from core.groups import agree
from core.groups.global_names import namer
from core.moe import TopKRouter, auxiliary_loss_scale
from core.verify.buffers import buffers_of, set_buffers, start_of
from core.verify.gathered import BIAS, cast, load_full_weights, on_tensors, piece_of
from core.verify.job import Job, LossFn, in_full, split_loss
from core.verify.megatron_program import auxiliary_scale, state_of_one_process, with_state
from core.verify.recording import Point, Recorder, dense_parameters, relative_difference
from core.watch.waiting import waiting

ModelFn = Callable[[], nn.Module]
Sent = TypeVar("Sent")


@dataclass(frozen=True)
class Expected:
    """Expected values after one step, on every rank: full tensors on the CPU.

    Attributes:
        loss: Loss of the global batch.
        tokens: Number of tokens; None if the loss is a mean.
        grads: Gradients by name.
        biases: Router biases after this step.
        loss_noise: Absolute error of the loss in the layout's dtype; 0 if that is the reference's dtype.
        noise: Absolute error of each gradient in the layout's dtype; empty if that is the reference's dtype.
        unreached: Parameters that got no gradient at all.
        recomputes: True if a module ran again in backward.
    """

    loss: float
    tokens: float | None
    grads: dict[str, Tensor]
    biases: dict[str, Tensor] = field(default_factory=dict)
    loss_noise: float = 0.0
    noise: dict[str, float] = field(default_factory=dict)
    unreached: tuple[str, ...] = ()
    recomputes: bool = False


@dataclass(frozen=True)
class Recording:
    """Module outputs, and the gradients at them, for one data rank's microbatches in the reference.

    Each tensor comes with its noise: the relative error that the layout's dtype alone causes.

    Attributes:
        outputs: (output, noise) by point.
        gradients: (gradient, noise) by point.
        calls: Number of calls of each module, in the order of forward.
        stale: As in Recorder.
    """

    outputs: dict[Point, tuple[Tensor, float]]
    gradients: dict[Point, tuple[Tensor, float]]
    calls: dict[str, int]
    stale: dict[str, float]


class Reference:
    """Unsplit model on rank 0 with the layout's weights. Every method is collective over the world.

    Auxiliary losses of experts belong to one microbatch of one data rank (or of all data ranks). Models with experts
    therefore run the batch in the same pieces as the layout; other models run it at once.

    Args:
        job: Model and steps of the layout.
        reference_fn: Builds the unsplit model.
        dtype: Dtype of the reference.
        loss_fn: As in check_gradients.
        starts: Buffers that each data rank's microbatches start from; empty dicts for the model's own. By default no
            buffers are restored.
    """

    def __init__(
        self,
        job: Job,
        reference_fn: ModelFn,
        dtype: torch.dtype,
        loss_fn: LossFn,
        starts: Sequence[Mapping[str, Tensor]] = (),
    ) -> None:
        self.config: Any = job.model.chunks[0].config
        self.device = job.model.device
        self.dtype = dtype
        self.loss_fn = loss_fn
        self.per_token = job.per_token
        self.data_ranks = job.groups.size("dp" if job.groups.dp is not None else "dp_cp")
        self.microbatches = job.microbatches
        self.inputs_to = job.inputs_to
        self.scale, self.token_weight = job.scale, job.token_weight
        self.shares: list[float] | None = None  # weight of each piece in the mean of the losses; None for equal ones
        weights = job.model.full_weights()
        self.model: nn.Module | None = None
        self.low: nn.Module | None = None  # copy in the layout's dtypes, if they differ
        self.casts: torch.dtype | None = None  # dtype to which the layout casts weights and inputs
        self.biases: dict[str, Tensor] = {}  # router -> its bias before the last step
        self.starts = starts
        self.writes_buffers: bool | None = None  # if so, microbatches run separately; None until a step has shown it
        self.one_process = state_of_one_process() if dist.get_rank() == 0 else {}
        self._on_rank_zero(lambda: self._build(reference_fn, job, weights))

    @property
    def moves(self) -> bool:
        """True if a step changes the next one's result although no weight is updated."""
        return bool(getattr(self.config, "moe_router_enable_expert_bias", False))

    @property
    def has_auxiliary(self) -> bool:
        """True if auxiliary losses add gradients that are not part of the reported loss."""
        config = self.config
        has = getattr(config, "moe_aux_loss_coeff", 0.0) or getattr(config, "moe_z_loss_coeff", None)
        return bool(has) and getattr(config, "num_moe_experts", None) is not None

    def step(self, batch: Any) -> Expected:
        """Compute loss and gradients of the global batch, and their rounding errors in the layout's dtype."""

        def compute(model: nn.Module) -> Expected:
            expected = self._compute(model, batch, 1.0)
            if self.writes_buffers is None:
                self.writes_buffers = self._has_written(model)
                expected = self._compute(model, batch, 1.0, again=True) if self.writes_buffers else expected
            if self.low is None:
                return expected
            low = self._compute(self.low, batch, 1.0, again=True, tokens=expected.tokens)
            noise = {name: float((low.grads[name].double() - grad).norm()) for name, grad in expected.grads.items()}
            return replace(expected, loss_noise=abs(low.loss - expected.loss), noise=noise)

        return self._shared(compute)

    def again(self, batch: Any, *, auxiliary: float = 1.0) -> Expected:
        """Repeat the last step."""
        return self._shared(lambda model: self._compute(model, batch, auxiliary, again=True))

    def of_microbatches(self, batch: Any, names: Sequence[str], most: int) -> tuple[str, list[list[Tensor]]]:
        """Choose one of these parameters and return each data rank's microbatches' parts of its gradient.

        Args:
            batch: The complete global batch.
            names: Parameters to choose from.
            most: Number of elements. The largest parameter with at most this many is chosen, or else the smallest.

        Returns:
            The parameter's name, and its gradient for each data rank and microbatch.
        """

        def compute(model: nn.Module) -> tuple[str, list[list[Tensor]]]:
            params = dict(model.named_parameters())
            sizes = {name: params[name].numel() for name in names if name in params}
            name = max(sizes, key=lambda name: sizes[name] if sizes[name] <= most else -sizes[name])
            cast_batch, parts, tokens = self._cast(model, batch), [], 0.0
            for number in range(self.data_ranks * self.microbatches):
                self._prepare(model)
                loss, count = self._loss(model, self.piece(cast_batch, number), number)
                loss.backward()
                grad = params[name].grad
                parts.append((torch.zeros_like(params[name]) if grad is None else grad).detach().cpu().clone())
                tokens += count
            divisor = (tokens or 1.0) if self.per_token else len(parts)
            rows = range(0, len(parts), self.microbatches)
            return name, [[part / divisor for part in parts[row : row + self.microbatches]] for row in rows]

        return self._sent(compute, "the microbatches")

    def record(self, batch: Any, mine: int) -> Recording:
        """Record module outputs and gradients for data rank ``mine``'s part of the batch."""
        found: Recording | None = None
        for number in range(self.data_ranks):
            sent = self._sent(partial(self._record, batch=batch, data_rank=number), "the reference's modules")
            found = sent if number == mine else found
        assert found is not None, f"data rank {mine} of {self.data_ranks}"
        return found

    def dense_parameters(self) -> dict[str, frozenset[str]]:
        """Return the parameters below each module of the unsplit model, on every rank."""
        return self._sent(lambda model: dense_parameters(model, lambda name: name), "the reference's modules")

    def gather(self, values: Callable[[nn.Module], dict[str, Tensor]]) -> dict[str, Tensor]:
        """Return tensors of rank 0's model, on every rank."""
        return self._shared(lambda model: Expected(0.0, None, values(model))).grads

    def _build(self, reference_fn: ModelFn, job: Job, weights: dict[str, Tensor]) -> None:
        self.model = _cast(self._full_model(reference_fn, job), self.dtype)
        load_full_weights(self.model, weights)
        if self.starts and not self.starts[0]:
            self.starts = [start_of(self.model)] * self.data_ranks
        self.casts = job.model.computes_in
        if self.casts or any(weights[name].dtype != self.dtype for name, _ in self.model.named_parameters()):
            self.low = _cast(self._full_model(reference_fn, job), job.model.dtype)
            for name, param in self.low.named_parameters():
                param.data = param.data.to(self.casts or weights[name].dtype)
            load_full_weights(self.low, weights)

    def _full_model(self, reference_fn: ModelFn, job: Job) -> nn.Module:
        """Build a new unsplit model; copy it if the function returns the same model every time."""
        model = reference_fn()
        if model is self.model or any(model is chunk.module for chunk in job.model.chunks):
            model = copy.deepcopy(model)
        for param in model.parameters():
            param.grad = None
        return model

    def piece(self, batch: Any, number: int) -> Any:
        """Return one microbatch of the global batch; the first data rank's microbatches come first."""
        return piece_of(batch, self.data_ranks * self.microbatches, number)

    def pieces(self, batch: Any) -> list[Any]:
        """Return the pieces of the global batch that run through the model separately."""
        if getattr(self.config, "num_moe_experts", None) is None and not self.writes_buffers:
            return [batch]
        parts = [self.piece(batch, number) for number in range(self.data_ranks * self.microbatches)]
        if getattr(self.config, "moe_router_load_balancing_type", "") != "global_aux_loss":
            return parts
        return [_joined(parts[number :: self.microbatches]) for number in range(self.microbatches)]

    def _compute(
        self, model: nn.Module, batch: Any, auxiliary: float, *, again: bool = False, tokens: float | None = None
    ) -> Expected:
        """Compute loss and gradients; if ``tokens`` is known, divide losses by it before backward, as most loops do."""
        factor = self.scale / (tokens or 1.0)
        routers = {n: m for n, m in model.named_modules() if getattr(m, BIAS, None) is not None}
        if not again:
            self.biases = {name: getattr(router, BIAS).clone() for name, router in routers.items()}
        self._prepare(model)
        total, counted = 0.0, 0.0
        ran: list[nn.Module] = []  # modules that ran in backward
        pieces = self.pieces(self._cast(model, batch))
        with auxiliary_loss_scale(auxiliary * factor), auxiliary_scale(auxiliary * factor):
            for number, (piece, share) in enumerate(zip(pieces, self.shares or [1.0] * len(pieces), strict=True)):
                loss, count = self._loss(model, piece, number)
                loss = loss * share if share != 1.0 else loss
                handle = register_module_forward_pre_hook(lambda module, _: ran.append(module))
                try:
                    in_full(loss, factor).backward()
                finally:
                    handle.remove()
                total += float(loss.detach())
                counted += count
        divisor = (counted or 1.0) if self.per_token else len(pieces)
        grads = {
            name: (torch.zeros_like(param) if param.grad is None else in_full(param.grad, 1.0 / factor) / divisor).cpu()
            for name, param in model.named_parameters()
            if param.requires_grad
        }
        biases = {f"{name}.{BIAS}": self._moved_bias(router) for name, router in routers.items()}
        return Expected(
            total / divisor,
            counted if self.per_token else None,
            grads,
            biases,
            unreached=tuple(n for n, param in model.named_parameters() if param.requires_grad and param.grad is None),
            recomputes=bool(ran),
        )

    def _loss(self, model: nn.Module, piece: Any, number: int) -> tuple[Tensor, float]:
        """Return loss and number of tokens of a piece, which starts from the buffers of its data rank."""
        if self.starts:
            set_buffers(model, self.starts[number // self.microbatches])
        return split_loss(self.loss_fn(model, piece), self.per_token)

    def _has_written(self, model: nn.Module) -> bool:
        """Return True if a forward has written the buffers that it started from."""
        now = buffers_of(model, {})
        starts = [(now[name], value) for name, value in (self.starts or [{}])[0].items() if name in now]
        return not all(torch.equal(value, start.to(value)) for value, start in starts)

    def _prepare(self, model: nn.Module) -> None:
        """Clear the gradients and restore the routers' biases from before the step."""
        for param in model.parameters():
            param.grad = None
        for name, bias in self.biases.items():
            model.get_submodule(name).get_buffer(BIAS).copy_(bias)

    def _cast(self, model: nn.Module, batch: Any) -> Any:
        """Cast the batch to the reference's dtype, or for the low-precision copy to the layout's."""
        dtype = (self.casts or self.inputs_to) if model is self.low else self.dtype
        return on_tensors(lambda t: cast(t, dtype, t.device), batch)

    def _record(self, model: nn.Module, batch: Any, data_rank: int) -> Recording:
        high = self._recorder(model, batch, data_rank)
        low = high if self.low is None else self._recorder(self.low, batch, data_rank)

        def with_noise(own: dict[Point, Tensor], other: dict[Point, Tensor]) -> dict[Point, tuple[Tensor, float]]:
            return {
                point: (tensor, relative_difference(other[point], tensor))
                for point, tensor in own.items()
                if point in other
            }

        outputs, gradients = with_noise(high.outputs, low.outputs), with_noise(high.gradients, low.gradients)
        return Recording(outputs, gradients, high.calls, high.stale)

    def _recorder(self, model: nn.Module, batch: Any, data_rank: int) -> Recorder:
        """Record the model during one data rank's microbatches."""
        self._prepare(model)
        batch = self._cast(model, batch)
        weight = self.scale * (self.token_weight if self.per_token else 1.0 / self.microbatches)
        first = data_rank * self.microbatches
        loads = _GlobalLoads(model)
        if getattr(self.config, "moe_router_load_balancing_type", "") == "global_aux_loss":
            for number in range(self.data_ranks * self.microbatches):
                with loads.added(number % self.microbatches):
                    self.loss_fn(model, self.piece(batch, number))
        with Recorder() as recorder, auxiliary_loss_scale(weight), auxiliary_scale(weight), loads:
            recorder.in_backward = False
            recorder.add(model, namer(model))
            for number in range(first, first + self.microbatches):
                loads.number = number - first
                loss, _ = self._loss(model, self.piece(batch, number), number)
                with recorder.backward():
                    in_full(loss, weight).backward()
        return recorder

    def _moved_bias(self, router: Any) -> Tensor:
        """Raise the bias of experts with fewer tokens than the mean and lower the others, one by one as by hand."""
        bias, counts = getattr(router, BIAS), router.local_tokens_per_expert
        loads = [int(count) for count in counts]
        for expert, load in enumerate(loads):
            excess = load * len(loads) - sum(loads)
            bias[expert] += self.config.moe_router_bias_update_rate * ((excess < 0) - (excess > 0))
        counts.zero_()
        moved: Tensor = bias.detach().cpu().clone()
        return moved

    def _on_rank_zero(self, act: Callable[[], Any]) -> Any:
        """Run a function on rank 0 and raise its error on every rank, since the others would otherwise wait forever."""
        result, failure = None, None
        if dist.get_rank() == 0:
            try:
                with with_state(self.one_process):
                    result = act()
            except Exception as error:
                failure = error
        failure = agree.gather(failure, None, "the reference")[0]
        if failure is not None:
            raise failure
        return result

    def _sent(self, compute: Callable[[nn.Module], Sent], what: str) -> Sent:
        """Compute a value from rank 0's model and send it to every rank."""
        found: Sent = agree.gather(self._on_rank_zero(lambda: compute(self._built)), None, what)[0]
        return found

    @property
    def _built(self) -> nn.Module:
        assert self.model is not None, "rank 0 has built it"
        return self.model

    def _shared(self, compute: Callable[[nn.Module], Expected]) -> Expected:
        mine: Expected | None = self._on_rank_zero(lambda: compute(self._built))
        answer: Any = None
        if mine is not None:
            answer = replace(mine, grads={})
        rest = agree.gather(answer, None, "the reference")[0]
        return replace(rest, grads=sent_from_rank_zero({} if mine is None else mine.grads, self.device))


def sent_from_rank_zero(values: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Return rank 0's tensors by name, on every rank's CPU. Collective over the world."""
    shapes = {name: (value.shape, value.dtype) for name, value in values.items()}
    sent = {}
    for name, (shape, dtype) in agree.gather(shapes, None, "the reference")[0].items():
        value = values[name] if dist.get_rank() == 0 else torch.empty(shape, dtype=dtype)
        value = value.to(device).contiguous()
        with waiting("the reference's tensors", dist.group.WORLD):
            dist.broadcast(value, src=0)
        sent[name] = value.cpu()
    return sent


class _GlobalLoads:
    """Expert loads summed over all data ranks, by router and microbatch, in place of a single data rank's loads.

    A context manager: inside it, routers of an unsplit model balance these loads, as the layout's routers do. It does
    nothing if no loads were added.
    """

    def __init__(self, model: nn.Module) -> None:
        self.routers = [module for module in model.modules() if isinstance(module, TopKRouter)]
        self.loads: dict[tuple[int, int], Tensor] = {}
        self.number = 0  # index of the microbatch

    @contextmanager
    def added(self, number: int) -> Iterator[None]:
        """Add the loads of one data rank's microbatch that runs inside the context."""

        def add(router: int, counts: Tensor, _: str) -> Tensor:
            self.loads[router, number] = self.loads.get((router, number), 0) + counts
            return counts

        with self._instead(add):
            yield

    @contextmanager
    def _instead(self, total: Callable[[int, Tensor, str], Tensor]) -> Iterator[None]:
        for place, router in enumerate(self.routers):
            object.__setattr__(router, "_total", partial(total, place))
        try:
            yield
        finally:
            for router in self.routers:
                object.__delattr__(router, "_total")

    def __enter__(self) -> None:
        self.until = ExitStack()
        if self.loads:
            self.until.enter_context(self._instead(lambda router, counts, _: self.loads[router, self.number]))

    def __exit__(self, *_: object) -> None:
        self.until.close()


def _joined(parts: list[Any]) -> Any:
    """Concatenate parts of a batch along the first dimension."""
    first = parts[0]
    if isinstance(first, Tensor):
        return torch.cat(parts)
    if isinstance(first, dict):
        return {key: _joined([part[key] for part in parts]) for key in first}
    if isinstance(first, (tuple, list)):
        return type(first)(_joined([part[i] for part in parts]) for i in range(len(first)))
    return first


def _cast(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Cast a model's real tensors; ``Module.to`` would drop the imaginary part of complex ones, such as rotary
    tables.
    """
    return model._apply(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)
