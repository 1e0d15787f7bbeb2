"""Formats of the systems before BERT: vectors of word2vec and GloVe, ELMo's options.json with hdf5 weights."""

from bert_jax.interop.ancestors.allennlp import is_allennlp, read_allennlp, write_allennlp
from bert_jax.interop.ancestors.word2vec import is_word2vec, read_word2vec, write_word2vec

__all__ = ["is_allennlp", "is_word2vec", "read_allennlp", "read_word2vec", "write_allennlp", "write_word2vec"]
