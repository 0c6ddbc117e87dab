"""Where rows come from: files, tables and streams, each exactly once."""
