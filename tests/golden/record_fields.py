"""Records the keys and defaults of the config class of each family.

    python tests/golden/record_fields.py MODEL_TYPE ...   adds those of the installed transformers to
                                                          tests/golden/fixtures/families/config_fields.json

Run it in the environment of each release (4.57 and 5.23). A model type that a release lacks is left out.
"""

import json
import sys
from pathlib import Path

import transformers

FILE = Path(__file__).parent / "fixtures" / "families" / "config_fields.json"


def main() -> None:
    fields = json.loads(FILE.read_text()) if FILE.exists() else {}
    release = ".".join(transformers.__version__.split(".")[:2])
    for name in sys.argv[1:]:
        if name in transformers.CONFIG_MAPPING:
            config = transformers.CONFIG_MAPPING[name]()
            fields.setdefault(name, {})[release] = config.to_dict()
    FILE.write_text(json.dumps(fields, indent=0, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
