"""Settings: one frozen model per room, one home for every default, recipes read from TOML. No torch."""
