"""Translation: an encoder and a decoder with cross-attention, beam search, BLEU and chrF, EncoderDecoderModel."""

COMMANDS = {"encoder-decoder": "bert_jax.contrib.translation.commands:COMMANDS"}
ENCODERS = {"encoder_decoder": "bert_jax.contrib.translation.network:EncoderDecoder"}
ENCODER_OPTIONS = {"encoder_decoder": "bert_jax.contrib.translation.config:EncoderDecoderConfig"}
FINETUNE_CONFIG = {"translation": "bert_jax.contrib.translation.config:TranslatedConfig"}
FINETUNE_OPTIONS = {"translation": "bert_jax.contrib.translation.run_options:TranslationOptions"}
EXTENSIONS = {
    "task.kind translation": "bert_jax.contrib.translation.task:TranslationTask",
    "--decoder_from": "bert_jax.contrib.translation.start:with_decoder",
}
