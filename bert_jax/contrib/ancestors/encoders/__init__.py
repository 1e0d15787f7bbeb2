"""Encoders before the Transformer: word vectors, NNLM, LSTM language models and ELMo, by ``model.encoder``.

Each has the interface of ``bert_jax.model.bert.Encoder``, so that objectives, tasks and heads read any of them.
"""
