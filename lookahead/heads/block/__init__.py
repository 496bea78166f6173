"""Block drafters: a small network fills a block of masked places after the text's last token in one pass."""
