"""Translation models made from other models: the encoder of one and the decoder of another (``--decoder_from``)."""

import dataclasses

import numpy as np

from bert_jax.config import HeadsConfig, ModelSpec
from bert_jax.config.architecture import ModelConfig
from bert_jax.contrib.translation.config import EncoderDecoderConfig, joined
from bert_jax.contrib.translation.run_options import TranslationOptions
from bert_jax.interop.model_bundle import ModelBundle, ReadOptions
from bert_jax.interop.readers import read_weights
from bert_jax.io.hub import model_path
from bert_jax.start.fixed_options import Given, value_of

# Parts of the parameters of the network, and canonical prefixes in a model of one part.
SOURCE, TARGET = "encoder/source/", "encoder/target/"
_OF_DECODER = ("embeddings/", "encoder/", "mlm_head/")


def with_decoder(options: TranslationOptions, weights: ModelBundle, given: Given) -> ModelBundle:
    """Return the translation model with the encoder ``weights`` and the decoder that ``options`` names.

    Parameters that neither has, such as those of cross-attention, are not in the result: a run initializes them
    randomly. Raises ``ValueError`` (one line) for models that cannot be joined.
    """
    name = options.decoder_from
    if others := options.changes[1:]:
        raise ValueError(
            f"--{others[0]}: not allowed with --decoder_from; save the changed model first, and omit it"
        )
    if isinstance(weights.spec.model, EncoderDecoderConfig):
        raise ValueError(f"--decoder_from {name}: {options.init_from} has a decoder already; omit --decoder_from")
    if name in ("same", "shared"):
        return join(weights, weights, shared=name == "shared")
    if name == "random":
        return _with_random_decoder(weights, value_of(given, "model.decoder", ()))
    return join(weights, read_weights(model_path(name), ReadOptions(allow_mismatch=options.allow_mismatch)))


def join(encoder: ModelBundle, decoder: ModelBundle, *, shared: bool = False) -> ModelBundle:
    """Return the translation model with the encoder of one model and the decoder of another, which must have the
    vocabulary of the encoder. See :func:`with_decoder`."""
    if encoder.tokenizer_content != decoder.tokenizer_content:
        raise ValueError(
            "--decoder_from: the models have different vocabularies; train both with one vocabulary of both "
            "languages, or use a multilingual model"
        )
    model = joined(_plain(encoder), _plain(decoder), shared)
    params = _source_params(encoder)
    for name, array in decoder.params.items():
        if name.startswith(_OF_DECODER) and not (shared and not name.startswith("mlm_head/")):
            params[target_name(name)] = array
    return _model(encoder, model, params)


def _with_random_decoder(encoder: ModelBundle, decoder: tuple[str, ...]) -> ModelBundle:
    values = {one.name: getattr(encoder.spec.model, one.name) for one in dataclasses.fields(ModelConfig)}
    model = EncoderDecoderConfig(**values | {"encoder": "encoder_decoder", "decoder": decoder})
    return _model(encoder, model, _source_params(encoder))


def _source_params(encoder: ModelBundle) -> dict[str, np.ndarray]:
    own = encoder.params.items()
    return {f"{SOURCE}{name}": values for name, values in own if name.startswith(("embeddings/", "encoder/"))}


def target_name(name: str) -> str:
    """Return the name of a parameter of a model, by its canonical name, in the decoder."""
    return TARGET + (name.removeprefix("encoder/") if name.startswith("encoder/") else name)


def _plain(weights: ModelBundle) -> ModelConfig:
    """Return the network of one part. Raises ``ValueError`` for a network that is no Transformer."""
    model = weights.spec.model
    if not model.has_attention:
        raise ValueError(
            f"--decoder_from: a model with model.encoder {model.encoder} is not allowed; use a Transformer"
        )
    return model


def _model(encoder: ModelBundle, model: EncoderDecoderConfig, params: dict[str, np.ndarray]) -> ModelBundle:
    spec = ModelSpec(model=model, heads=HeadsConfig(), tokenizer=encoder.spec.tokenizer, family=encoder.spec.family)
    what = "shared" if model.shared else f"a decoder of {model.target.num_layers} layers"
    return dataclasses.replace(
        encoder, spec=spec, params=params, notes=(*encoder.notes, f"translation model: {what}")
    )
