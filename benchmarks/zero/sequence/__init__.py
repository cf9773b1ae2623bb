"""Long rows shared out over a sequence group."""
