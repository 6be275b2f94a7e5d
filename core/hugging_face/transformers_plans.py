"""The one file that reads how Transformers says what is parallel: rules of modules, for a stated range of versions.

A model carries `tp_plan`: name of a module or parameter, with `*` for a number, -> style. Rules of its config and of
its children are merged in it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from torch import nn

from core.hugging_face.plan import PADDED, Plan, PlanError, Seam, Split, Style, cut_of, style_of
from core.hugging_face.policies import Policy, longest_fit, policy_of

VERSIONS = ((5, 23), (5, 24))  # from, up to but not including: names and meanings of styles are read at these
# Names of attributes, of attention modules and configs, that hold how many heads a projection makes.
KEY_VALUE_HEADS = ("num_key_value_heads", "num_kv_heads", "num_attention_heads", "num_heads")
QUERY_HEADS = ("num_attention_heads", "num_heads", "n_heads")
PROJECTIONS = {
    **dict.fromkeys(("k_proj", "v_proj"), KEY_VALUE_HEADS),
    **dict.fromkeys(("q_proj", "q_b_proj", "kv_b_proj", "query_key_value"), QUERY_HEADS),
    **dict.fromkeys(("query", "key", "value", "q", "k", "v"), QUERY_HEADS),
}
EXPERTS, EXPERT_WEIGHT = "ep_dispatch_experts", "grouped_gemm"  # styles of expert parallelism: of modules, parameters
# Rules that are wrong in these versions, found by `check`: model type -> end of a rule's name -> style.
# Gate and up lie one after the other in the experts' fused weight, and are chunked: each is cut for itself.
CORRECTIONS: dict[str, dict[str, str]] = {
    **dict.fromkeys(("inkling_text", "inkling2_text"), {"mlp.experts.gate_up_proj": "packed_colwise"}),
}


def transformers_package() -> ModuleType:
    """transformers, or an error that names the extra or the versions."""
    try:
        import transformers
    except ImportError as error:
        raise ImportError(
            "Hugging Face models need transformers; install the extra: pip install 'gradient-core[transformers]'"
        ) from error
    version = tuple(int(part) for part in re.findall(r"\d+", transformers.__version__)[:2])
    first, after = VERSIONS
    if not first <= version < after:
        raise PlanError(
            f"transformers {transformers.__version__}: its parallel plans are read for versions from "
            f"{'.'.join(map(str, first))} and before {'.'.join(map(str, after))}, because styles change their meaning "
            "between versions. Install one of these"
        )
    return transformers


def read_plan(model: Any, policy: Policy | None = None) -> Plan:
    """The tensor-parallel plan of a transformers model. Its weights may be on the meta device.

    policy: rules to use in place of the model's own; by default its own, or those of `policies` for a family that ships
    none. Raises PlanError where there are none, a style is unknown, or tied parameters would be cut differently.
    """
    transformers_package()
    family = f"{model.config.model_type} ({type(model).__name__})"
    rules: dict[str, str | Style] = dict(getattr(model, "tp_plan", None) or {})
    if policy is None and not rules:
        policy = policy_of(model.config)
    if policy is not None:
        rules = policy.expanded([name for name, _ in (*model.named_modules(), *_all_parameters(model))])
    if not rules:
        raise PlanError(
            f"{family} has no tensor-parallel plan (`base_model_tp_plan` of its config is empty) and no policy here, "
            "so it cannot be split; give a Policy for it"
        )
    for end, style in CORRECTIONS.get(model.config.model_type, {}).items():
        rules = {name: style if name.endswith(end) else old for name, old in rules.items()}
    rules = {**_rules_of_ties(model, rules), **rules}
    modules = dict(model.named_modules())
    splits: dict[str, Split] = {}
    seams: dict[str, Seam] = {}
    partial: set[str] = set()
    whole: dict[str, tuple[int, ...]] = {}
    by_id: dict[int, str] = {}
    for name, module in modules.items():
        word = _rule_for(name, rules)
        how = None if word is None else style_of(family, name, word)
        if word is not None and how is not None and how.has_seam:
            label = word if isinstance(word, str) else "policy"
            heads = _count_of_heads(policy, name.rpartition(".")[0], modules) if how.after == "select" else 0
            tail = _rope_features(model, name, modules) if how.after == "copy tail" else 0
            if heads:
                tail = module.weight.shape[0] // (heads + how.shared) * how.shared
            seams[name] = Seam(name, label, how.before, how.after, tail, heads)
            others = [leaf for leaf, _ in module.named_parameters(recurse=False) if leaf != "weight"]
            if how.before == "vocabulary" and others:
                raise PlanError(
                    f"{family}: embedding {name!r} has {others[0]!r} beside its weight, which it places by token id; a "
                    "rank's part of the vocabulary has row numbers of its own"
                )
        for leaf, parameter in module.named_parameters(recurse=False):
            full = f"{name}.{leaf}" if name else leaf
            split, is_partial = _cut(model, family, rules, full, tuple(parameter.shape), modules)
            first = by_id.setdefault(id(parameter), full)
            if first != full and (split is None) != (first not in splits):
                raise PlanError(
                    f"{family}: {first!r} and {full!r} are one tied parameter, and the plan cuts one of them"
                )
            if split is not None:
                splits[full] = split
            elif is_partial:
                partial.add(full)
            if split is None and first == full:
                whole[full] = tuple(parameter.shape)
    numbers = {} if policy is None else _divide_modules(family, policy, modules, seams)
    return Plan(family, splits, seams, frozenset(partial), whole, numbers)


def read_experts(model: Any) -> dict[str, dict[str, tuple[int, ...]]]:
    """Modules of fused experts, by the model's `ep_plan`: name -> its parameters and their shapes, all [experts, ...].

    Raises PlanError for a style that is unknown, and for experts that hold something which is not one an expert.
    """
    rules: dict[str, str] = dict(getattr(model, "ep_plan", None) or {})
    family = f"{model.config.model_type} ({type(model).__name__})"
    for name, style in rules.items():
        if style not in (EXPERTS, EXPERT_WEIGHT):  # tensor parallelism beside experts, which `tp_plan` has too
            style_of(family, name, style)
    found: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, module in model.named_modules():
        if _rule_for(name, rules) != EXPERTS:
            continue
        count = getattr(module, "num_experts", None)
        held = [*module.named_parameters(), *module.named_buffers()]
        for leaf, tensor in held:
            if _rule_for(f"{name}.{leaf}", rules) != EXPERT_WEIGHT or tensor.shape[:1] != (count,):
                raise PlanError(
                    f"{family}: {f'{name}.{leaf}'!r} {list(tensor.shape)} is not one for each of {count} experts, by "
                    "its plan, so its experts cannot be on several ranks; use expert_model_parallel_size=1"
                )
        found[name] = {f"{name}.{leaf}": tuple(tensor.shape) for leaf, tensor in held}
    return found


def _divide_modules(
    family: str, policy: Policy, modules: Mapping[str, nn.Module], seams: dict[str, Seam]
) -> dict[str, int]:
    """The numbers of modules that a policy divides; `seams` gets those at which arguments are cut by heads."""
    numbers: dict[str, int] = {}
    for name, module in modules.items():
        for attribute in policy.divided.get(longest_fit(name, policy.divided) or "", ()):
            numbers[f"{name}.{attribute}"] = _number(family, name, module, attribute)
        arguments = policy.per_head.get(longest_fit(name, policy.per_head) or "", ())
        if arguments:
            heads = _count_of_heads(policy, name, modules)
            seams[name] = Seam(name, "policy", before="heads", heads=heads, arguments=arguments)
    return numbers


def _all_parameters(model: Any) -> list[tuple[str, nn.Parameter]]:
    return list(model.named_parameters(remove_duplicate=False))


def _number(family: str, name: str, module: nn.Module, attribute: str) -> int:
    value = getattr(module, attribute, None)
    if not isinstance(value, int) or value < 1:
        raise PlanError(f"{family}: the policy divides {attribute!r} of module {name!r}, which is {value!r}")
    return value


def _count_of_heads(policy: Policy | None, name: str, modules: Mapping[str, nn.Module]) -> int:
    """How many heads a policy says that an attention has: the first number that it divides there."""
    fit = None if policy is None else longest_fit(name, policy.divided)
    if policy is None or fit is None:
        raise PlanError(f"the policy cuts heads of module {name!r} and does not say which number counts them")
    return _number("policy", name, modules[name], policy.divided[fit][0])


def _rule_for(name: str, rules: Mapping[str, str | Style]) -> str | Style | None:
    """The style of the rule that names a module or parameter; a number between dots matches `*`."""
    generic = re.sub(r"\.\d+(?=\.|$)", ".*", name)
    return rules.get(name, rules.get(generic))


def _cut(
    model: Any,
    family: str,
    rules: Mapping[str, str | Style],
    name: str,
    shape: tuple[int, ...],
    modules: Mapping[str, nn.Module],
) -> tuple[Split | None, bool]:
    """How a parameter is cut, by its own rule or its module's; and whether it is whole with a partial gradient."""
    owner = name.rpartition(".")[0]
    own = _rule_for(name, rules)
    word = own or _rule_for(owner, rules)
    if word is None:
        return None, False
    style = style_of(family, name if own else owner, word)
    cut = cut_of(style, name, shape, named=own is not None)
    if cut is None:
        return None, style.partial
    dim, blocks = cut
    output = _embeddings(model)[1]
    is_output = modules[owner] is output
    tied = output is not None and getattr(output, "bias", None) is modules[owner]._parameters[name.rpartition(".")[2]]
    padded = word in PADDED or (is_output and style.after == "gather") or (tied and not is_output)
    gathered = style.after == "gather"
    heads = 0 if gathered else _heads(owner, modules, shape[dim], style.weight == -2)
    groups, queries = _groups(owner, modules, heads) if style.before == "copy" and blocks == 1 else ("", 0)
    return Split(name, shape, dim, blocks, padded, heads, groups, queries), False


def _groups(owner: str, modules: Mapping[str, nn.Module], heads: int) -> tuple[str, int]:
    """The attribute that says how many queries share a head of keys or values, and how many queries there are."""
    parent, _, leaf = owner.rpartition(".")
    sharing = getattr(modules.get(parent), "num_key_value_groups", None)
    if leaf not in ("k_proj", "v_proj") or not heads or not isinstance(sharing, int):
        return "", 0
    return f"{parent}.num_key_value_groups", heads * sharing


def _heads(owner: str, modules: Mapping[str, nn.Module], length: int, outputs: bool) -> int:
    """How many heads the outputs of an attention's projection are; 0 if it is none, or nothing says so."""
    leaf, parent = owner.rpartition(".")[2], modules.get(owner.rpartition(".")[0])
    if not outputs or leaf not in PROJECTIONS or parent is None:
        return 0
    width = getattr(parent, "head_dim", None)
    if leaf in ("q_proj", "k_proj", "v_proj") and isinstance(width, int) and length % width == 0:
        return length // width
    for holder in (parent, getattr(parent, "config", None)):
        for attribute in PROJECTIONS[leaf]:
            heads = getattr(holder, attribute, None)
            if isinstance(heads, int) and heads > 0 and length % heads == 0:
                return heads
    return 0


def _rope_features(model: Any, name: str, modules: Mapping[str, nn.Module]) -> int:
    """How many last features of a compressed projection are rotated keys, which all heads share."""
    for holder in (modules.get(name.rpartition(".")[0]), model.config.get_text_config()):
        width = getattr(holder, "qk_rope_head_dim", None)
        if isinstance(width, int):
            return width
    raise PlanError(
        f"{name!r} has style 'mla_kv_a_proj', and neither its attention nor the config has qk_rope_head_dim"
    )


def _rules_of_ties(model: Any, rules: Mapping[str, str | Style]) -> dict[str, str | Style]:
    """Rules for the input or output embedding that is tied to one with a rule, and has none itself."""
    names = {id(module): name for name, module in model.named_modules()}
    inputs, outputs = _embeddings(model)
    if inputs is None or outputs is None or getattr(inputs, "weight", 0) is not getattr(outputs, "weight", None):
        return {}
    first, last = names.get(id(inputs), ""), names.get(id(outputs), "")
    if _rule_for(last, rules) == "colwise_gather_output" and _rule_for(first, rules) is None:
        return {first: "embedding_rowwise"}
    if _rule_for(first, rules) == "embedding_rowwise" and _rule_for(last, rules) is None:
        return {last: "colwise_gather_output"}
    return {}


def _embeddings(model: Any) -> list[nn.Module | None]:
    """The input and the output embedding; None for one that the model does not have."""
    found: list[nn.Module | None] = []
    for getter in (model.get_input_embeddings, model.get_output_embeddings):
        try:
            found.append(getter())
        except (AttributeError, NotImplementedError):
            found.append(None)
    return found
