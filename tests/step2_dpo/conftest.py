"""The model of the tests of DPO and KTO."""

from pathlib import Path

import pytest

from tests.pipeline.models.tiny import config_of, language_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    language_model(config_of("llama")).save_pretrained(path)
    return path
