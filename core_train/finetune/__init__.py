"""The fine-tuning job: a checkpoint directory of Hugging Face in, another one or an adapter out."""
