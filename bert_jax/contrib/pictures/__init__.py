"""Pictures of a model: its attention and its words in a page, a game with masked words, the story of a run."""

COMMANDS = dict.fromkeys(("picture", "play", "story"), "bert_jax.contrib.pictures.commands:COMMANDS")
EXTENSIONS = {"LoadedModel.picture": "bert_jax.contrib.pictures.picture:picture"}
