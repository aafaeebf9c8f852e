"""Which kernel adds each sum of the decoder, and in which order: read off programs, and recovered from bits."""
