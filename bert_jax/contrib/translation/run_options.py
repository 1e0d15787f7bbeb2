"""Options of runs that translate. This module does not import jax."""

from dataclasses import dataclass

from bert_jax.commands.finetune import FinetuneRunOptions, Records
from bert_jax.config.finetune import FinetuneConfig


@dataclass(frozen=True, kw_only=True)
class TranslationOptions(FinetuneRunOptions):
    """Options of fine-tuning for translation."""

    # Decoder to add to the model of --init_from: another model, in any format that bert-jax reads; same (a copy of
    # the model of --init_from); shared (like same, but during training, encoder and decoder share all parameters
    # except those of cross-attention); or random (random parameters, with the options of the encoder and of
    # model.decoder). The model of --init_from becomes the encoder of the translation model.
    decoder_from: str = ""

    @property
    def changes(self) -> tuple[str, ...]:
        return (*super().changes, *(["decoder_from"] if self.decoder_from else []))

    def records(self, config: FinetuneConfig) -> Records:
        if config.task.kind != "translation":
            return super().records(config)
        from bert_jax.contrib.translation.records import read_records

        return read_records(config)
