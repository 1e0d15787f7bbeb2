"""Systems before BERT: NNLM, word2vec, GloVe, AWD-LSTM and ELMo: encoders, objectives, formats of files."""

ENCODERS = {
    "none": "bert_jax.contrib.ancestors.encoders.word_vectors:WordVectors",
    "nnlm": "bert_jax.contrib.ancestors.encoders.word_vectors:Nnlm",
    "lstm": "bert_jax.contrib.ancestors.encoders.lstm:LstmEncoder",
    "bidirectional_lstm": "bert_jax.contrib.ancestors.encoders.lstm:LstmEncoder",
}
ENCODER_OPTIONS = {
    "none": "bert_jax.contrib.ancestors.config:WordVectorsConfig",
    "nnlm": "bert_jax.contrib.ancestors.config:NnlmConfig",
    "lstm": "bert_jax.contrib.ancestors.config:LstmConfig",
    "bidirectional_lstm": "bert_jax.contrib.ancestors.config:BidirectionalLstmConfig",
}
OBJECTIVES = {
    "bidirectional_lm": "bert_jax.contrib.ancestors.objectives.bidirectional_lm:BidirectionalLm",
    "skip_gram": "bert_jax.contrib.ancestors.objectives.word2vec:SkipGram",
    "cbow": "bert_jax.contrib.ancestors.objectives.word2vec:Cbow",
    "glove": "bert_jax.contrib.ancestors.objectives.glove:Glove",
}
OBJECTIVE_OPTIONS = {
    "bidirectional_lm": "bert_jax.contrib.ancestors.config:BidirectionalLmConfig",
    "skip_gram": "bert_jax.contrib.ancestors.config:Word2VecConfig",
    "cbow": "bert_jax.contrib.ancestors.config:CbowConfig",
    "glove": "bert_jax.contrib.ancestors.config:GloveConfig",
}
FORMATS = {
    "word2vec": "bert_jax.contrib.ancestors.formats.word2vec:FORMAT",
    "allennlp": "bert_jax.contrib.ancestors.formats.allennlp:FORMAT",
}
EXTENSIONS = {"model.character_filters": "bert_jax.contrib.ancestors.encoders.characters"}
