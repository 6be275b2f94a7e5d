"""HybridParallelCheckpointIO: files with the full model for any layout, from which each rank reads its slices."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from core.booster.checkpoint_io.checks import check_names, check_shapes, expect_model
from core.booster.checkpoint_io.low_level_zero_checkpoint_io import LowLevelZeroCheckpointIO, values_of
from core.booster.checkpoint_io.sharded_states import of_all_stages
from core.checkpoint.weights.one_file import SAFE_SUFFIX, in_turn
from core.checkpoint.weights.sliced import FileTensor, SlicedFile
from core.hugging_face.checkpoint import read_slices
from core.hugging_face.cut_model import CutModel
from core.hugging_face.lora import is_of_adapter, name_in_base
from core.hugging_face.read.plan import without_adapters

if TYPE_CHECKING:
    from core.booster.plugin.hybrid_parallel_model import HybridParallelModel


class HybridParallelCheckpointIO(LowLevelZeroCheckpointIO):
    """Checkpoints of models that are split over tensor-parallel ranks and pipeline stages.

    Tensors are gathered one at a time, over tensor-parallel ranks and then over stages, and rank 0 writes. A file
    written in one layout loads in any other, under the other plugins, and in transformers. A rank reads only its own
    slices of safetensors files; it reads other formats one file at a time.
    """

    def full_module(self, model: HybridParallelModel) -> nn.Module:
        return model.cut.shell

    def tied_names(self, model: nn.Module) -> dict[tuple[str, ...], torch.dtype]:
        """Return the dtypes of tied parameters, keyed by their names with adapters and without."""
        own = super().tied_names(model)
        return own | {tuple(name_in_base(name) for name in names): dtype for names, dtype in own.items()}

    def model_tensors(self, model: HybridParallelModel) -> Iterator[tuple[str, Any]]:
        """Yield each tensor of the full model. A tied tensor is the same object under all of its names."""
        model.expect_values()
        cut = model.cut
        seen: set[str] = set()

        def mine() -> Iterator[tuple[str, torch.Tensor]]:
            for chunk, part in zip(model.chunks, cut.parts, strict=True):
                for name, value in part.state_dict(keep_vars=True).items():
                    if name not in seen:
                        seen.update(cut.names_of(name))
                        yield name, cut.whole_of(name, values_of(chunk, value))

        given: set[str] = set()
        for name, value in of_all_stages(mine(), cut.groups.pp):
            for same in cut.names_of(name) if name not in given else ():
                given.add(same)
                yield same, value

    def read_file(self, path: Path) -> Mapping[str, Any]:
        """Return the tensors of a file. Tensors of a safetensors file are read on access."""
        if path.suffix != SAFE_SUFFIX:
            return super().read_file(path)
        return SlicedFile(path, verify=in_turn(path, dist.get_rank(), dist.get_world_size()))

    def _load(self, model: Any, readers: Iterable[Callable[[], Any]], names: set[str] | None, strict: bool) -> None:
        expect_model(model, "load_model")
        with model.loading():  # all ranks enter, and an error of one is raised on all at exit
            self._read(model, readers, names, strict)
        model.update_master_params()

    @torch.no_grad()
    def _read(
        self, model: HybridParallelModel, readers: Iterable[Callable[[], Any]], names: set[str] | None, strict: bool
    ) -> None:
        """Copy this rank's slices from files, one file or one tensor at a time."""
        cut = model.cut
        whole = cut.shell.state_dict(keep_vars=True)
        read: list[int] = []
        named: Callable[[str], str] = str
        for reader in readers:
            content: Mapping[str, Any] = reader()
            names = set(content) if names is None else names
            if cut.adapters is not None and not names & whole.keys():  # the file has the model without adapters
                whole = {name_in_base(name): value for name, value in whole.items() if not is_of_adapter(name)}
                named = name_in_base
            if isinstance(content, SlicedFile) and (content.path.parent / "config.json").is_file():
                known = names <= whole.keys()
                if not known or any(value.shape != whole[name].shape for name, value in content.items()):
                    converted = self._read_converted(model, content.path.parent, strict, read)
                    names = set(whole) if strict else converted
                    break
            check_names(whole, names, strict)
            check_shapes(whole, content)
            for part in cut.parts:
                for name, own in part.state_dict(keep_vars=True).items():
                    if named is name_in_base and is_of_adapter(name):
                        continue
                    same = (named(each) for each in cut.names_of(name))
                    found = next((content[each] for each in same if each in content), None)
                    if found is not None:
                        own.copy_(_part_of(found, name, cut, read))
        # Names that are not here belong to other stages, and all ranks have read the same names.
        found_in = names or set()
        cut.unread.difference_update(
            [name for name in cut.unread if any(named(each) in found_in for each in cut.names_of(name))]
        )
        model.bytes_read = sum(read)

    def _read_converted(self, model: HybridParallelModel, directory: Path, strict: bool, read: list[int]) -> set[str]:
        """Read a directory whose tensors are named or stacked differently from the model's.

        The number of bytes read is appended to ``read``. Return the names in the model that have values, including
        other stages' names.
        """
        cut = model.cut
        base = without_adapters(cut.shell)
        stages = [None] if cut.layout is None else cut.layout.stages_of(cut.groups.rank("pp"))
        names: set[str] = set()
        tied = self.tied_names(model)
        multiple = max((split.multiple for split in cut.splits.values()), default=1)  # a vocabulary's padding
        for part, stage in zip(cut.parts, stages, strict=True):
            found, stored, count = read_slices(
                *(directory, type(base), cut.policy, cut.layout, stage, cut.groups, tied),
                vocabulary_multiple=multiple,
                strict=strict,
                config=base.config,  # the directory's config may describe a larger or smaller model
                dtype=base.dtype,
            )
            for name, own in part.state_dict(keep_vars=True).items():
                plain_name = name_in_base(name) if cut.adapters is not None else name
                if plain_name in found and not is_of_adapter(name):
                    own.copy_(found[plain_name])
            names |= stored
            read.append(count)
        return names


def _part_of(found: Any, name: str, cut: CutModel, read: list[int]) -> torch.Tensor:
    """Return this rank's slice of a tensor in memory or in a file, and append the number of bytes read to ``read``."""
    if isinstance(found, FileTensor):
        split = cut.split_of(name)
        return found.part(() if split is None else split.cuts, cut.groups, read)
    read.append(found.numel() * found.element_size())
    return cut.slice_of(name, found)
