"""Layout: how a model's training is split over ranks, and the tables of layouts that the oracle runs. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Layout:
    """One row of the table. Everything has the default of a plain run on one process.

    sp: sequence parallelism. bucket_size: elements, None for the default. microbatches: backwards a step.
    instances: distributed optimizer instances. per_token: the loss is a sum, with another number of tokens on every
    rank (none on some), divided by all of them at the end. average: the collective divides. fusion: linear layers write
    their weight gradients into the buffer. recompute: layers are computed again in backward. deterministic: reductions
    add in rank order. model: 'classic' (learned positions, GELU, LayerNorm, tied embedding) or 'modern' (rotary,
    SwiGLU, RMSNorm, grouped queries, q/k norm, untied).

    A further axis is a field here, a size in `world`, and what `core.verify.gpt` makes of it.
    """

    dp: int = 1
    tp: int = 1
    sp: bool = False
    strategy: str = "no_shard"
    overlap: bool = False
    bucket_size: int | None = None
    microbatches: int = 1
    instances: int = 1
    per_token: bool = False
    average: bool = False
    fusion: bool = False
    recompute: bool = False
    deterministic: bool = False
    model: str = "classic"

    @property
    def world(self) -> int:
        """The number of ranks."""
        return self.dp * self.tp

    @property
    def family(self) -> Layout | None:
        """In deterministic mode layouts of one family give the same bits; None outside of that mode.

        Of such layouts only strategy, overlap and bucket size differ.
        """
        if not self.deterministic:
            return None
        return replace(self, strategy="no_shard", overlap=False, bucket_size=None)

    def __str__(self) -> str:
        words = [f"dp{self.dp}", f"tp{self.tp}{'+sp' if self.sp else ''}", self.strategy]
        words += ["overlap"] if self.overlap else []
        words += [f"bucket {self.bucket_size}"] if self.bucket_size else []
        words += [f"{self.microbatches} microbatches"] if self.microbatches > 1 else []
        words += [f"{self.instances} instances"] if self.instances > 1 else []
        flags = ("per_token", "average", "fusion", "recompute", "deterministic")
        words += [flag.replace("_", " ") for flag in flags if getattr(self, flag)]
        words += [self.model] if self.model != "classic" else []
        return " ".join(words)


BASES = (
    Layout(),
    Layout(dp=2),
    Layout(dp=3),
    Layout(dp=4),
    Layout(tp=2),
    Layout(tp=2, sp=True),
    Layout(dp=2, tp=2),
    Layout(dp=2, tp=2, sp=True),
    Layout(tp=4, sp=True),
    Layout(dp=3, tp=2, sp=True),
    Layout(dp=8),
    Layout(dp=4, tp=2, sp=True),
    Layout(dp=2, tp=4, sp=True),
    Layout(tp=8, sp=True),
)


def _variants(base: Layout) -> Iterator[Layout]:
    """What is tried on each pair of data and tensor parallel sizes."""
    yield base
    deterministic = replace(base, deterministic=True, microbatches=2)
    yield deterministic
    yield replace(deterministic, overlap=True, bucket_size=2000)
    yield replace(deterministic, strategy="optim", bucket_size=2000)
    yield replace(deterministic, strategy="optim", overlap=True, bucket_size=500)
    yield replace(base, strategy="optim", overlap=True, bucket_size=1, microbatches=3, per_token=True)
    yield replace(base, overlap=True, microbatches=3, average=True, bucket_size=700)
    if base.tp <= 4:
        yield replace(base, model="modern", strategy="optim", overlap=True, fusion=True, bucket_size=1000)
        yield replace(base, model="modern", per_token=True, recompute=True, microbatches=2)
    if base.dp % 2 == 0:
        instances = replace(base, strategy="optim", instances=2, overlap=True, bucket_size=900)
        yield instances
        yield replace(instances, overlap=False, per_token=True, microbatches=3)


FULL = tuple(layout for base in BASES for layout in _variants(base))
QUICK = (
    Layout(),
    Layout(dp=2, overlap=True, bucket_size=700, microbatches=2),
    Layout(dp=3, strategy="optim", per_token=True, microbatches=2),
    Layout(dp=4, strategy="optim", instances=2, overlap=True, bucket_size=500),
    Layout(dp=4, average=True, overlap=True),
    Layout(tp=2),
    Layout(dp=2, tp=2, sp=True, deterministic=True, microbatches=2),
    Layout(dp=2, tp=2, sp=True, deterministic=True, microbatches=2, strategy="optim", overlap=True, bucket_size=500),
    Layout(dp=2, tp=2, sp=True, per_token=True, strategy="optim", overlap=True, bucket_size=900, model="modern"),
    Layout(tp=4, sp=True, fusion=True, recompute=True),
    Layout(dp=4, tp=2, sp=True, strategy="optim", overlap=True, bucket_size=2000),
)
TABLES = {"quick": QUICK, "full": FULL}
