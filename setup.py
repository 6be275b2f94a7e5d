"""Package metadata; the settings of the development tools are in pyproject.toml."""

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
VERSION = re.search(r'^__version__ = "(.+)"$', (HERE / "core" / "__init__.py").read_text(), re.MULTILINE)

# core.hugging_face reads the parallel plans that this package ships, and refuses versions whose plans were never read.
TRANSFORMERS = "transformers>=5.23,<5.25"

# Imported as `core`; three packages next to it are applications of it.
PACKAGES = ("core", "core_plan", "core_train", "core_compat")

EXTRAS = {
    "train": ["tyro", "matplotlib", "tensorboard", "tokenizers"],
    "safetensors": ["safetensors"],
    "transformers": [TRANSFORMERS, "safetensors"],
    "peft": ["peft", "safetensors"],
    "integrations": ["accelerate", TRANSFORMERS, "lightning-fabric", "safetensors"],
    "trl": ["trl>=1.16,<1.17", "peft", "accelerate", TRANSFORMERS, "datasets", "safetensors"],
    "data": ["datasets"],
    "test": ["pytest", "pytest-timeout", "pytest-xdist", "psutil", "setuptools>=77"],
    "check": ["ruff", "mypy"],
    "docs": ["sphinx", "furo", "myst-parser"],
}

# Left out of "dev". triton: 290 MB to fetch and 1 GB on disk, which a CUDA build of torch brings along anyway.
ON_REQUEST = {"triton": ["triton"], "trackers": ["wandb", "mlflow-skinny"]}

setup(
    name="gradient-core",
    version=VERSION[1] if VERSION else None,
    description="Train PyTorch models on several GPUs or processes, with every gradient checked: data, tensor, "
    "sequence, pipeline, expert and context parallelism, ZeRO sharding, checkpoints",
    long_description=(HERE / "README.md").read_text(),
    long_description_content_type="text/markdown",
    author="the gradient-core authors",
    license_expression="Apache-2.0",
    license_files=["LICENSE"],
    keywords="distributed training, DDP, ZeRO, FSDP, Megatron, tensor parallelism, pipeline parallelism, MoE, pytorch",
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3 :: Only",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
    packages=find_packages(include=[*PACKAGES, *(f"{name}.*" for name in PACKAGES)]),
    package_data={
        **{name: ["py.typed"] for name in PACKAGES},
        "core_plan": ["py.typed", "devices/*.json", "models/*.json", "models/*.toml"],
    },
    py_modules=["pretrain_gpt"],
    entry_points={"console_scripts": ["gradient-core = core.__main__:main"]},
    python_requires=">=3.10",
    install_requires=["torch>=2.11,<2.14", "numpy", "einops"],
    extras_require={**EXTRAS, **ON_REQUEST, "dev": sorted({name for names in EXTRAS.values() for name in names})},
)
