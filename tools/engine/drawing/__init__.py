"""Pictures of what models compute for images."""
