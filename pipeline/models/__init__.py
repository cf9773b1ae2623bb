"""Models as the stages use them: where they come from, the two modules that are trained, their engines, their export.

Nothing is imported here: the chat needs `source` alone, and `build` brings peft and accelerate along.
"""
