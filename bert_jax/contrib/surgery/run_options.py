"""Options that change the network of an initial model. This module does not import jax."""

from dataclasses import dataclass

from bert_jax.commands.finetune import FinetuneRunOptions
from bert_jax.config import RunOptions
from bert_jax.config.schema import AtLeast0


@dataclass(frozen=True, kw_only=True)
class ChangeOptions(RunOptions):
    """Options of pretraining and fine-tuning."""

    # Convert the BERT or RoBERTa of --init_from to a Longformer with this number of positions (Beltagy et al. 2020,
    # section 5). The Longformer has global tokens, and every other token attends to model.attention_windows tokens
    # on each side (default 256). 0: no conversion.
    to_long: AtLeast0[int] = 0
    # Layers of the model in --init_from, counted from 0, that form the network of the run, in this order (Sanh et
    # al. 2019: every second layer). A layer may occur several times. Empty: all layers.
    init_layers: tuple[int, ...] = ()

    @property
    def changes(self) -> tuple[str, ...]:
        return (*super().changes, *(name for name in ("init_layers", "to_long") if getattr(self, name)))


@dataclass(frozen=True, kw_only=True)
class TaskChangeOptions(ChangeOptions, FinetuneRunOptions):
    """Options of fine-tuning."""

    # Add the pieces _start_, _delimiter_ and _classify_ to the vocabulary of a GPT, with randomly initialized
    # embeddings, and frame texts and pairs with these pieces (Radford et al. 2018, section 3.3).
    gpt_inputs: bool = False

    @property
    def changes(self) -> tuple[str, ...]:
        return (*super().changes, *(["gpt_inputs"] if self.gpt_inputs else []))
