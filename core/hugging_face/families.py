"""The table of families: each configuration class with a plan, made small, split and compared on ranks of its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from core.hugging_face.check import Verdict, check_on_rank, ranks_of
from core.hugging_face.tiny import families, families_with_policy
from core.verify.rank_pool import RankFailure, RankPool


def check_families(
    names: Iterable[str],
    tp: int,
    told: Callable[[Verdict], object] = lambda verdict: None,
    overrides: Mapping[str, Any] | None = None,
    pp: int = 1,
    ep: int = 1,
    sp: str | None = None,
) -> list[Verdict]:
    """The verdicts on families (`family/ConfigClass`), one after another on processes of this machine."""
    verdicts, world = [], ranks_of(tp, pp, ep, sp)
    with RankPool(world) as pool:
        for name in names:
            try:
                arguments = (name, tp, dict(overrides or {}), pp, ep, sp)
                verdict: Verdict = pool.run(_on_rank, world, arguments, limit_s=180.0)
            except RankFailure as error:
                last = str(error).strip().splitlines()[-1]
                verdict = Verdict(name, "wrong", f"it fails while it is trained: {last}")
            told(verdict)
            verdicts.append(verdict)
    return verdicts


def _on_rank(name: str, tp: int, overrides: Mapping[str, Any], pp: int, ep: int, sp: str | None) -> Verdict:
    import warnings

    from core.hugging_face.transformers_plans import transformers_package

    transformers_package().logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    return check_on_rank(name, {**families(), **families_with_policy()}[name], tp, overrides, pp=pp, ep=ep, sp=sp)


def table(verdicts: Iterable[Verdict], tp: int, pp: int = 1, ep: int = 1, sp: str | None = None) -> str:
    """The verdicts as a table in Markdown, with counts: one row a family, reasons in words."""
    verdicts = list(verdicts)
    counts = ", ".join(f"{n} {answer}" for answer, n in Counter(verdict.answer for verdict in verdicts).most_common())
    layout = f"tp {tp}" + "".join(f", {name} {size}" for name, size in (("pp", pp), ("ep", ep)) if size > 1)
    layout += f", {sp}" if sp else ""
    rows = [f"At {layout}: {counts}.", "", "| family | answer | |", "| --- | --- | --- |"]
    for verdict in verdicts:
        total, without = verdict.summed
        summed = f"{total} gradients summed over tp, {without} of them without a rule" if without else ""
        rows.append(f"| `{verdict.name}` | {verdict.answer} | {summed if verdict.answer == 'equal' else verdict.why} |")
    return "\n".join(rows)
