"""Documentation read as structure: manual pages, help texts, completions, folders of documents, docstrings."""
