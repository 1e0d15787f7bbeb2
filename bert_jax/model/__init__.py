"""The encoder and its heads: pure Linen modules that do not read or write files."""

from bert_jax.model.bert import BertForPretraining, BertModel, BertOutput, padded_vocab_size
from bert_jax.model.canonical import canonical_leaves, from_canonical, to_canonical
