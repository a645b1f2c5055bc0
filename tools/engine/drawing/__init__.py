"""Draw what models compute for images."""
