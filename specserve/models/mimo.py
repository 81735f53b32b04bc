"""MiMo: Qwen2 with an extra layer that predicts one more token. The target runs without that layer."""

from __future__ import annotations

from typing import ClassVar

from specserve.models.qwen2 import Qwen2Model


class MiMoModel(Qwen2Model):
    """Ignores the ``mtp_layers``, which belong to a drafter."""

    unread: ClassVar[tuple[str, ...]] = (*Qwen2Model.unread, "mtp_layers.")
