"""What a run tells about itself: metric names and their aggregation, TensorBoard and JSONL files, the terminal view."""
