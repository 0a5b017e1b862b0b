"""EPD-G: a disaggregated serving cluster for multimodal language models on Ray."""
