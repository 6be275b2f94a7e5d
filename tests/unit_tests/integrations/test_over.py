"""`over(trainer_class)`: a Trainer of TRL, or of a user's own, trains in any layout as on one process."""

from __future__ import annotations

import pytest

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")


def test_a_class_is_derived_once_and_keeps_its_name() -> None:
    from core.integrations import Trainer, over

    class Mine(transformers.Trainer):  # type: ignore[misc, name-defined]
        pass

    derived = over(Mine)
    assert derived.__name__ == "Mine" and issubclass(derived, Mine)
    assert over(Mine) is derived and over(derived) is derived and over(transformers.Trainer) is Trainer
    with pytest.raises(TypeError, match="over takes a class derived from transformers.Trainer, and was given 3"):
        over(3)


def test_the_trainers_of_trl_are_there_by_name() -> None:
    trl = pytest.importorskip("trl")
    from core import integrations

    for name in ("SFTTrainer", "DPOTrainer", "RewardTrainer"):
        found = getattr(integrations, name)
        assert issubclass(found, getattr(trl, name)) and found is integrations.over(getattr(trl, name))
