"""Encoders before the Transformer: word vectors, NNLM, LSTM language models and ELMo, by ``model.encoder``.

Each has the interface of ``bert_jax.model.bert.Encoder``, so that objectives, tasks and heads read any of them.
"""

from bert_jax.model.ancestors.lstm import LstmEncoder
from bert_jax.model.ancestors.word_vectors import Nnlm, WordVectors

ENCODERS = {"none": WordVectors, "nnlm": Nnlm, "lstm": LstmEncoder, "bidirectional_lstm": LstmEncoder}

__all__ = ["ENCODERS"]
