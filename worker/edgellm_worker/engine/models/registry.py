"""From a checkpoint's config and weights to a model that ops can run."""

from __future__ import annotations

from dataclasses import dataclass, replace

from edgellm_worker.engine.models.config import ModelConfig
from edgellm_worker.engine.models.decoder import Decoder, read_decoder
from edgellm_worker.engine.models.mtp import Mtp, read_mtp
from edgellm_worker.engine.models.source import WeightSource


@dataclass(frozen=True, slots=True)
class Model:
    """`mtp` is None for a checkpoint without a draft head, `no_mtp_reason` then says why nothing is drafted."""

    config: ModelConfig
    base: Decoder
    mtp: Mtp | None
    no_mtp_reason: str | None = None

    def without_mtp(self) -> Model:
        return replace(self, mtp=None)


def read_model(config: ModelConfig, base: WeightSource, draft: WeightSource | None) -> Model:
    """`draft` is the `mtp.` namespace, None where there is none. Raises `CheckpointError`."""
    decoder = read_decoder(base, config)
    if not config.num_mtp_layers:
        return Model(config, decoder, None, "checkpoint has no MTP")
    if draft is None or not draft.has("fc.weight"):
        return Model(config, decoder, None, "config names an MTP layer but the files hold no mtp. tensors")
    return Model(config, decoder, read_mtp(draft, config, decoder.embedding))
