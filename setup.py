"""Installation; setup.cfg holds everything except for the recipes, which a wheel gets as ``bert_jax/configs``."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithRecipes(build_py):
    """Copies ``configs/`` into the package, except for an editable installation, which reads the folder itself."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            target = Path(self.build_lib) / "bert_jax" / "configs"
            shutil.copytree("configs", target, ignore=shutil.ignore_patterns("*.py"), dirs_exist_ok=True)


setup(cmdclass={"build_py": BuildWithRecipes})
