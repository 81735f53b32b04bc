"""A server and an ``LLM``, each with an empty kernel cache: when they are ready, and how fast they are from then on."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest

from benchmarks.startup import DOORS, settings_of, through
from specserve.config.paths import BUNDLED_DRAFTS, BUNDLED_MODEL

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("shape", ["off", "3,1,4"])
def test_both_doors_keep_their_speed_from_the_first_answer_on(
    shape: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = Namespace(model=str(BUNDLED_MODEL), eagle3=str(BUNDLED_DRAFTS["EAGLE3"]))
    found = {}
    for door in DOORS:
        monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / door))
        found[door] = through(door, settings_of(args, shape))
        assert (found[door]["late_kernels"], found[door]["eager_steps"]) == (0, 0), door
        assert min(row["ratio"] for row in found[door]["rates"]) > 0.8, found
    seconds = [each["seconds"] for each in found.values()]
    assert max(seconds) < 1.3 * min(seconds)
    for server, llm in zip(*(each["rates"] for each in found.values()), strict=True):
        assert llm["later"] > 0.8 * server["later"], found
