"""Fixtures of the main job's tests."""

import pytest


@pytest.fixture(scope="session")
def text_flags(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Flags for a small text: this repository's own source."""
    from tests.unit_tests.core_train.training_reference import text_flags_in  # imports what the suite may skip

    return text_flags_in(tmp_path_factory.mktemp("tokens"))
