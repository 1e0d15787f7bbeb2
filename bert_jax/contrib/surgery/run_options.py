"""Options that change the network of an initial model. This module does not import jax."""

from dataclasses import dataclass

from bert_jax.commands.finetune import FinetuneRunOptions
from bert_jax.config import RunOptions
from bert_jax.config.schema import AtLeast0


@dataclass(frozen=True, kw_only=True)
class ChangeOptions(RunOptions):
    """Options of pretraining and fine-tuning."""

    # Number of positions of a Longformer into which the BERT or RoBERTa of --init_from is converted (Beltagy et al.
    # 2020, section 5), with global tokens and with windows of model.attention_windows tokens on each side (default
    # 256); 0: no conversion.
    to_long: AtLeast0[int] = 0
    # Layers of --init_from, counted from 0, of which the model initially consists, in this order (every second
    # layer: Sanh et al. 2019). A layer may occur several times. Empty: all layers.
    init_layers: tuple[int, ...] = ()

    @property
    def changes(self) -> tuple[str, ...]:
        return (*super().changes, *(name for name in ("init_layers", "to_long") if getattr(self, name)))


@dataclass(frozen=True, kw_only=True)
class TaskChangeOptions(ChangeOptions, FinetuneRunOptions):
    """Options of fine-tuning."""

    # Add the pieces _start_, _delimiter_ and _classify_ to the vocabulary of a GPT, with randomly initialized
    # embeddings, and frame texts and pairs with them (Radford et al. 2018, section 3.3).
    gpt_inputs: bool = False

    @property
    def changes(self) -> tuple[str, ...]:
        return (*super().changes, *(["gpt_inputs"] if self.gpt_inputs else []))
