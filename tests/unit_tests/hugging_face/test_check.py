"""The command line: what it says of a family, and its exit status."""

import pytest

pytest.importorskip("transformers")

from core.hugging_face.read.transformers_plans import transformers_package
from tests.families.__main__ import main
from tests.families.check import Verdict, table
from tests.families.tiny import families


def test_check_says_equal_and_refused_of_families(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "glm4_moe", "--tp", "2", "--set", "use_qk_norm=True"]) == 0
    assert "glm4_moe/Glm4MoeConfig: equal: at most" in capsys.readouterr().out
    assert main(["check", "doge/DogeConfig"]) == 0
    assert "doge/DogeConfig: refused: doge (DogeForCausalLM): its forward fails once" in capsys.readouterr().out


def test_a_family_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "lama"]) == 2
    assert "no family with a plan is called 'lama'" in capsys.readouterr().err
    assert main(["check", "llama", "--set", "head_dim"]) == 2
    assert "--set takes NAME=VALUE, got 'head_dim'" in capsys.readouterr().err


def test_every_family_with_a_plan_is_found() -> None:
    version = tuple(int(part) for part in transformers_package().__version__.split(".")[:2])
    found = families()
    assert (len(found), len({name.split("/")[0] for name in found})) == {(5, 23): (144, 132), (5, 24): (164, 152)}[
        version
    ]


@pytest.mark.parametrize("name", ["internlm3/InternLM3Config", "iquestcoder/IQuestCoderConfig"])
def test_a_family_with_another_one_s_model_is_built_and_equal(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The package has a configuration for it, and says in its auto classes that llama's model is meant."""
    assert main(["check", name]) == 0
    assert f"{name}: equal" in capsys.readouterr().out


def test_the_table_counts_answers_and_gives_reasons() -> None:
    verdicts = [Verdict("a/A", "equal", off=1e-15, summed=(8, 4)), Verdict("b/B", "refused", "no plan")]
    text = table(verdicts, 2)
    assert "At tp 2: 1 equal, 1 refused." in text
    assert "| `a/A` | equal | 8 gradients summed over tp, 4 of them without a rule |" in text
    assert "| `b/B` | refused | no plan |" in text
