"""LoRA adapters by peft, for plugins that train them."""

from __future__ import annotations

from typing import Any

from torch import nn


def add_lora(
    model: nn.Module, pretrained_dir: str | None, lora_config: Any, bnb_quantization_config: Any = None
) -> nn.Module:
    """A model with new adapters (`lora_config`, a peft.LoraConfig) or with those of a directory, trainable."""
    refuse_quantized(bnb_quantization_config is not None)
    peft = peft_package()
    if pretrained_dir is None:
        return peft.get_peft_model(model, check_config(lora_config))
    options = {} if lora_config is None else {"config": check_config(lora_config)}
    return peft.PeftModel.from_pretrained(model, pretrained_dir, is_trainable=True, **options)


def check_config(lora_config: Any) -> Any:
    """A peft.LoraConfig, or an error that says so."""
    if not isinstance(lora_config, peft_package().LoraConfig):
        raise TypeError(f"lora_config must be a peft.LoraConfig, and is {lora_config!r}")
    return lora_config


def refuse_quantized(quantize: bool) -> None:
    """Base weights in 4 or 8 bits are bitsandbytes', which is CUDA only and whose weights no plugin here can shard."""
    if quantize:
        raise NotImplementedError(
            "enable_lora with quantize or bnb_quantization_config is not here: quantized base weights (bitsandbytes) "
            "cannot be cast, sharded or saved like others. Train LoRA on bf16 base weights instead (a quarter of the "
            "memory of full training is already saved by not keeping optimizer state for them)"
        )


def peft_package() -> Any:
    """peft, or an error that names the extra."""
    try:
        import peft
    except ImportError as error:
        raise ImportError("LoRA needs peft; install the extra: pip install 'gradient-core[peft]'") from error
    return peft
