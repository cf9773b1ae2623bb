"""Bytes by owner while a run goes on."""

from engine.ledger.ledger import Ledger
from engine.ledger.saved import Saved

__all__ = ["Ledger", "Saved"]
