"""Package metadata; the settings of the development tools are in pyproject.toml."""

from setuptools import find_packages, setup

EXTRAS = {
    "train": ["rich", "tyro", "matplotlib", "tensorboard", "tokenizers"],
    "safetensors": ["safetensors"],
    "transformers": ["transformers", "safetensors"],
    "peft": ["peft", "safetensors"],
    "test": ["pytest", "pytest-timeout", "psutil"],
    "check": ["ruff", "mypy"],
    "docs": ["sphinx", "furo", "myst-parser"],
}

# Left out of "dev": 290 MB to fetch and 1 GB on disk, which a CUDA build of torch brings along anyway.
KERNELS = {"triton": ["triton"]}

setup(
    name="gradient-core",
    version="0.1.0",
    description="A training core for models split over data, tensor, sequence, pipeline and expert parallelism",
    packages=find_packages(include=["core", "core.*"]),
    package_data={"core": ["py.typed"]},
    py_modules=["pretrain_gpt"],
    python_requires=">=3.10",
    install_requires=["torch>=2.11,<2.14", "numpy", "einops"],
    extras_require={**EXTRAS, **KERNELS, "dev": sorted({name for names in EXTRAS.values() for name in names})},
)
