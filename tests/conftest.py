"""Nothing heavy here: the fast tests run without torch."""
