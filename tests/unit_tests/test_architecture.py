"""The house, held by a test: floors, light imports, docstrings, file sizes, one place for gradient collectives."""

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]

# A module stands on the floor of the longest name here that it starts with. A file directly in core/ is ground.
PACKAGES = ("core", "core_plan", "core_train", "core_compat")
FLOORS = {
    "core": 0,
    "core.watch": -2,
    "core.groups": -1,
    "core.distributed": 3,
    "core.context_parallel": 2,
    "core.tensor_parallel": 2,
    "core.transformer": 2,
    "core.models": 2,
    "core.pipeline_parallel": 3,
    "core.moe": 2,
    "core.optimizer": 3,
    "core.checkpoint": 3,
    "core.booster": 4,
    "core.interface": 4,
    "core.gradient_accumulation": 4,
    "core.gradient_handler": 4,
    "core.hugging_face": 4,
    "core.verify": 4,
    "core.integrations": 4,
    "core_plan": 5,
    "core_compat": 5,
    "core_train": 6,
    "core.__main__": 7,
    "pretrain_gpt": 7,
    "benchmarks": 7,
    "examples": 7,
}
# The rooms of the engine and what lies next to them stand below its faces.
FLOORS |= {
    f"core.distributed.{path.stem}": 1
    for path in (ROOT / "core" / "distributed").iterdir()
    if path.stem not in {"__init__", "engine", "hooks", "distributed_data_parallel", "finalize_model_grads"}
}
# Rooms of the optimizer, lowest first; a file directly in core/optimizer is a face or one of the settings.
OPTIMIZER_ROOMS = ("algorithms", "settings", "masters", "groups", "norm", "step", "faces")
OPTIMIZER_SETTINGS = {"optimizer_config", "loss_scaler"}
LONGEST_FILE = 500
LONGER_FOR_A_REASON = {"core/parallel_state.py": 660}  # a list of one-line accessors, whose names users know
BASE_PACKAGES = {"torch", "numpy", "einops"}
EXTRA_PACKAGES = {
    "tyro",
    "matplotlib",
    "tensorboard",
    "tokenizers",
    "safetensors",
    "transformers",
    "peft",
    "accelerate",
    "lightning",
    "lightning_fabric",
    "datasets",
    "trl",
    "pytest",
    "triton",
    "wandb",
    "mlflow",
}
# The rooms of the engine, lowest first. A room imports from rooms before it, also for types.
ROOMS = ("contract", "wire", "layout", "buffer", "guard", "sharded", "reduce", "faces")
# Files next to the rooms that are no faces. The options are values that the user gives, as tags are.
ROOM_OF_FILE = {"distributed_data_parallel_config": "contract"}
MOST_ARROWS, MOST_FLOORS, MOST_BOOLEANS = 24, 6, 4
# May only become shorter, but for what the promises need and torch tells nowhere else. The last was
# _top_saved_tensors_default_hooks, without which a budget of memory does not see what a checkpoint keeps, and
# _DisableTorchDispatch, without which a selective checkpoint meets gathers.
PRIVATE_TORCH_NAMES = frozenset(
    {
        "_C",
        "_DisableTorchDispatch",
        "_StorageInfo",
        "_active_ddp_module",
        "_autograd",
        "_backward_hooks",
        "_batch_p2p",  # torch's choice of NCCL's communicator for messages, which both ends must share
        "_distributed_c10d",
        "_execution_engine",
        "_foreach_copy_",
        "_foreach_mul_",
        "_foreach_zero_",
        "_get_backend",
        "_make_wrapper_subclass",
        "_module_classes_to_ignore",
        "_modules",
        "_opt_called",
        "_orig_mod",
        "_parameters",
        "_process_group_name",
        "_pytree",
        "_run_policy",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_backward",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_flash_attention_for_cpu_backward",
        "_set_pg_timeout",
        "_timeout",
        "_top_saved_tensors_default_hooks",
        "_version",
        "_will_engine_execute_node",
    }
)
STANDARD_PRIVATE_NAMES = frozenset(
    {"_asdict", "_current_frames", "_exit", "_getframe", "_replace"}
)  # documented by Python
# Of the classes of accelerate and Lightning Fabric that core.integrations derives from.
DERIVED_PRIVATE_NAMES = frozenset({"_ddp_kwargs", "_is_accelerate_prepared", "_models"})
# Private names of transformers, accelerate and peft. May only become fewer.
PRIVATE_NAMES_OF_EXTRAS = frozenset(
    {
        "_experts_implementation",
        "_get_dtype_plan",
        "_is_accelerate_prepared",
        "_is_hf_initialized",
        "_load_best_model",
        "_load_pretrained_model",
        "_model_mapping",
        "_models",
        "_optimizers",
        "_save_optimizer_and_scheduler",
    }
)
ENDINGS_OF_NAMES = frozenset({"_embeddings", "_layers", "_loss", "_text"})
FOLDERS_WITH_EXTRAS = (
    "core/hugging_face",
    "core/integrations",
    "core_train/finetune",
    "core_train/commands",
    "core/checkpoint/weights",
)
# What the table of sharding strategies answers. Lines elsewhere that ask may only become fewer.
STRATEGY_TABLE = "core/distributed/distributed_data_parallel_config.py"
STRATEGY_QUESTIONS = {"strategy", "residency", "sharded", "shards_gradients", "shards_parameters"}
STRATEGY_QUESTIONS |= {"reduces_every_microbatch", "keeps_params", "keeps_whole"}
MOST_STRATEGY_QUESTIONS = 74
# What asks whether ranks agree, besides core/groups/agree.py, with the reason. The list is exact, and may only shrink.
AGREEMENTS = re.compile(r"all_gather_object|gather_object|broadcast_object_list|scatter_object_list|MAX|MIN|BAND|BOR")
AGREEMENTS_ELSEWHERE = {
    "core/distributed/wire/collectives.py": {"MAX"},  # the seam: a user's sync rule may be a maximum
    "core/distributed/reduce/model_order.py": {"MAX"},  # asks on a communicator of its own, next to what is under way
    "core/tensor_parallel/cross_entropy.py": {"MAX"},  # the largest logit, of the loss
    "core_train/job.py": {"gather_object"},  # traces of steps, for rank 0 to draw
    "core/verify/record/recorder.py": {"gather_object"},  # sketches, for rank 0 to write
    "core/verify/gathered.py": {"gather_object"},  # whole weights, for rank 0 to compute with
}
COLLECTIVES = re.compile(r"^(all_reduce|reduce|reduce_scatter|all_gather|all_to_all|broadcast|_reduce_scatter)(_.*)?$")


def files() -> list[Path]:
    ours = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    return sorted([*ours, *ROOT.glob("pretrain_*.py"), *(ROOT / "benchmarks").rglob("*.py")])


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in files()}


def floor_of(module: str) -> int | None:
    parts = module.split(".")
    names = [".".join(parts[:length]) for length in range(len(parts), 0, -1)]
    return next((FLOORS[name] for name in names if name in FLOORS), None)


def only_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def imports_of(module: str, *, inside_functions: bool, types: bool = False) -> Iterator[tuple[str, int]]:
    """(imported module, line) of each import that runs; `from package import module` gives the module.

    types: True if imports for annotations alone count too.
    """
    path = MODULES[module]
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    waiting: list[ast.AST] = [tree_of(path)]
    while waiting:
        node = waiting.pop()
        if only_for_types(node) and not types:
            continue
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)) and not inside_functions:
            continue
        waiting.extend(ast.iter_child_nodes(node))
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                yield (inner if inner in MODULES else base), node.lineno


def test_imports_go_down_the_floors() -> None:
    wrong = []
    for module, path in MODULES.items():
        mine = floor_of(module)
        if mine is None:
            continue
        for imported, line in imports_of(module, inside_functions=True):
            theirs = floor_of(imported) if imported.split(".")[0] in (*PACKAGES, "benchmarks", "pretrain_gpt") else None
            if theirs is not None and theirs > mine:
                wrong.append(f"{path.relative_to(ROOT)}:{line}: floor {mine} imports {imported} on floor {theirs}")
    assert not wrong, "\n" + "\n".join(wrong)


def test_imports_make_no_circle() -> None:
    """Imports inside functions count too: they end a circle for Python, and not for a reader."""
    below = {
        module: {name for name, _ in imports_of(module, inside_functions=True) if name in MODULES and name != module}
        for module in MODULES
    }
    reached = {module: reached_from(module, below) for module in MODULES}
    circles = {frozenset(other for other in reached[module] if module in reached[other]) for module in MODULES} - {
        frozenset()
    }
    assert not circles, f"imports in a circle: {[sorted(circle) for circle in circles]}"


def reached_from(module: str, below: dict[str, set[str]]) -> set[str]:
    found: set[str] = set()
    waiting = [module]
    while waiting:
        new = below[waiting.pop()] - found
        found |= new
        waiting.extend(new)
    return found


def house_room_of(module: str) -> str | None:
    """A folder or a file of core/, or a package next to it; None for the door, `core` and `core.__main__`."""
    package, _, rest = module.partition(".")
    if package != "core":
        return package if package in PACKAGES else None
    return None if rest in ("", "__main__") else f"core.{rest.partition('.')[0]}"


def arrows_of_rooms() -> dict[str, set[str]]:
    """Room -> the rooms that it imports from, also inside functions and for types."""
    below: dict[str, set[str]] = {}
    for module in MODULES:
        mine = house_room_of(module)
        if mine is not None:
            found = {house_room_of(name) for name, _ in imports_of(module, inside_functions=True, types=True)}
            below.setdefault(mine, set()).update(room for room in found if room not in (None, mine))
    return below


def test_rooms_make_no_circle_and_applications_are_imported_by_jobs_alone() -> None:
    below = arrows_of_rooms()
    circles = {room for room in below if room in reached_from(room, below)}
    assert not circles, f"these rooms import each other in a circle: {sorted(circles)}"
    others = {(room, name) for room, names in below.items() for name in names if name in PACKAGES[1:]}
    assert others == {("core_train", "core_plan")}, "core imports no application, and only the jobs import another one"


# Most today, and the aim. The first number may only fall; lower it when it has.
BUDGETS = {
    "lines of core": (58_240, 48_500),
    "lines of all packages": (74_110, 63_500),
    "lines of core/distributed": (9_838, 9_950),
    "rooms": (25, 25),
    "arrows between rooms": (161, 160),  # the last: the main job records its steps (core_train -> core.verify)
}


@pytest.mark.parametrize("what", BUDGETS)
def test_the_house_grows_no_further(what: str) -> None:
    below = arrows_of_rooms()
    counted = {"rooms": len(below), "arrows between rooms": sum(map(len, below.values()))}
    if what.startswith("lines"):
        folder = what.removeprefix("lines of ")
        inside = PACKAGES if folder == "all packages" else (folder,)
        files_inside = [path for name in inside for path in (ROOT / name).rglob("*.py")]
        counted[what] = sum(len(path.read_text().splitlines()) for path in files_inside)
    most, aim = BUDGETS[what]
    assert counted[what] <= most, f"{counted[what]:,} {what}, at most {most:,} (the aim is {aim:,}): take something out"


def room_of(module: str) -> str | None:
    parts = module.split(".")
    if parts[:2] != ["core", "distributed"]:
        return None
    name = parts[2] if len(parts) > 2 else "__init__"
    return name if name in ROOMS else ROOM_OF_FILE.get(name, "faces")


def test_rooms_of_the_engine_import_only_what_lies_below_them() -> None:
    """Imports for types count too: whoever reads a file has to know what its types are."""
    arrows: dict[tuple[str, str], str] = {}
    for module, path in MODULES.items():
        mine = room_of(module)
        for imported, line in imports_of(module, inside_functions=True, types=True) if mine else ():
            theirs = room_of(imported)
            if mine and theirs and mine != theirs:
                arrows.setdefault((mine, theirs), f"{path.relative_to(ROOT)}:{line}")
    upward = [
        f"{where}: {above} imports {below}"
        for (above, below), where in arrows.items()
        if ROOMS.index(below) > ROOMS.index(above)
    ]
    assert not upward, "imports that point up:\n" + "\n".join(upward)
    assert len(arrows) <= MOST_ARROWS, f"{len(arrows)} arrows between rooms: {sorted(arrows)}"
    floors: dict[str, int] = {}
    for room in ROOMS:
        floors[room] = 1 + max((floors[below] for above, below in arrows if above == room), default=0)
    assert max(floors.values()) <= MOST_FLOORS, floors


def optimizer_room_of(module: str) -> str | None:
    parts = module.split(".")
    if parts[:2] != ["core", "optimizer"]:
        return None
    name = parts[2] if len(parts) > 2 else "__init__"
    return "settings" if name in OPTIMIZER_SETTINGS else name if name in OPTIMIZER_ROOMS else "faces"


def test_rooms_of_the_optimizer_import_only_what_lies_below_them() -> None:
    wrong = []
    for module, path in MODULES.items():
        mine = optimizer_room_of(module)
        for imported, line in imports_of(module, inside_functions=True, types=True) if mine else ():
            theirs = optimizer_room_of(imported)
            if mine and theirs and OPTIMIZER_ROOMS.index(theirs) > OPTIMIZER_ROOMS.index(mine):
                wrong.append(f"{path.relative_to(ROOT)}:{line}: {mine} imports {imported}")
    assert not wrong, "imports that point up:\n" + "\n".join(wrong)


def test_a_class_of_the_engine_has_few_booleans() -> None:
    """n booleans are 2 ** n states, and a reader has to find out which of them there are."""
    found = {}
    for module, path in MODULES.items():
        if (room_of(module) or optimizer_room_of(module)) and not module.endswith("_config"):
            for node in ast.walk(tree_of(path)):
                if isinstance(node, ast.ClassDef) and len(booleans_of(node)) > MOST_BOOLEANS:
                    found[node.name] = booleans_of(node)
    assert not found, f"more than {MOST_BOOLEANS} booleans: {found}"


def booleans_of(node: ast.ClassDef) -> set[str]:
    """Names of fields and of attributes of `self` that are annotated as bool, or given a value that is one."""
    found: set[str] = set()
    for statement in node.body:
        if isinstance(statement, ast.AnnAssign) and ast.unparse(statement.annotation) == "bool":
            found.add(ast.unparse(statement.target))
        if isinstance(statement, ast.FunctionDef):
            arguments = [*statement.args.args, *statement.args.kwonlyargs]
            flags = {a.arg for a in arguments if a.annotation is not None and ast.unparse(a.annotation) == "bool"}
            for inner in ast.walk(statement):
                annotated = isinstance(inner, ast.AnnAssign) and ast.unparse(inner.annotation) == "bool"
                if annotated or (isinstance(inner, ast.Assign) and is_bool(inner.value, flags)):
                    targets = [inner.target] if isinstance(inner, ast.AnnAssign) else inner.targets
                    on_self = [t for t in targets if isinstance(t, ast.Attribute) and ast.unparse(t.value) == "self"]
                    found |= {target.attr for target in on_self}
    return found


def is_bool(value: ast.expr, flags: set[str]) -> bool:
    if isinstance(value, ast.Call):
        return ast.unparse(value.func) in ("bool", "any", "all", "isinstance")
    if isinstance(value, ast.BoolOp):
        return any(is_bool(part, flags) for part in value.values)
    named = isinstance(value, ast.Name) and value.id in flags
    constant = isinstance(value, ast.Constant) and isinstance(value.value, bool)
    return named or constant or isinstance(value, ast.Compare) or ast.unparse(value).startswith("not ")


def names_made_in(path: Path) -> Iterator[str]:
    """Names of functions, classes, variables and attributes of `self` that a file defines."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            yield node.attr


def test_private_names_of_torch_are_few() -> None:
    """A name that begins with an underscore may be gone in torch's next version."""
    core = [path for path in files() if path.relative_to(ROOT).parts[0] in PACKAGES]
    ours = {name for path in core for name in names_made_in(path)} - set(vars(torch.nn.Module()))
    used: dict[str, str] = {}
    known = ours | STANDARD_PRIVATE_NAMES | DERIVED_PRIVATE_NAMES
    for path in core:
        for node in ast.walk(tree_of(path)):
            names: list[str] = []
            if isinstance(node, ast.Attribute):
                names = [node.attr]
            elif isinstance(node, ast.Call) and ast.unparse(node.func) == "getattr":
                names = [str(value.value) for value in node.args if isinstance(value, ast.Constant)]
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
                names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            for name in names:
                if name.startswith("_") and not name.startswith("__") and name not in known:
                    used.setdefault(name, f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}")
    wrong = [f"{where}: {name}" for name, where in used.items() if name not in PRIVATE_TORCH_NAMES]
    assert not wrong, "private names of torch:\n" + "\n".join(sorted(wrong))
    gone = PRIVATE_TORCH_NAMES - set(used)
    assert not gone, f"take out of PRIVATE_TORCH_NAMES: {sorted(gone)}"


def test_private_names_of_transformers_accelerate_and_peft_are_few() -> None:
    """Names in strings, and attributes that no file of these folders defines."""
    paths = [path for path in files() if str(path.relative_to(ROOT)).startswith(FOLDERS_WITH_EXTRAS)]
    found: dict[str, str] = {}
    for path in paths:
        for node in ast.walk(tree_of(path)):
            name = (
                node.value if isinstance(node, ast.Constant) else node.attr if isinstance(node, ast.Attribute) else None
            )
            if isinstance(name, str) and re.fullmatch(r"_[a-z]\w+", name):
                found.setdefault(name, f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}")
    ours = {name for path in paths for name in names_made_in(path)}
    ours |= PRIVATE_TORCH_NAMES | STANDARD_PRIVATE_NAMES | DERIVED_PRIVATE_NAMES | ENDINGS_OF_NAMES
    wrong = [f"{where}: {name}" for name, where in found.items() if name not in PRIVATE_NAMES_OF_EXTRAS | ours]
    assert not wrong, "private names of an optional package:\n" + "\n".join(sorted(wrong))
    gone = PRIVATE_NAMES_OF_EXTRAS - set(found)
    assert not gone, f"take out of PRIVATE_NAMES_OF_EXTRAS: {sorted(gone)}"


def test_lines_that_ask_for_the_sharding_strategy_become_fewer() -> None:
    lines = {
        (str(path.relative_to(ROOT)), node.lineno)
        for path in files()
        if path.relative_to(ROOT).parts[0] in PACKAGES and str(path.relative_to(ROOT)) != STRATEGY_TABLE
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) and node.attr in STRATEGY_QUESTIONS
    }
    words = "let the table or a class per strategy answer, instead of one line more that asks"
    assert len(lines) <= MOST_STRATEGY_QUESTIONS, f"{len(lines)} lines ask, at most {MOST_STRATEGY_QUESTIONS}: {words}"


def test_core_imports_only_torch_numpy_and_einops_when_loaded() -> None:
    wrong = []
    for module, path in MODULES.items():
        if not module.startswith("core"):
            continue
        for imported, line in imports_of(module, inside_functions=False):
            package = imported.split(".")[0]
            if package not in BASE_PACKAGES | {*PACKAGES} and package not in sys.stdlib_module_names:
                wrong.append(f"{path.relative_to(ROOT)}:{line}: import {imported} inside the function that needs it")
    assert not wrong, "\n" + "\n".join(wrong)


COMPILER = "torch._dynamo"


@pytest.mark.parametrize(
    ("module", "packages"),
    [
        ("core", ()),
        ("core.parallel_state", ()),
        ("core.distributed", ("core.distributed",)),
        ("core.checkpoint", ("core.checkpoint",)),
    ],
)
def test_importing_a_package_loads_no_extra_and_no_model_kernel_or_job(module: str, packages: tuple[str, ...]) -> None:
    loaded = modules_loaded_by(f"import {module}") - {"core"}
    above = {name for name in loaded if (floor_of(name) or 0) > 0 and not name.startswith(packages)}
    assert not above, f"import {module} also loads {sorted(above)}"
    assert COMPILER not in loaded, f"import {module} also loads {COMPILER}, which takes longer than torch itself"
    assert module != "core" or not loaded, f"import core, which only tells a version, also loads {sorted(loaded)}"


def test_the_start_of_a_job_loads_neither_the_planner_nor_checkpoints() -> None:
    """Every process of a job pays for its imports; the planner's took longer than torch's."""
    loaded = modules_loaded_by("import core_train.main")
    rest = {name for name in loaded if name.startswith("core_plan.") and name.split(".")[1] not in ("job", "machine")}
    others = {name for name in loaded if name.startswith(("core.checkpoint", "core.hugging_face", "core.booster"))}
    assert not rest | others, f"import core_train.main also loads {sorted(rest | others)}"
    assert "core.distributed" not in modules_loaded_by("import core_plan.machine.own_ranks")


def test_every_module_of_core_is_imported_without_the_extras() -> None:
    modules = sorted(name for name in MODULES if name.startswith("core") and not name.endswith("__main__"))
    assert set(modules) <= modules_loaded_by("; ".join(f"import {name}" for name in modules))


def modules_loaded_by(statement: str) -> set[str]:
    """Modules of the packages, and COMPILER, that `statement` loads in a fresh process that has none of the extras."""
    program = (
        f"import sys\nfor name in {sorted(EXTRA_PACKAGES)!r}: sys.modules[name] = None\n{statement}\n"
        f"print(*[name for name in sys.modules if name == {COMPILER!r} or name.partition('.')[0] in {PACKAGES!r}])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_every_public_module_function_and_class_of_core_has_a_docstring() -> None:
    silent = []
    for module, path in MODULES.items():
        if not module.startswith("core"):
            continue
        tree = tree_of(path)
        if not ast.get_docstring(tree):
            silent.append(f"{path.relative_to(ROOT)}:1: the module")
        for node in tree.body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
                overload = any("overload" in ast.unparse(decorator) for decorator in node.decorator_list)
                if not overload and not ast.get_docstring(node):
                    silent.append(f"{path.relative_to(ROOT)}:{node.lineno}: {node.name}")
    assert not silent, "\n" + "\n".join(silent)


def test_no_file_of_core_is_longer_than_a_reader_can_hold() -> None:
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in files()}
    long = {name: length for name, length in lengths.items() if length > LONGER_FOR_A_REASON.get(name, LONGEST_FILE)}
    assert not long, f"more than {LONGEST_FILE} lines, so probably two subjects: {long}"


def test_gradients_are_reduced_in_one_file_only() -> None:
    wrong = []
    for path in (ROOT / "core" / "distributed").rglob("*.py"):
        if path.name in ("collectives.py", "fp8_communication.py"):  # the second sends blocks of bytes, with scales
            continue
        for node in ast.walk(tree_of(path)):
            is_call = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
            if is_call and ast.unparse(node.func.value).endswith(("dist", "distributed", "_functional_collectives")):
                if COLLECTIVES.match(node.func.attr):
                    wrong.append(f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node.func)}")
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch.distributed"):
                names = [alias.name for alias in node.names if COLLECTIVES.match(alias.name)]
                wrong.extend(f"{path.relative_to(ROOT)}:{node.lineno}: imports {name}" for name in names)
    assert not wrong, "these belong in core/distributed/wire/collectives.py:\n" + "\n".join(wrong)


def test_ranks_agree_in_one_file_only() -> None:
    found: dict[str, set[str]] = {}
    for module, path in MODULES.items():
        if module.startswith("core") and module != "core.groups.agree":
            for node in ast.walk(tree_of(path)):
                if isinstance(node, ast.Attribute) and AGREEMENTS.fullmatch(node.attr):
                    found.setdefault(str(path.relative_to(ROOT)), set()).add(node.attr)
    assert found == AGREEMENTS_ELSEWHERE, "small facts of ranks are compared and gathered by core/groups/agree.py"


def test_an_accelerator_is_never_asked_for_without_a_guard() -> None:
    """`.cuda()` is nowhere, and a function that names torch.cuda also asks whether there is one."""
    guard = re.compile(r"is_available|is_initialized|is_cuda|device_count|\.type\b|backend|accelerator")
    wrong = []
    for module, path in MODULES.items():
        if not module.startswith("core"):
            continue
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "cuda":
                wrong.append(f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}")
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                source = ast.unparse(node)
                if re.search(r"torch\.cuda\.\w+\(", source) and not guard.search(source):
                    wrong.append(f"{path.relative_to(ROOT)}:{node.lineno}: {node.name} calls torch.cuda unguarded")
    assert not wrong, "\n" + "\n".join(wrong)


MAKERS = {"zeros", "ones", "empty", "full", "tensor", "arange", "randn", "rand", "randint", "linspace"}


@pytest.mark.parametrize("folder", ["distributed", "optimizer", "checkpoint", "gradient_accumulation", "booster"])
def test_new_tensors_say_where_they_lie(folder: str) -> None:
    """A user's `torch.set_default_device("cuda")` is for the model; what the engine means for the CPU stays there."""
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}"
        for path in sorted((ROOT / "core" / folder).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and ast.unparse(node.func.value) == "torch"
        and node.func.attr in MAKERS
        and not any(keyword.arg in ("device", None) for keyword in node.keywords)
    ]
    assert not found, "name the device of these tensors:\n" + "\n".join(found)
