"""Paragraphs of articles from MediaWiki XML dumps."""
