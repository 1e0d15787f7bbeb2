"""bert_jax: BERT-class encoders in JAX. Import the subpackages; this module stays free of jax."""
