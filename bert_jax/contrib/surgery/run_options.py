"""Options that change the network of an initial model. This module does not import jax."""

from dataclasses import dataclass

from bert_jax.commands.finetune import FinetuneRunOptions
from bert_jax.config import RunOptions
from bert_jax.config.schema import AtLeast0


@dataclass(frozen=True, kw_only=True)
class ChangeOptions(RunOptions):
    """Options of pretraining and fine-tuning."""

    # Turn the BERT or RoBERTa of --init_from into a Longformer with so many positions (Beltagy et al. 2020, section
    # 5), windows of model.attention_windows tokens on each side (default 256), and global tokens; 0: off.
    to_long: AtLeast0[int] = 0
    # Layers of --init_from, from 0, with which the model starts, in this order (every second one: Sanh et al.
    # 2019). A layer may occur several times. Empty: all layers.
    init_layers: tuple[int, ...] = ()

    @property
    def changes(self) -> tuple[str, ...]:
        return (*super().changes, *(name for name in ("init_layers", "to_long") if getattr(self, name)))


@dataclass(frozen=True, kw_only=True)
class TaskChangeOptions(ChangeOptions, FinetuneRunOptions):
    """Options of fine-tuning."""

    # Add the pieces _start_, _delimiter_ and _classify_, which frame texts and pairs, with randomly initialized
    # embeddings to the vocabulary of the GPT that is fine-tuned (Radford et al. 2018, section 3.3).
    gpt_inputs: bool = False

    @property
    def changes(self) -> tuple[str, ...]:
        return (*super().changes, *(["gpt_inputs"] if self.gpt_inputs else []))
