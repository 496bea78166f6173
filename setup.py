"""Package metadata; tool settings live in pyproject.toml."""

import os
import re
from pathlib import Path

from setuptools import Extension, find_packages, setup

here = Path(__file__).parent
home = "https://github.com/lookahead-decoding/lookahead"
version = re.search(r'__version__ = "(.+?)"', (here / "lookahead" / "_version.py").read_text())
assert version is not None
# Where the package is published, links of the README lead to the repository.
readme = (here / "README.md").read_text()
readme = re.sub(r"\]\((?!https?:|#)([^)]+\.(?:svg|png))\)", rf"]({home}/raw/main/\1)", readme)
readme = re.sub(r"\]\((?!https?:|#)([^)]+)\)", rf"]({home}/blob/main/\1)", readme)
serve = ["fastapi", "uvicorn", "prometheus-client"]
quantised = ["torchao", "bitsandbytes", "gguf"]
grammar = ["llguidance>=1.9"]
bundled = ("tiny-coder", "tiny-coder-medusa", "tiny-coder-eagle")
# Without a compiler there are slower twins in Python, so a build that fails is no error, but where LOOKAHEAD_C=required
# says so, as for wheels. No product and sum become one, so that both compute the same.
flags = ["-O3", "-fvisibility=hidden", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"]
if os.name == "nt":
    flags = ["/O2", "/fp:precise", "/wd4146"]  # minus of what has no sign is meant
speedups = Extension(
    "lookahead._speedups",
    sorted(f"lookahead/_c/{file.name}" for file in (here / "lookahead" / "_c").glob("*.c")),
    depends=sorted(f"lookahead/_c/{file.name}" for file in (here / "lookahead" / "_c").glob("*.h")),
    extra_compile_args=flags,
    optional=os.environ.get("LOOKAHEAD_C") != "required",
)

setup(
    name="lookahead-decoding",
    version=version.group(1),
    description="Exact lookahead decoding for Hugging Face transformers: plain generate's text in fewer forward passes",
    long_description=readme,
    long_description_content_type="text/markdown",
    author="The lookahead developers",
    url=home,
    project_urls={
        "Documentation": f"{home}/tree/main/docs",
        "Changelog": f"{home}/blob/main/CHANGELOG.md",
        "Benchmarks": f"{home}/blob/main/BENCHMARKS.md",
    },
    keywords=["speculative decoding", "lookahead decoding", "language models", "inference", "transformers"],
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.11",
    packages=find_packages(include=["jacobi", "lookahead", "lookahead.*"]),
    ext_modules=[speedups],
    package_data={
        "jacobi": ["py.typed"],
        "lookahead": ["py.typed", "assets/*.json", *(f"assets/{name}/*" for name in bundled)],
        "lookahead.heads.medusa": ["presets.json"],
        "lookahead.serve": ["*.html", "*.json"],
        "lookahead.pictures": ["*.html", "*.css", "*.js"],
    },
    install_requires=[
        "torch>=2.8",
        "transformers>=5.20,<5.25",
        "numpy",
        "huggingface_hub",
        "typer",
        "rich",
        "safetensors",
        "filelock",
    ],
    extras_require={
        "train": ["accelerate", "peft"],
        "bench": ["matplotlib"],
        "real": ["gguf", "accelerate", "sentencepiece"],
        "serve": serve,
        "ray": ["ray[serve,data]", *serve],
        "evals": ["lm-eval"],
        "docs": ["mkdocs-material", "mkdocstrings[python]"],
        "integrations": ["ipykernel", "lm-eval", "matplotlib", "nbclient", "playwright", "ray[serve,data]", *quantised],
        "quantised": quantised,
        "grammar": grammar,
        "dev": [
            *("pytest", "pytest-xdist", "hypothesis", "ruff", "mypy", "import-linter", "pre-commit", "gguf"),
            *(*serve, *grammar, "httpx", "openai", "pexpect"),
        ],
    },
    entry_points={"console_scripts": ["lookahead=lookahead.cli:app"]},
    classifiers=[
        "Development Status :: 4 - Beta",
        "Environment :: Console",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: OS Independent",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3 :: Only",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
)
