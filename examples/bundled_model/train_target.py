"""Trains the bundled target model from random weights, on one GPU in minutes.

    python -m examples.bundled_model.train_target --data DIR --output DIR --time-limit 480 --compile

``--data`` holds ``train.npz``, ``heldout.npz`` and the tokenizer's files. The result is a Hugging Face
directory.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from examples.bundled_model.save_target import save_target
from specserve.layers.batch import TokenBatch
from specserve.layers.config import LayerConfig
from specserve.layers.rotary import RopeConfig
from specserve.models.checkpoint import load_target
from specserve.models.config import ModelConfig
from specserve.models.llama import LlamaModel
from specserve.tools.train.attend import CausalAttend
from specserve.tools.train.data import load_tokens
from specserve.tools.train.loop import TrainingLoop, LoopConfig, Metrics
from specserve.tools.train.optim import OPTIMIZERS, SCHEDULES, build_optimizers
from specserve.tools.train.packing import Batch, Rows, RowSampler, make_batch, pack

BOS, EOS = 0, 1
CONTEXT_WEIGHT = 0.3  # of a token that the assistant did not write
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
)


def model_config(args: argparse.Namespace) -> ModelConfig:
    """The bundled target's shape: about 10 million parameters."""
    layer = LayerConfig(
        hidden_size=args.hidden_size,
        intermediate_size=args.intermediate_size,
        num_heads=args.heads,
        num_kv_heads=args.kv_heads,
        head_dim=args.head_dim,
        rms_norm_eps=1e-5,
        input_size=args.hidden_size,
    )
    return ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=args.vocab_size,
        layers=(layer,) * args.layers,
        ropes=(RopeConfig(theta=10000.0),),
        tie_word_embeddings=False,
        max_position_embeddings=4096,
        eos_token_ids=(EOS,),
        bos_token_id=BOS,
        dtype="bfloat16",
    )


@torch.no_grad()
def init_weights(model: LlamaModel) -> None:
    """Normal(0, 0.02), with the projections that write the residual stream scaled down by depth."""
    depth = (2 * model.config.num_layers) ** -0.5
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2:
            writes = name.endswith(("o_proj.weight", "down_proj.weight"))
            nn.init.normal_(parameter, std=0.02 * (depth if writes else 1.0))


class NextToken:
    """Cross-entropy of every next token inside a document; what others wrote weighs ``CONTEXT_WEIGHT``."""

    def __init__(self, model: LlamaModel) -> None:
        self.model = model

    def __call__(self, batch: Batch) -> tuple[Tensor, Metrics]:
        losses_T, mask_T, inside_T = self.losses(batch)
        weight_T = torch.where(mask_T, 1.0, CONTEXT_WEIGHT) * inside_T
        loss = (losses_T * weight_T).sum() / weight_T.sum().clamp(min=1)
        learned_T = mask_T & inside_T
        own = (losses_T.detach() * learned_T).sum() / learned_T.sum().clamp(min=1)
        return loss, {"masked_loss": own}

    def losses(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Per token: its loss, whether the assistant wrote the next one, whether that is in the same
        document.
        """
        hidden_TH, _ = self.model(TokenBatch(batch.tokens_T, batch.positions_T, CausalAttend(batch.packing)))
        labels_T = batch.tokens_T.roll(-1)
        losses_T = F.cross_entropy(self.model.logits(hidden_TH).float(), labels_T, reduction="none")
        document_T = batch.packing.documents(labels_T.shape[0])
        return losses_T, batch.mask_T.roll(-1), document_T == document_T.roll(-1)


class HeldOut:
    """The mean loss on tokens that are trained on, for each held-out source."""

    def __init__(
        self, loop_loss: NextToken, sources: Mapping[str, Rows], rows: int, amp: bool, flash: bool
    ) -> None:
        self.loss, self.sources, self.rows, self.amp, self.flash = loop_loss, sources, rows, amp, flash

    @torch.no_grad()
    def __call__(self) -> dict[str, float]:
        return {f"heldout_{name}": self._mean(rows) for name, rows in self.sources.items()}

    def _mean(self, rows: Rows) -> float:
        device = next(self.loss.model.parameters()).device
        total, count = 0.0, 0.0
        for start in range(0, len(rows), self.rows):
            chosen = torch.arange(start, min(start + self.rows, len(rows))).numpy()
            batch = make_batch([(rows, chosen)], device, self.flash)
            with torch.autocast(device.type, torch.bfloat16, enabled=self.amp):
                losses_T, mask_T, inside_T = self.loss.losses(batch)
            learned_T = mask_T & inside_T
            total, count = total + float((losses_T * learned_T).sum()), count + float(learned_T.sum())
        return round(total / max(count, 1.0), 5)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="directory of train.npz and heldout.npz")
    parser.add_argument("--tokenizer", type=Path, help="directory of the tokenizer's files (default: --data)")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--init-from", type=Path, help="Hugging Face directory to start from")
    parser.add_argument("--restart", action="store_true", help="ignore the checkpoint in --output")
    parser.add_argument("--time-limit", type=float, help="seconds after which the schedule has ended")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument("--batch-tokens", type=int, default=131072)
    parser.add_argument("--accumulate", type=int, default=1, help="batches of --batch-tokens a step")
    parser.add_argument("--text-fraction", type=float, default=0.35)
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="muon")
    parser.add_argument("--schedule", choices=sorted(SCHEDULES), default="linear")
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--warmup", type=int, default=150)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log-every", type=int, default=20)
    parser.add_argument("--evaluate-every", type=int, default=500)
    parser.add_argument("--evaluate-rows", type=int, default=512, help="most held-out rows a source")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--dense-attention", action="store_true", help="no flash attention (slower)")
    sizes = {"hidden-size": 256, "intermediate-size": 768, "layers": 10, "heads": 8, "kv-heads": 2}
    for name, default in {**sizes, "head-dim": 32, "vocab-size": 4096}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    return parser.parse_args()


def load_rows(args: argparse.Namespace) -> tuple[list[Rows], list[float], dict[str, Rows]]:
    """Training rows, their shares, held-out rows."""
    train = load_tokens(args.data / "train.npz")
    shares = [args.text_fraction if name == "text" else 1 - args.text_fraction for name in train]
    rows = {name: pack(documents, args.seq_len, args.seed) for name, documents in train.items()}
    for name, packed in rows.items():
        print(f"{name}: {len(train[name])} documents, {len(train[name].tokens)} tokens, {len(packed)} rows")
    heldout = {}
    for name, documents in load_tokens(args.data / "heldout.npz").items():
        packed = pack(documents, args.seq_len, args.seed)
        most = min(len(packed), args.evaluate_rows)
        heldout[name] = Rows(packed.tokens[:most], packed.mask[:most], packed.starts[:most])
    return list(rows.values()), shares, heldout


def make_model(args: argparse.Namespace, device: torch.device) -> LlamaModel:
    torch.manual_seed(args.seed)
    if args.init_from:
        return load_target(args.init_from, torch.float32, device, args.seq_len)
    model = LlamaModel(model_config(args), args.seq_len)
    init_weights(model)
    return model.to(device)


def loop_config(args: argparse.Namespace, amp: bool) -> LoopConfig:
    fixed = (
        "seed",
        "seq_len",
        "batch_tokens",
        "accumulate",
        "text_fraction",
        "optimizer",
        "lr",
        "weight_decay",
    )
    return LoopConfig(
        output=args.output,
        steps=args.steps,
        time_limit=args.time_limit,
        warmup=args.warmup,
        schedule=args.schedule,
        accumulate=args.accumulate,
        log_every=args.log_every,
        evaluate_every=args.evaluate_every,
        amp=amp,
        compile=args.compile,
        settings={name: getattr(args, name) for name in fixed},
    )


def save(model: LlamaModel, args: argparse.Namespace) -> None:
    """Writes the Hugging Face directory."""
    config = model_config(args) if args.init_from is None else model.config
    save_target(model, config, args.output, torch.bfloat16)
    generation = {"bos_token_id": BOS, "eos_token_id": EOS}
    (args.output / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    source = args.tokenizer or args.data
    for name in TOKENIZER_FILES:
        if (source / name).exists():
            shutil.copyfile(source / name, args.output / name)


def main() -> None:
    args = parse_args()
    device = torch.device(args.device)
    amp = device.type == "cuda"
    flash = amp and not args.dense_attention
    torch.set_float32_matmul_precision("high")
    rows, shares, heldout = load_rows(args)
    batch_rows = max(1, args.batch_tokens // args.seq_len)
    model = make_model(args, device)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {batch_rows} rows a batch")
    loss = NextToken(model)
    loop = TrainingLoop(
        loop_config(args, amp),
        model,
        build_optimizers(model, args.optimizer, args.lr, args.weight_decay),
        loss,
        RowSampler(rows, shares, batch_rows, args.seed, device, flash),
        HeldOut(loss, heldout, max(1, batch_rows // 4), amp, flash),
    )
    if args.restart:
        loop.forget()
    loop.run()
    save(model, args)


if __name__ == "__main__":
    main()
