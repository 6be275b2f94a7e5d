"""Foreign names over a table of ours: below our package, under their own, and an error that helps."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import core_compat.megatron as mcore
from core import distributed, parallel_state
from core_compat.install import Surface, install, register, run, uninstall
from tests.unit_tests.forked_python import run_python

ROOT = Path(__file__).parents[3]


@pytest.fixture
def surface() -> Iterator[Surface]:
    """A surface of its own package, which is the one of the tests."""
    modules = {
        "optim": {"core.optimizer": "OptimizerConfig Chain=ChainedOptimizer"},
        "optim.deep.chain": {"core.optimizer.chained_optimizer": "*"},
    }
    made = Surface("their.library", __package__, modules, {"data": "bring data of your own"}, {"o": "optim"})
    yield made
    uninstall(made)
    sys.meta_path[:] = [finder for finder in sys.meta_path if getattr(finder, "surface", None) is not made]
    for name in [name for name in sys.modules if name.startswith((f"{__package__}.o", "their"))]:
        del sys.modules[name]


def test_names_are_ours_below_our_package_and_under_their_own(surface: Surface) -> None:
    from core.optimizer import ChainedOptimizer, OptimizerConfig

    register(surface)
    ours = importlib.import_module(f"{__package__}.optim")
    assert ours.Chain is ChainedOptimizer and ours.deep.chain.ChainedOptimizer is ChainedOptimizer
    assert "Chain" in dir(ours) and "Mapping" not in dir(ours.deep.chain)
    with pytest.raises(ModuleNotFoundError, match="their"):
        importlib.import_module("their.library")
    install(surface)
    space: dict[str, object] = {}
    exec("from their.library.optim import *\nimport their.library.o.deep.chain as chain", space)
    assert space["OptimizerConfig"] is OptimizerConfig and space["chain"] is ours.deep.chain
    uninstall(surface)
    with pytest.raises(ModuleNotFoundError, match="their"):
        importlib.import_module("their.library.optim")


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("from their.library.data.sets import Tokens", "their.library.data is not in .*: bring data of your own"),
        ("from their.library.optim import Chian", "near to it are Chain"),
        ("from their.library.optim.deep import Chain", "the name is at .*optim$"),
        ("import their.library.nowhere", "their.library.nowhere is not in"),
    ],
)
def test_an_import_that_fails_says_what_to_do(surface: Surface, line: str, says: str) -> None:
    install(surface)
    with pytest.raises(ImportError, match=says):
        exec(line)


def test_a_missing_attribute_is_an_attribute_error_and_assigning_is_refused(surface: Surface) -> None:
    register(surface)
    ours = importlib.import_module(f"{__package__}.optim")
    assert not hasattr(ours, "Nothing") and getattr(ours, "Nothing", 7) == 7
    with pytest.raises(AttributeError, match="would change nothing"):
        ours.Chain = None


def test_installing_over_an_installed_or_imported_package_is_refused(surface: Surface, tmp_path: Path) -> None:
    (tmp_path / "their" / "library").mkdir(parents=True)
    (tmp_path / "their" / "library" / "__init__.py").write_text("real = True\n")
    sys.path.insert(0, str(tmp_path))
    importlib.invalidate_caches()
    try:
        with pytest.raises(RuntimeError, match="is installed in this environment"):
            install(surface)
        install(surface, replace_installed=True)
        assert importlib.import_module("their.library.optim").Chain.__name__ == "ChainedOptimizer"
        uninstall(surface)
        assert importlib.import_module("their.library").real
        with pytest.raises(RuntimeError, match="imported already"):
            install(surface, replace_installed=True)
    finally:
        sys.path.remove(str(tmp_path))


def test_every_row_of_megatrons_table_leads_to_something() -> None:
    for path in mcore.SURFACE.modules:
        for name in mcore.SURFACE.all_names(path):
            assert mcore.SURFACE.resolve(path, name) is not None
    assert mcore.mpu.get_tensor_model_parallel_rank is parallel_state.get_tensor_model_parallel_rank
    assert mcore.distributed.finalize_model_grads is distributed.finalize_model_grads, "the function, not the module"
    assert importlib.import_module("core_compat.megatron.distributed.finalize_model_grads") is not None
    assert mcore.distributed.finalize_model_grads is distributed.finalize_model_grads, "also after the module's import"


PROGRAM = """
import sys
from megatron.core import mpu
from helper_of_the_program import WORD
assert __name__ == "__main__"
print(WORD, sys.argv[1:], mpu.__name__)
"""


def test_a_program_that_cannot_be_edited_runs_by_the_command(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "helper_of_the_program.py").write_text("WORD = 'beside it'\n")
    command = ("-m", "core_compat.megatron")
    done = run_python(*command, tmp_path / "program.py", "--flag", "1", folder=tmp_path)
    assert done.stdout == "beside it ['--flag', '1'] core_compat.megatron.parallel_state\n", done.stderr
    usage = run_python(*command, folder=tmp_path)
    assert (
        usage.returncode == 2
        and "usage: python -m core_compat.megatron [--replace-installed] script.py" in usage.stdout
    )


def test_the_command_hides_an_installed_package_only_if_asked(tmp_path: Path) -> None:
    package = tmp_path / "megatron" / "core"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (tmp_path / "program.py").write_text("from megatron.core import mpu; print(mpu.__name__)\n")
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"}
    command = ("-m", "core_compat.megatron")
    for asked, status, said in (
        ([], 1, "error: megatron.core is installed in this environment"),
        (["--replace-installed"], 0, "core_compat.megatron.parallel_state"),
    ):
        done = run_python(*command, *asked, "program.py", folder=tmp_path, cwd=tmp_path, env=environment)
        assert done.returncode == status
        assert (done.stdout + done.stderr).startswith(said) and "Traceback" not in done.stderr


@pytest.mark.parametrize(("arguments", "what"), [(["none.py"], "program none.py"), (["-m", "no.ne"], "module no.ne")])
def test_a_program_that_is_not_there_is_one_line(surface: Surface, arguments: list[str], what: str) -> None:
    with pytest.raises(SystemExit, match=rf"error: there is no {what} \(from "):
        run(surface, arguments)
