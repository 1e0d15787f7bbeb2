"""What one family of Hugging Face folders has apart: dialects, masks, heads, and what is refused."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from drawn_families import drawn_models
from family_folders import close, make_folder, read, recorded, run
from flax import traverse_util
from golden.family_cases import inputs, values
from hf_folders import FIXTURES, save

from bert_jax.config import ExecutionConfig
from bert_jax.interop.hf.config_json import hf_config, model_parts
from bert_jax.interop.hf.write import write_hf
from bert_jax.interop.programs.serving import sample_inputs
from bert_jax.io.safetensors_file import read_header, read_values
from bert_jax.model import BertModel


class TestModernBert:
    def bases(self, tmp_path, **config):
        model = read(make_folder(tmp_path, "modernbert", "ModernBertModel", config=config)).spec.model
        return model.rotary_base, model.rotary_base_of(1)

    @pytest.mark.parametrize("local", [None, -1, -1.0])
    def test_no_local_base_means_the_global_one(self, tmp_path, local):
        old = {"rope_parameters": ..., "global_rope_theta": 5e4, "local_rope_theta": local, "layer_types": ...}
        assert self.bases(tmp_path, **old) == (5e4, 5e4)
        # Where the key is missing, the releases that wrote it used 10,000.
        assert self.bases(tmp_path, **old | {"local_rope_theta": ...}) == (5e4, 1e4)

    def test_an_mlm_head_without_a_bias_has_no_output_layer_in_the_file(self, tmp_path):
        """``decoder_bias`` false with tied weights: only the layers before the output are stored."""
        folder = make_folder(
            tmp_path / "from", "modernbert", "ModernBertForMaskedLM", config={"decoder_bias": False},
            change=lambda tensors: [tensors.pop(name) for name in list(tensors) if name.startswith("decoder.")],
        )  # fmt: skip
        weights = read(folder)
        assert (
            weights.spec.heads.mlm
            and weights.spec.model.tied_output
            and not weights.spec.model.has_bias("mlm_output")
        )
        (tmp_path / "to").mkdir()
        write_hf(tmp_path / "to", weights)
        again = read(tmp_path / "to")
        assert again.spec == weights.spec and again.params.keys() == weights.params.keys()
        assert all(np.array_equal(again.params[key], array) for key, array in weights.params.items())

    def test_both_dialects_are_the_same_model(self, tmp_path):
        weights = read(make_folder(tmp_path / "new", "modernbert", "ModernBertModel"))
        written = hf_config(weights.spec, "float32")
        newer = {"layer_types", "rope_parameters"}
        older = {"global_attn_every_n_layers", "global_rope_theta", "local_rope_theta"}
        assert written.keys() >= newer | older
        for dialect in (newer, older):
            config = {key: value for key, value in written.items() if key not in dialect}
            assert model_parts(config, "config.json").model == weights.spec.model

    @pytest.mark.parametrize(
        ("config", "words"),
        [
            ({"layer_types": ["full_attention"]}, "layer_types is .* allowed: a list of 3 entries"),
            ({"rope_parameters": {"full_attention": {"rope_type": "yarn"}}}, "allowed: rope_type default"),
            ({"classifier_pooling": "max"}, "classifier_pooling is .* allowed: cls, mean"),
            ({"local_attention": 1}, "local_attention is 1; supported: 2 or more"),
            ({"num_hidden_layers": 20_000_000}, "num_hidden_layers is 20000000; allowed: 1 to 10000"),
            ({"rope_scaling": {"factor": 2.0}}, "rope_scaling is .* supported"),
        ],
    )
    def test_other_functions_are_refused(self, tmp_path, config, words):
        with pytest.raises(ValueError, match=words):
            read(make_folder(tmp_path, "modernbert", "ModernBertModel", config=config))


class TestNeoBERT:
    @pytest.mark.parametrize(
        ("config", "words"),
        [
            ({"kwargs": {"ngpt": True}}, "ngpt is true; supported: false"),
            ({"kwargs": [1]}, r"kwargs is \[1\], not an object"),
            ({"rope": False}, "rope is false; supported: true"),
            ({"rms_norm": False}, "rms_norm is false; supported: true"),
            ({"hidden_act": "gelu"}, 'hidden_act is "gelu"; supported: "SwiGLU", "swiglu"'),
            ({"swiglu_packed": False}, "swiglu_packed is false; supported: true"),
            ({"rope_theta": 500}, "rope_theta is 500; supported: 10000"),
            ({"dim_head": 5}, "dim_head is 5; supported: hidden_size / num_attention_heads, 10"),
            ({"auto_map": {"AutoModel": "evil.Network"}}, 'auto_map names "evil.Network"; supported: classes'),
            ({"intermediate_size": 30}, "intermediate_size is 24 in config.json, but 8 in the tensors"),
        ],
    )  # fmt: skip
    def test_other_functions_are_refused(self, tmp_path, config, words):
        with pytest.raises(ValueError, match=words):
            read(make_folder(tmp_path, "neobert", "NeoBERT", config=config))

    def test_a_width_that_the_authors_code_rounds_is_refused(self, tmp_path):
        bundle = dict(drawn_models("neobert"))["NeoBERT"]
        model = dataclasses.replace(bundle.spec.model, intermediate_size=14)
        with pytest.raises(ValueError, match=r"model\.intermediate_size: 14 is not supported .* \(supported: 16\)"):
            hf_config(dataclasses.replace(bundle.spec, model=model), "float32")


class TestDebertaV2:
    def test_a_head_that_no_class_has_is_omitted_by_name(self, tmp_path):
        def add(tensors):
            tensors["mask_predictions.dense.weight"] = np.zeros((20, 20), np.float32)
            tensors["deberta.embeddings.position_embeddings.weight"] = np.zeros((26, 20), np.float32)

        weights = read(make_folder(tmp_path / "more", "deberta-v2", "DebertaV2ForMaskedLM", change=add))
        plain = read(make_folder(tmp_path / "plain", "deberta-v2", "DebertaV2ForMaskedLM"))
        assert weights.spec == plain.spec and weights.params.keys() == plain.params.keys()
        (note,) = set(weights.notes) - set(plain.notes)
        assert "omitted" in note and "mask_predictions.dense.weight" in note and "position_embeddings" in note

    def test_every_distance_has_a_row_without_buckets(self, tmp_path):
        model = read(make_folder(tmp_path, "deberta-v2_legacy", "DebertaV2Model")).spec.model
        assert (model.relative_buckets, model.relative_max_distance) == (16, 8)
        assert hf_config(read(tmp_path).spec, "float32")["position_buckets"] == -1

    @pytest.mark.parametrize(
        ("config", "words"),
        [
            ({"conv_kernel_size": 3}, "conv_kernel_size is 3; supported: 0"),
            ({"share_att_key": False}, "share_att_key is false; supported: true"),
            ({"pos_att_type": ["p2c"]}, r'pos_att_type is \["p2c"\]; supported: \["c2p", "p2c"\]'),
            ({"norm_rel_ebd": "none"}, 'norm_rel_ebd is "none"; supported: "layer_norm"'),
            ({"relative_attention": False}, "relative_attention is false with pos_att_type"),
            ({"position_buckets": 26}, "position_buckets is 26 with 26 relative positions; supported: -1 or fewer"),
            ({"position_buckets": 5}, "relative_buckets is 10 in config.json, but 8"),
            ({"embedding_size": 10}, "embedding_size is 10; supported: 20"),
            ({"attention_head_size": 5}, "attention_head_size is 5; supported: hidden_size / num_attention_heads"),
            ({"pooler_hidden_act": "mish"}, 'pooler_hidden_act is "mish"; allowed: tanh'),
            ({"pooler_dropout": 0.1}, "pooler_dropout is 0.1; supported"),
        ],
    )
    def test_other_functions_are_refused(self, tmp_path, config, words):
        with pytest.raises(ValueError, match=words):
            read(make_folder(tmp_path, "deberta-v2", "DebertaV2Model", config=config))


class TestGpt:
    def test_published_folders_have_neither_prefix_nor_head_but_masks(self, tmp_path):
        """openai-community/gpt2: tensors of GPT2Model, buffers of its attention, and the class with the head."""

        def published(tensors):
            for key in [*tensors]:
                tensors[key.removeprefix("transformer.")] = tensors.pop(key)
            tensors["h.0.attn.bias"] = np.tril(np.ones((1, 1, 26, 26), np.float32))
            tensors["h.0.attn.masked_bias"] = np.float32(-1e4).reshape(1)

        weights = read(make_folder(tmp_path / "saved", "gpt2", "GPT2LMHeadModel"))
        again = read(make_folder(tmp_path / "published", "gpt2", "GPT2LMHeadModel", change=published))
        assert again.spec == weights.spec and again.spec.heads.mlm and again.notes == weights.notes
        assert all(np.array_equal(again.params[key], array) for key, array in weights.params.items())

    def test_a_stored_copy_of_the_tied_output_layer_must_equal_it(self, tmp_path):
        def copied(tensors):
            tensors["lm_head.weight"] = tensors["transformer.wte.weight"].copy()

        def changed(tensors):
            copied(tensors)
            tensors["lm_head.weight"][3, 1] += 1

        assert read(make_folder(tmp_path / "copy", "gpt2", "GPT2LMHeadModel", change=copied)).spec.heads.mlm
        with pytest.raises(ValueError, match=r"lm_head\.weight differs from embeddings/word_embeddings/embedding"):
            read(make_folder(tmp_path / "other", "gpt2", "GPT2LMHeadModel", change=changed))

    def test_no_dropout_precedes_the_sequence_head(self, tmp_path):
        weights = read(make_folder(tmp_path, "gpt2", "GPT2ForSequenceClassification"))
        assert weights.spec.heads.dropout == 0 and weights.spec.model.hidden_dropout == 0.15

    def test_ids_that_transformers_recognizes_padding_by(self, tmp_path):
        for case, name, pad in (("gpt2", "GPT2Model", 39), ("openai-gpt", "OpenAIGPTModel", 0)):
            spec = read(make_folder(tmp_path / case, case, name)).spec
            assert hf_config(spec, "float32")["pad_token_id"] == pad

    def test_samples_for_transformers_have_the_id_of_padding_nowhere_else(self, tmp_path):
        spec = read(make_folder(tmp_path, "gpt2", "GPT2ForSequenceClassification")).spec
        for padding in (None, 0, 1, 39):
            for batch in sample_inputs(spec, padding=padding):
                is_padding = batch["input_ids"] == (39 if padding is None else padding)
                assert np.array_equal(is_padding, batch["attention_mask"] == 0)


class TestBigBird:
    """``record_big_bird.py`` recorded the outputs in training, without dropout, and of questions."""

    def recorded(self):
        with np.load(FIXTURES / "families" / "big_bird_blocks.npz") as arrays:
            return dict(arrays)

    def test_training_has_the_random_blocks_of_transformers(self, tmp_path):
        none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        weights = read(make_folder(tmp_path, "big_bird", "BigBirdModel", config=none))
        batch = inputs("big_bird", False)
        places = np.broadcast_to(np.arange(33), batch["input_ids"].shape)
        features = {**batch, "sequence_ids": batch["attention_mask"], "position_ids": places}
        features = {key: np.asarray(array, np.int32) for key, array in features.items()}
        network = BertModel(weights.spec.model, ExecutionConfig(vocab_multiple=1), weights.spec.heads)
        params = {"params": traverse_util.unflatten_dict(weights.params, sep="/")}
        real = np.asarray(batch["attention_mask"], bool)
        keys = jax.random.key(0), None
        program = jax.jit(lambda params: [network.apply(params, features, key).sequence_output for key in keys])
        found, predicted = map(np.asarray, program(params))
        close(found[real], self.recorded()["training"][real], "training")
        assert np.abs(predicted - found)[real].max() > 0.1

    def test_no_answer_begins_in_the_question(self, tmp_path):
        folder = make_folder(tmp_path, "big_bird", "BigBirdForQuestionAnswering", config={"sep_token_id": 7})
        weights, arrays = read(folder), self.recorded()
        batch = inputs("big_bird", False)
        (found,) = run(weights, batch | {"input_ids": arrays["question/ids"]})
        scores = np.stack([found["start_logits"], found["end_logits"]], -1)
        asked, real = scores[..., 0] < -5e5, batch["attention_mask"].astype(bool)
        assert np.array_equal(asked, arrays["question/asked"]) and asked.sum(1).tolist() == [6, 4, 0]
        close(scores[real & ~asked], arrays["question/scores"][real & ~asked], "scores")
        np.testing.assert_allclose(scores[asked] + 1e6, arrays["question/scores"][asked], atol=0.1)

    def test_a_pooler_that_no_output_reads_is_written_as_zeros(self, tmp_path):
        weights = read(make_folder(tmp_path / "source", "big_bird", "BigBirdForMaskedLM"))
        assert weights.spec.heads.present() == ("mlm",)
        assert any("the pooler is omitted: no output depends on it" in note for note in weights.notes)
        (tmp_path / "written").mkdir()
        write_hf(tmp_path / "written", weights)
        stored = read_header(tmp_path / "written" / "model.safetensors")
        assert not read_values(stored["bert.pooler.weight"]).any() and stored["bert.pooler.bias"].shape == (20,)

    @pytest.mark.parametrize(
        ("config", "words"),
        [
            ({"attention_type": "sparse"}, 'attention_type is "sparse"; allowed: block_sparse, original_full'),
            ({"block_size": 0}, "block_size is 0; allowed: above 0"),
            ({"num_random_blocks": 0}, "random_blocks: 0 is not allowed"),
            ({"use_bias": None}, "use_bias is null; allowed: true, false"),
            ({"is_decoder": True}, "is_decoder is true; supported: false"),
            ({"position_embedding_type": "relative_key"}, 'position_embedding_type is "relative_key"; supported'),
            ({"architectures": ["BigBirdForCausalLM"]}, "BigBirdForCausalLM.* with model_type big_bird; supported"),
        ],
    )
    def test_other_functions_are_refused(self, tmp_path, config, words):
        with pytest.raises(ValueError, match=words):
            read(make_folder(tmp_path, "big_bird", "BigBirdModel", config=config))

    def test_a_classifier_with_another_activation_is_refused(self, tmp_path):
        weights = read(make_folder(tmp_path, "big_bird", "BigBirdForSequenceClassification"))
        model = dataclasses.replace(weights.spec.model, pooler_layer=("tanh",))
        with pytest.raises(ValueError, match=r"model\.pooler_layer: .* \(supported: .*gelu_tanh.*\)"):
            hf_config(dataclasses.replace(weights.spec, model=model), "float32")
        heads = dataclasses.replace(weights.spec.heads, sequence_labels=())
        assert hf_config(dataclasses.replace(weights.spec, model=model, heads=heads), "float32")


# A config.json of the authors' code, with the sizes of the recorded model but the width of the feed-forward layer.
NOMIC = {
    "model_type": "nomic_bert", "architectures": ["NomicBertForPreTraining"], "activation_function": "swiglu",
    "auto_map": {
        "AutoConfig": "configuration_hf_nomic_bert.NomicBertConfig",
        "AutoModel": "nomic-ai/nomic-bert-2048--modeling_hf_nomic_bert.NomicBertModel",
    },
    "n_embd": 20, "n_layer": 3, "n_head": 2, "n_inner": 14, "n_positions": 26, "vocab_size": 40,
    "pad_vocab_size_multiple": 8, "type_vocab_size": 2, "qkv_proj_bias": False, "mlp_fc1_bias": False,
    "mlp_fc2_bias": False, "rotary_emb_base": 1000, "rotary_emb_fraction": 1.0, "rotary_emb_interleaved": False,
    "rotary_emb_scale_base": None, "rotary_scaling_factor": None, "prenorm": False, "parallel_block": False,
    "parallel_block_tied_norm": False, "causal": False, "use_rms_norm": False, "layer_norm_epsilon": 1e-12,
    "resid_pdrop": 0.0, "attn_pdrop": 0.0, "embd_pdrop": 0.0, "fused_bias_fc": True, "use_flash_attn": True,
    "max_trained_positions": 2048, "scale_attn_weights": True, "summary_type": "cls_index",
    "summary_first_dropout": 0.1, "summary_use_proj": True, "summary_proj_to_labels": True,
}  # fmt: skip


class TestNomicBert:
    def authors(self, folder, change=None, **config):
        """A folder of the authors' code: a feed-forward layer of 256 columns, whose further ones have no effect."""
        told, _ = recorded("nomic_bert", "NomicBertForMaskedLM")
        tensors = {}
        for key, shape in told["tensors"].items():
            array = values(key, tuple(shape))
            if ".mlp." in key:
                widths = [(0, 256 - 14), (0, 0)] if "fc2" not in key else [(0, 0), (0, 256 - 14)]
                array = np.pad(array, widths)
            tensors[key.replace("nomic_bert.", "bert.")] = array
        for bias in ("transform.dense.bias", "bias"):
            tensors.pop(f"cls.predictions.{bias}")
        if change is not None:
            change(tensors)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(NOMIC | config))
        save(folder, tensors)
        return folder

    def without_biases(self, weights):
        biases = ("mlm_head/transform/bias", "mlm_head/output_bias")
        return {key: array * 0 if key in biases else array for key, array in weights.params.items()}

    @pytest.mark.slow
    def test_a_folder_of_the_authors_code_is_the_same_model(self, tmp_path):
        weights = read(make_folder(tmp_path / "new", "nomic_bert", "NomicBertForMaskedLM"))
        again = read(self.authors(tmp_path / "old"))
        model = dataclasses.replace(again.spec.model, intermediate_size=14)
        assert again.spec.model.intermediate_size == 256 and model == weights.spec.model
        batch = inputs("nomic_bert", left=False)
        (expected,) = run(dataclasses.replace(weights, params=self.without_biases(weights)), batch)
        for key, found in run(again, batch)[0].items():
            np.testing.assert_allclose(found, expected[key], atol=1e-5)
        (tmp_path / "written").mkdir()
        write_hf(tmp_path / "written", again)
        assert read(tmp_path / "written").spec == again.spec

    def test_names_of_transformers_are_the_same_model(self, tmp_path):
        weights = read(make_folder(tmp_path / "stored", "nomic_bert", "NomicBertForSequenceClassification"))

        def native(tensors):
            pairs = (
                ("encoder.layers", "layers"), ("emb_ln", "embeddings.LayerNorm"), ("fc11", "up_proj"),
                ("attn.out_proj", "self_attn.o_proj"), ("fc12", "gate_proj"), ("fc2", "down_proj"),
                ("norm1", "post_attention_layernorm"), ("norm2", "post_mlp_layernorm"),
            )  # fmt: skip
            for key in list(tensors):
                array, name = tensors.pop(key), key
                for stored, own in pairs:
                    name = name.replace(stored, own)
                place, _, _ = name.partition("attn.Wqkv")
                parts = zip("qkv", np.split(array, 3), strict=True) if "Wqkv" in name else ()
                names = {f"{place}self_attn.{part}_proj.weight": values_ for part, values_ in parts}
                tensors.update(names or {name: array})

        again = read(
            make_folder(tmp_path / "own", "nomic_bert", "NomicBertForSequenceClassification", change=native)
        )
        assert again.spec == weights.spec and again.notes == weights.notes
        assert all(np.array_equal(again.params[key], array) for key, array in weights.params.items())

    @pytest.mark.parametrize(
        ("config", "words"),
        [
            ({"prenorm": True}, "prenorm is true; supported: false"),
            ({"activation_function": "gelu"}, 'activation_function is "gelu"; supported: "swiglu"'),
            ({"qkv_proj_bias": True}, "qkv_proj_bias is true; supported: false"),
            ({"mlp_fc1_bias": True}, "mlp_fc1_bias is true; supported: false"),
            ({"mlp_fc2_bias": True}, "mlp_fc2_bias is true; supported: false"),
            ({"parallel_block": True}, "parallel_block is true; supported: false"),
            ({"causal": True}, "causal is true; supported: false"),
            ({"use_rms_norm": True}, "use_rms_norm is true; supported: false"),
            ({"num_heads_kv": 1}, "num_heads_kv is 1; supported: folders without it"),
            ({"rotary_emb_fraction": 0.5}, "rotary_emb_fraction is 0.5; supported: 1"),
            ({"rotary_emb_interleaved": True}, "rotary_emb_interleaved is true; supported: false"),
            ({"rotary_emb_scale_base": 512}, "rotary_emb_scale_base is 512; supported: folders without it"),
            ({"rotary_scaling_factor": 2}, "rotary_scaling_factor is 2; supported: 0"),
            ({"rotary_head_dim": True}, "rotary_head_dim is true; supported: false"),
            ({"auto_map": {"AutoModel": "evil.Network"}}, 'auto_map names "evil.Network"; supported: classes'),
            ({"n_inner": 300}, "intermediate_size is 512 in config.json, but 256 in the tensors"),
            ({"n_embd": 32}, "hidden_size is 32 in config.json, but 20 in the tensors"),
        ],
    )  # fmt: skip
    def test_other_functions_of_the_authors_code_are_refused(self, tmp_path, config, words):
        with pytest.raises(ValueError, match=words):
            read(self.authors(tmp_path, **config))

    @pytest.mark.parametrize(
        ("config", "words"),
        [
            ({"head_dim": 4}, "head_dim is 4; supported: hidden_size / num_attention_heads, 10"),
            ({"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters is .* allowed: rope_type default"),
            ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "supported: a partial_rotary_factor of 1"),
            ({"rope_scaling": {"factor": 2.0}}, "rope_scaling is .* supported"),
        ],
    )
    def test_other_functions_are_refused(self, tmp_path, config, words):
        with pytest.raises(ValueError, match=words):
            read(make_folder(tmp_path, "nomic_bert", "NomicBertModel", config=config))

    def test_a_head_with_one_bias_is_not_completed(self, tmp_path):
        def add(tensors):
            tensors["cls.predictions.bias"] = np.zeros(40, np.float32)

        with pytest.raises(ValueError, match=r"missing cls\.predictions\.transform\.dense\.bias"):
            read(self.authors(tmp_path, change=add))
