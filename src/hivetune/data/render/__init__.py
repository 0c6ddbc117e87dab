"""From messages to tokens and their mask, by the model's own chat template."""
