"""From a training module to the twin that generates, and back."""
