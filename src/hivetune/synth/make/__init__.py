"""From what a page documents to questions and answers, without a model."""
