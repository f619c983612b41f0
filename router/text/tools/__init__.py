"""Parsers and grammars for tool calls in model output, one file per family of syntax."""
