"""Where prompts come from: one module per public dataset, plus what they share (files, turns)."""
