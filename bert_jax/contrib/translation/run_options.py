"""Options of runs that translate. This module does not import jax."""

from dataclasses import dataclass

from bert_jax.commands.finetune import FinetuneRunOptions, TaskCaller, train
from bert_jax.config.loader import Settings
from bert_jax.process import early, exits
from bert_jax.process.signals import StopRequest


@dataclass(frozen=True, kw_only=True)
class TranslationOptions(FinetuneRunOptions):
    """Options of fine-tuning for translation."""

    # Adds a decoder to the model of --init_from, which becomes the encoder of a translation model: another model,
    # in any format that bert-jax reads; same (a copy of the model of --init_from); shared (as same, but encoder
    # and decoder share their parameters during training, except cross-attention); or random (random parameters,
    # with the options of the encoder and of model.decoder).
    decoder_from: str = ""

    @property
    def changes(self) -> tuple[str, ...]:
        return (*super().changes, *(["decoder_from"] if self.decoder_from else []))

    def execute(self, settings: Settings, stop: StopRequest) -> int:
        kinds = [value for _, key, value in settings.all if key == "task.kind"]
        if kinds[-1:] != ["translation"]:
            return super().execute(settings, stop)
        from bert_jax.contrib.translation.records import read_records

        train(self, settings, stop, early.STARTED, TaskCaller(read=read_records))
        return exits.OK
