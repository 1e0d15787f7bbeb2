"""Names of the tensors of a model in Hugging Face folders, for both the reader and the writer.

torch stores the weight of a linear layer as [out, in], so a stored kernel is the transpose of the canonical kernel.
"""

import re
from collections.abc import Iterable

from bert_jax.config import ModelSpec
from bert_jax.interop.hf.families import FAMILIES
from bert_jax.interop.model_bundle import parameter_shapes
from bert_jax.interop.stored_model import StoredName

# Buffers that some versions of transformers store. They contain constants, not weights. The last two are masks of
# GPT and GPT-2.
BUFFERS = ("position_ids", "token_type_ids", "inv_freq", ".attn.bias", ".attn.masked_bias")

_LEAF = {"kernel": "weight", "bias": "bias", "scale": "weight", "embedding": "weight", "output_bias": "bias"}


# Beginning of the names of tensors that classes with a head have, if the family has the name of its encoder.
_RECOGNIZED = {
    family.name: re.compile(rf"(module\.)?{re.escape(family.prefix)}(embeddings|encoder|transformer)\.")
    for family in FAMILIES.values()
    if family.prefix == f"{family.name}."
}


def recognized_family(names: Iterable[str]) -> str | None:
    """Return the family to which tensors with these names belong. Return None if no family or several families
    match: the classes without heads have no prefix, so their names do not determine the family."""
    names = [*names]
    families = [family for family, begin in _RECOGNIZED.items() if any(map(begin.match, names))]
    return families[0] if len(families) == 1 else None


def hf_names(spec: ModelSpec, prefix: str | None = None) -> dict[str, StoredName]:
    """Return a dict from canonical to stored parameter names, in the order of ``parameter_shapes``.

    Parameters of the sentence head are excluded. The names of encoder tensors begin with ``prefix``, which includes
    its dot; None: the prefix that the transformers class with these heads uses. Raises ``ValueError`` for heads
    whose tensors have the same name, and for a head that the family does not have.
    """
    family, heads = FAMILIES[spec.family], spec.heads
    held = [head for head in heads.present() if head != "pooler"]
    for head in held:
        if head not in family.heads:
            raise ValueError(f"{family.title} has no {head} head in Hugging Face folders")
    owners: dict[str, list[str]] = {}
    for head in held:
        owners.setdefault(family.output_layer(head), []).append(head)
    clash = next((names for names in owners.values() if len(names) > 1), None)
    if clash:
        heads_found = f"{', '.join(clash)}, because their tensors have the same name"
        raise ValueError(f"a Hugging Face folder can contain only one of the heads {heads_found}; keep one of them")
    if prefix is None:
        # Classes with a head name the encoder after the family.
        prefix = family.prefix if held else ""
    places, names = family.places(prefix, spec.model.num_layers, held), {}
    for name in parameter_shapes(spec):
        module, _, leaf = name.rpartition("/")
        if name.startswith("sentence_head/"):
            continue
        place = places[module]
        names[name] = StoredName(
            f"{place.module}.{_LEAF[leaf]}",
            leaf == "kernel" and not place.input_first,
            place.part,
            place.parts,
            spec.model.num_attention_heads if place.per_head else 1,
            spec.model.head_size if place.interleaved else 0,
        )
    return names
