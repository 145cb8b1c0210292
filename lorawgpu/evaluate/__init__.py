"""`lorawgpu evaluate`: loss and perplexity on a file."""
