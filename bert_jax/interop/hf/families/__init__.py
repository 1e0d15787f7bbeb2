"""The families of models whose Hugging Face folders can be read and written, one file each."""

from bert_jax.interop.hf.families import (
    albert,
    bert,
    deberta_v2,
    distilbert,
    electra,
    gpt,
    long,
    modernbert,
    mpnet,
    neobert,
    nomic_bert,
    roberta,
)

FAMILIES = {
    family.name: family
    for family in (
        bert.FAMILY, roberta.ROBERTA, roberta.XLM_ROBERTA, roberta.CAMEMBERT, modernbert.FAMILY, distilbert.FAMILY,
        albert.FAMILY, electra.FAMILY, mpnet.FAMILY, deberta_v2.FAMILY, gpt.GPT2, gpt.GPT,
        nomic_bert.FAMILY, neobert.FAMILY, long.LONGFORMER, long.BIG_BIRD,
    )
}  # fmt: skip
