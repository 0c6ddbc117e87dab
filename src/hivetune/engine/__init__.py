"""The only room that imports torch, transformers and peft. Others reach it by starting a task in a child."""
