"""The training loop: scheduled by steps or by the clock, resumable, logged."""

from __future__ import annotations

import json
import logging
import math
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from tqdm import tqdm

from specserve.tools.files import replacing
from specserve.tools.train.optim import rate
from specserve.tools.train.packing import Batch

log = logging.getLogger("specserve.tools.train")
Metrics = dict[str, Tensor]
LossFunction = Callable[[Batch], tuple[Tensor, Metrics]]
BAR = "{desc}: {percentage:3.0f}%|{bar}| {elapsed}<{remaining}{postfix}"
SHOW_EVERY, SHOW_EVERY_IN_FILES = 1.0, 30.0  # seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopConfig:
    """Configuration of a run. ``steps``, ``time_limit`` (seconds) or both must be given. ``warmup``: see ``rate``.

    ``amp`` runs the loss in bfloat16 autocast; ``accumulate`` averages the gradients of that many batches per step;
    ``save_every`` is in seconds, ``log_every`` and ``evaluate_every`` (0: only at the end) are in steps.
    """

    output: Path
    steps: int | None = None
    time_limit: float | None = None
    warmup: int | None = None
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


class TrainingLoop:
    """Train ``module`` with ``loss`` on ``batches(0), batches(1), ...`` and keep ``output/checkpoint``.

    ``elapsed``: seconds of training, without the first step of each process, which compiles and warms up.
    """

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
        self._began = 0.0  # the time at which ``elapsed`` was 0, had the clock never stopped
        self._last: Metrics = {}  # the last step's loss and gradient norm
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
        self._check_space()
        try:
            if self.progress() < 1:
                self._first_step()
            with self._bar() as bar:
                self._steps(bar)
        except KeyboardInterrupt:
            self.save()
            raise
        self.save()

    def _bar(self) -> tqdm[Any]:
        every = SHOW_EVERY if sys.stderr.isatty() else SHOW_EVERY_IN_FILES
        begin = self.progress()
        return tqdm(desc="training", total=1.0, initial=begin, mininterval=every, miniters=0, bar_format=BAR)

    def _first_step(self) -> None:
        """Run this process's first step, then start the clock."""
        log.info("the first step%s", " compiles, which can take minutes" if self.config.compile else "")
        began = time.monotonic()
        metrics = self.train_step()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self._began = time.monotonic() - self.elapsed
        log.info("it took %.1f s, the loss is %.3f", time.monotonic() - began, float(metrics["loss"]))
        self._after_step(metrics)

    def _steps(self, bar: tqdm[Any]) -> None:
        saved, shown = self.elapsed, 0.0
        while self.progress() < 1:
            metrics = self.train_step()
            self._read_clock()
            if self._is_logged() or time.monotonic() - shown > SHOW_EVERY:
                self._show(metrics, bar)
                shown = time.monotonic()
            self._after_step(metrics)
            if self.elapsed - saved >= self.config.save_every:
                self.save()
                saved = self.elapsed

    def _after_step(self, metrics: Metrics) -> None:
        if self._is_logged():
            self._log(metrics)
        self._evaluate_sometimes()

    def _is_logged(self) -> bool:
        return self.step == 1 or self.step % self.config.log_every == 0 or self.progress() >= 1

    def _read_clock(self) -> None:
        self.elapsed = time.monotonic() - self._began

    def _check_space(self) -> None:
        """Raise ValueError if the disk has no room for the draft and its checkpoint, which has two moments of each
        weight and is there twice while a new one replaces it."""
        weights = sum(p.nbytes for p in self.module.parameters() if p.requires_grad)
        need = weights + 3 * weights * (1 if self.checkpoint.exists() else 2)
        free = shutil.disk_usage(self.config.output).free
        if free < need:
            raise ValueError(
                f"--output: {self.config.output} has {free / 2**30:.2f} GiB free; the draft and its checkpoint need"
                f" {need / 2**30:.2f} GiB"
            )

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
        self._last = {"loss": loss.detach(), "grad_norm": norm}
        return {**self._last, **metrics}

    def autocast(self) -> torch.autocast:
        """Return the context of the precision in which the loss is computed."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.config.amp)

    def _show(self, metrics: Metrics, bar: tqdm[Any]) -> None:
        """Update the bar. Reading the loss also keeps the host from running ahead of the device."""
        loss = float(metrics["loss"])
        self._read_clock()
        of = f"/{self.config.steps}" if self.config.steps else ""
        bar.set_postfix_str(f"step {self.step}{of}, loss {loss:.3f}", refresh=False)
        bar.update(self.progress() - bar.n)

    def _check_finite(self) -> None:
        """Raise FloatingPointError if the last step's loss or gradient, and so the weights, are not finite."""
        wrong = [name for name, value in self._last.items() if not math.isfinite(float(value))]
        if wrong:
            raise FloatingPointError(
                f"the {' and the '.join(wrong)} of step {self.step} or before are not finite; start over (--restart)"
                " with a lower learning rate (--lr)"
            )

    def _log(self, metrics: Metrics) -> None:
        self._check_finite()
        rates = [group["lr"] for optimizer in self.optimizers for group in optimizer.param_groups]
        self._write({"lr": rates[0], **{name: round(float(value), 5) for name, value in metrics.items()}})

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
        """Write the checkpoint; a crash, or a loss that is not finite, leaves the old one intact."""
        self._check_finite()
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
        with replacing("--output", self.checkpoint) as partial, partial.open("wb") as file:
            torch.save(state, file)

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

    def losses(self) -> list[float]:
        """Return the logged losses, from the first step on, unless the log was deleted."""
        text = self.log_path.read_text() if self.log_path.exists() else ""
        lines = (json.loads(line) for line in text.splitlines())
        return [line["loss"] for line in lines if "loss" in line]

    def _trim_log(self) -> None:
        """Drop log lines later than the checkpoint; they will be written again."""
        if self.log_path.exists():
            lines = self.log_path.read_text().splitlines(keepends=True)
            self.log_path.write_text("".join(x for x in lines if json.loads(x)["step"] <= self.step))
