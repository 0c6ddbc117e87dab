"""Adapter, merged model and GGUF, and the proof that they are the model that was trained."""
