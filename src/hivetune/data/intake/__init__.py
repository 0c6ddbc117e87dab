"""Where rows come from: files, tables and streams, each row once by its content."""
