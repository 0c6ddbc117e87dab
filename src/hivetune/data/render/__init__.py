"""The rendering of messages to tokens and their mask, by the model's own chat template."""
