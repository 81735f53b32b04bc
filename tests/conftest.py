"""Small checkpoints that several tests serve, made once a run."""

from __future__ import annotations

import pytest

from tests.engines import Checkpoints
from tests.reference.draft_models import make_eagle, make_eagle3
from tests.reference.models import make_llama


@pytest.fixture(scope="session")
def agreeing(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    """A target that is nearly a table of next tokens, and drafts that often say what it says."""
    path = tmp_path_factory.mktemp("agreeing")
    target = make_llama(path / "target", branch_scale=0.04)
    eagle = make_eagle(path / "eagle", target, agree=True)
    return Checkpoints(target, eagle, make_eagle3(path / "eagle3", target, agree=True, draft_vocab=40))


@pytest.fixture(scope="session")
def random_models(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    """Nothing agrees, and every output depends on all features and all of the cache."""
    path = tmp_path_factory.mktemp("random")
    target = make_llama(path / "target")
    eagle = make_eagle(path / "eagle", target, fc_bias=True, qkv_bias=True)
    return Checkpoints(target, eagle, make_eagle3(path / "eagle3", target, draft_vocab=24, rope_theta=500.0))
