"""Which kernel adds each sum of the decoder, and in which order: read off compiled programs, and recovered from bits."""
