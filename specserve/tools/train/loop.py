"""The training loop: scheduled by steps or by the clock, resumable, logged."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from tqdm import tqdm

from specserve.tools.train.optim import rate
from specserve.tools.train.packing import Batch

Metrics = dict[str, Tensor]
LossFunction = Callable[[Batch], tuple[Tensor, Metrics]]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopConfig:
    """Configuration of a run. ``steps``, ``time_limit`` (seconds) or both must be given.

    ``amp`` runs the loss in bfloat16 autocast; ``accumulate`` averages the gradients of that many batches per step;
    ``save_every`` is in seconds, ``log_every`` and ``evaluate_every`` (0: only at the end) are in steps.
    """

    output: Path
    steps: int | None = None
    time_limit: float | None = None
    warmup: int = 100
    schedule: str = "cosine"
    clip: float = 1.0
    accumulate: int = 1
    log_every: int = 10
    save_every: float = 120.0
    evaluate_every: int = 0
    amp: bool = False
    compile: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)  # must not change when a run is resumed

    def __post_init__(self) -> None:
        for name in ("steps", "time_limit"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} must be positive, found {value}")
        if self.steps is None and self.time_limit is None:
            raise ValueError("give the number of steps, the time limit or both")


class Loop:
    """Train ``module`` with ``loss`` on ``batches(0), batches(1), ...`` and keep ``output/checkpoint``."""

    def __init__(
        self,
        config: LoopConfig,
        module: nn.Module,
        optimizers: list[Optimizer],
        loss: LossFunction,
        batches: Callable[[int], Batch],
        evaluate: Callable[[], Mapping[str, float]] | None = None,
    ) -> None:
        self.config, self.module, self.optimizers = config, module, optimizers
        self.batches, self.evaluate = batches, evaluate
        self.device = next(module.parameters()).device
        self.loss: LossFunction = torch.compile(loss) if config.compile else loss
        self.base_rates = [[group["lr"] for group in o.param_groups] for o in optimizers]
        self.step, self.tokens, self.elapsed = 0, 0, 0.0
        self._began, self._before = (
            0.0,
            0.0,
        )  # clock and elapsed seconds when this process started
        self.checkpoint = config.output / "checkpoint" / "state.pt"
        self.log_path = config.output / "train_log.jsonl"

    def progress(self) -> float:
        """Return the finished share of the run, 0 to 1."""
        by_steps = self.step / self.config.steps if self.config.steps else 0.0
        by_clock = self.elapsed / self.config.time_limit if self.config.time_limit else 0.0
        return min(1.0, max(by_steps, by_clock))

    def run(self) -> None:
        """Train to the end of the schedule. An interrupt leaves a checkpoint to resume from."""
        self.config.output.mkdir(parents=True, exist_ok=True)
        if self.checkpoint.exists():
            self.load()
        self._began, self._before = time.monotonic(), self.elapsed
        try:
            with tqdm(total=100, initial=int(100 * self.progress()), unit="%", desc="training") as bar:
                self._steps(bar)
        except KeyboardInterrupt:
            self.save()
            raise
        self.save()

    def _steps(self, bar: tqdm[Any]) -> None:
        saved = self.elapsed
        while self.progress() < 1:
            metrics = self.train_step()
            self._read_clock()
            if self.step % self.config.log_every == 0 or self.progress() >= 1:
                self._log(metrics, bar)
            self._evaluate_sometimes()
            if self.elapsed - saved >= self.config.save_every:
                self.save()
                saved = self.elapsed

    def _read_clock(self) -> None:
        self.elapsed = self._before + time.monotonic() - self._began

    def train_step(self) -> Metrics:
        factor = rate(self.config.schedule, self.step, self.config.warmup, self.progress())
        for optimizer, rates in zip(self.optimizers, self.base_rates, strict=True):
            for group, base in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = base * factor
        self.module.train()
        for i in range(self.config.accumulate):
            batch = self.batches(self.step * self.config.accumulate + i)
            with self.autocast():
                loss, metrics = self.loss(batch)
            (loss / self.config.accumulate).backward()
            self.tokens += batch.tokens_T.numel()
        norm = nn.utils.clip_grad_norm_(self.module.parameters(), self.config.clip)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.step += 1
        return {"loss": loss.detach(), "grad_norm": norm, **metrics}

    def autocast(self) -> torch.autocast:
        """Return the context of the precision in which the loss is computed."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.config.amp)

    def _log(self, metrics: Mapping[str, Tensor | float], bar: tqdm[Any]) -> None:
        """Append a line to the log. Reading the metrics also keeps the host from running ahead of the device."""
        values = {name: round(float(value), 5) for name, value in metrics.items()}
        self._read_clock()
        if not math.isfinite(values["loss"]):
            raise RuntimeError(f"the loss is {values['loss']} at step {self.step}; try a lower learning rate")
        rates = [group["lr"] for optimizer in self.optimizers for group in optimizer.param_groups]
        self._write({"lr": rates[0], **values})
        bar.update(int(100 * self.progress()) - bar.n)
        bar.set_postfix(step=self.step, loss=values["loss"])

    def _write(self, values: Mapping[str, float]) -> None:
        head = {"step": self.step, "elapsed": round(self.elapsed, 2), "tokens": self.tokens}
        with self.log_path.open("a") as file:
            file.write(json.dumps({**head, **values}) + "\n")

    def _evaluate_sometimes(self) -> None:
        every = self.config.evaluate_every
        due = bool(every) and self.step % every == 0
        if self.evaluate is not None and (due or self.progress() >= 1):
            self._write(self.evaluate())

    def save(self) -> None:
        """Write the checkpoint; a crash leaves the old one intact."""
        state = {
            "settings": json.dumps(self.config.settings, sort_keys=True),
            "step": self.step,
            "tokens": self.tokens,
            "elapsed": self.elapsed,
            "module": self.module.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "rng": torch.get_rng_state(),
            "device_rng": torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else None,
        }
        self.checkpoint.parent.mkdir(parents=True, exist_ok=True)
        partial = self.checkpoint.with_suffix(".partial")
        torch.save(state, partial)
        partial.replace(self.checkpoint)

    def forget(self) -> None:
        """Delete the checkpoint and the log, so that ``run`` starts over."""
        self.checkpoint.unlink(missing_ok=True)
        self.log_path.unlink(missing_ok=True)

    def load(self) -> None:
        """Resume from the checkpoint. Raises ValueError if it belongs to a run with other settings."""
        state = torch.load(self.checkpoint, map_location=self.device, weights_only=True)
        old, new = json.loads(state["settings"]), json.loads(json.dumps(self.config.settings))
        changed = [name for name in sorted({*old, *new}) if old.get(name) != new.get(name)]
        if changed:
            found = ", ".join(f"{name} (was {old.get(name)!r}, now {new.get(name)!r})" for name in changed)
            raise ValueError(
                f"{self.checkpoint} is from a run with other settings: {found}; or give --restart"
            )
        self.module.load_state_dict(state["module"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.step, self.tokens, self.elapsed = state["step"], state["tokens"], state["elapsed"]
        torch.set_rng_state(state["rng"].cpu())
        if state["device_rng"] is not None and self.device.type == "cuda":
            torch.cuda.set_rng_state(state["device_rng"].cpu(), self.device)
        self._trim_log()

    def _trim_log(self) -> None:
        """Drop log lines later than the checkpoint; they will be written again."""
        if self.log_path.exists():
            lines = self.log_path.read_text().splitlines(keepends=True)
            self.log_path.write_text("".join(x for x in lines if json.loads(x)["step"] <= self.step))
