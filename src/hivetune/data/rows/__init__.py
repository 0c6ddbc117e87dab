"""From the bytes of a file to an example: formats, layouts, fields."""
