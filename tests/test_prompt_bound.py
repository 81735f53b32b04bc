"""Prompts between steps, and first tokens before them."""

from __future__ import annotations

import itertools

import pytest

from specserve.core import SamplingParams
from specserve.engine.commands import Prefill
from specserve.engine.launch import Launch
from specserve.engine.runner import Runner
from tests.engines import Checkpoints, Client, make_scheduler


@pytest.mark.parametrize("overlap", ["on", "off"])
def test_a_long_prompt_comes_in_pieces_between_steps(
    agreeing: Checkpoints, monkeypatch: pytest.MonkeyPatch, overlap: str
) -> None:
    """And the texts are those of a server without the bound."""
    launches: list[int | str] = []
    prefill, step = Runner.prefill, Runner.step

    def prefilled(runner: Runner, command: Prefill) -> Launch:
        launches.append(sum(len(row.tokens) for row in command.rows))
        return prefill(runner, command)

    monkeypatch.setattr(Runner, "prefill", prefilled)
    monkeypatch.setattr(
        Runner, "step", lambda runner, command: launches.append("step") or step(runner, command)
    )
    texts = []
    for bound in (None, 8):
        launches.clear()
        scheduler = make_scheduler(
            agreeing.target,
            dtype="float64",
            max_total_tokens=400,
            max_prefill_tokens_per_step=bound,
            overlap_schedule=overlap,
        )
        client, params = Client(scheduler), SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
        client.submit("short", list(range(2, 22)), params)
        client.iterate()
        client.submit("long", list(range(3, 43)), params)
        client.run()
        texts.append([client.answers[rid].tokens for rid in ("short", "long")])
        prompts = [found for found in launches if found != "step"]
        assert prompts == ([20, 40] if bound is None else [20, 8, 8, 8, 8, 8])
        if bound is not None:
            at = [index for index, found in enumerate(launches) if found == 8]
            assert all(second - first == 2 for first, second in itertools.pairwise(at))
    assert texts[0] == texts[1]


@pytest.mark.parametrize("overlap", ["on", "off"])
def test_a_first_token_does_not_wait_for_the_step_after_it(agreeing: Checkpoints, overlap: str) -> None:
    scheduler = agreeing.scheduler("EAGLE3", (3, 1, 4), overlap_schedule=overlap)
    client, params = Client(scheduler), SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    for rid in ("first", "second"):
        client.submit(rid, list(range(2, 22)), params)
        while not client.answers[rid].tokens:
            client.iterate()
        assert len(client.answers[rid].tokens) == 1
    client.run()
    assert all(len(answer.tokens) == 20 for answer in client.answers.values())
