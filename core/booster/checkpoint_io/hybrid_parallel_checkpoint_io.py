"""HybridParallelCheckpointIO: files hold the whole model in any layout; each rank takes its slices of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from core.booster.checkpoint_io.checkpoint_io_base import expect_model
from core.booster.checkpoint_io.general_checkpoint_io import States, check_names, check_shapes
from core.booster.checkpoint_io.low_level_zero_checkpoint_io import LowLevelZeroCheckpointIO
from core.checkpoint.weights.one_file import SAFE_SUFFIX, in_turn
from core.checkpoint.weights.sliced import FileTensor, SlicedFile
from core.distributed import DistributedDataParallel

if TYPE_CHECKING:
    from core.booster.plugin.hybrid_parallel_model import HybridParallelModel
    from core.booster.plugin.hybrid_parallel_optimizer import HybridParallelOptimizer


class HybridParallelCheckpointIO(LowLevelZeroCheckpointIO):
    """Tensors are put together one at a time, over tensor-parallel ranks and then over stages; rank 0 writes.

    A file that was written in one layout loads in any other, in the other plugins, and in transformers. Of safetensors
    files a rank reads its own slices; of others it has one file at a time.
    """

    def whole_module(self, model: HybridParallelModel) -> nn.Module:
        """The whole model without memory."""
        return model.whole.shell

    def tied_names(self, model: nn.Module) -> dict[tuple[str, ...], torch.dtype]:
        """As they are, and as the model without adapters has them."""
        from core.booster.plugin.hybrid_parallel_parts import name_in_base

        own = super().tied_names(model)
        return own | {tuple(name_in_base(name) for name in names): dtype for names, dtype in own.items()}

    def values_of(self, model: nn.Module, tensor: torch.Tensor) -> torch.Tensor:
        """The values of a tensor of a wrapped stage; a copy where parameters are sharded. Collective then."""
        if not (isinstance(model, DistributedDataParallel) and model.ddp_config.shards_parameters):
            return tensor.detach()
        with model.reading():
            return tensor.detach().clone()

    def model_tensors(self, model: HybridParallelModel) -> Iterator[tuple[str, Any]]:
        """Each tensor of the whole model; a tied one is one tensor under all of its names."""
        from core.booster.plugin.hybrid_parallel_optimizer import of_all_stages
        from core.hugging_face.slices import whole_of

        model.expect_values()
        groups = model.groups
        seen: set[str] = set()

        def mine() -> Iterator[tuple[str, torch.Tensor]]:
            for chunk, part in zip(model.chunks, model.parts(), strict=True):
                for name, value in part.state_dict(keep_vars=True).items():
                    if name not in seen:
                        seen.update(model.whole.tied.get(name, (name,)))
                        own = self.values_of(chunk, value)
                        yield name, whole_of(own, model.whole.splits.get(name), groups).cpu()

        given: set[str] = set()
        for name, value in of_all_stages(mine(), groups.pp):
            for same in model.whole.tied.get(name, (name,)) if name not in given else ():
                given.add(same)
                yield same, value

    def read_file(self, path: Path) -> Mapping[str, Any]:
        """The tensors of a file: of a safetensors file those that are asked for."""
        if path.suffix != SAFE_SUFFIX:
            return super().read_file(path)
        return SlicedFile(path, verify=in_turn(path, dist.get_rank(), dist.get_world_size()))

    def _load(self, model: Any, readers: Iterable[Callable[[], Any]], names: set[str] | None, strict: bool) -> None:
        expect_model(model, "load_model")
        with ExitStack() as loading:  # all ranks come here, and learn of an error of one when they leave
            for chunk in model.chunks:
                if isinstance(chunk, DistributedDataParallel):
                    loading.enter_context(chunk.engine.params.loading())
            self._read(model, readers, names, strict)
        model.update_master_params()

    @torch.no_grad()
    def _read(
        self, model: HybridParallelModel, readers: Iterable[Callable[[], Any]], names: set[str] | None, strict: bool
    ) -> None:
        """Copy what files hold of this rank's slices, one file or one tensor at a time."""
        from core.booster.plugin.hybrid_parallel_parts import name_in_base

        whole = model.whole.shell.state_dict(keep_vars=True)
        read: list[int] = []
        named: Callable[[str], str] = str
        for reader in readers:
            content: Mapping[str, Any] = reader()
            names = set(content) if names is None else names
            if hasattr(model.whole.shell, "peft_config") and not names & whole.keys():  # of the model without adapters
                whole = {name_in_base(name): value for name, value in whole.items() if "lora_" not in name}
                named = name_in_base
            if isinstance(content, SlicedFile) and (content.path.parent / "config.json").is_file():
                known = names <= whole.keys()
                if not known or any(value.shape != whole[name].shape for name, value in content.items()):
                    self._read_converted(model, content.path.parent)
                    return
            check_names(whole, names, strict)
            check_shapes(whole, content)
            for part in model.parts():
                for name, own in part.state_dict(keep_vars=True).items():
                    same = (named(each) for each in model.whole.tied.get(name, (name,)))
                    found = next((content[each] for each in same if each in content), None)
                    if found is not None:
                        own.copy_(_part_of(found, model.whole.splits.get(name), model, read))
        # Other stages have what is not here, and all ranks have read the same names.
        ties = ((name, model.whole.tied.get(name, (name,))) for name in model.whole.shell.state_dict())
        model.unread.difference_update(n for n, same in ties if any(named(each) in (names or ()) for each in same))
        model.bytes_read = sum(read)

    def _read_converted(self, model: HybridParallelModel, directory: Path) -> None:
        """Read a directory that names or stacks its tensors in another way than the model does."""
        from core.booster.plugin.hybrid_parallel_parts import name_in_base
        from core.hugging_face.checkpoint import read_slices

        shell: Any = model.whole.shell
        adapted = hasattr(shell, "peft_config")
        base = shell.get_base_model() if adapted else shell
        stages = [None] if model.layout is None else model.layout.stages_of(model.groups.rank("pp"))
        model.bytes_read = 0
        tied = self.tied_names(model)
        multiple = max((split.multiple for split in model.whole.splits.values()), default=1)  # of a vocabulary
        for part, stage in zip(model.parts(), stages, strict=True):
            found, count = read_slices(
                *(directory, type(base), model.whole.policy, model.layout, stage, model.groups, tied),
                vocabulary_multiple=multiple,
                dtype=base.dtype,
            )
            for name, own in part.state_dict(keep_vars=True).items():
                plain_name = name_in_base(name) if adapted else name
                if plain_name in found:
                    own.copy_(found[plain_name])
            model.bytes_read += count
        model.unread.clear()

    def optimizer_groups(self, optimizer: HybridParallelOptimizer) -> list[dict[str, Any]]:  # type: ignore[override]
        """The user's groups, with the whole model's numbers and names."""
        return optimizer.packed_groups()

    def optimizer_states(  # type: ignore[override]
        self, optimizer: HybridParallelOptimizer
    ) -> Iterator[tuple[int, dict[str, Any]]]:
        """Each parameter's state, gathered."""
        yield from optimizer.whole_states()

    def place_state(  # type: ignore[override]
        self, optimizer: HybridParallelOptimizer, number: int, state: dict[str, Any]
    ) -> dict[str, Any]:
        """This rank's part of a parameter's state."""
        return optimizer.place(number, state)

    def load_optimizer_states(  # type: ignore[override]
        self, optimizer: HybridParallelOptimizer, groups: list[dict[str, Any]], states: States
    ) -> None:
        """Take over groups, and parts that `place_state` has given."""
        optimizer.load_states(groups, states)


def _part_of(found: Any, split: Any, model: HybridParallelModel, read: list[int]) -> torch.Tensor:
    """This rank's slice of a tensor that is in memory, or in a file. read: gets the bytes that were read."""
    from core.hugging_face.slices import slice_of

    if isinstance(found, FileTensor):
        return found.part(() if split is None else split.cuts, model.groups, read)
    read.append(found.numel() * found.element_size())
    return slice_of(found, split, model.groups)
