"""Objectives of the systems before BERT: word2vec, GloVe and ELMo. NNLM and AWD-LSTM train with ``causal_lm``."""
