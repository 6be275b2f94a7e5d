"""Plans, policies and files of Hugging Face models, and the example of one small forward. Nothing is cut."""
