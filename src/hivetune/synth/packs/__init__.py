"""Topic packs: a category, where its documentation is, and which questions are made of it. One TOML file each."""
