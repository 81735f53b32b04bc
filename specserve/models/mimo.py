"""MiMo: Qwen2 whose checkpoint carries a layer that predicts one token further. As a target it runs without that."""

from __future__ import annotations

from typing import ClassVar

from specserve.models.qwen2 import Qwen2Model


class MiMoModel(Qwen2Model):
    """``mtp_layers`` are a drafter's."""

    unread: ClassVar[tuple[str, ...]] = (*Qwen2Model.unread, "mtp_layers.")
