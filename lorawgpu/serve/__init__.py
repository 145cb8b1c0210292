"""`lorawgpu serve`: OpenAI's API and a page, for one base model and any number of its adapters."""
