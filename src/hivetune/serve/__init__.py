"""The exported model behind a server, and a chat with it."""
