"""XLNet (Yang et al. 2019) for bert_jax: an encoder, an objective and a command that entry points add."""
