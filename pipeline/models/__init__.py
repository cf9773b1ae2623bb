"""The models of the stages: sources, trained modules, engines and export.

This file imports no submodule, so that the chat loads only the submodules that it uses.
"""
