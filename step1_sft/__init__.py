"""Stage 1, supervised fine-tuning: imitate the assistant's turns of conversations."""
