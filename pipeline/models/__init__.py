"""Models of the stages: sources, the trained modules, their engines and their export.

This file imports nothing, because the chat needs only `source`, and `build` imports peft and accelerate.
"""
