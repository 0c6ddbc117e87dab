"""The sources of rows: files, tables and streams; each row is stored once by its content."""
