"""From files to records to token ids to micro-batches."""
