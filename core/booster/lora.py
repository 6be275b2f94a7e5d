"""LoRA adapters with peft, for plugins that can train them."""

from __future__ import annotations

from typing import Any

from torch import nn

from core.hugging_face.read.transformers_plans import peft_by_old_names


def add_lora(
    model: nn.Module, pretrained_dir: str | None, lora_config: Any, bnb_quantization_config: Any = None
) -> nn.Module:
    """Add trainable LoRA adapters to a model, either new ones or ones saved in ``pretrained_dir``.

    Raises NotImplementedError for a quantization config, and TypeError if ``lora_config`` is not a peft.LoraConfig.
    """
    refuse_quantized(bnb_quantization_config is not None)
    peft = peft_package()
    options = {} if lora_config is None and pretrained_dir else {"config": check_config(lora_config)}
    with peft_by_old_names():
        if pretrained_dir is None:
            return peft.get_peft_model(model, options["config"])
        return peft.PeftModel.from_pretrained(model, pretrained_dir, is_trainable=True, **options)


def check_config(lora_config: Any) -> Any:
    """Return ``lora_config``, or raise TypeError if it is not a peft.LoraConfig."""
    if not isinstance(lora_config, peft_package().LoraConfig):
        raise TypeError(f"lora_config must be a peft.LoraConfig, and is {lora_config!r}")
    return lora_config


def refuse_quantized(quantize: bool) -> None:
    """Raise NotImplementedError for base weights in 4 or 8 bits.

    They need bitsandbytes, which runs on CUDA only and whose weights no plugin here can shard.
    """
    if quantize:
        raise NotImplementedError(
            "enable_lora with quantize or bnb_quantization_config is not here: quantized base weights (bitsandbytes) "
            "cannot be cast, sharded or saved like others. Train LoRA on bf16 base weights instead (a quarter of the "
            "memory of full training is already saved by not keeping optimizer state for them)"
        )


def peft_package() -> Any:
    """Import peft, or raise an ImportError that names the extra to install."""
    try:
        import peft
    except ImportError as error:
        raise ImportError("LoRA needs peft; install the extra: pip install 'gradient-core[peft]'") from error
    return peft
