"""Campaigns: hundreds of runs under faults and with bad inputs, too slow for every `make test`.

    python -m tests.campaign kills|faults|inputs [--seed S]

Each part is one module with `main(arguments) -> exit status`. A small sample of each part is among the tests.
"""
