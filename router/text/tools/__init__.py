"""Tool calls in the text of an answer: one file for each family of syntax."""
