"""Names of sentence-transformers, transformers, KerasHub and scikit-learn, and what to use here instead."""

from collections.abc import Collection

from bert_jax.io.errors import did_you_mean

_FINETUNE = "use bert_jax.finetune(model, train=(texts, labels), dev=0.1)"
_VECTORS = "use bert_jax.load(path).encode(texts)"
_CLASSIFIER = "use bert_jax.TextClassifier(model), or bert_jax.load(path).predict(texts)"
_COSINES = "multiply vectors of length 1: a = encode(texts, normalize=True); a @ b.T"
_METHODS = "use bert_jax.load(path) and its methods: encode, predict, fill_mask, zero_shot"

# Attributes of the package.
OF_PACKAGE = {
    **dict.fromkeys(("SentenceTransformer", "TextEmbedder", "BertVectorizer", "TextVectorizer"), _VECTORS),
    **dict.fromkeys(("BertClassifier", "SequenceClassifier", "models"), _CLASSIFIER),
    **dict.fromkeys(("AutoModel", "BertModel", "AutoTokenizer", "BertTokenizer", "from_pretrained"), _METHODS),
    **dict.fromkeys(("Trainer", "TrainingArguments", "SentenceTransformerTrainer", "losses"), _FINETUNE),
    "BertRegressor": "use bert_jax.TextRegressor(model)",
    "CrossEncoder": "use bert_jax.load(path).predict([(query, text)])",
    "pipeline": _METHODS,
    "util": f"{_COSINES}; for many texts, bert-jax search",
    "callbacks": "give functions of a line of metrics, finetune(..., callbacks=[lambda line: ...]); True stops the "
    'run; options={"training.patience": 2} stops early',
}
# Beginnings of such attributes, for the classes of a task: AutoModelForMaskedLM, BertForQuestionAnswering.
_PREFIXES = ("AutoModelFor", "BertFor", "TFAutoModel", "FlaxAutoModel", "FlaxBert", "BertTextClassifier")

# Attributes of a loaded model.
OF_MODEL = {
    "similarity": _COSINES,
    "encode_query": 'use encode(texts, prompt_name="query")',
    "encode_document": 'use encode(texts, prompt_name="document")',
    "get_sentence_embedding_dimension": "use encode(text).size",
    "max_seq_length": "use spec.max_length",
    "transform": "use embed",
    "classes_": "use classes",
    "generate": "use bert-jax generate, for causal models",
    "push_to_hub": "use save_pretrained, then hf upload",
    **dict.fromkeys(("summary", "num_parameters", "count_params"), "use print(model)"),
    **dict.fromkeys(("backbone", "bert", "encoder"), "use sequence_output, pooled_output or hidden_states"),
    "preprocessor": "use tokenize(texts)",
    "save_to_preset": "use save(path)",
    "evaluate": "use bert_jax.finetune(model, train=..., test=...).metrics, or scikit-learn's metrics of predict",
    **dict.fromkeys(("fit", "train", "compile"), _FINETUNE),
}

# Parameters of functions: names of parameters, of which the first that the function has counts, or a whole remedy.
OF_FUNCTIONS = {
    **dict.fromkeys(("epochs", "num_train_epochs", "max_epochs", "n_epochs"), ("num_epochs",)),
    **dict.fromkeys(("max_steps", "steps", "max_iter"), ("num_steps",)),
    **dict.fromkeys(("lr", "learning_rate_init"), ("learning_rate",)),
    **dict.fromkeys(("per_device_train_batch_size", "train_batch_size"), ("batch_size",)),
    **dict.fromkeys(("max_seq_length", "max_len", "sequence_length"), ("max_length",)),
    **dict.fromkeys(("output_dir", "output_path", "checkpoint_path", "logdir"), ("workdir", "path")),
    **dict.fromkeys(("validation_split", "validation_data", "eval_dataset", "validation_fraction"), ("dev",)),
    **dict.fromkeys(("train_dataset", "train_data", "x", "X"), ("train", "texts")),
    **dict.fromkeys(("y", "labels"), ("train=(texts, labels)",)),
    **dict.fromkeys(("random_state", "random_seed"), ("seed",)),
    **dict.fromkeys(("model_name_or_path", "model_name", "pretrained", "preset"), ("init_from", "model", "path")),
    **dict.fromkeys(("normalize_embeddings", "normalize_to_unit"), ("normalize",)),
    **dict.fromkeys(("show_progress_bar", "verbose"), ("progress", "report")),
    "truncate_dim": ("width", "encode(texts, width=...)"),
    "output_value": ("sequence_output(texts)",),
    "top_k": ("top", "predict_proba(texts)"),
    "pooling_mode": ("pooling",),
    "resume_from_checkpoint": ("workdir",),
    "warmup_steps": ('options={"optimizer.warmup_steps": ...}',),
    "weight_decay": ('options={"optimizer.weight_decay": ...}',),
    "mlm_probability": ('options={"data.mask_fraction": ...}',),
    "save_steps": ('options={"training.checkpoint_interval": ...}',),
    "early_stopping": ('options={"training.patience": ...}',),
}


def package_hint(name: str) -> str | None:
    """Return what to use instead of ``bert_jax.NAME``, or None for a name that no known library has."""
    return _METHODS if name.startswith(_PREFIXES) else OF_PACKAGE.get(name)


def parameter_hint(name: str, known: Collection[str]) -> str:
    """Return ``; instead of NAME, use OTHER`` for a parameter of another library, else :func:`did_you_mean`."""
    for other in OF_FUNCTIONS.get(name, ()):
        if other in known or not other.isidentifier():
            return f"; instead of {name}, use {other}"
    return did_you_mean(name, known)
