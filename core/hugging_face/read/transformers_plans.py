"""Reader of Transformers' tensor- and expert-parallel rules. Supports a range of versions; no other file reads them.

A model has ``tp_plan``: name of a module or parameter (with ``*`` for a number) -> style. It already merges the rules
of the model's config and of its children.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from torch import nn

from core.hugging_face.read.plan import PADDED, Plan, PlanError, Seam, Split, Style, cut_of, family_of, style_of
from core.hugging_face.read.policies import Policy, longest_fit, policy_of

VERSIONS = ((5, 23), (5, 25))  # first supported, first unsupported; styles may change between versions
# Attributes of attention modules and configs that count the heads of a projection's output.
KEY_VALUE_HEADS = ("num_key_value_heads", "num_kv_heads", "num_attention_heads", "num_heads")
QUERY_HEADS = ("num_attention_heads", "num_heads", "n_heads")
PROJECTIONS = {
    **dict.fromkeys(("k_proj", "v_proj"), KEY_VALUE_HEADS),
    **dict.fromkeys(("q_proj", "q_b_proj", "kv_b_proj", "query_key_value"), QUERY_HEADS),
    **dict.fromkeys(("query", "key", "value", "q", "k", "v"), QUERY_HEADS),
}
EXPERTS, EXPERT_WEIGHT = "ep_dispatch_experts", "grouped_gemm"  # expert-parallel styles of modules and of parameters
TIED_STYLES = ("embedding_rowwise", "colwise_gather_output")  # styles of tied input and output embeddings
# Rules that are wrong or missing in these versions, found by `check`: model type -> end of a module's or parameter's
# name -> style. Inkling's fused expert weight holds gate and up one after the other, so each block is cut separately.
CORRECTIONS: dict[str, dict[str, str]] = {
    **dict.fromkeys(
        ("inkling_text", "inkling2_text", "inkling2_loop_text"), {"mlp.experts.gate_up_proj": "packed_colwise"}
    ),
}


def transformers_package() -> ModuleType:
    """Import and return transformers.

    Raises ImportError, naming the extra, if it is not installed, and PlanError if the version is not supported.
    """
    try:
        import transformers
    except ImportError as error:
        raise ImportError(
            "Hugging Face models need transformers; install the extra: pip install 'gradient-core[transformers]'"
        ) from error
    check_version(transformers.__version__)
    return transformers


def checkpoint_each_layer(model: Any) -> None:
    """Turn on transformers' gradient checkpointing in every layer. Raises ValueError if the family does not
    support it.
    """
    newer = getattr(model, "activation_checkpointing_enable", None)  # if both exist, the older name warns
    (newer or model.gradient_checkpointing_enable)({"use_reentrant": False})


@contextmanager
def peft_by_old_names() -> Iterator[None]:
    """Ignore transformers' warning about the old name by which peft (0.21) reads a model, within a block.

    It appeared on every rank, and a user cannot avoid it. All other warnings pass.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
        yield


def check_version(version: str) -> None:
    """Raise PlanError if plans of this version are not supported (``VERSIONS``)."""
    first, after = VERSIONS
    if not first <= tuple(int(part) for part in re.findall(r"\d+", version)[:2]) < after:
        raise PlanError(
            f"transformers {version}: its parallel plans are read for versions from {'.'.join(map(str, first))} and "
            f"before {'.'.join(map(str, after))}, because styles change their meaning between versions. Install one of "
            "these: pip install 'gradient-core[transformers]'"
        )


def read_plan(model: Any, policy: Policy | None = None) -> Plan:
    """Read the tensor-parallel plan of a transformers model, possibly on the meta device, for any number of ranks.

    ``policy`` has rules that replace the model's own. By default the model's own rules are used, or the ones in
    ``policies`` for a family without rules. Raises PlanError if the family has no rules, a style is unknown, or tied
    parameters would be cut differently.
    """
    transformers_package()
    return _Reader(model, policy).plan()


class _Reader:
    """Reader of a model's rules and its modules' head counts."""

    def __init__(self, model: Any, policy: Policy | None) -> None:
        self.model, self.family, self.modules = model, family_of(model), dict(model.named_modules())
        self.input, self.output = (_embedding(model, end) for end in ("input", "output"))
        rules: dict[str, str | Style] = dict(getattr(model, "tp_plan", None) or {})
        self.policy = policy_of(model.config) if policy is None and not rules else policy
        names = [*self.modules, *(name for name, _ in model.named_parameters(remove_duplicate=False))]
        if self.policy is not None:
            fits = {name: longest_fit(name, self.policy.rules) for name in names}
            rules = {name: self.policy.rules[fit] for name, fit in fits.items() if fit is not None}
        if not rules:
            raise PlanError(
                f"{self.family} has no tensor-parallel plan (`base_model_tp_plan` of its config is empty) and no "
                "policy here, so it cannot be split; give a Policy for it"
            )
        for end, style in CORRECTIONS.get(model.config.model_type, {}).items():
            rules |= {name: style for name in names if name.endswith(f".{end}")}
        self.rules = {**self._rules_of_ties(rules), **rules}
        words = {name: _rule_for(name, self.rules) for name in self.modules}
        self.words = {name: word for name, word in words.items() if word is not None}
        self.styles = {name: style_of(self.family, name, word) for name, word in self.words.items()}
        # A second parameter of an embedding is indexed by token id too, and would point to the wrong row in a rank's
        # part of the vocabulary. Such embeddings and their ties stay unsplit.
        embeddings: list[Any] = [self.modules[n] for n, style in self.styles.items() if style.before == "vocabulary"]
        self.full_weights = {id(each.weight) for each in embeddings if len(list(each.parameters(recurse=False))) > 1}

    def plan(self) -> Plan:
        splits: dict[str, Split] = {}
        seams: dict[str, Seam] = {}
        partial: set[str] = set()
        whole: dict[str, tuple[int, ...]] = {}
        first_names: dict[int, str] = {}
        for name, module in self.modules.items():
            seam = self._seam(name, module)
            if seam is not None:
                seams[name] = seam
            for leaf, parameter in module.named_parameters(recurse=False):
                full = f"{name}.{leaf}" if name else leaf
                split, is_partial = self._cut(name, full, parameter)
                first = first_names.setdefault(id(parameter), full)
                if first != full and (split is None) != (first not in splits):
                    raise PlanError(
                        f"{self.family}: {first!r} and {full!r} are one tied parameter, and the plan cuts one of them"
                    )
                if split is not None:
                    splits[full] = split
                elif is_partial:
                    partial.add(full)
                if split is None and first == full:
                    whole[full] = tuple(parameter.shape)
        numbers: dict[str, int] = {}
        for name in self.modules if self.policy is not None else ():
            for attribute in self._of_policy(name, "divided"):
                numbers[f"{name}.{attribute}"] = self._number(name, attribute)
            arguments = self._of_policy(name, "per_head")
            if arguments:
                seams[name] = Seam(name, "policy", "heads", heads=self._count_of_heads(name), arguments=arguments)
        return Plan(self.family, splits, seams, frozenset(partial), whole, numbers)

    def _seam(self, name: str, module: nn.Module) -> Seam | None:
        word, how = self.words.get(name), self.styles.get(name, Style())
        if word is None or not (how.before or how.after) or id(getattr(module, "weight", None)) in self.full_weights:
            return None
        heads = self._count_of_heads(name.rpartition(".")[0]) if how.after == "select" else 0
        tail = self._rope_features(name) if how.after == "copy tail" else 0
        if heads:
            tail = module.weight.shape[0] // (heads + how.shared) * how.shared
        return Seam(name, word if isinstance(word, str) else "policy", how.before, how.after, tail, heads)

    def _cut(self, owner: str, name: str, parameter: nn.Parameter) -> tuple[Split | None, bool]:
        """Return a parameter's cut, by its own or its module's rule, and True if unsplit with a partial gradient."""
        own = _rule_for(name, self.rules)
        word = own or self.words.get(owner)
        if word is None or id(getattr(self.modules[owner], "weight", None)) in self.full_weights:
            return None, False
        style, shape = style_of(self.family, name if own else owner, word), tuple(parameter.shape)
        cut = cut_of(style, name, shape, named=own is not None)
        if cut is None:
            return None, style.partial
        dim, blocks = cut
        is_output, gathered = self.modules[owner] is self.output, style.after == "gather"
        tied = getattr(self.output, "bias", None) is parameter
        padded = word in PADDED or (is_output and gathered) or (tied and not is_output)
        heads = 0 if gathered or style.weight != -2 else self._heads(owner, shape[dim])
        parent, _, leaf = owner.rpartition(".")
        sharing = getattr(self.modules.get(parent), "num_key_value_groups", None)
        if (
            not heads
            or blocks > 1
            or leaf not in ("k_proj", "v_proj")
            or style.before != "copy"
            or not isinstance(sharing, int)
        ):
            return Split(name, shape, dim, blocks, padded, heads), False
        return Split(name, shape, dim, blocks, padded, heads, f"{parent}.num_key_value_groups", heads * sharing), False

    def _heads(self, owner: str, length: int) -> int:
        """Return the number of heads in the output of an attention projection, or 0 if unknown or not a projection."""
        above, _, leaf = owner.rpartition(".")
        parent = self.modules.get(above)
        if leaf not in PROJECTIONS or parent is None:
            return 0
        width = getattr(parent, "head_dim", None)
        if leaf in ("q_proj", "k_proj", "v_proj") and isinstance(width, int) and length % width == 0:
            return length // width
        holders = (parent, getattr(parent, "config", None))
        counts = (getattr(holder, attribute, None) for holder in holders for attribute in PROJECTIONS[leaf])
        return next((n for n in counts if isinstance(n, int) and n > 0 and length % n == 0), 0)

    def _of_policy(self, name: str, field: str) -> tuple[str, ...]:
        table: Mapping[str, tuple[str, ...]] = getattr(self.policy, field, {})
        return table.get(longest_fit(name, table) or "", ())

    def _number(self, name: str, attribute: str) -> int:
        value = getattr(self.modules[name], attribute, None)
        if not isinstance(value, int) or value < 1:
            raise PlanError(f"{self.family}: the policy divides {attribute!r} of module {name!r}, which is {value!r}")
        return value

    def _count_of_heads(self, name: str) -> int:
        """Return the number of heads of an attention module: the first number that the policy divides there."""
        numbers = self._of_policy(name, "divided")
        if not numbers:
            raise PlanError(f"the policy cuts heads of module {name!r} and does not say which number counts them")
        return self._number(name, numbers[0])

    def _rope_features(self, name: str) -> int:
        """Return the number of last features of a compressed projection that are rotary keys shared by all heads."""
        for holder in (self.modules.get(name.rpartition(".")[0]), self.model.config.get_text_config()):
            width = getattr(holder, "qk_rope_head_dim", None)
            if isinstance(width, int):
                return width
        raise PlanError(
            f"{name!r} has style 'mla_kv_a_proj', and neither its attention nor the config has qk_rope_head_dim"
        )

    def _rules_of_ties(self, rules: Mapping[str, str | Style]) -> dict[str, str | Style]:
        """Return rules for an input or output embedding without a rule that is tied to one with a rule."""
        ends = (self.input, self.output)
        if None in ends or getattr(ends[0], "weight", 0) is not getattr(ends[1], "weight", None):
            return {}
        names = {id(module): name for name, module in self.modules.items()}
        tied = [(names.get(id(end), ""), style) for end, style in zip(ends, TIED_STYLES, strict=True)]
        for (here, style), (there, its_style) in (tied, tied[::-1]):
            if _rule_for(there, rules) == its_style and _rule_for(here, rules) is None:
                return {here: style}
        return {}


def _embedding(model: Any, end: str) -> nn.Module | None:
    try:
        return getattr(model, f"get_{end}_embeddings")()
    except (AttributeError, NotImplementedError):
        return None


def _rule_for(name: str, rules: Mapping[str, str | Style]) -> str | Style | None:
    """Return the style that the rules give a module or parameter. ``*`` matches a number between dots."""
    generic = re.sub(r"\.\d+(?=\.|$)", ".*", name)
    return rules.get(name, rules.get(generic))


def read_experts(model: Any) -> dict[str, dict[str, tuple[int, ...]]]:
    """Find modules of fused experts by the model's ``ep_plan``. The model may be on the meta device.

    Return module name -> its parameters and buffers with their shapes, all [experts, ...]. Raises PlanError if a style
    is unknown, or an experts' tensor does not have one entry per expert.
    """
    rules: dict[str, str] = dict(getattr(model, "ep_plan", None) or {})
    family = family_of(model)
    for name, style in rules.items():
        if style not in (EXPERTS, EXPERT_WEIGHT):  # tensor-parallel rules, which `tp_plan` contains too
            style_of(family, name, style)
    found: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, module in model.named_modules():
        if _rule_for(name, rules) != EXPERTS:
            continue
        count = getattr(module, "num_experts", None)
        tensors = [*module.named_parameters(), *module.named_buffers()]
        for leaf, tensor in tensors:
            if _rule_for(f"{name}.{leaf}", rules) != EXPERT_WEIGHT or tensor.shape[:1] != (count,):
                raise PlanError(
                    f"{family}: {f'{name}.{leaf}'!r} {list(tensor.shape)} is not one for each of {count} experts, by "
                    "its plan, so its experts cannot be on several ranks; use expert_model_parallel_size=1"
                )
        found[name] = {f"{name}.{leaf}": tuple(tensor.shape) for leaf, tensor in tensors}
    return found
