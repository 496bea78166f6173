"""Package metadata; tool settings live in pyproject.toml."""

import re
from pathlib import Path

from setuptools import find_packages, setup

here = Path(__file__).parent
version = re.search(r'__version__ = "(.+?)"', (here / "lookahead" / "_version.py").read_text())
assert version is not None

setup(
    name="lookahead-decoding",
    version=version.group(1),
    description="Exact lookahead decoding for Hugging Face transformers: plain generate's text in fewer forward passes",
    long_description=(here / "README.md").read_text(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.11",
    packages=find_packages(include=["jacobi", "lookahead", "lookahead.*"]),
    package_data={
        "jacobi": ["py.typed"],
        "lookahead": ["py.typed", "assets/routes.json", "assets/tiny-coder/*", "assets/tiny-coder-medusa/*"],
        "lookahead.sources.medusa": ["presets.json"],
    },
    install_requires=[
        "torch>=2.8",
        "transformers>=5.20,<6",
        "numpy",
        "huggingface_hub",
        "typer",
        "rich",
        "safetensors",
    ],
    extras_require={
        "train": ["accelerate", "peft"],
        "bench": ["matplotlib"],
        "dev": ["pytest", "pytest-xdist", "hypothesis", "ruff", "mypy", "pre-commit"],
    },
    entry_points={"console_scripts": ["lookahead=lookahead.cli:app"]},
    classifiers=[
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.11",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
)
