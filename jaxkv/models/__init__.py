"""The decoder and the four families it computes."""
