"""What may be done to a cache or a residual stream."""
