"""Formats of the systems before BERT: vectors of word2vec and GloVe, ELMo's options.json with hdf5 weights."""
