"""Export of a finished stage: a folder with a model card, adapters in peft's format, an upload, a GGUF file."""
