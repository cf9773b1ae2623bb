"""What tests of recordings share."""

import pytest

from engine.generation import slot_decoder


@pytest.fixture
def untried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots serve a model whose tokens change each other, as no model's do: its recording is what is tested."""
    monkeypatch.setattr(slot_decoder, "far_apart", lambda *_: False)
