"""Unpadded parameter counts of the published model sizes, both heads included, from shapes alone."""

import math

import jax
import pytest
from flax import linen as nn

from bert_jax.config import ExecutionConfig, ModelConfig
from bert_jax.model import BertForPretraining, BertModel
from bert_jax.training.state import abstract_params, parameter_count

# layers, width, feed-forward width, exact count of transformers' BertForPreTraining, published count. The
# published counts: Devlin et al. 2018, section 3 (base, large; rounded there to 110M and 340M) and Turc et
# al. 2019, table 1 (in millions).
SIZES = {
    "tiny": (2, 128, 512, 4_433_468, 4.4),
    "mini": (4, 256, 1024, 11_267_900, 11.3),
    "small": (4, 512, 2048, 29_058_876, 29.1),
    "medium": (8, 512, 2048, 41_668_412, 41.7),
    "base": (12, 768, 3072, 110_106_428, 110.1),
    "large": (24, 1024, 4096, 336_226_108, None),
}


def network(size: str, execution: ExecutionConfig, *, has_nsp: bool = True) -> BertModel:
    layers, width, inner, _, _ = SIZES[size]
    config = ModelConfig(
        num_layers=layers, hidden_size=width, num_attention_heads=width // 64, intermediate_size=inner
    )
    return BertForPretraining(config, execution, has_nsp=has_nsp)


@pytest.mark.cases(1)
@pytest.mark.parametrize("scan_layers", [False, True])
@pytest.mark.parametrize("size", SIZES)
def test_counts(size: str, scan_layers: bool) -> None:
    model = network(size, ExecutionConfig(scan_layers=scan_layers, vocab_multiple=128))
    params = nn.unbox(abstract_params(model))
    count = parameter_count(params, model.config.vocab_size)
    _, _, _, exact, published = SIZES[size]
    assert count == exact
    assert published is None or round(count / 1e6, 1) == published
    # In memory the vocabulary is padded from 30,522 to 30,592 rows.
    in_memory = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))
    assert in_memory == exact + 70 * (model.config.hidden_size + 1)


@pytest.mark.slow
def test_without_next_sentence_head() -> None:
    """Without next-sentence prediction there is neither pooler nor head."""
    model = network("base", ExecutionConfig(), has_nsp=False)
    params = nn.unbox(abstract_params(model))
    assert "pooler" not in params and "nsp_head" not in params
    assert parameter_count(params, 30522) == 110_106_428 - (768 * 768 + 768) - (768 * 2 + 2)
